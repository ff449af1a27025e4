"""FedAvg, which every other method builds on.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
AISTATS 2017. With another server optimizer than SGD at rate 1: FedAvgM (Hsu et al., 2019),
FedAdam and others (Reddi et al., ICLR 2021).

    client k:  w_k ← w_t, then for every batch  w_k ← w_k − η ∇CE(w_k)
    server:    w_{t+1} ← w_t − η_s (w_t − Σ_k n_k/n w_k)
"""

from collections import defaultdict
from functools import partial
from typing import Any, Literal, cast

import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.engines.base import Engine, LocalEngine
from fedgkd_pl.errors import require
from fedgkd_pl.federation.client import FederatedClient, Objective
from fedgkd_pl.federation.exchange import Exchange
from fedgkd_pl.federation.hardware import threads
from fedgkd_pl.federation.losses import CrossEntropy, LocalLoss
from fedgkd_pl.federation.message import OF_NET, ClientUpdate, Message, Specs, State, like
from fedgkd_pl.federation.optimizer import RoundSchedule, first_optimizer
from fedgkd_pl.federation.own_module import is_own_module, one_of
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.federation.teachers import FrozenNet, TeacherPrecision, WeightedMean
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

Weighting = Literal["samples", "uniform"]
DISTIL = "distil"  # the number in a message that says whether the teacher teaches


def is_plain(optimizer: OptimizerCallable) -> bool:
    """Whether a server optimizer is SGD at rate 1, which takes the mean as it is."""
    weight = [nn.Parameter(torch.zeros(1))]
    given, plain = optimizer(weight), torch.optim.SGD(weight, lr=1.0)
    return type(given) is type(plain) and given.defaults == plain.defaults


class FedAvgClient(FederatedClient):
    """The client module of FedAvg: cross-entropy."""

    def objective(self, x: Tensor, y: Tensor, teacher_output: Tensor | None) -> Objective:
        """CE(w)."""
        _, loss, parts = self.task_loss(x, y)
        return loss, parts


class TeacherClient(FedAvgClient):
    """A client with a frozen teacher: the model ``teacher`` of the message, or else w_t."""

    teacher_precision: TeacherPrecision = "same"

    def __init__(self, net: nn.Module, *args: Any, **settings: Any) -> None:
        super().__init__(net, *args, **settings)
        self.teacher = FrozenNet(self.net, self.teacher_precision, shares=True)
        self.distil = False

    def receive(self, message: Message, state: State) -> None:
        """Loads the student and the teacher."""
        super().receive(message, state)
        self.distil = self.has_teacher(message)
        if self.distil:
            model = message.models.get("teacher", message.models["global"])
            self.teacher.load(self.whole(model), self.device)

    def has_teacher(self, message: Message) -> bool:
        """Whether the teacher teaches in this round."""
        return bool(message.numbers.get(DISTIL))

    def teach(self, x: Tensor) -> Tensor | None:
        """The teacher's logits."""
        return self.teacher(x) if self.distil else None


class FedAvg(FederatedServer):
    """FedAvg: the clients' models are averaged.

    Args:
        net: the model to learn; any module from inputs to logits, or a LightningModule.
        local_epochs: passes of a client over its data in a round (E).
        local_steps: instead of epochs, this many batches.
        optimizer: of the clients, built anew for every client and round; None is what a
            LightningModule configures, or SGD at rate 0.05.
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
        exchange: which names of the net travel, and which stay with each client; by default all
            travel.
    """

    title = "FedAvg"
    citation = "McMahan et al., AISTATS 2017"
    colour = 0
    client_class: type[FederatedClient] = FedAvgClient
    averages = True  # whether the server averages the clients' models
    public_inputs = 0  # how many the method needs at least

    def __init__(
        self,
        net: nn.Module | None = None,
        local_epochs: int = 1,
        local_steps: int | None = None,
        optimizer: OptimizerCallable | None = None,
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
        exchange: Exchange = Exchange(),  # noqa: B008
    ) -> None:
        if not self.averages:
            text = f"has no effect: {self.title} does not average models"
            require(weighting == "samples", "weighting", text, weighting)
            require(is_plain(server_optimizer), "server_optimizer", text)
        net = one_of(net, module)
        clients = (min_clients, max_failed_rounds, compile)
        super().__init__(net, engine, local_epochs, local_steps, *clients)
        for part in ("share", "personal"):
            unused = part in self.exchanges or getattr(exchange, part) in ("all", [])
            require(
                unused, f"exchange.{part}", f"is not for {self.title}, which needs whole models"
            )
        if self.client_nets.index is None:
            self.split = exchange.split(net)
        configures = is_own_module(net) and is_overridden("configure_optimizers", net)
        if optimizer is None and not configures:
            optimizer = partial(torch.optim.SGD, lr=0.05)
        self.optimizer = optimizer
        self.scheduler, self.server_optimizer = scheduler, server_optimizer
        self.local_loss, self.metrics, self.weighting = loss, metrics or {}, weighting
        self.start: State = {}  # w_0, of a method that keeps it, unless clients have different nets
        self.answers: list[Any] = []  # what on_update has kept of the round, for server_step
        self.sums = defaultdict[str, Any](float)  # and what it has added up
        if round_scheduler is not None:
            if self.optimizer is None:
                made = cast(LightningModule, net).configure_optimizers()
            else:
                made = self.optimizer([nn.Parameter(torch.zeros(1))])
            lr = first_optimizer(made).param_groups[0]["lr"]
            self.schedule = RoundSchedule(round_scheduler, lr)

    def training_step(self, cohort: list[int], batch_idx: int) -> None:
        """One communication round (Algorithm 1)."""
        with threads(1):  # so that nothing depends on how many cores the server has
            self.answers, self.sums = [], defaultdict[str, Any](float)
            message = self.broadcast()
            total = WeightedMean()
            for update in self.local_updates(message, cohort):
                total.add(self.client_nets.in_server_net(update), self.weight(update))
                self.on_update(update)
            if self.round_counts():
                self.server_step(total.mean(exact=True))

    @override
    def reset(self) -> None:
        super().reset()
        if "start" in self.keeps and self.client_nets.index is None:
            self.start = self.global_copy()

    @override
    def check(self, data: FederatedDataModule) -> None:
        if self.public_inputs:
            data.client_data  # noqa: B018  (loads it)
            text = f"must have at least {self.public_inputs} inputs: such as HeldOut, or OtherData"
            require(len(data.public or ()) >= self.public_inputs, "public", text)
        super().check(data)

    @override
    def client(self, number: int = 0) -> FederatedClient:
        client = super().client(number)
        if "start" in self.keeps:
            client.start = self.start_of(number)
        return client

    def start_of(self, number: int = 0) -> State:
        """w_0 of clients with one of the nets, on the CPU and in the precision of now."""
        return {
            name: self.start.get(name, t).detach().to("cpu", t.dtype, copy=True)
            for name, t in self.nets[number].state_dict().items()
        }

    def broadcast(self) -> Message:
        """What every client gets: w_t; where clients have several nets, the model of each."""
        if self.client_nets.index is None or self.client_nets.layout != "per_net":
            return Message(self.round, {"global": self.shared(self.global_state())})
        models = {f"global{OF_NET}{n}": net.state_dict() for n, net in enumerate(self.nets)}
        return Message(self.round, models)

    def weight(self, update: ClientUpdate) -> int:
        """A client's weight in the mean."""
        by_samples = self.weighting == "samples" and not self.client_nets.one_per_client
        return update.num_samples if by_samples else 1

    def exact_parameters(self) -> State:
        """The parameters of w_t that travel, in double precision."""
        return {name: p.detach().cpu().double() for name, p in self.shared_parameters()}

    def shared_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that travel, by name."""
        named = self.net.named_parameters()
        return [(n, p) for n, p in named if self.split is None or n in self.split.shared]

    def move_of(self, update: ClientUpdate) -> State:
        """w_k − w_t of every parameter, in double precision."""
        return {n: update.weights[n].double() - w for n, w in self.exact_parameters().items()}

    def parameter_specs(self) -> Specs:
        """The form of what clients send or keep of every parameter that travels."""
        return like({name: p.detach() for name, p in self.shared_parameters()})

    def net_to_tune(self) -> nn.Module:
        """What clients fine-tune for themselves after the last round."""
        return self.net

    def on_update(self, update: ClientUpdate) -> None:
        """Adds what a method needs of a client's answer to ``answers`` or ``sums``."""

    @torch.no_grad()
    def server_step(self, mean: State) -> None:
        """Moves the global model towards the clients' mean; what no client had stays as it is."""
        for name, parameter in self.net.named_parameters():
            if not parameter.requires_grad or name not in mean:  # frozen, for weight decay too
                continue
            if self.client_nets.one_per_client:  # it is that client's own
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
