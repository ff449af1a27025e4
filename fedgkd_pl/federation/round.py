"""What clients are trained on, what they must answer, and what they have answered so far."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.index import largest_first
from fedgkd_pl.federation.answers import Form
from fedgkd_pl.federation.client_trainer import Job
from fedgkd_pl.federation.evaluation import cohort_statistics
from fedgkd_pl.federation.message import Answer, ClientFailure, ClientUpdate, State
from fedgkd_pl.federation.own_module import is_own_module
from fedgkd_pl.federation.task_view import TaskView
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import Precision
from torch import nn
from torch.amp import GradScaler

if TYPE_CHECKING:
    from fedgkd_pl.federation.client import FederatedClient
    from fedgkd_pl.federation.server import FederatedServer

log = logging.getLogger("fedgkd_pl")


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

    def values(self) -> dict[str, float]:
        """What is logged of the round."""
        return {
            **cohort_statistics(self.reports),
            "client/failed": len(self.failures),
            "comm/bytes_down": self.bytes_down,
            "comm/bytes_up": self.bytes_up,
        }


def forms_of(server: "FederatedServer", cohort: Sequence[int]) -> list[Form]:
    """What the answers of a round must be, as the method declares it, for every net of clients'."""
    owners = (owner for owner in (server, *type(server).__mro__) if "client" in vars(owner))
    known = server.engine.max_samples is None
    data, round = server.datamodule.client_data, server.round
    travel = server.shares_models or not server.engine.states_stay  # as models of clients do
    form = Form(
        weights={},
        extra=server.client_extra(),
        metrics=_reported(server, vars(next(owners)).get("client_metrics")),
        samples={client: data.size(client, round) for client in cohort} if known else {},
        max_samples=server.engine.max_samples,
        check=server.client_fault,
    )
    return [
        replace(
            form,
            weights=server.client_model(number) if travel else {},
            state=server.engine.states(server.client_state_of(number)),
        )
        for number in range(len(server.kinds))
    ]


def _reported(
    server: "FederatedServer", declared: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    """What clients may report; a module logs what it likes."""
    if declared is None or is_own_module(server.net):
        return None
    return (*declared, server.local_loss.name, *server.metrics)


def _halves(server: "FederatedServer", data: FederatedDataModule) -> "list[FederatedClient]":
    """The client halves of a method, one for every net; where data has tasks, with a view of them.

    All nets of a half and their copies share one view.
    """
    if data.client_data.tasks is None:
        return server.clients()
    view = TaskView()
    with ExitStack() as stack:
        for net in server.kinds:
            stack.enter_context(view.on(net))
        halves = server.clients()
    for half in halves:
        half.view = view
    return halves


def _completed(
    client: "FederatedClient", server: "FederatedServer", data: FederatedDataModule
) -> "FederatedClient":
    """A client half of a method, with what every client of a run has."""
    client.local_loss = server.local_loss
    client.needs_outputs = server.needs_outputs or bool(server.metrics)
    if server.metrics:
        client.metrics = nn.ModuleDict({n: deepcopy(m) for n, m in server.metrics.items()})
    client.num_classes, client.run_seed = data.num_classes, data.seed
    if client.uses_public:
        client.public = data.public
    return client


def job_of(server: "FederatedServer", trainer: Trainer, data: FederatedDataModule) -> Job:
    """What clients are trained on and how; the server's precision and clipping are theirs."""
    halves = [_completed(client, server, data) for client in _halves(server, data)]
    return Job(
        client=halves[0],
        data=data.client_data,
        device=trainer.strategy.root_device,
        trainer={
            "precision": trainer.precision,
            "max_epochs": server.local_epochs if server.local_steps is None else -1,
            "max_steps": -1 if server.local_steps is None else server.local_steps,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        },
        states=server._client_states,
        compile=server.compiles,
        accelerator=trainer.accelerator,
        precision=_of_clients(trainer.precision_plugin),
        others=halves[1:],
        net_of=server.net_of,
    )


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


def waiting(
    server: "FederatedServer", answers: Iterator[Answer], cohort: Sequence[int]
) -> Iterator[tuple[int, Answer]]:
    """The answers, each with who was asked for it; counts the time that is waited for them."""
    start = time.perf_counter()
    for client in largest_first(server.datamodule.client_data.index, cohort):
        answer = next(answers, ClientFailure(client, "did not answer"))
        server.waited += time.perf_counter() - start
        yield client, answer
        start = time.perf_counter()
    for _ in answers:
        log.warning("round %d: more answers than clients were asked", server.round)
    server.waited += time.perf_counter() - start
