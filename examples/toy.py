"""The paper's toy figure: the classes that clients' models and their mean see in the plane.

FedGKD above, FedAvg below; the two differ in the distillation term alone. Trains in seconds:

    python examples/toy.py toy.svg
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from fedgkd_pl import MLP, FedAvg, FederatedCallback, FedGKD, LocalEngine, Toy2D
from fedgkd_pl.data.datasets.small import sector
from fedgkd_pl.federation.message import ClientUpdate, State
from fedgkd_pl.plots.figures import scatter_class
from fedgkd_pl.plots.style import PALETTE, TEXT, boxed, literal, make_panels, save
from fedgkd_pl.seeds import derive, seeded
from lightning.pytorch import LightningModule, Trainer
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch.optim import Adam

USERS = 3  # as many as the paper draws
SIDE = 200  # of the grid that boundaries are drawn from
SQUARE = (-4.0, 4.0)  # from and to, along both axes


@dataclass(frozen=True)
class Boundary:
    """The classes a model predicts on a square of the plane."""

    title: str
    classes: NDArray[np.int64]  # on a regular grid; rows from low to high y
    points: NDArray[np.floating]  # what the model was trained on, points × 2; may be empty
    labels: NDArray[np.int64]  # of the points


class LatestModels(FederatedCallback):
    """Keeps the clients' models of the latest round."""

    def __init__(self) -> None:
        self.models: dict[int, State] = {}

    def on_client_end(
        self, trainer: Trainer, pl_module: LightningModule, update: ClientUpdate, cohort_size: int
    ) -> None:
        """Keeps one."""
        self.models[update.client] = update.weights


def toy_figure(
    rounds: int = 5, seed: int = 0, gamma: float = 0.2, local_epochs: int = 5
) -> tuple[Figure, dict[str, dict[str, float]]]:
    """Trains both methods on :class:`Toy2D` and draws the first three users and the aggregate.

    Args:
        seed: of the net, the batches and the cohorts; the points are always the same.

    Returns:
        The figure, and for each method the accuracies on the test square in [0, 1]: of the
        ``aggregate``, of ``user 1`` to ``user 3``, and of each where it has never seen a point
        (``user 1, unseen``).
    """
    settings: dict[str, Any] = {
        "local_epochs": local_epochs,
        "optimizer": partial(Adam, lr=0.01),
        "engine": LocalEngine(workers=1),  # the work is too small for a pool
    }
    rows, numbers = {}, {}
    for name in ("FedGKD", "FedAvg"):
        with seeded(derive(seed, "model")):  # the same first weights for both
            net = MLP(in_features=2, hidden=[32, 32], num_classes=4)
        data = Toy2D(num_clients=4, batch_size=32, seed=seed)
        if name == "FedGKD":
            method: FedAvg = FedGKD(net, gamma=gamma, buffer_size=5, **settings)
        else:
            method = FedAvg(net, **settings)
        models = _train(method, data, rounds)
        numbers[name] = accuracies(net, models, data)
        rows[name] = _panels(net, models, data, numbers[name])
    return decision_boundaries(rows), numbers


def _train(method: FedAvg, data: Toy2D, rounds: int) -> dict[str, State]:
    """The first users' models in the last round, and the aggregate after it."""
    local = LatestModels()
    trainer = Trainer(
        max_epochs=rounds,
        callbacks=[local],
        accelerator="cpu",
        devices=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(method, data)
    users = {f"user {client + 1}": local.models[client] for client in range(USERS)}
    return users | {"aggregate": {n: t.clone() for n, t in method.global_state().items()}}


def accuracies(net: MLP, models: Mapping[str, State], data: Toy2D) -> dict[str, float]:
    """The share of the test square that models get right, and users where they saw nothing."""
    points = data.test.inputs.numpy()
    owner = sector(points, data.num_clients)
    results = {}
    for client, (name, state) in enumerate(models.items()):
        right = _predict(net, state, points) == data.test.targets.numpy()
        results[name] = float(right.mean())
        if client < USERS:
            results[f"{name}, unseen"] = float(right[owner != client].mean())
    return results


def _panels(
    net: MLP, models: Mapping[str, State], data: Toy2D, numbers: Mapping[str, float]
) -> list[Boundary]:
    edges = np.linspace(*SQUARE, SIDE + 1)
    centres = (edges[:-1] + edges[1:]) / 2
    grid = np.stack(np.meshgrid(centres, centres), axis=-1).reshape(-1, 2).astype(np.float32)
    clients = data.client_data
    panels = []
    for client, (name, state) in enumerate(models.items()):
        rows = clients.index[client] if client < USERS else np.empty(0, dtype=np.int64)
        panels.append(
            Boundary(
                f"{name}: {100 * numbers[name]:.1f} %",
                _predict(net, state, grid).reshape(SIDE, SIDE),
                clients.examples.inputs[rows].double().numpy(),
                clients.examples.targets[rows].numpy(),
            )
        )
    return panels


@torch.no_grad()
def _predict(net: MLP, state: State, points: NDArray[np.floating]) -> NDArray[np.int64]:
    net.load_state_dict(state)
    classes: NDArray[np.int64] = net(torch.from_numpy(points)).argmax(1).numpy()
    return classes


def decision_boundaries(rows: Mapping[str, Sequence[Boundary]]) -> Figure:
    """The classes models predict on a square, and their training points; rows of equal length."""
    columns = len(next(iter(rows.values())))
    shades = np.array([to_rgb(value) for value in PALETTE])
    figure, grid = make_panels(len(rows) * columns, columns, (2.3, 2.3))
    panels = [panel for row in rows.values() for panel in row]
    for axes, panel in zip(grid, panels, strict=True):
        image = np.dstack([shades[panel.classes], np.full(panel.classes.shape, 0.38)])
        axes.imshow(image, origin="lower", extent=2 * SQUARE, interpolation="nearest", zorder=0)
        for number in np.unique(panel.labels):
            scatter_class(axes, panel.points[panel.labels == number], int(number), 5)
        axes.axhline(0, color=TEXT, linewidth=0.9, linestyle="--", zorder=2)
        axes.axvline(0, color=TEXT, linewidth=0.9, linestyle="--", zorder=2)
        axes.set(title=literal(panel.title), xticks=[], yticks=[], xlim=SQUARE, ylim=SQUARE)
        axes.grid(visible=False)
        boxed(axes)
    for axes, name in zip(grid[::columns], rows, strict=True):
        axes.set_ylabel(literal(name), fontsize="large", fontweight="bold")
    return figure


if __name__ == "__main__":
    figure, found = toy_figure()
    for method, values in found.items():
        print(f"{method}: {', '.join(f'{k} {100 * v:.1f}' for k, v in values.items())}")
    save(figure, sys.argv[1] if sys.argv[1:] else "toy.svg")
