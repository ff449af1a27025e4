"""Every method on a table that the oracles can follow."""

from functools import partial
from typing import Any

import numpy as np
import torch
from fedgkd_pl import (
    MLP,
    MOON,
    FedAvg,
    FedDistill,
    FedDistillPlus,
    FedGen,
    FedGKD,
    FedGKDPlus,
    FedGKDVote,
    FedProx,
    LocalEngine,
)
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
FEDGEN = {"alpha": 0.8, "beta": 0.6, "decay": 0.9, "noise": 5, "hidden": 7}
FEDGEN |= {"generator_steps": 6, "generator_lr": 0.05, "generator_batch_size": 8}
EVERY = [*METHODS, "FedGen"]


def net(projection: int | None = None) -> MLP:
    torch.manual_seed(0)
    return MLP(in_features=4, hidden=[6], num_classes=3, projection=projection)


def build(name: str, workers: int = 1, **changes: Any) -> FedAvg:
    class_, settings, _, _, projection = METHODS.get(name, (FedGen, FEDGEN, "", {}, None))
    local = {"local_epochs": 2, "optimizer": partial(SGD, **LOCAL), "engine": LocalEngine(workers)}
    model: FedAvg = class_(net(projection), **(settings | changes), **local)
    return model


def table(**kwargs: Any) -> Table:
    return Table(**({"sizes": (8, 5, 6), "batch_size": 4, "val_fraction": 0.1} | kwargs))
