"""Points in the plane: features of a net, and the classes models predict on a square."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from fedgkd_pl.plots.style import PALETTE, TEXT, boxed, legend, literal, make_panels
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

SQUARE = (-4.0, 4.0)  # from and to, along both axes
MARKERS = "o^sDvP*X"  # classes beyond the palette take the colours again with the next marker
CLASSES = 1_000  # of a feature map


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


def read_feature_map(path: str | Path, name: str = "") -> FeatureMapData:
    """Reads a map that :class:`~fedgkd_pl.FeatureMap` wrote; nothing in the file is run.

    Args:
        path: of ``features-round<NNN>.npz``.
        name: of the run, for titles.
    """
    with np.load(path, allow_pickle=False) as file:
        values = {key: file[key] if file[key].ndim else file[key].item() for key in file.files}
    data = FeatureMapData(**values, name=name)
    shapes = {data.global_points.shape, data.local_points.shape, (*data.labels.shape, 2)}
    if len(shapes) > 1 or not 0 <= data.labels.min() <= data.labels.max() < CLASSES:
        raise ValueError(f"{path} is not a feature map")
    return data


def encode_feature_map(data: FeatureMapData) -> bytes:
    """Encodes a map as the content of an ``.npz`` file."""
    content = io.BytesIO()
    names = [field.name for field in fields(data) if field.name != "name"]
    arrays: dict[str, Any] = {name: np.array(getattr(data, name)) for name in names}
    np.savez(content, **arrays)
    return content.getvalue()


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
                _scatter(axes, points[data.labels == number], number, 7)
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
    panels = [panel for row in rows.values() for panel in row]
    for axes, panel in zip(grid, panels, strict=True):
        image = np.dstack([shades[panel.classes], np.full(panel.classes.shape, 0.38)])
        axes.imshow(image, origin="lower", extent=2 * SQUARE, interpolation="nearest", zorder=0)
        for number in np.unique(panel.labels):
            _scatter(axes, panel.points[panel.labels == number], int(number), 5)
        axes.axhline(0, color=TEXT, linewidth=0.9, linestyle="--", zorder=2)
        axes.axvline(0, color=TEXT, linewidth=0.9, linestyle="--", zorder=2)
        axes.set(title=literal(panel.title), xticks=[], yticks=[], xlim=SQUARE, ylim=SQUARE)
        axes.grid(visible=False)
        boxed(axes)
    for axes, name in zip(grid[::columns], rows, strict=True):
        axes.set_ylabel(literal(name), fontsize="large", fontweight="bold")
    return figure


def _scatter(axes: "Axes", points: Floats, number: int, size: float) -> None:
    """Draws the points of a class."""
    again, index = divmod(number, len(PALETTE))
    marker = MARKERS[again % len(MARKERS)]
    dots: dict[str, Any] = {"color": PALETTE[index], "marker": marker, "label": str(number)}
    axes.scatter(points[:, 0], points[:, 1], s=size, linewidths=0, zorder=3, **dots)
