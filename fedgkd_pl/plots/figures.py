"""The paper's figures of numbers, each a pure function from plain data to a figure."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from fedgkd_pl.plots.style import (
    BLUE,
    NAMED,
    PALETTE,
    RUST,
    TEXT,
    boxed,
    colours,
    grey,
    label_panels,
    legend,
    literal,
    make_panels,
    style,
    whole_numbers,
)
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[Mapping[int, float]]]  # label → seeds → round → value
Shares = Mapping[str, Mapping[float, Sequence[float]]]  # label → participation → a value a seed
Values = Mapping[str, Sequence[float]]  # label → a value a seed
Line = dict[str, Any]  # how Matplotlib draws one
Counts = Sequence[Sequence[int]]  # samples of each class, for every client
Floats = NDArray[np.float64]

WRITTEN = 12  # a confusion matrix of more classes than this has no numbers in its cells
LARGEST = 1e100  # a curve has gaps where values are larger
ACCURACY = "test accuracy, %"
FAR = 300  # times the median: such values need a logarithmic axis
CLASSES = 1_000  # of a feature map, or of a bubble chart: the first ones
SHOWN = 60  # clients of a bubble chart, the first ones
NUMBERED = 40  # of more clients than this, the axis has no numbers
MARKERS = "o^sDvP*X"  # classes beyond the palette take the colours again with the next marker


def learning_curves(curves: Curves, title: str = "", ylabel: str = ACCURACY) -> "Figure":
    """A line per label: the mean over seeds, in a band of one standard deviation to either side.

    Args:
        curves: for every label its seeds, each from round to value, in the unit of ``ylabel``.
            Only rounds that all seeds of a label have are drawn, lest the mean jump where one ends.
    """
    return curve_panels({title: curves}, 1, ylabel)


def curve_panels(
    panels: Mapping[str, Curves],
    columns: int = 3,
    ylabel: str = ACCURACY,
    chosen: Mapping[str, str] | None = None,
) -> "Figure":
    """:func:`learning_curves` side by side, a panel per title; they share the y-axis.

    Where one line is far above the others, as that of a run that diverges, the axis is logarithmic.

    Args:
        chosen: the colour of every label, where it must be that of other figures.
    """

    def draw(axes: "Axes", seeds: Sequence[Mapping[int, float]], how: Line) -> None:
        table = pd.DataFrame([seed for seed in seeds if len(seed)])
        table = table.dropna(axis=1).sort_index(axis=1)
        table = table.where(table.abs() < LARGEST)
        if table.empty:
            return
        axes.plot(table.columns, table.mean(), **{**how, "marker": "", "zorder": 3})
        if len(table) > 1:
            low, high = table.mean() - table.std(), table.mean() + table.std()
            axes.fill_between(table.columns, low, high, color=how["color"], alpha=0.18, linewidth=0)

    size = (5.6, 3.6) if len(panels) == 1 else (3.1, 2.6)
    figure, grid = _panels(panels, columns, size, draw, chosen)
    for axes in grid:
        whole_numbers(axes.xaxis)
    drawn = [np.asarray(line.get_ydata()) for axes in grid for line in axes.lines]
    shown = np.concatenate([*drawn, [np.nan]])
    shown = shown[np.isfinite(shown)]
    if len(shown) and shown.min() > 0 and shown.max() > FAR * np.median(shown):
        for axes in grid:
            axes.set_yscale("log", nonpositive="clip")
            axes.set_ylim(shown.min() / 2, 2 * shown.max())
    label_panels(grid, columns, "communication round", ylabel)
    return figure


def participation_panels(panels: Mapping[str, Shares]) -> "Figure":
    """Accuracy in percent over the participation ratio: mean and standard deviation over seeds.

    A panel per title, such as one for each α; they share the y-axis.
    """

    def draw(axes: "Axes", by_ratio: Mapping[float, Sequence[float]], how: Line) -> None:
        _error_bars(axes, {ratio: pd.Series(values) for ratio, values in by_ratio.items()}, how)

    size = (4.6, 3.4) if len(panels) == 1 else (3.1, 2.6)
    figure, grid = _panels(panels, 3, size, draw)
    for axes, values in zip(grid, panels.values(), strict=True):
        axes.set_xticks(sorted({ratio for by_ratio in values.values() for ratio in by_ratio}))
    label_panels(grid, 3, "participation ratio C", ACCURACY)
    return figure


def task_panels(panels: Mapping[str, Curves]) -> "Figure":
    """A panel per title, a line per label over the number of tasks learned, in percent.

    Args:
        panels: for every label its seeds, each from the number of tasks to the value. Drawn are the
            mean of the seeds that have a value and, if several have, their standard deviation.
    """
    figure, grid = _panels(panels, 2, (3.6, 3.0), _error_bars, share=False)
    for axes in grid:
        axes.set(xlabel="tasks learned", ylabel="%")
        whole_numbers(axes.xaxis)
    return figure


def _panels(
    panels: Mapping[str, Mapping[str, Any]],
    columns: int,
    size: tuple[float, float],
    draw: Callable[["Axes", Any, Line], None],
    chosen: Mapping[str, str] | None = None,
    share: bool = True,
) -> "tuple[Figure, list[Axes]]":
    """A panel per title, with a line per label in the colour of its method, and one legend."""
    figure, grid = make_panels(len(panels), columns, size, share)
    chosen = chosen or colours(label for lines in panels.values() for label in lines)
    for axes, (title, lines) in zip(grid, panels.items(), strict=True):
        for label, values in lines.items():
            how: Line = {"label": literal(label), "color": chosen[label], "linewidth": 1.6}
            how |= {"linestyle": style(label).dash, "marker": style(label).symbol}
            draw(axes, values, how)
        axes.set_title(literal(title))
    legend(figure, grid)
    return figure, grid


def _error_bars(axes: "Axes", values: Any, how: Line) -> None:
    """Mean ± standard deviation of every column that has values; no whiskers for a single one."""
    table = pd.DataFrame(values).dropna(axis=1, how="all").sort_index(axis=1)
    how |= {"markersize": 5, "elinewidth": 1.2, "capsize": 3}
    axes.errorbar(table.columns, table.mean(), table.std(), **how)


def client_accuracies(table: pd.DataFrame) -> "Figure":
    """How far the clients of a round are apart: a dot each, their mean, and from worst to best.

    Args:
        table: columns ``round`` and ``acc``, a share of 1; a row for every round and client.
    """
    accs = 100 * table.groupby("round")["acc"].agg(["min", "max", "mean"])
    figure, (axes,) = make_panels(1, 1, (5.6, 3.4))
    shade: Line = {"color": BLUE, "alpha": 0.15, "linewidth": 0, "label": "min to max"}
    axes.fill_between(accs.index, accs["min"], accs["max"], **shade)
    axes.scatter(table["round"], 100 * table["acc"], 12, BLUE, linewidths=0, label="a client")
    axes.plot(accs.index, accs["mean"], color=RUST, linewidth=1.8, label="mean")
    whole_numbers(axes.xaxis)
    label_panels([axes], 1, "communication round", "accuracy of clients, %")
    legend(figure, [axes])
    return figure


def bar_panels(
    panels: Mapping[str, Values],
    xlabel: str = ACCURACY,
    paper: Mapping[str, Mapping[str, float]] | None = None,
    chosen: Mapping[str, str] | None = None,
) -> "Figure":
    """A bar per label, the best on top, with its standard deviation; a panel per title.

    Panels share both axes. Labels are in one order, by their mean over the panels that have them.

    Args:
        paper: the paper's numbers, by panel and label.
        chosen: the colour of every label, where it must be that of other figures.
    """
    known = {t: {k: np.mean(v) for k, v in each.items() if len(v)} for t, each in panels.items()}
    means = pd.DataFrame(known)
    order = list(means.mean(axis=1).sort_values(kind="stable").index)
    one = len(panels) == 1
    size = (6.2 if one else 3.5, 1.2 + 0.34 * max(2, len(order)))
    figure, grid = make_panels(len(panels), 3, size)
    chosen = chosen or colours(means.index)
    furthest = 0.0
    for axes, (title, values) in zip(grid, panels.items(), strict=True):
        theirs = {k: v for k, v in (paper or {}).get(title, {}).items() if values.get(k)}
        for row, label in enumerate(order):
            if shown := values.get(label):
                reach = _bar(axes, row, shown, chosen[label], theirs.get(label, 0.0))
                furthest = max(furthest, reach)
        if theirs:
            diamond: Line = {"marker": "D", "s": 30, "linewidths": 1.0, "zorder": 4}
            diamond |= {"facecolors": "white", "edgecolors": "black", "label": "paper"}
            axes.scatter(list(theirs.values()), list(map(order.index, theirs)), **diamond)
        axes.set(yticks=range(len(order)), yticklabels=list(map(literal, order)))
        axes.set(title=literal(title), ylim=(-0.6, len(order) - 0.4))
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
    for axes in grid:
        axes.set_xlim(0, furthest * (1.24 if one else 1.6) or 1.0)  # room for the numbers
    label_panels(grid, 3, xlabel, "")
    legend(figure, grid)
    return figure


def _bar(axes: "Axes", row: int, seeds: Sequence[float], colour: str, paper: float) -> float:
    """Draws a bar, with whiskers if it is of several seeds, and its number; how far it reaches."""
    mean, std = float(np.mean(seeds)), 0.0
    digits = 2 if mean < 1000 else 0
    text = f"{mean:,.{digits}f}"
    axes.barh(row, mean, height=0.68, color=colour)
    if len(seeds) > 1:
        std = float(np.std(seeds, ddof=1))
        text += f" ± {std:,.{digits}f}"
        axes.errorbar(mean, row, xerr=std, fmt="none", ecolor=TEXT, elinewidth=1.4, capsize=3)
    reach = max(mean + std, paper)
    beside: Line = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(text, (reach, row), fontsize="small", color=TEXT, **beside)
    return reach


def confusion_chart(matrix: ArrayLike, title: str = "", names: Sequence[str] = ()) -> "Figure":
    """A confusion matrix: of every true class, the share that each prediction has.

    Args:
        matrix: counts; rows are the truth, columns the prediction.
        names: of the classes; by default, and where there are too many to write, their numbers.
    """
    counts = np.asarray(matrix, dtype=float)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    figure, (axes,) = make_panels(1, 1, (4.6, 4.2))
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    grey(figure.colorbar(image, ax=axes, shrink=0.85, label="share of the true class").ax)
    classes = range(len(counts))
    if len(counts) <= WRITTEN:
        centred: Line = {"ha": "center", "va": "center", "fontsize": "small"}
        for (row, column), share in np.ndenumerate(shares):
            colour = "white" if share > 0.55 else "#303030"
            axes.text(column, row, f"{100 * share:.0f}", color=colour, **centred)
        axes.set(xticks=classes, yticks=classes)
    if 0 < len(names) <= NAMED:
        names = list(map(literal, names))
        axes.set_xticks(classes, names, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(classes, names)
    axes.set(xlabel="predicted class", ylabel="true class", title=literal(title))
    axes.grid(visible=False)
    axes.tick_params(length=0)
    return figure


def bubble_chart(counts: Counts, title: str = "", names: Sequence[str] = ()) -> "Figure":
    """Clients × classes, the area of a bubble being the number of samples.

    Args:
        names: of the classes; by default, and where there are too many to write, their numbers.
    """
    table = np.asarray(counts)[:SHOWN, :CLASSES]
    clients, classes = table.shape
    width, height = max(4.0, 0.3 * clients + 1.5), max(3.0, 0.3 * min(classes, 40) + 1.2)
    figure, (axes,) = make_panels(1, 1, (width, height))
    x, y = np.nonzero(table)
    area = table[x, y] / max(1, table.max()) * min(260.0, 20000 / max(clients, classes))
    axes.scatter(x, y, s=area, color=RUST, linewidths=0)
    label = "client" if clients == len(counts) else f"client (first {clients})"
    axes.set(xlabel=label, ylabel="class", title=literal(title))
    axes.set(xlim=(-0.8, clients - 0.2), ylim=(-0.8, classes - 0.2))
    whole_numbers(axes.xaxis)
    whole_numbers(axes.yaxis)
    if len(names) == classes <= NAMED:
        axes.set_yticks(range(classes), list(map(literal, names)))
    return figure


def per_client(accs: pd.DataFrame, title: str = "") -> "Figure":
    """A dot for every client and model, sorted by the first model; lines join a client's dots.

    Horizontal lines mark the mean and, dotted, that of the worst tenth of the clients.

    Args:
        accs: shares of 1, a row for every client and a column for one model or two. The first has
            every client; the other may lack some.
    """
    first = accs.columns[0]
    table = 100 * accs.rename_axis("client").sort_values([first, "client"])
    wide = min(10.0, max(5.6, 2.4 + 0.11 * len(table)))
    figure, (axes,) = make_panels(1, 1, (wide, 3.8))
    places = np.arange(len(table))
    axes.vlines(places, table.min(axis=1), table.max(axis=1), color=TEXT, alpha=0.5, linewidth=0.9)
    styles = ((BLUE, "o", 1.8), (RUST, "s", 1.0))  # equal ones: a square in a disc
    size = 22 if len(table) <= NUMBERED else 7
    for (label, values), (colour, symbol, larger) in zip(table.items(), styles, strict=False):
        mean, worst = values.mean(), worst_tenth(values.dropna())
        text = f"{label}: mean {mean:.1f} (line), worst 10 % {worst:.1f} (dots)"
        dots: Line = {"label": literal(text), "linewidths": 0, "zorder": 3}
        axes.scatter(places, values, larger * size, colour, marker=symbol, **dots)
        for height, dash in ((mean, "-"), (worst, ":")):
            axes.axhline(height, color=colour, linestyle=dash, linewidth=1.3)
    axes.set_title(literal(title))
    shown = list(map(str, table.index)) if len(table) <= NUMBERED else []
    axes.set_xticks(range(len(shown)), shown, rotation=90 if len(shown) > 20 else 0)
    axes.set_xlim(-0.8, len(table) - 0.2)
    axes.grid(visible=False, axis="x")
    label_panels([axes], 1, f"clients, sorted by {literal(first)}", "accuracy on own samples, %")
    legend(figure, [axes])
    return figure


def worst_tenth(values: Sequence[float]) -> float:
    """The mean of the worst tenth of the clients, of one at least."""
    return float(np.sort(values)[: max(1, len(values) // 10)].mean())


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
        values = {key: array if array.ndim else array.item() for key, array in file.items()}
    data = FeatureMapData(**values, name=name)
    shapes = {data.global_points.shape, data.local_points.shape, (*data.labels.shape, 2)}
    if len(shapes) > 1 or not 0 <= data.labels.min() <= data.labels.max() < CLASSES:
        raise ValueError(f"{path} is not a feature map")
    return data


def encode_feature_map(data: FeatureMapData) -> bytes:
    """Encodes a map as the content of an ``.npz`` file."""
    content = io.BytesIO()
    np.savez(content, **{key: value for key, value in asdict(data).items() if key != "name"})
    return content.getvalue()


def feature_map(maps: Sequence[FeatureMapData]) -> "Figure":
    """t-SNE of features, coloured by class: the global models, and below each a client's.

    Of one run, the two stand side by side.
    """
    columns = len(maps)
    figure, grid = make_panels(2 * columns, max(2, columns), (3.0, 3.0), share=False)
    classes = max(int(data.labels.max()) + 1 for data in maps)
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
    dots: Line = {"marker": MARKERS[again % len(MARKERS)], "linewidths": 0, "zorder": 3}
    axes.scatter(points[:, 0], points[:, 1], size, PALETTE[index], label=str(number), **dots)
