"""FedWeIT: clients learn a sequence of tasks each, and share what their tasks have in common.

Yoon et al., Federated Continual Learning with Weighted Inter-client Transfer, ICML 2021. The
weights of a client in its task t are B, which all share, under a mask of its own, what the task
adapts, and what others have adapted for theirs (those of every layer but the last; m is one number
per output channel, a one per client j):

    θ_t = B ⊙ σ(m_t) + A_t + Σ_j a_tj KB_tj
    L_t = CE(θ_t) + λ1 ( Σ|m_t| + Σ_{i≤t} Σ|A_i| ) + λ2 Σ_{i<t} ‖ B ⊙ σ(m_i) + A_i − θ_i ‖²

with θ_i = B ⊙ σ(m_i) + A_i as it was when task t began: the last term holds old tasks' weights
while B moves and old A_i follow. Biases, norm layers and the last layer belong to a client and a
task. Each round:

    client:  sends B in the channels whose |m_t| is above a quantile, with which those are; in a
             task's last round A_t, entries not above λ1 set to 0
    server:  B ← Σ_k B_k / Σ_k mask_k by channel; 0 for one that nobody sends. In a task's first
             round all clients' last A_t go out, as KB

Without tasks in the data there is one task, which never ends.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.errors import not_negative, require
from fedgkd_pl.federation.client import Objective, Parts
from fedgkd_pl.federation.message import (
    OF_GROUP,
    ClientUpdate,
    Message,
    Spec,
    Specs,
    State,
    grouped,
    joined,
    like,
)
from fedgkd_pl.federation.optimizer import empty_state, first_optimizer, load_state, state_of
from fedgkd_pl.methods.fedavg import FedAvg, FedAvgClient, Weighting
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.init import trunc_normal_

BASE, MASK, ADAPTIVE = "base", "mask", "adaptive"  # groups of what is sent
LEARNED = "learned"  # for every task so far, whether the client has trained in it
TRUNCATED = 0.87962566103423978  # the standard deviation of a normal one that is cut at ±2


class Memory:
    """What a client keeps between rounds: groups of tensors, each by the names of weights.

    With t for a task's place in the client's sequence and p for that of the last one:

        base                    the client's own B, as it left it
        mask t, adaptive t      m_t and A_t
        rest t                  what is not decomposed: biases, norm layers, head
        old t                   B⊙σ(m_t) + A_t when task p began, for t < p
        attended t              Σ_j a_j KB_j of task t, which is over, for 0 < t < p
        attention, knowledge j  a and KB_j of task p > 0
        moments                 the optimizer's state
    """

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
            start: the decomposed weights of the first round, in the type that clients train in.
            rest: what else a client has of its own, as it is at first; may be empty.
            clients: how many there are, whose knowledge is attended to.
        """
        last, place = self.place, self.place + 1
        self.groups.pop("moments", None)
        for task in range(place):
            base, masks = self.groups["base"], self.groups[f"mask {task}"]
            adaptive = self.groups[f"adaptive {task}"].items()
            old = {name: compose(base[name], masks[name], a) for name, a in adaptive}
            if not self.learned[task]:
                old = {name: torch.zeros_like(weight) for name, weight in old.items()}
            self.groups[f"old {task}"] = old
        if last > 0:
            self.groups[f"attended {last}"] = self.attended(last)
        if rest:
            self.groups[f"rest {place}"] = {name: t.clone() for name, t in rest.items()}
        self.groups[f"mask {place}"] = {n: draw(len(w), w) for n, w in start.items()}
        self.groups[f"adaptive {place}"] = {n: w / 3 for n, w in start.items()}
        if place:
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
        clients = sum(group.startswith("knowledge ") for group in self.groups)
        parts = [self.groups[f"knowledge {n}"][name] for n in range(clients)]
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
        attended, masks = self.attended(task), self.groups[f"mask {task}"]
        return {n: compose(base[n], masks[n], a, attended.get(n)) for n, a in pruned.items()}


class FedWeITClient(FedAvgClient):
    """The client module of FedWeIT; its net's own weights are B, and what is not decomposed."""

    memory: Memory

    def __init__(self, net: nn.Module, *args: Any, **settings: Any) -> None:
        super().__init__(net, *args, **settings)
        self.own: dict[str, nn.Parameter] = {}  # m and a of the task, A of all tasks so far
        self.knowledge: State = {}
        self.old: list[tuple[int, State, State]] = []  # σ(m) and θ of the tasks before

    def receive(self, message: Message, state: State) -> None:
        """Takes B, where it is 0 its own, and goes on in its task or begins the next."""
        sent, clients = message.tensors["base"], int(message.numbers["clients"])
        start, rest = split(self.start, self.decomposed)
        memory = self.memory = Memory.read(state)
        memory.groups.setdefault("base", dict(start))
        place = 0 if self.task is None else self.task.place
        while memory.place < place:
            memory.begin(start, rest, clients)
        if "knowledge" in message.tensors:
            told = Memory.read(message.tensors["knowledge"]).groups
            memory.learn_from({int(client): a for client, a in told.items()}, start, clients)
        base = {n: received(t, memory.groups["base"][n]) for n, t in sent.items()}
        model = self.start | base | memory.groups.get(f"rest {place}", {})
        super().receive(Message(message.round, {"global": model}, message.numbers), {})
        self._load(place)

    @torch.no_grad()
    def _load(self, place: int) -> None:
        """Makes parameters of what is trained, in the layout of the net's weights."""
        weights, groups, learned = self.weights(), self.memory.groups, self.memory.learned
        own = {"mask": groups[f"mask {place}"]}
        own |= {f"adaptive {task}": groups[f"adaptive {task}"] for task in range(place + 1)}
        values = joined({g: {n: named[n] for n in weights} for g, named in own.items()})
        values |= joined({"attention": groups["attention"]} if place else {})
        parameters: dict[str, nn.Parameter] = {}
        for key, value in values.items():
            name = key.split(OF_GROUP, 1)[1]
            layout = weights[name].detach() if key.startswith("adaptive") else value
            made = torch.empty_like(layout, device=self.device, dtype=value.dtype)
            kept = self.own.get(key)  # compiled code knows the parameter, not its values
            if kept is None or (kept.shape, kept.dtype) != (made.shape, made.dtype):
                kept = nn.Parameter(made)
            kept.grad = None
            kept.copy_(value)
            parameters[key] = kept
        self.own = parameters
        told = weights if place else ()
        self.knowledge = {n: self.memory.knowledge(n).to(self.device) for n in told}
        self.old = [
            (
                task,
                {n: m.to(self.device).sigmoid() for n, m in groups[f"mask {task}"].items()},
                {
                    n: torch.empty_like(weights[n], dtype=t.dtype).copy_(t)
                    for n, t in groups[f"old {task}"].items()
                },
            )
            for task in range(place)
            if learned[task]
        ]

    def weights(self) -> dict[str, nn.Parameter]:
        """B."""
        parameters = dict(self.net.named_parameters())
        return {name: parameters[name] for name in self.decomposed}

    def named(self) -> dict[str, nn.Parameter]:
        """All that is trained."""
        return joined({"net": dict(self.net.named_parameters())}) | self.own

    def trained(self) -> list[nn.Parameter]:
        """All that is trained."""
        return list(self.named().values())

    def configure_optimizers(self) -> Any:
        """A new optimizer, which in a task goes on from where that of the last round stopped."""
        configured = super().configure_optimizers()
        if hasattr(self, "memory"):
            kept = self.memory.groups.get("moments", {})
            load_state(first_optimizer(configured), kept, self.named())
        return configured

    def on_train_end(self) -> None:
        """Keeps the optimizer's state, which Lightning drops after this hook."""
        optimizer = first_optimizer(self.optimizers(use_pl_optimizer=False))
        all_moved = {name: nn.Parameter(w.detach()) for name, w in self.named().items()}
        unmoved = empty_state(self.optimizer, all_moved)
        self.memory.groups["moments"] = state_of(optimizer, unmoved, self.named())

    def theta(self) -> dict[str, Tensor]:
        """θ_t."""
        own, composed = grouped(self.own), {}
        masks, adaptive = own["mask"], own[f"adaptive {self.memory.place}"]
        attention = own.get("attention", {}).items()
        attended = {n: attend(a, self.knowledge[n]) for n, a in attention}
        for name, base in self.weights().items():
            composed[name] = compose(base, masks[name], adaptive[name], attended.get(name))
        return composed

    def task_loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Parts]:
        """CE(θ_t); see :meth:`FederatedClient.task_loss`."""
        outputs: Tensor = functional_call(self.net, self.theta(), (x,))
        return outputs, *self.loss_of(outputs, y)

    def objective(self, x: Tensor, y: Tensor, teacher_output: Tensor | None) -> Objective:
        """CE(θ_t) + λ1 ( Σ|m_t| + Σ_{i≤t} Σ|A_i| ) + λ2 Σ_{i<t} ‖ B ⊙ σ(m_i) + A_i − θ_i ‖²."""
        loss, parts = super().objective(x, y, teacher_output)
        if self.lam1:
            parts["sparsity"] = self.lam1 * self.sparsity_term()
            loss = loss + parts["sparsity"]
        if self.lam2 and self.old:
            parts["drift"] = self.lam2 * self.drift_term()
            loss = loss + parts["drift"]
        return loss, parts

    def sparsity_term(self) -> Tensor:
        """Σ|m_t| + Σ_{i≤t} Σ|A_i|, of tasks that the client has trained in."""
        tasks = [*(task for task, _, _ in self.old), self.memory.place]
        groups = ("mask", *(f"adaptive {task}" for task in tasks))
        terms = [self.own[f"{g}{OF_GROUP}{n}"].abs().sum() for g in groups for n in self.decomposed]
        return torch.stack(terms).sum()

    def drift_term(self) -> Tensor:
        """Σ_{i<t} ‖ B ⊙ σ(m_i) + A_i − θ_i ‖²."""
        weights, terms = self.weights(), []
        for task, masks, old in self.old:
            for name, theta in old.items():
                adaptive = self.own[f"adaptive {task}{OF_GROUP}{name}"]
                now = weights[name] * over(masks[name], theta) + adaptive
                terms.append(((now - theta) ** 2).sum())
        return torch.stack(terms).sum()

    def reply(self) -> ClientUpdate:
        """Sends B and A under their masks, and keeps all; its model is θ_t, with A pruned."""
        update = super().reply()
        memory, place = self.memory, self.memory.place
        memory.learned[place] = True
        base, rest = split(update.weights, self.decomposed)
        memory.groups |= {"base": base, f"rest {place}": rest}
        for group, parameters in grouped(self.own).items():
            copies = {n: p.detach().cpu().clone() for n, p in parameters.items()}
            memory.groups[f"mask {place}" if group == "mask" else group] = copies
        update.extra = self._sent(base, memory.groups[f"mask {place}"])
        update.weights = update.weights | memory.effective(place, base, self.lam1)
        update.state = memory.state()
        return update

    def _sent(self, base: State, masks: State) -> State:
        kept = {name: torch.ones_like(mask) for name, mask in masks.items()}
        if self.sparsity is not None:
            kept = {name: kept_channels(mask, self.sparsity) for name, mask in masks.items()}
        sent = {BASE: {n: b * over(kept[n], b) for n, b in base.items()}, MASK: kept}
        if self.task is not None and self.task.ends:
            adaptive = self.memory.groups[f"adaptive {self.task.place}"]
            sent[ADAPTIVE] = {name: prune(a, self.lam1) for name, a in adaptive.items()}
        return joined(sent)


class FedWeIT(FedAvg):
    """FedWeIT: weights are a masked common base, a task's own sparse part, and others' parts.

    Every client has a model of its own for every task; the mean of the round's clients' models,
    which nobody sends, is evaluated as the global one. A client keeps three models for each of its
    tasks, and in the current one those of all clients.

    Args:
        net: the model to learn; any module from inputs to logits.
        lam1: λ1, the weight of Σ|m| and Σ|A|, and where A is pruned (published code: 0.001).
        lam2: λ2, the weight of the drift of old tasks' weights (published code: 100, with a half of
            the sum: 50 here).
        sparsity: the part of the channels whose B is not sent; null sends all.
        optimizer: of the clients; by default about that of the published code, Adam at 0.001/3.
        weighting: of the clients in B's mean: ``uniform``, or by their ``samples``.
        kwargs: those of :class:`FedAvg`; ``server_optimizer`` does not move B.
    """

    title = "FedWeIT"
    citation = "Yoon et al., ICML 2021"
    exchanges = ()
    colour = 24
    client_class = FedWeITClient
    client_settings = ("decomposed", "lam1", "lam2", "sparsity")
    takes_modules = False
    tasks = ("classes",)
    shares_models = False
    models_differ = True
    keeps = ("start", "base", "knowledge", "informed")

    def __init__(
        self,
        net: nn.Module,
        lam1: float = 1e-3,
        lam2: float = 100.0,
        sparsity: float | None = 0.3,
        optimizer: OptimizerCallable = lambda params: torch.optim.Adam(params, lr=0.00033),
        weighting: Weighting = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, optimizer=optimizer, weighting=weighting, **kwargs)
        not_negative(lam1=lam1, lam2=lam2)
        text = "must be in [0, 1), or null to send all channels"
        require(sparsity is None or 0 <= sparsity < 1, "sparsity", text, sparsity)
        self.lam1, self.lam2, self.sparsity = lam1, lam2, sparsity
        self.decomposed = decomposed(net)
        self._cohort: Sequence[int] = ()
        self.reset()

    def reset(self) -> None:
        """Starts from the net as it is, without knowledge."""
        super().reset()
        self.knowledge: dict[int, State] = {}  # the A of the last task, by client
        self.informed: dict[int, int] = {}  # at which place a client has last been told of it
        self.base = {name: self.start[name].clone() for name in self.decomposed}

    def check(self, data: FederatedDataModule) -> None:
        """Asks for a layer to decompose, and for an optimizer whose state can be kept."""
        text = "FedWeIT decomposes the weights of Linear and Conv2d before the last layer: has none"
        require(len(self.decomposed) > 0, "net", text)
        super().check(data)
        empty_state(self.optimizer, dict(self.net.named_parameters()))

    # -- a round -------------------------------------------------------------------------------

    def training_step(self, cohort: list[int], batch_idx: int) -> None:
        """One communication round; whom it asks decides whether knowledge must be sent."""
        self._cohort = cohort
        super().training_step(cohort, batch_idx)

    def broadcast(self) -> Message:
        """B, and in a new task KB, until every client of the cohort has it."""
        message = super().broadcast()
        types = {name: weight.dtype for name, weight in message.models.pop("global").items()}
        message.tensors["base"] = {n: weight.to(types[n]) for n, weight in self.base.items()}
        message.numbers["clients"] = self.datamodule.num_clients
        if self._without_knowledge(self._cohort):
            told = {str(client): adapted for client, adapted in self.knowledge.items()}
            message.tensors["knowledge"] = joined(told)
        return message

    def on_update(self, update: ClientUpdate) -> None:
        """Sums B and the masks up; keeps A until the round counts."""
        groups = grouped(update.extra)
        self.answers.append((update.client, groups.pop(ADAPTIVE, {})))
        for name, value in joined(groups).items():
            self.sums[name] += self.weight(update) * value.double()

    def server_step(self, mean: State) -> None:
        """B is the mean of what was sent, and the global model that of the clients' models."""
        super().server_step(mean)
        sums, now = grouped(self.sums), self.global_state()
        for name, total in sums[BASE].items():
            self.base[name] = mean_of_sent(total, sums[MASK][name]).to(now[name].dtype)
        self.informed |= {client: self._place() for client, _ in self.answers}
        if self._ends():
            self.knowledge = dict(self.answers)

    # -- what clients send and keep ------------------------------------------------------------

    def client_extra(self) -> Specs:
        """B and which channels of it count; in a task's last round A."""
        model = self.client_model()
        base = {name: model[name] for name in self.decomposed}
        masks = {name: Spec(form.shape[:1], form.dtype, 0, 1) for name, form in base.items()}
        extra = {BASE: base, MASK: masks}
        return joined(extra | {ADAPTIVE: base} if self._ends() else extra)

    def client_state(self, number: int = 0) -> Specs:
        """A client's :class:`Memory`: as one that begins all tasks so far without numbers."""
        place = self._place()
        with torch.device("meta"):
            first = {name: t.to("meta") for name, t in self.start_of().items()}
            start, rest = split(first, self.decomposed)
            memory = Memory({"base": start}, [])
            for _ in range(place + 1):
                memory.begin(start, rest, self.datamodule.num_clients)
        net: State = dict(self.net.named_parameters())
        moved, own = {"net": net, "mask": memory.groups[f"mask {place}"]}, ("adaptive", "attention")
        moved |= {g: s for g, s in memory.groups.items() if g.startswith(own)}
        shapes = joined(moved).items()
        copies = {n: nn.Parameter(torch.zeros(t.shape, dtype=t.dtype)) for n, t in shapes}
        memory.groups["moments"] = empty_state(self.optimizer, copies)
        return {**like(joined(memory.groups)), LEARNED: Spec((place + 1,), torch.int64, 0, 1)}

    def client_fault(self, update: ClientUpdate) -> str:
        """A channel is sent or is not; of one that is not, B is 0."""
        sent = grouped(update.extra)
        for name, base in sent[BASE].items():
            mask = sent[MASK][name]
            if not torch.equal(mask, mask.bool().to(mask)):
                return f"its mask of {name} is not 0 or 1"
            if base[~mask.bool()].any():
                return f"its base of {name} is of channels that its mask leaves out"
        return ""

    def bytes_of(self, message: Message, cohort: Sequence[int]) -> int:
        """B for everybody; KB, without its zeros, for those who do not have it."""
        knowledge = message.tensors.get("knowledge", {}).values()
        told = sum(map(sparse_bytes, knowledge)) * len(self._without_knowledge(cohort))
        return sum(t.nbytes for t in message.tensors["base"].values()) * len(cohort) + told

    def bytes_of_answer(self, update: ClientUpdate) -> int:
        """The channels that are sent and which those are; A without its zeros."""
        sent = grouped(update.extra)
        total = sum(map(sparse_bytes, sent.get(ADAPTIVE, {}).values()))
        for name, mask in sent[MASK].items():
            total += int(mask.sum()) * sent[BASE][name][:1].nbytes + -(-len(mask) // 8)
        return total

    # -- tasks ---------------------------------------------------------------------------------

    def _place(self) -> int:
        tasks = self.datamodule.client_data.tasks
        return 0 if tasks is None else tasks.place(self.round)

    def _ends(self) -> bool:
        tasks = self.datamodule.client_data.tasks
        return tasks is not None and tasks.ends(self.round)

    def _without_knowledge(self, cohort: Sequence[int]) -> list[int]:
        place = self._place()
        if not place or not self.knowledge:
            return []
        return [client for client in cohort if self.informed.get(client) != place]

    def model_of(self, client: int, place: int = 0) -> State:
        """A client's own parameters of a task with the B of now.

        Of a task that it has not begun: with m = 0, the first A and nothing attended to.
        """
        memory = Memory.read(self.client_states.get(client) or {})
        model = self.start_of()
        own = memory.groups.get("base", self.start)
        base = {n: received(t.to(model[n].dtype), own[n]) for n, t in self.base.items()}
        if place <= memory.place:
            rest = memory.groups.get(f"rest {place}", {})
            return model | rest | memory.effective(place, base, self.lam1)
        return model | {n: b / 2 + prune(model[n] / 3, self.lam1) for n, b in base.items()}


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


def split(state: State, decomposed: Sequence[str]) -> tuple[State, State]:
    """The weights that are decomposed, and the rest."""
    rest = {name: tensor for name, tensor in state.items() if name not in decomposed}
    return {name: state[name] for name in decomposed}, rest


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


def received(sent: Tensor, own: Tensor) -> Tensor:
    """B as the server sent it, where it is not 0; there, the client's own."""
    return torch.where(sent == 0, own.to(sent), sent)


def draw(size: int, like: Tensor) -> Tensor:
    """Numbers as the authors' code begins with: normal, cut at two deviations, of variance 1/size.

    Drawn in float32, so that every precision begins alike.
    """
    deviation = sqrt(1 / size) / TRUNCATED
    values = torch.empty(size, dtype=torch.float32)
    return trunc_normal_(values, std=deviation, a=-2 * deviation, b=2 * deviation).to(like.dtype)


def sparse_bytes(tensor: Tensor) -> int:
    """Of the entries that are not 0, and a bit for each that says whether it is one of them."""
    return int(tensor.count_nonzero()) * tensor.element_size() + -(-tensor.numel() // 8)
