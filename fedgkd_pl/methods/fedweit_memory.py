"""What a client of FedWeIT keeps between rounds, and the weights that follow from it.

A memory is groups of tensors, each by the names of weights. With t for a task's place in the
client's sequence and p for that of the last one:

    base                    the client's own B, as it left it
    mask t, adaptive t      m_t and A_t
    rest t                  what is not decomposed: biases, norm layers, head
    old t                   B⊙σ(m_t) + A_t when task p began, for t < p
    attended t              Σ_j a_j KB_j of task t, which is over, for 0 < t < p
    attention, knowledge j  a and KB_j of task p > 0
    moments                 the optimizer's state
"""

from collections.abc import Mapping
from math import sqrt

import torch
from fedgkd_pl.federation.message import State, grouped, joined
from torch import Tensor, nn
from torch.nn.init import trunc_normal_

LEARNED = "learned"  # for every task so far, whether the client has trained in it
TRUNCATED = 0.87962566103423978  # the standard deviation of a normal one that is cut at ±2


class Memory:
    """The memory of one client."""

    def __init__(self, groups: dict[str, State], learned: list[bool]) -> None:
        self.groups = groups
        self.learned = learned

    @classmethod
    def read(cls, state: State) -> "Memory":
        """From a client's state; an empty one is of a client that has never trained."""
        groups = dict(state)
        learned = groups.pop(LEARNED, torch.zeros(0)).bool().tolist()
        return cls(grouped(groups), learned)

    def state(self) -> State:
        """The inverse of :meth:`read`."""
        return {LEARNED: torch.tensor(self.learned, dtype=torch.int64), **joined(self.groups)}

    @property
    def place(self) -> int:
        """That of the last task; -1 before the first."""
        return len(self.learned) - 1

    def begin(self, start: State, rest: State, clients: int) -> None:
        """Begins the next task.

        Args:
            start: the decomposed weights of the first round, in the type that clients train in;
                none if nothing is decomposed.
            rest: what else a client has of its own, as it is at first; may be empty.
            clients: how many there are, whose knowledge is attended to.
        """
        last, place = self.place, self.place + 1
        self.groups.pop("moments", None)
        for task in range(place) if start else ():
            whole = self._without_knowledge(task, self.groups["base"])
            kept = (
                whole if self.learned[task] else {n: torch.zeros_like(w) for n, w in whole.items()}
            )
            self.groups[f"old {task}"] = kept
        if start and last > 0:
            self.groups[f"attended {last}"] = self.attended(last)
        if rest:
            self.groups[f"rest {place}"] = {name: t.clone() for name, t in rest.items()}
        if start:
            self.groups[f"mask {place}"] = {n: draw(len(w), w) for n, w in start.items()}
            self.groups[f"adaptive {place}"] = {n: w / 3 for n, w in start.items()}
        if start and place:
            self.groups["attention"] = {n: draw(clients, w) for n, w in start.items()}
            self.learn_from({}, start, clients)
        self.learned.append(False)

    def learn_from(self, knowledge: Mapping[int, State], like: State, clients: int) -> None:
        """Takes the other tasks' A of every client in; of one who sent none it is zero."""
        for client in range(clients):
            none = {name: torch.zeros_like(weight) for name, weight in like.items()}
            self.groups[f"knowledge {client}"] = knowledge.get(client, none)

    def knowledge(self, name: str) -> Tensor:
        """KB of one weight, those of all clients stacked."""
        found = [group for group in self.groups if group.startswith("knowledge ")]
        parts = [self.groups[f"knowledge {n}"][name] for n in range(len(found))]
        return torch.stack(parts).contiguous()

    def attended(self, task: int) -> State:
        """Σ_j a_j KB_j of a task; empty of the first one, which attends to nothing."""
        if not task:
            return {}
        if task < self.place:
            return self.groups[f"attended {task}"]
        return {n: attend(a, self.knowledge(n)) for n, a in self.groups["attention"].items()}

    def effective(self, task: int, base: State, lam1: float) -> State:
        """The weights that a client uses for a task: A is pruned at λ1."""
        pruned = {n: prune(a, lam1) for n, a in self.groups[f"adaptive {task}"].items()}
        attended = self.attended(task)
        masks = self.groups[f"mask {task}"]
        return {n: compose(base[n], masks[n], a, attended.get(n)) for n, a in pruned.items()}

    def _without_knowledge(self, task: int, base: State) -> State:
        masks = self.groups[f"mask {task}"]
        adaptive = self.groups[f"adaptive {task}"]
        return {name: compose(base[name], masks[name], a) for name, a in adaptive.items()}


def groups_of(place: int, clients: int) -> dict[str, str]:
    """The groups of a memory at a place, each with the kind of its tensors."""
    kinds = {"base": "weight"}
    for task in range(place + 1):
        kinds |= {f"mask {task}": "mask", f"adaptive {task}": "weight", f"rest {task}": "rest"}
        if task < place:
            kinds[f"old {task}"] = "weight"
        if 0 < task < place:
            kinds[f"attended {task}"] = "weight"
    if place:
        kinds["attention"] = "attention"
        kinds |= {f"knowledge {client}": "weight" for client in range(clients)}
    return kinds


def decomposed(net: nn.Module) -> list[str]:
    """The names of the weights that are decomposed: of Linear and Conv2d but for the last layer.

    The last layer is ``classifier``, where the net has that; otherwise the last of its modules.
    """
    layers = {
        name: module
        for name, module in net.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and module.weight.requires_grad
    }
    last = "classifier" if "classifier" in layers else next(reversed(layers), "")
    return [f"{name}.weight" for name in layers if name != last]


def compose(base: Tensor, mask: Tensor, adaptive: Tensor, attended: Tensor | None = None) -> Tensor:
    """B ⊙ σ(m) + A + Σ_j a_j KB_j, with one m for every output channel, the first dimension."""
    weight = base * over(mask.sigmoid(), base) + adaptive
    return weight if attended is None else weight + attended


def attend(attention: Tensor, knowledge: Tensor) -> Tensor:
    """Σ_j a_j KB_j; no matrix product, which autocast would round."""
    return (over(attention, knowledge) * knowledge).sum(0)


def over(values: Tensor, like: Tensor) -> Tensor:
    """One value for each index of the first dimension, in a form that multiplies the others."""
    return values.view(-1, *[1] * (like.dim() - 1))


def prune(tensor: Tensor, threshold: float) -> Tensor:
    """Entries not above a threshold in absolute value become 0."""
    return tensor * (tensor.abs() > threshold)


def kept_channels(mask: Tensor, sparsity: float) -> Tensor:
    """Ones for the channels that are sent: |m| is strictly above that of the quantile's channel."""
    sizes = mask.abs()
    threshold = sizes.sort().values[int(sparsity * len(sizes))]
    return (sizes > threshold).to(mask)


def mean_of_sent(total: Tensor, count: Tensor) -> Tensor:
    """Σ B̂ / Σ masks, channel by channel; 0, which tells clients to keep theirs, if nobody sent."""
    count = over(count, total)
    return torch.where(count > 0, total / count.clamp(min=1e-15), 0.0)


def received(sent: Tensor, own: Tensor | None) -> Tensor:
    """B as the server sent it, where it is not 0; there, the client's own."""
    return sent if own is None else torch.where(sent == 0, own.to(sent), sent)


def draw(size: int, like: Tensor) -> Tensor:
    """Numbers as the authors' code begins with: normal, cut at two deviations, of variance 1/size.

    Drawn in float32, so that every precision begins alike.
    """
    deviation = sqrt(1 / size) / TRUNCATED
    values = torch.empty(size, dtype=torch.float32)
    return trunc_normal_(values, std=deviation, a=-2 * deviation, b=2 * deviation).to(like.dtype)
