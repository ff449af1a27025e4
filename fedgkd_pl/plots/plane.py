"""Points in the plane: the features of a net by t-SNE."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from fedgkd_pl.plots.style import PALETTE, boxed, legend, literal, make_panels
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

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
                scatter_class(axes, points[data.labels == number], number, 7)
            axes.set(title=literal(title), xticks=[], yticks=[])
            boxed(axes)
    if classes <= 2 * len(PALETTE):
        legend(figure, grid, title="class", scale=2.2)
    return figure


def scatter_class(axes: "Axes", points: Floats, number: int, size: float) -> None:
    """Draws the points of a class."""
    again, index = divmod(number, len(PALETTE))
    marker = MARKERS[again % len(MARKERS)]
    dots: dict[str, Any] = {"color": PALETTE[index], "marker": marker, "label": str(number)}
    axes.scatter(points[:, 0], points[:, 1], s=size, linewidths=0, zorder=3, **dots)
