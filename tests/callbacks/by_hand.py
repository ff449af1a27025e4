"""What callbacks' values are compared with: the models of a run, and a Linear in NumPy."""

import csv
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from fedgkd_pl import FedGKD, LocalEngine
from fedgkd_pl.federation.message import ClientUpdate, State
from lightning.pytorch import Callback, seed_everything
from torch import nn
from torch.optim import SGD

from tests.conftest import fit

Array = np.ndarray[Any, Any]


def copied(state: State) -> State:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


class Watch(Callback):
    """The models of every round, and what was logged of it."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.before: list[State] = []  # the global model
        self.after: list[State] = []
        self.answers: list[dict[int, State]] = []  # by client, in the order in which they came

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.before.append(copied(pl_module.global_state()))
        self.answers.append({})

    def on_client_end(self, trainer: Any, pl_module: Any, update: ClientUpdate, _: int) -> None:
        self.answers[-1][update.client] = copied(update.weights)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.after.append(copied(pl_module.global_state()))
        self.logged.append(dict(pl_module.report))

    def values(self, prefix: str, round: int) -> dict[str, float]:
        """What was logged of a round, from 0."""
        return {name: v for name, v in self.logged[round].items() if name.startswith(prefix)}


def watched(model: Any, data: Any, rounds: int, *callbacks: Callback, **kwargs: Any) -> Watch:
    watch = Watch()
    fit(model, data, rounds, callbacks=[*callbacks, watch], **kwargs)
    return watch


def rows_of(file: Path) -> list[dict[str, float]]:
    """A table; an empty cell is missing."""
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    return [{key: float(value) for key, value in row.items() if value} for row in rows]


def gkd(**kwargs: Any) -> FedGKD:
    """A net with dropout, and with buffers, an integer one among them."""
    seed_everything(1, verbose=False)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    local = partial(SGD, lr=0.3, momentum=0.9)
    return FedGKD(net, optimizer=local, engine=LocalEngine(1), buffer_size=2, gamma=1.0, **kwargs)


def logits_of(model: State, x: Array) -> Array:
    """Of a Linear."""
    weight, bias = (model[name].double().numpy() for name in ("weight", "bias"))
    logits: Array = x.astype(np.float64) @ weight.T + bias
    return logits


def softmax(logits: Array) -> Array:
    raised = np.exp(logits - logits.max(1, keepdims=True))
    probabilities: Array = raised / raised.sum(1, keepdims=True)
    return probabilities


def score(logits: Array, y: Array) -> tuple[float, float]:
    """Accuracy and cross-entropy."""
    right = softmax(logits)[np.arange(len(y)), y]
    return float((logits.argmax(1) == y).mean()), float(-np.log(right).mean())
