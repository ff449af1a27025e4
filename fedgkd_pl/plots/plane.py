"""Points in the plane: features of a net, and the classes models predict on a square."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from fedgkd_pl.plots.style import PALETTE, TEXT, boxed, legend, literal, make_panels
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

SQUARE = (-4.0, 4.0)  # from and to, along both axes
MARKERS = "o^sDvP*X"  # classes beyond the palette take the colours again with the next marker


@dataclass(frozen=True)
class FeatureMapData:
    """What a global and a client's model see in the same test samples, embedded in the plane."""

    global_points: Floats  # samples × 2
    local_points: Floats  # of the client's model, samples × 2
    labels: NDArray[np.int64]
    global_acc: float  # on the whole split, in [0, 1]
    local_acc: float
    client: int
    round: int  # after which the global model is taken, from 1
    name: str = ""  # of the run, such as the method; begins the titles


@dataclass(frozen=True)
class Boundary:
    """The classes a model predicts on a square of the plane."""

    title: str
    classes: NDArray[np.int64]  # on a regular grid; rows from low to high y
    points: Floats  # what the model was trained on, points × 2; may be empty
    labels: NDArray[np.int64]  # of the points


def feature_map(maps: Sequence[FeatureMapData]) -> "Figure":
    """t-SNE of features, coloured by class: the global models, and below each a client's.

    Of one run, the two stand side by side.
    """
    columns = len(maps)
    figure, grid = make_panels(2 * columns, max(2, columns), (3.0, 3.0), share=False)
    classes = max((int(data.labels.max()) + 1 for data in maps), default=0)
    for column, data in enumerate(maps):
        name = f"{data.name}, " if data.name else ""
        titles = {
            f"{name}global, round {data.round}: {100 * data.global_acc:.1f} %": data.global_points,
            f"{name}client {data.client}: {100 * data.local_acc:.1f} %": data.local_points,
        }
        for axes, (title, points) in zip(grid[column::columns], titles.items(), strict=True):
            for number in range(classes):
                mine = points[data.labels == number]
                axes.scatter(mine[:, 0], mine[:, 1], s=7, linewidths=0, **_class_style(number))
            axes.set(title=literal(title), xticks=[], yticks=[])
            boxed(axes)
    if classes <= 2 * len(PALETTE):
        legend(figure, grid, title="class", scale=2.2)
    return figure


def decision_boundaries(rows: Mapping[str, Sequence[Boundary]]) -> "Figure":
    """The classes models predict on a square, and their training points; rows of equal length."""
    from matplotlib.colors import to_rgb

    columns = len(next(iter(rows.values())))
    shades = np.array([to_rgb(value) for value in PALETTE])
    figure, grid = make_panels(len(rows) * columns, columns, (2.3, 2.3))
    flat = [(name, column, panel) for name, row in rows.items() for column, panel in enumerate(row)]
    for axes, (name, column, panel) in zip(grid, flat, strict=True):
        image = np.dstack([shades[panel.classes], np.full(panel.classes.shape, 0.38)])
        axes.imshow(image, origin="lower", extent=2 * SQUARE, interpolation="nearest", zorder=0)
        for number in np.unique(panel.labels):
            mine = panel.points[panel.labels == number]
            axes.scatter(
                mine[:, 0], mine[:, 1], s=5, linewidths=0, zorder=3, **_class_style(int(number))
            )
        axes.axhline(0, color=TEXT, linewidth=0.9, linestyle="--", zorder=2)
        axes.axvline(0, color=TEXT, linewidth=0.9, linestyle="--", zorder=2)
        axes.set(title=literal(panel.title), xticks=[], yticks=[], xlim=SQUARE, ylim=SQUARE)
        axes.grid(visible=False)
        boxed(axes)
        if column == 0:
            axes.set_ylabel(literal(name), fontsize="large", fontweight="bold")
    return figure


def _class_style(number: int) -> dict[str, Any]:
    again, index = divmod(number, len(PALETTE))
    marker = MARKERS[again % len(MARKERS)]
    return {"color": PALETTE[index], "marker": marker, "label": str(number)}
