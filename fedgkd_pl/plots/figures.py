"""The paper's figures of numbers, each a pure function from plain data to a figure."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd
from fedgkd_pl.plots.style import (
    BLUE,
    NAMED,
    RUST,
    TEXT,
    colours,
    grey,
    label_panels,
    legend,
    literal,
    make_panels,
    style,
    whole_numbers,
)
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[Mapping[int, float]]]  # label → seeds → round → value
Shares = Mapping[str, Mapping[float, Sequence[float]]]  # label → participation → a value a seed
Values = Mapping[str, Sequence[float]]  # label → a value a seed
Line = dict[str, Any]  # how Matplotlib draws one
T = TypeVar("T")

WRITTEN = 12  # a confusion matrix of more classes than this has no numbers in its cells
LARGEST = 1e100  # a curve has gaps where values are larger
ACCURACY = "test accuracy, %"
NOT_NEGATIVE = ("loss", "distance from global")  # what the labels of such values end in
FAR = 300  # times the median: such values need a logarithmic axis


def learning_curves(curves: Curves, title: str = "", ylabel: str = ACCURACY) -> "Figure":
    """A line per label: the mean over seeds, in a band of one standard deviation to either side.

    The band ends where values are no longer possible; see :func:`band`.

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

    def draw(axes: "Axes", _: str, seeds: Sequence[Mapping[int, float]], how: Line) -> None:
        table = pd.DataFrame([seed for seed in seeds if len(seed)])
        table = table.dropna(axis=1).sort_index(axis=1)
        table = table.where(table.abs() < LARGEST)
        if table.empty:
            return
        axes.plot(table.columns, table.mean(), **{**how, "marker": "", "zorder": 3})
        if len(table) > 1:
            ends = band(table, ylabel)
            axes.fill_between(table.columns, *ends, color=how["color"], alpha=0.18, linewidth=0)

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


def participation_panels(panels: Mapping[str, Shares], columns: int = 3) -> "Figure":
    """Accuracy in percent over the participation ratio: mean and standard deviation over seeds.

    A panel per title, such as one for each α; they share the y-axis.
    """

    def draw(axes: "Axes", _: str, by_ratio: Mapping[float, Sequence[float]], how: Line) -> None:
        table = pd.DataFrame({ratio: pd.Series(values) for ratio, values in by_ratio.items()})
        _error_bars(axes, table, ACCURACY, how)

    size = (4.6, 3.4) if len(panels) == 1 else (3.1, 2.6)
    figure, grid = _panels(panels, columns, size, draw)
    for axes, values in zip(grid, panels.values(), strict=True):
        axes.set_xticks(sorted({ratio for by_ratio in values.values() for ratio in by_ratio}))
    label_panels(grid, columns, "participation ratio C", ACCURACY)
    return figure


def task_panels(panels: Mapping[str, Curves]) -> "Figure":
    """A panel per title, a line per label over the number of tasks learned, in percent.

    Args:
        panels: for every label its seeds, each from the number of tasks to the value. Drawn are the
            mean of the seeds that have a value and, if several have, their standard deviation.
    """

    def draw(axes: "Axes", title: str, seeds: Sequence[Mapping[int, float]], how: Line) -> None:
        kind = ACCURACY if title.endswith("accuracy") else ""  # forgetting may be below 0
        _error_bars(axes, pd.DataFrame(list(seeds)), kind, how)

    figure, grid = _panels(panels, 2, (3.6, 3.0), draw, share=False)
    for axes in grid:
        axes.set(xlabel="tasks learned", ylabel="%")
        whole_numbers(axes.xaxis)
    return figure


def _panels(
    panels: Mapping[str, Mapping[str, T]],
    columns: int,
    size: tuple[float, float],
    draw: "Callable[[Axes, str, T, Line], None]",
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
            draw(axes, title, values, how)
        axes.set_title(literal(title))
    legend(figure, grid)
    return figure, grid


def _error_bars(axes: "Axes", table: pd.DataFrame, kind: str, how: Line) -> None:
    """Mean and :func:`band` of every column that has values; no whiskers for a single one."""
    table = table.dropna(axis=1, how="all").sort_index(axis=1)
    whiskers = [(end - table.mean()).abs() for end in band(table, kind)]
    axes.errorbar(
        table.columns, table.mean(), whiskers, **how, markersize=5, elinewidth=1.2, capsize=3
    )


def band(table: pd.DataFrame, label: str) -> tuple[pd.Series, pd.Series]:
    """From one standard deviation below the mean to one above, no further than values can be.

    Shares end at 0 and 100 %, losses at 0, unless the values themselves are outside.

    Args:
        table: a row for every seed.
        label: of the axis; one of shares ends in ``, %``, one of losses in ``loss``.
    """
    shares = label.endswith(", %")
    least = 0.0 if shares or label.endswith(NOT_NEGATIVE) else -np.inf
    most = 100.0 if shares else np.inf
    low, high = (table.mean() + sign * table.std() for sign in (-1, 1))
    return low.clip(lower=min(least, table.min().min())), high.clip(
        upper=max(most, table.max().max())
    )


def client_accuracies(table: pd.DataFrame) -> "Figure":
    """How far the clients of a round are apart: a dot each, their mean, and from worst to best.

    Args:
        table: columns ``round`` and ``acc``, a share of 1; a row for every round and client.
    """
    accs = 100 * table.groupby("round")["acc"].agg(["min", "max", "mean"])
    figure, (axes,) = make_panels(1, 1, (5.6, 3.4))
    shade: Line = {"color": BLUE, "alpha": 0.15, "linewidth": 0, "label": "min to max"}
    axes.fill_between(accs.index, accs["min"], accs["max"], **shade)
    dots: Line = {"s": 12, "color": BLUE, "linewidths": 0, "label": "a client"}
    axes.scatter(table["round"], 100 * table["acc"], **dots)
    axes.plot(accs.index, accs["mean"], color=RUST, linewidth=1.8, label="mean")
    whole_numbers(axes.xaxis)
    label_panels([axes], 1, "communication round", "accuracy of clients, %")
    legend(figure, [axes])
    return figure


def bar_panels(
    panels: Mapping[str, Values],
    columns: int = 3,
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
    means = pd.DataFrame(
        {
            title: {label: np.mean(seeds) for label, seeds in values.items() if len(seeds)}
            for title, values in panels.items()
        }
    )
    order = list(means.mean(axis=1).sort_values(kind="stable").index)
    one = len(panels) == 1
    size = (6.2 if one else 3.5, 1.2 + 0.34 * max(2, len(order)))
    figure, grid = make_panels(len(panels), columns, size)
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
    label_panels(grid, columns, xlabel, "")
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
    bar = figure.colorbar(image, ax=axes, shrink=0.85, label="share of the true class")
    grey(bar.ax)
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
