"""The client module of FedWeIT; see fedweit.py for the equations and the server's half."""

from typing import Any

import torch
from fedgkd_pl.federation.client import Objective, Parts
from fedgkd_pl.federation.message import (
    OF_GROUP,
    ClientUpdate,
    Message,
    State,
    grouped,
    joined,
)
from fedgkd_pl.federation.optimizer import empty_state, first_optimizer, load_state, state_of
from fedgkd_pl.methods.fedavg import FedAvgClient
from fedgkd_pl.methods.fedweit_memory import (
    Memory,
    attend,
    compose,
    kept_channels,
    over,
    prune,
    received,
)
from torch import Tensor, nn
from torch.func import functional_call

BASE, MASK, ADAPTIVE = (f"{kind}{OF_GROUP}" for kind in ("base", "mask", "adaptive"))


class FedWeITClient(FedAvgClient):
    """The client module of FedWeIT; its net's own weights are B, and what is not decomposed."""

    start: State  # w_0
    decomposed: list[str]
    lam1: float
    lam2: float
    sparsity: float | None
    adaptive: bool
    local: bool
    keep_optimizer: bool
    memory: Memory

    def __init__(self, net: nn.Module, *args: Any, **settings: Any) -> None:
        super().__init__(net, *args, **settings)
        self.own: dict[str, nn.Parameter] = {}  # m and a of the task, A of all tasks so far
        self.knowledge: State = {}
        self.old: list[tuple[int, State, State]] = []  # σ(m) and θ of the tasks before

    def receive(self, message: Message, state: State) -> None:
        """Takes B, where it is 0 its own, and goes on in its task or begins the next."""
        sent, clients = message.tensors["base"], int(message.numbers["clients"])
        first = self.start
        start = {name: first[name] for name in self.decomposed} if self.adaptive else {}
        rest = {n: t for n, t in first.items() if n not in self.decomposed} if self.local else {}
        memory = self.memory = Memory.read(state)
        memory.groups.setdefault("base", dict(start))
        place = 0 if self.task is None else self.task.place
        while memory.place < place:
            memory.begin(start, rest, clients)
        if "knowledge" in message.tensors:
            told = Memory.read(message.tensors["knowledge"]).groups
            memory.learn_from({int(client): a for client, a in told.items()}, start, clients)
        base = {n: received(t, memory.groups["base"].get(n)) for n, t in sent.items()}
        model = first | base | memory.groups.get(f"rest {place}", {})
        super().receive(Message(message.round, {"global": model}, message.numbers), {})
        if self.adaptive:
            self._load(place)

    @torch.no_grad()
    def _load(self, place: int) -> None:
        """Makes parameters of what is trained, in the layout of the net's weights."""
        weights, groups, learned = self.weights(), self.memory.groups, self.memory.learned
        adaptive = [f"adaptive {task}" for task in range(place + 1)]
        values = joined(
            {
                "mask": {n: groups[f"mask {place}"][n] for n in weights},
                **{group: {n: groups[group][n] for n in weights} for group in adaptive},
                "attention": groups["attention"] if place else {},
            }
        )
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
        self.knowledge = {}
        if place:
            self.knowledge = {n: self.memory.knowledge(n).to(self.device) for n in weights}
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
        net = joined({"net": dict(self.net.named_parameters())})
        return net | (self.own if self.adaptive else {})

    def trained(self) -> list[nn.Parameter]:
        """All that is trained."""
        return list(self.named().values())

    def configure_optimizers(self) -> Any:
        """A new optimizer, which in a task goes on from where that of the last round stopped."""
        configured = super().configure_optimizers()
        if self.keep_optimizer and hasattr(self, "memory"):
            kept = self.memory.groups.get("moments", {})
            load_state(first_optimizer(configured), kept, self.named())
        return configured

    def on_train_end(self) -> None:
        """Keeps the optimizer's state, which Lightning drops after this hook."""
        if self.keep_optimizer:
            optimizer = first_optimizer(self.optimizers(use_pl_optimizer=False))
            all_moved = {name: nn.Parameter(w.detach()) for name, w in self.named().items()}
            unmoved = empty_state(self.optimizer, all_moved)
            self.memory.groups["moments"] = state_of(optimizer, unmoved, self.named())

    def theta(self) -> dict[str, Tensor]:
        """θ_t."""
        place = self.memory.place
        composed = {}
        for name, base in self.weights().items():
            mask, adaptive, attention = (
                self.own.get(f"{group}{OF_GROUP}{name}")
                for group in ("mask", f"adaptive {place}", "attention")
            )
            attended = None if attention is None else attend(attention, self.knowledge[name])
            assert mask is not None and adaptive is not None
            composed[name] = compose(base, mask, adaptive, attended)
        return composed

    def task_loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Parts]:
        """CE(θ_t); see :meth:`FederatedClient.task_loss`."""
        outputs: Tensor = (
            functional_call(self.net, self.theta(), (x,)) if self.adaptive else self.net(x)
        )
        return outputs, *self.loss_of(outputs, y)

    def objective(self, x: Tensor, y: Tensor, teacher_output: Tensor | None) -> Objective:
        """CE(θ_t) + λ1 ( Σ|m_t| + Σ_{i≤t} Σ|A_i| ) + λ2 Σ_{i<t} ‖ B ⊙ σ(m_i) + A_i − θ_i ‖²."""
        loss, parts = super().objective(x, y, teacher_output)
        if self.adaptive and self.lam1:
            parts["sparsity"] = self.lam1 * self.sparsity_term()
            loss = loss + parts["sparsity"]
        if self.adaptive and self.lam2 and self.old:
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
        if self.local:
            rest = {n: t for n, t in update.weights.items() if n not in self.decomposed}
            memory.groups[f"rest {place}"] = rest
        if self.adaptive:
            base = memory.groups["base"] = {n: update.weights[n] for n in self.decomposed}
            for group, parameters in grouped(self.own).items():
                copies = {n: p.detach().cpu().clone() for n, p in parameters.items()}
                memory.groups[f"mask {place}" if group == "mask" else group] |= copies
            update.extra = self._sent(base, memory.groups[f"mask {place}"])
            update.weights = update.weights | memory.effective(place, base, self.lam1)
        if self.adaptive or self.local or self.keep_optimizer:
            update.state = memory.state()
        return update

    def _sent(self, base: State, masks: State) -> State:
        sent: State = {}
        for name, mask in masks.items():
            kept = torch.ones_like(mask)
            if self.sparsity is not None:
                kept = kept_channels(mask, self.sparsity)
            sent |= {BASE + name: base[name] * over(kept, base[name]), MASK + name: kept}
        if self.task is not None and self.task.ends:
            adaptive = self.memory.groups[f"adaptive {self.task.place}"]
            sent |= {ADAPTIVE + n: prune(a, self.lam1) for n, a in adaptive.items()}
        return sent
