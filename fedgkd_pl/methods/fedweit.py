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

Without tasks in the data there is one task, which never ends. The client module is in
fedweit_client.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.errors import not_negative, require
from fedgkd_pl.federation.message import (
    ClientUpdate,
    Message,
    Spec,
    Specs,
    State,
    grouped,
    joined,
    like,
)
from fedgkd_pl.federation.optimizer import empty_state
from fedgkd_pl.methods.fedavg import FedAvg, Weighting
from fedgkd_pl.methods.fedweit_client import (
    ADAPTIVE,
    BASE,
    LEARNED,
    MASK,
    FedWeITClient,
    Memory,
    decomposed,
    mean_of_sent,
    prune,
    received,
    split,
)
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn


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
    colour = 24
    client_class = FedWeITClient
    client_settings = ("decomposed", "lam1", "lam2", "sparsity")
    takes_modules = False
    tasks: tuple[str, ...] = ("classes",)
    shares_models = False
    models_differ = True
    keeps: tuple[str, ...] = ("start", "base", "knowledge", "informed")

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
        self.lam1, self.lam2 = lam1, lam2
        self.sparsity = sparsity
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
        moved: dict[str, State] = {"net": dict(self.net.named_parameters())}
        moved["mask"] = memory.groups[f"mask {place}"]
        own = ("adaptive", "attention")
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
        base, knowledge = (message.tensors.get(group, {}) for group in ("base", "knowledge"))
        told = sum(map(sparse_bytes, knowledge.values())) * len(self._without_knowledge(cohort))
        return sum(t.nbytes for t in base.values()) * len(cohort) + told

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

    def model_of(self, client: int, place: int) -> State:
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


def sparse_bytes(tensor: Tensor) -> int:
    """Of the entries that are not 0, and a bit for each that says whether it is one of them."""
    return int(tensor.count_nonzero()) * tensor.element_size() + -(-tensor.numel() // 8)
