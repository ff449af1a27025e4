"""FedDF: the server distils the clients' ensemble into their mean.

Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020. After
the mean w of the cohort's models w_k, on unlabelled public inputs x:

    w ← argmin  KL( softmax( mean_k h(w_k, x) / τ ) ‖ softmax( h(w, x) / τ ) )

by Adam with a cosine schedule, gradients clipped to 5. Every ``validate_every`` steps the model is
evaluated on the server's validation set; the best of these is kept, and without a better one for
``patience`` steps it ends. The start is no candidate.

With ``nets``, w is the model of one of them, a prototype: the mean of the clients that have it. All
clients of the round teach every prototype that has one in it; the others stay as they are. What is
evaluated is the mean of the prototypes' logits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.examples import Examples
from fedgkd_pl.errors import at_least, not_negative, positive, require
from fedgkd_pl.federation.message import ClientUpdate, Message, State
from fedgkd_pl.federation.nets import ClientNets, server_net
from fedgkd_pl.federation.server_training import (
    answered_batches,
    server_adam,
    server_steps,
    validation_scores,
)
from fedgkd_pl.federation.teachers import FrozenNet
from fedgkd_pl.methods.fedavg import FedAvg, Weighting
from fedgkd_pl.methods.fedgkd import distillation
from fedgkd_pl.seeds import derive
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR


class FedDF(FedAvg):
    """FedDF: FedAvg, then ensemble distillation on public data.

    Args:
        net: the model to learn; any module from inputs to logits; or ``nets``, a prototype each.
        distil_steps: the server's steps in a round, at most; 0 is FedAvg.
        distil_lr: their rate, at the start of the cosine.
        distil_batch_size: public inputs a step (authors: the clients' 64).
        distil_clip: largest norm of the server's gradients.
        temperature: τ, which divides all logits.
        validate_every: steps from one evaluation to the next.
        patience: steps without a better evaluation that end the round's distillation.
        weighting: of the clients in their mean: ``uniform`` (authors), or by their ``samples``.
        nets: of clients that have different nets, in turn.
        nets_of: the number of every client's net, from 0, if not in turn.
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedDF"
    citation = "Lin et al., NeurIPS 2020"
    colour = 22
    takes_modules = False
    takes_sequences = False
    tasks: tuple[str, ...] = ("classes",)

    def __init__(
        self,
        net: nn.Module | None = None,
        distil_steps: int = 10_000,
        distil_lr: float = 1e-3,
        distil_batch_size: int = 64,
        distil_clip: float | None = 5.0,
        temperature: float = 1.0,
        validate_every: int = 100,
        patience: int = 1_000,
        weighting: Weighting = "uniform",
        nets: list[nn.Module] | None = None,
        nets_of: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        net = server_net("per_net", net, nets)
        super().__init__(net, weighting=weighting, **kwargs)
        self.client_nets = ClientNets("per_net", nets, nets_of)
        not_negative(distil_steps=distil_steps)
        positive(distil_lr=distil_lr, temperature=temperature)
        at_least(1, validate_every=validate_every, patience=patience)
        at_least(1, distil_batch_size=distil_batch_size)
        if distil_clip is not None:
            positive(distil_clip=distil_clip)
        self.distil_steps = distil_steps
        self.distil_lr = distil_lr
        self.distil_batch_size = distil_batch_size
        self.distil_clip = distil_clip
        self.temperature = temperature
        self.validate_every = validate_every
        self.patience = patience
        self._models: list[tuple[nn.Module, State]] = []  # of the round's clients, with their nets

    def check(self, data: FederatedDataModule) -> None:
        """Asks for public data, too."""
        check_public(data, self.title)
        super().check(data)

    def broadcast(self) -> Message:
        """w_t."""
        self._models = []
        return super().broadcast()

    def on_update(self, update: ClientUpdate) -> None:
        """Keeps a client's model until it has taught."""
        if self.distil_steps:
            self._models.append((self.nets[self.net_index(update.client)], update.weights))

    def server_step(self, mean: State) -> None:
        """As FedAvg; then the ensemble teaches the mean of every net that had a client."""
        super().server_step(mean)
        if not self.distil_steps:
            return
        present = {id(net) for net, _ in self._models}
        teachers = frozen(self._models, self.device)
        for net, label in zip(self.nets, self.net_names, strict=True):
            if id(net) not in present:
                continue
            optimizer = server_adam(net.parameters(), self.distil_lr)
            name = "server" if self.client_nets.index is None else f"server/{label}"
            best = Best(self, net, name)
            distil(
                *(self, net, teachers, (self.public, self.distil_batch_size)),
                *(optimizer, self.distil_steps, self.temperature),
                clip=self.distil_clip,
                scheduler=CosineAnnealingLR(optimizer, self.distil_steps),
                stop=best if len(self.datamodule.val) else lambda step: False,
                name=name,
            )
            best.restore()


def frozen(models: list[tuple[nn.Module, State]], device: torch.device) -> list[FrozenNet]:
    """The models of a round's clients, which are given away with it."""
    teachers = []
    while models:
        net, model = models.pop(0)
        teachers.append(FrozenNet(net))
        teachers[-1].load(model, device)
    return teachers


def distil(
    server: FedAvg,
    net: nn.Module,
    teachers: Sequence[FrozenNet],
    batches: tuple[Examples, int],
    optimizer: Optimizer,
    steps: int,
    temperature: float = 1.0,
    weights: Tensor | None = None,
    **options: Any,
) -> None:
    """Trains a net of the server towards an ensemble.

    Args:
        batches: the public data, and how many inputs a step takes.
        weights: of the teachers, a row for every input; None for alike.
        options: those of ``server_steps``.
    """
    like = next(net.parameters())

    def answer(x: Tensor, shares: Tensor | None = None) -> Tensor:
        logits = torch.stack([teacher(x) for teacher in teachers])
        return logits.mean(0) if shares is None else weighted_mean(logits, shares)

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return distillation(net(x), target, temperature=temperature)

    random = torch.Generator().manual_seed(derive(server.datamodule.seed, "server", server.round))
    answered = answered_batches(*batches, random, answer, like, known=weights)
    server_steps(server, optimizer, answered, loss, steps, **options)


class Best:
    """Evaluates a net every so many steps, and remembers the best; logs it below ``name``."""

    def __init__(self, server: FedDF, net: nn.Module, name: str) -> None:
        self.server = server
        self.net = net
        self.name = name
        self.step = 0
        self.accuracy = -1.0
        self.model: State | None = None

    def __call__(self, step: int) -> bool:
        """After a step: whether to end."""
        if step % self.server.validate_every:
            return False
        accuracy, _ = validation_scores(self.server, self.net)
        if accuracy > self.accuracy:
            self.step, self.accuracy = step, accuracy
            self.model = {n: t.clone() for n, t in self.net.state_dict().items()}
        return step - self.step >= self.server.patience

    def restore(self) -> None:
        """Takes the best model; the last, if none was evaluated."""
        if self.model is not None:
            self.net.load_state_dict(self.model)
            self.server.log_round({f"{self.name}/best_step": self.step})


def weighted_mean(logits: Tensor, shares: Tensor) -> Tensor:
    """Σ_k s_k z_k / Σ_k s_k, from clients × rows × classes and rows × clients."""
    scores = shares.T[:, :, None].to(logits)
    return (scores * logits).sum(0) / scores.sum(0)


def check_public(data: FederatedDataModule, method: str, least: int = 1) -> None:
    """Raises a clear error if there is no public data, or too little."""
    data.client_data  # noqa: B018  (loads it)
    text = f"{method} needs public data: such as data.public: HeldOut, or OtherData"
    require(data.public is not None, "public", text)
    found = len(data.public or ())
    require(found >= least, "public", f"{method} needs at least {least} inputs", found)
