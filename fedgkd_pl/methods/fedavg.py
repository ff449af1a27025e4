"""FedAvg, which every other method builds on.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
AISTATS 2017. With another server optimizer than SGD at rate 1: FedAvgM (Hsu et al., 2019),
FedAdam and others (Reddi et al., ICLR 2021).

    client k:  w_k ← w_t, then for every batch  w_k ← w_k − η ∇CE(w_k)
    server:    w_{t+1} ← w_t − η_s (w_t − Σ_k n_k/n w_k)
"""

from typing import Literal

import torch
from fedgkd_pl.engines.base import Engine
from fedgkd_pl.engines.local import LocalEngine
from fedgkd_pl.errors import require
from fedgkd_pl.federation.aggregate import WeightedMean
from fedgkd_pl.federation.client import FederatedClient, Objective
from fedgkd_pl.federation.losses import CrossEntropy, LocalLoss
from fedgkd_pl.federation.message import OF_NET, ClientUpdate, Message, State
from fedgkd_pl.federation.nets import server_net
from fedgkd_pl.federation.own_module import is_own_module
from fedgkd_pl.federation.performance import threads
from fedgkd_pl.federation.schedule import RoundSchedule
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.federation.steps import first_optimizer
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torchmetrics import Metric

Weighting = Literal["samples", "uniform"]


def is_default(optimizer: OptimizerCallable, lr: float = 0.05) -> bool:
    """Whether it is the one that clients (the server, at rate 1) have where none is given."""
    weight = [nn.Parameter(torch.zeros(1))]
    given, default = optimizer(weight), torch.optim.SGD(weight, lr=lr)
    return type(given) is type(default) and given.defaults == default.defaults


class FedAvg(FederatedServer):
    """FedAvg: the clients' models are averaged.

    Args:
        net: the model to learn; any module from inputs to logits, or a LightningModule.
        local_epochs: passes of a client over its data in a round (E).
        local_steps: instead of epochs, this many batches.
        optimizer: of the clients, built anew for every client and round; at its default, what a
            LightningModule configures goes first.
        scheduler: of the clients' learning rate, stepped once per local epoch.
        round_scheduler: of the same rate, stepped once per round.
        loss: of clients: cross-entropy, plain or adjusted to the classes a client holds; of other
            targets than classes BinaryCrossEntropy, SquaredError or AbsoluteError.
        weighting: of the clients in their mean: by their ``samples`` (n_k), or ``uniform``.
        server_optimizer: takes w_t − Σ n_k/n w_k as its gradient; SGD at rate 1 is FedAvg.
        engine: where the clients train.
        min_clients: a round in which fewer clients succeed changes nothing.
        max_failed_rounds: this many such rounds in a row end the run.
        compile: compile the clients' steps (student, teachers, loss), which takes up to a minute;
            what it gains depends on the net and the machine.
        metrics: torchmetrics by name, measured in every round of the validation and test sets and
            of what clients train on.
        module: a LightningModule instead of a net: its ``training_step`` is the clients' loss, its
            ``validation_step`` measures the global model.
        state_memory: megabytes of what clients keep between rounds (SCAFFOLD, MOON, ...) that stay
            in memory; the rest is on disk, beside the checkpoints.
        nets: of clients that have nets of their own, in turn; for the methods that do not average
            over all clients: FedMD, FedDF, FedDistill and CFD.
        nets_of: the number of every client's net, from 0, if they are not to have them in turn.
    """

    title = "FedAvg"
    citation = "McMahan et al., AISTATS 2017"
    colour = 0
    averages = True  # whether the server averages the clients' models
    client_metrics: tuple[str, ...] | None = ("loss", "acc", "ce")

    def __init__(
        self,
        net: nn.Module | None = None,
        local_epochs: int = 1,
        local_steps: int | None = None,
        optimizer: OptimizerCallable = lambda params: torch.optim.SGD(params, lr=0.05),
        scheduler: LRSchedulerCallable | None = None,
        round_scheduler: LRSchedulerCallable | None = None,
        loss: LocalLoss = CrossEntropy(),  # noqa: B008
        weighting: Weighting = "samples",
        server_optimizer: OptimizerCallable = lambda params: torch.optim.SGD(params, lr=1.0),
        engine: Engine = LocalEngine(),  # noqa: B008
        min_clients: int = 1,
        max_failed_rounds: int = 3,
        compile: bool = False,
        metrics: dict[str, Metric] | None = None,
        module: LightningModule | None = None,
        state_memory: float = 64,
        nets: list[nn.Module] | None = None,
        nets_of: list[int] | None = None,
    ) -> None:
        text = f"{type(self).__name__} averages weights, so all clients have one net: nets goes "
        require(
            not nets or bool(self.takes_nets),
            "nets",
            text + "with FedMD, FedDF, FedDistill and CFD",
        )
        if not self.averages:
            text = f"has no effect: {self.title} averages no models"
            require(weighting == "samples", "weighting", text, weighting)
            require(is_default(server_optimizer, lr=1.0), "server_optimizer", text)
        net = server_net(self.takes_nets, net, module, nets)
        super().__init__(
            *(net, engine, local_epochs, local_steps),
            *(min_clients, max_failed_rounds, compile, state_memory),
        )
        self.take_nets(nets, nets_of)
        configures = is_own_module(net) and is_overridden("configure_optimizers", net)
        self.optimizer = None if configures and is_default(optimizer) else optimizer
        self.scheduler = scheduler
        self.local_loss = loss
        self.metrics = metrics or {}
        self.weighting: Weighting = weighting
        self.server_optimizer = server_optimizer
        if round_scheduler is not None:
            client = FedAvgClient(self.kinds[0], self.optimizer)
            built = first_optimizer(client.configure_optimizers())
            self.schedule = RoundSchedule(round_scheduler, built.param_groups[0]["lr"])

    def training_step(self, cohort: list[int], batch_idx: int) -> None:
        """One communication round (Algorithm 1)."""
        with threads(1):  # so that nothing depends on how many cores the server has
            message = self.broadcast()
            total = WeightedMean()
            for update in self.local_updates(message, cohort):
                total.add(self.placed(update), self.weight(update))
                self.take(update)
            if self.round_counts():
                self.server_step(total.mean(exact=True))

    def broadcast(self) -> Message:
        """What every client gets: w_t; where clients have several nets, the model of each."""
        if self.net_of is None or self.takes_nets != "members":
            return Message(self.round, {"global": self.global_state()})
        models = {f"global{OF_NET}{n}": net.state_dict() for n, net in enumerate(self.kinds)}
        return Message(self.round, models)

    def weight(self, update: ClientUpdate) -> int:
        """A client's weight in the mean."""
        return update.num_samples if self.weighting == "samples" and not self.has_parties else 1

    def take(self, update: ClientUpdate) -> None:
        """What else a method makes of a client's answer; nothing here."""

    @torch.no_grad()
    def server_step(self, mean: State) -> None:
        """Moves the global model towards the clients' mean; what no client had stays as it is."""
        for name, parameter in self.net.named_parameters():
            if not parameter.requires_grad or name not in mean:  # frozen, for weight decay too
                continue
            if self.has_parties:  # it is that client's own
                parameter.copy_(mean[name])
                continue
            gradient = parameter.cpu().double() - mean[name]  # some devices have no doubles
            parameter.grad = gradient.to(parameter)
        optimizer = self.optimizers()
        optimizer.step()  # type: ignore[union-attr]
        optimizer.zero_grad()  # type: ignore[union-attr]
        for name, buffer in self.net.named_buffers():
            if name in mean:  # a non-persistent buffer does not travel
                buffer.copy_(mean[name])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The server's optimizer."""
        return self.server_optimizer(self.net.parameters())

    def client(self) -> "FedAvgClient":
        """The client half."""
        return FedAvgClient(self.net, self.optimizer, self.scheduler)

    def client_with(self, number: int) -> FederatedClient:
        """The client half with one of several nets."""
        return FedAvgClient(self.kinds[number], self.optimizer, self.scheduler)


class FedAvgClient(FederatedClient):
    """The client half of FedAvg: cross-entropy."""

    def objective(self, x: Tensor, y: Tensor, teacher_output: Tensor | None) -> Objective:
        """CE(w)."""
        _, loss, parts = self.task_loss(x, y)
        return loss, parts
