"""One round: the clients' job, the form of their answers, and what has come back so far."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.federation.client import TaskView
from fedgkd_pl.federation.client_trainer import Job
from fedgkd_pl.federation.evaluation import cohort_statistics
from fedgkd_pl.federation.message import NOT_FINITE, ClientFailure, ClientUpdate, Form, State
from fedgkd_pl.processes.command import CtrlC, stop_behind
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import Precision
from torch import nn
from torch.amp import GradScaler
from typing_extensions import override

if TYPE_CHECKING:
    from fedgkd_pl.federation.client import FederatedClient
    from fedgkd_pl.federation.server import FederatedServer

log = logging.getLogger("fedgkd_pl")
GROWTH = 1e10  # of the clients' mean loss, over that of the first round that counted


@dataclass
class RoundResults:
    """What the clients of a round have answered so far.

    Attributes:
        reports: the metrics of each client that succeeded.
        states: what clients keep, once the round counts.
        bytes_down: what was sent to the clients, failed ones included.
    """

    reports: list[dict[str, float]] = field(default_factory=list)
    failures: list[ClientFailure] = field(default_factory=list)
    states: dict[int, State] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0

    def add(self, update: ClientUpdate, nbytes: int) -> None:
        """Takes an answer in; the model is counted and not kept."""
        self.bytes_up += nbytes
        self.reports.append(update.metrics)
        if update.state:
            self.states[update.client] = update.state

    @property
    def mean_loss(self) -> float | None:
        """The mean of the clients' losses; None if no client reports one."""
        losses = [report["loss"] for report in self.reports if "loss" in report]
        return sum(losses) / len(losses) if losses else None

    def values(self) -> dict[str, float]:
        """What is logged of the round."""
        return {
            **cohort_statistics(self.reports),
            "client/failed": len(self.failures),
            "comm/bytes_down": self.bytes_down,
            "comm/bytes_up": self.bytes_up,
        }


def form(server: "FederatedServer", cohort: Sequence[int], number: int) -> Form:
    """The form of the answers of clients with one of the nets, as the method declares it."""
    known = server.engine.max_samples is None
    data, round = server.datamodule.client_data, server.round
    travel = server.shares_models or not server.engine.states_stay  # as models of clients do
    return Form(
        weights=server.client_model(number) if travel else {},
        extra=server.client_extra(),
        state=server.engine.states(server.kept_of(number)),
        samples={client: data.size(client, round) for client in cohort} if known else {},
        max_samples=server.engine.max_samples,
        check=server.client_fault,
    )


def _client_modules(
    server: "FederatedServer", data: FederatedDataModule
) -> "list[FederatedClient]":
    """A client module for every net; where data has tasks, with one view of them."""
    numbers = range(len(server.nets))
    if data.client_data.tasks is None:
        return [server.client(number) for number in numbers]
    view = TaskView()
    with ExitStack() as stack:
        for net in server.nets:
            stack.enter_context(view.on(net))
        modules = [server.client(number) for number in numbers]
    for module in modules:
        module.view = view
    return modules


def job_of(server: "FederatedServer", trainer: Trainer, data: FederatedDataModule) -> Job:
    """What clients are trained on and how; the server's precision and clipping are theirs."""
    modules = _client_modules(server, data)
    for client in modules:
        client.local_loss = server.local_loss
        client.needs_outputs = server.needs_outputs or bool(server.metrics)
        if server.metrics:
            copies = {name: deepcopy(metric) for name, metric in server.metrics.items()}
            client.metrics, client.report.metrics = nn.ModuleDict(copies), copies
        client.num_classes, client.run_seed = data.num_classes, data.seed
        if client.uses_public:
            client.public = data.public
    return Job(
        client=modules[0],
        data=data.client_data,
        device=trainer.strategy.root_device,
        trainer={
            "precision": trainer.precision,
            "max_epochs": server.local_epochs if server.local_steps is None else -1,
            "max_steps": -1 if server.local_steps is None else server.local_steps,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        },
        states=server.client_states,
        compile=server.compiles,
        accelerator=trainer.accelerator,
        precision=_of_clients(trainer.precision_plugin),
        others=modules[1:],
        net_of=server.client_nets.index,
    )


def divergence(results: RoundResults, first_loss: float | None) -> str:
    """How the clients of a round diverge, in words; empty if they do not.

    A client was left out because a number of its was not finite, or the mean loss is 1e10 times
    that of the first round that counted (in the first round itself, 1e10).
    """
    for failure in results.failures:
        if failure.reason.endswith(NOT_FINITE):
            return f"client {failure.client}: {failure.reason}"
    # a first loss near 0 grows by any factor: it counts as at least 1e-10
    base = 1.0 if first_loss is None else max(abs(first_loss), 1 / GROWTH)
    loss = results.mean_loss or 0.0
    return "" if isfinite(loss) and abs(loss) < GROWTH * base else f"loss {loss:.1e}"


class NoLossScale(GradScaler):
    """What the server's precision has for a loss scale, without a loss; it keeps the clients'."""

    def __init__(self, scaler: GradScaler) -> None:
        super().__init__(enabled=False)
        self.clients: GradScaler = scaler.clients if isinstance(scaler, NoLossScale) else scaler


def _of_clients(precision: Precision) -> Precision:
    made = deepcopy(precision)
    if isinstance(getattr(made, "scaler", None), NoLossScale):
        made.scaler = made.scaler.clients  # type: ignore[attr-defined]
    return made


class CloseOnError(Callback):
    """Ends the workers whatever fails, Ctrl-C included; a module has no hook for that."""

    def __init__(self) -> None:
        self.interrupts = CtrlC()

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.interrupts.begin()  # not before: Lightning puts back the handlers that it finds

    @override
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.interrupts.end()

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.interrupts.is_ending = True
        pl_module.close()
        if isinstance(trainer.datamodule, FederatedDataModule):
            trainer.datamodule.teardown("fit")  # Lightning does if nothing fails
        stop = stop_behind(exception)
        if stop is not None and not stop.hint:
            stop.hint = _how_to_go_on(trainer)
        elif isinstance(exception, KeyboardInterrupt):
            log.warning("interrupted; %s", _how_to_go_on(trainer))
        self.interrupts.end(exception)


def _how_to_go_on(trainer: Trainer) -> str:
    """The call that resumes from the newest of Lightning's checkpoints."""
    kept = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    paths = [each.last_model_path or each.best_model_path for each in kept]
    if not any(paths):
        return "no round is kept: train with a ModelCheckpoint to resume"
    return f"resume with: trainer.fit(model, data, ckpt_path={next(filter(None, paths))!r})"
