"""Every method on a table that the oracles can follow."""

from functools import partial
from typing import Any

import fedgkd_pl
import numpy as np
import torch
from fedgkd_pl import (
    MLP,
    MOON,
    FedAvg,
    FedDistill,
    FedDistillPlus,
    FedGKD,
    FedGKDPlus,
    FedGKDVote,
    FedProx,
    LocalEngine,
)
from fedgkd_pl.data.examples import Examples
from fedgkd_pl.data.public import PublicData, unlabelled
from fedgkd_pl.methods import discover
from torch.optim import SGD

from tests.conftest import Table


def batches_of(data: Table, epochs: int) -> Any:
    """The rows of every batch, found by their values."""
    clients = data.arrays()

    def batches(round: int, client: int) -> list[np.ndarray]:
        x = clients[client][0]
        loader = data.client_data.batches(client, round)
        return [
            np.array([int(np.where((x == row.numpy()).all(1))[0][0]) for row in rows])
            for _ in range(epochs)
            for rows, _ in loader
        ]

    return batches


LOCAL: dict[str, Any] = {"lr": 0.3, "momentum": 0.9}
# name: (class, its settings, the oracle's name, the oracle's settings, projection)
METHODS: dict[str, tuple[Any, dict[str, Any], str, dict[str, Any], int | None]] = {
    "FedProx": (FedProx, {"mu": 0.4}, "fedprox", {"mu": 0.4}, None),
    "FedGKD": (
        *(FedGKD, {"gamma": 0.8, "buffer_size": 2}),
        *("fedgkd", {"gamma": 0.8, "buffer_size": 2}, None),
    ),
    "FedGKD+": (
        *(FedGKDPlus, {"gamma": 0.8, "buffer_size": 3}),
        *("fedgkd", {"gamma": 0.8, "buffer_size": 3}, 5),
    ),
    "FedGKD-Vote": (
        *(FedGKDVote, {"lam": 0.5, "buffer_size": 3}),
        *("vote", {"lam": 0.5, "buffer_size": 3}, None),
    ),
    "MOON": (MOON, {"mu": 2.0, "tau": 0.5}, "moon", {"mu": 2.0, "tau": 0.5}, 5),
    "FedDistill+": (FedDistillPlus, {"coefficient": 0.7}, "distill+", {"coefficient": 0.7}, None),
    "FedDistill": (FedDistill, {"coefficient": 0.7}, "distill", {"coefficient": 0.7}, None),
}
# name: (its settings, the oracle's name, the oracle's settings), of oracle_more
MORE: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "SCAFFOLD": ({}, "scaffold", {}),
    "FedDyn": ({"alpha": 0.3}, "feddyn", {"alpha": 0.3}),
    "FedLSD": (
        {"beta": 0.4, "tau": 2.0},
        *("fedlsd", {"beta": 0.4, "tau": 2.0, "form": "additive"}),
    ),
    "FedNTD": ({"beta": 0.7, "tau": 1.5}, "fedntd", {"beta": 0.7, "tau": 1.5}),
    "FedNova": ({"mu": 0.2}, "fednova", {"mu": 0.2}),
    "FedExP": ({"epsilon": 0.01}, "fedexp", {"eps": 0.01, "uniform": True}),
    "FedGMT": (
        {"gamma": 0.6, "tau": 2.0, "alpha": 0.8, "beta": 4.0},
        *("fedgmt", {"gamma": 0.6, "tau": 2.0, "alpha": 0.8, "beta": 4.0, "bias_corrected": True}),
    ),
    "FedAvgM": (
        {"server_lr": 0.7, "server_momentum": 0.6},
        *("fedavg", {"server": {"kind": "avgm", "lr": 0.7, "beta": 0.6}}),
    ),
    "FedAdam": ({"server_lr": 0.2}, "fedavg", {"server": {"kind": "adam", "lr": 0.2}}),
    "FedYogi": ({"server_lr": 0.2}, "fedavg", {"server": {"kind": "yogi", "lr": 0.2}}),
    "FedAdagrad": (
        {"server_lr": 0.3, "server_momentum": 0.5},
        *("fedavg", {"server": {"kind": "adagrad", "lr": 0.3, "b1": 0.5}}),
    ),
}
# name: (its settings, the oracle's name, the oracle's settings), of oracle_server
SERVER: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "FedDF": (
        {"distil_steps": 7, "distil_lr": 0.02, "distil_batch_size": 4, "distil_clip": 0.3}
        | {"temperature": 1.5, "validate_every": 2, "patience": 4},
        "feddf",
        {"steps": 7, "distil_lr": 0.02, "distil_clip": 0.3}
        | {"tau": 1.5, "validate_every": 2, "patience": 4},
    ),
    "CFD": (
        {"bits_up": 2, "bits_down": 3, "client_steps": 5, "server_steps": 6}
        | {"distil_lr": 0.02, "distil_batch_size": 4},
        *("cfd", {"bits_up": 2, "bits_down": 3, "client_steps": 5, "server_steps": 6}),
    ),
    "FedAUX": (
        {"distil_epochs": 2, "distil_lr": 0.02, "distil_batch_size": 3, "epsilon": 50.0},
        *("fedaux", {"negatives": 2, "epochs": 2}),
    ),
}
for row in (SERVER["CFD"], SERVER["FedAUX"]):
    row[2]["distil_lr"] = 0.02
FEDMD: dict[str, Any] = {"public_samples": 6, "public_epochs": 0, "start_epochs": 3}
FEDMD |= {"digest_epochs": 2, "digest_batch_size": 4, "digest_decay": 0.01, "distil_lr": 0.02}
FEDGEN = {"alpha": 0.8, "beta": 0.6, "decay": 0.9, "noise": 5, "hidden": 7}
FEDGEN |= {"generator_steps": 6, "generator_lr": 0.05, "generator_batch_size": 8}
# by title; one without settings of its own here has its defaults
CLASSES = {info.title: getattr(fedgkd_pl, name) for name, info in discover().items()}
SETTINGS: dict[str, dict[str, Any]] = {name: row[1] for name, row in METHODS.items()}
SETTINGS |= {name: row[0] for name, row in (MORE | SERVER).items()} | {"FedGen": FEDGEN}
SETTINGS["FedMD"] = FEDMD
OWN_OPTIMIZER = ("FedAvgM", "FedAdam", "FedYogi", "FedAdagrad")  # of the server
EVERY = [title for title in CLASSES if title != "FedAvg"]


def net(projection: int | None = None) -> MLP:
    torch.manual_seed(0)
    return MLP(in_features=4, hidden=[6], num_classes=3, projection=projection)


def build(name: str, workers: int = 1, **changes: Any) -> FedAvg:
    local = {"local_epochs": 2, "optimizer": partial(SGD, **LOCAL), "engine": LocalEngine(workers)}
    settings = local | SETTINGS.get(name, {}) | changes
    model: FedAvg = CLASSES[name](net(METHODS[name][4] if name in METHODS else None), **settings)
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
