"""Every method on a table that the oracles can follow."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from typing import Any

import fedgkd_pl
import numpy as np
import torch
from fedgkd_pl import MLP, FedAvg, LocalEngine
from fedgkd_pl.data.datamodule import PublicData, unlabelled
from fedgkd_pl.data.examples import Batches, Examples
from fedgkd_pl.methods import discover
from fedgkd_pl.seeds import derive
from torch.optim import SGD

from tests.conftest import Table


def batches_of(data: Table, epochs: int) -> Any:
    """The rows of every batch, found by their values."""
    clients = data.arrays()

    def batches(round: int, client: int) -> list[torch.Tensor]:
        x = torch.from_numpy(clients[client][0])
        loader = data.client_data.batches(client, round)
        return [
            torch.cat([(x == row).all(1).nonzero()[0] for row in rows])
            for _ in range(epochs)
            for rows, _ in loader
        ]

    return batches


LOCAL: dict[str, Any] = {"lr": 0.3, "momentum": 0.9}
Row = tuple[dict[str, Any], str, dict[str, Any]]


def row(reference: str, theirs: dict[str, Any] | None = None, **settings: Any) -> Row:
    """A method's settings, the oracle's name for it and the oracle's settings, if other ones."""
    return settings, reference, settings if theirs is None else theirs


PROJECTION = {"FedGKD+": 5, "MOON": 5}
METHODS: dict[str, Row] = {  # of oracle_methods
    "FedProx": row("fedprox", mu=0.4),
    "FedGKD": row("fedgkd", gamma=0.8, buffer_size=2),
    "FedGKD+": row("fedgkd", gamma=0.8, buffer_size=3),
    "FedGKD-Vote": row("vote", lam=0.5, buffer_size=3),
    "MOON": row("moon", mu=2.0, tau=0.5),
    "FedDistill+": row("distill+", coefficient=0.7),
    "FedDistill": row("distill", coefficient=0.7),
}


def fedopt(kind: str, lr: float, **settings: Any) -> dict[str, Any]:
    return {"server": {"kind": kind, "lr": lr, **settings}}


GMT = {"gamma": 0.6, "tau": 2.0, "alpha": 0.8, "beta": 4.0}
MORE: dict[str, Row] = {  # of oracle_more
    "SCAFFOLD": row("scaffold"),
    "FedDyn": row("feddyn", alpha=0.3),
    "FedLSD": row("fedlsd", beta=0.4, tau=2.0, form="convex"),
    "FedNTD": row("fedntd", beta=0.7, tau=1.5),
    "FedNova": row("fednova", mu=0.2),
    "FedExP": row("fedexp", {"eps": 0.01, "uniform": True}, epsilon=0.01),
    "FedGMT": row("fedgmt", GMT | {"bias_corrected": True}, **GMT),
    "FedAvgM": row("fedavg", fedopt("avgm", 0.7, beta=0.6), server_lr=0.7, server_momentum=0.6),
    "FedAdam": row("fedavg", fedopt("adam", 0.2), server_lr=0.2),
    "FedYogi": row("fedavg", fedopt("yogi", 0.2), server_lr=0.2),
    "FedAdagrad": row("fedavg", fedopt("adagrad", 0.3, b1=0.5), server_lr=0.3, server_momentum=0.5),
}
CODED = {"bits_up": 2, "bits_down": 3, "client_steps": 5, "server_steps": 6, "distil_lr": 0.02}
SERVER: dict[str, Row] = {  # of oracle_server
    "CFD": row("cfd", CODED, distil_batch_size=4, **CODED),
    "FedAUX": row(
        *("fedaux", {"negatives": 2, "epochs": 2, "distil_lr": 0.02}),
        **{"distil_epochs": 2, "distil_lr": 0.02, "distil_batch_size": 3, "epsilon": 50.0},
    ),
}
FEDDF = {"distil_lr": 0.02, "distil_clip": 0.3, "validate_every": 2, "patience": 4}
FEDDF_TOO = {"distil_steps": 7, "distil_batch_size": 4, "temperature": 1.5}  # by other names there
FEDMD: dict[str, Any] = {"public_samples": 6, "public_epochs": 0, "start_epochs": 3}
FEDMD |= {"digest_epochs": 2, "digest_batch_size": 4, "digest_decay": 0.01, "distil_lr": 0.02}
FEDGEN = {"alpha": 0.8, "beta": 0.6, "decay": 0.9, "noise": 5, "hidden": 7}
FEDGEN |= {"generator_steps": 6, "generator_lr": 0.05, "generator_batch_size": 8}
# by title; one without settings of its own here has its defaults
CLASSES = {info.title: getattr(fedgkd_pl, name) for name, info in discover().items()}
SETTINGS = {name: settings for name, (settings, *_) in (METHODS | MORE | SERVER).items()}
SETTINGS |= {"FedGen": FEDGEN, "FedMD": FEDMD, "FedDF": FEDDF | FEDDF_TOO}
EVERY = [title for title in CLASSES if title != "FedAvg"]


def net(projection: int | None = None) -> MLP:
    torch.manual_seed(0)
    return MLP(in_features=4, hidden=[6], num_classes=3, projection=projection)


def build(name: str, workers: int = 1, **changes: Any) -> FedAvg:
    local = {"local_epochs": 2, "optimizer": partial(SGD, **LOCAL), "engine": LocalEngine(workers)}
    settings = local | SETTINGS.get(name, {}) | changes
    model: FedAvg = CLASSES[name](net(PROJECTION.get(name)), **settings)
    return model


class Inputs(PublicData):
    """Ten rows that no client has."""

    def take(self, train: Examples, num_classes: int, generator: Any) -> Any:
        rng = np.random.default_rng(11)
        rows = torch.from_numpy(rng.normal(size=(10, train.inputs.shape[1])).astype(np.float32))
        labels = torch.zeros(10, dtype=torch.int64)
        return torch.arange(len(train)), unlabelled(Examples(rows, labels, train.transform))


def table(**kwargs: Any) -> Table:
    """Three clients; public data, which most methods ignore."""
    settings: dict[str, Any] = {"sizes": (8, 5, 6), "batch_size": 4, "val_fraction": 0.1}
    settings["scored"] = True
    return Table(**(settings | {"public": Inputs()} | kwargs))


def double(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A copy in float64."""
    return {name: tensor.detach().double().clone() for name, tensor in state.items()}


def cohorts(data: Table, rounds: int) -> list[list[int]]:
    """Whom the rounds ask."""
    data.setup()
    sampler = data.train_dataloader().sampler
    drawn = []
    for epoch in range(rounds):
        sampler.set_epoch(epoch)
        drawn.append(sampler.cohort())
    return drawn


def clients_of(data: Table) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.from_numpy(x).double(), torch.from_numpy(y)) for x, y in data.arrays()]


def passes(length: int, size: int, seed: int, epochs: int | None = None) -> Iterator[torch.Tensor]:
    """The rows of every batch of some passes, endless by default, found by drawing them again."""
    rows = torch.arange(length)
    numbered = Examples(rows, rows, lambda x, _: x)
    batches = Batches(numbered, size, torch.Generator().manual_seed(seed))
    return (batch for _ in islice(count(), epochs) for batch, _ in batches)


def client_seed(round: int, client: int) -> int:
    """That of the public batches of a client."""
    torch.manual_seed(derive(0, "model", round, client))
    return int(torch.randint(2**62, ()))


def watched(model: FedAvg, see: Callable[[], Any] | None = None) -> list[Any]:
    """What is to be seen after every server step, by default the global model."""
    seen: list[Any] = []
    step = model.server_step

    def keep(mean: Any) -> None:
        step(mean)
        seen.append(see() if see else double(model.net.state_dict()))

    model.server_step = keep  # type: ignore[method-assign]
    return seen


def agree(ours: Any, theirs: Any, atol: float = 1e-9) -> None:
    """All numbers of every round are the oracle's, which may look at less."""
    for round, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        for key in b:
            message = f"{key} in round {round}"
            torch.testing.assert_close(a[key], b[key], atol=atol, rtol=0, msg=message)
