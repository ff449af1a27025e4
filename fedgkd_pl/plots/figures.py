"""The paper's figures of numbers, each a pure function from plain data to a figure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
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
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[Mapping[int, float]]]  # label → seeds → round → value
Shares = Mapping[str, Mapping[float, Sequence[float]]]  # label → participation → a value a seed
Values = Mapping[str, Sequence[float]]  # label → a value a seed
Floats = NDArray[np.float64]
Line = dict[str, Any]  # how Matplotlib draws one
T = TypeVar("T")

WRITTEN = 12  # a confusion matrix of more classes than this has no numbers in its cells
LARGEST = 1e100  # a curve has gaps where values are larger, or no numbers
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
        rounds, values = _table(seeds)
        if not len(rounds):
            return
        axes.plot(rounds, mean_and_std(values)[0], **{**how, "marker": "", "zorder": 3})
        if len(values) > 1:
            ends = band(values, ylabel)
            axes.fill_between(rounds, *ends, color=how["color"], alpha=0.18, linewidth=0)

    size = (5.6, 3.6) if len(panels) == 1 else (3.1, 2.6)
    figure, grid = _panels(panels, columns, size, draw, chosen)
    for axes in grid:
        whole_numbers(axes.xaxis)
    shown = np.concatenate([line.get_ydata() for axes in grid for line in axes.lines] or [[1.0]])
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
        known = {ratio: by_ratio[ratio] for ratio in sorted(by_ratio) if len(by_ratio[ratio])}
        _error_bars(axes, known, ACCURACY, how)

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
        learned = sorted({number for seed in seeds for number in seed})
        known = {float(n): [seed[n] for seed in seeds if n in seed] for n in learned}
        kind = ACCURACY if title.endswith("accuracy") else ""  # forgetting may be below 0
        _error_bars(axes, known, kind, how)

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


def _error_bars(
    axes: "Axes", values: Mapping[float, Sequence[float]], kind: str, how: Line
) -> None:
    if values:
        means, whiskers = means_and_whiskers(list(values.values()), kind)
        marks: dict[str, Any] = {"markersize": 5, "elinewidth": 1.2, "capsize": 3}
        axes.errorbar(list(values), means, whiskers, **how, **marks)


def client_accuracies(
    rows: Iterable[tuple[int, int, float]], title: str = "", ylabel: str = "accuracy of clients, %"
) -> "Figure":
    """How far the clients of a round are apart: a dot each, their mean, and from worst to best.

    Args:
        rows: round, client and its accuracy, in the unit of ``ylabel``.
    """
    by_round: dict[int, list[float]] = {}
    for number, _, value in sorted(rows):
        by_round.setdefault(int(number), []).append(float(value))
    rounds, values = list(by_round), list(by_round.values())
    figure, (axes,) = make_panels(1, 1, (5.6, 3.4))
    low, high = list(map(min, values)), list(map(max, values))
    axes.fill_between(rounds, low, high, color=BLUE, alpha=0.15, linewidth=0, label="min to max")
    x, y = zip(*((number, value) for number in rounds for value in by_round[number]), strict=True)
    axes.scatter(x, y, s=12, color=BLUE, linewidths=0, label="a client")
    means = [float(np.mean(each)) for each in values]
    axes.plot(rounds, means, color=RUST, linewidth=1.8, label="mean")
    axes.set_title(literal(title))
    whole_numbers(axes.xaxis)
    label_panels([axes], 1, "communication round", ylabel)
    legend(figure, [axes])
    return figure


def mean_and_std(values: ArrayLike) -> tuple[Floats, Floats]:
    """Mean and standard deviation (ddof 1; 0 for one seed) over the first axis, the seeds."""
    table = np.asarray(values, dtype=float)
    mean: Floats = table.mean(axis=0)
    return mean, table.std(axis=0, ddof=1) if len(table) > 1 else np.zeros_like(mean)


def band(values: ArrayLike, label: str) -> tuple[Floats, Floats]:
    """From one standard deviation below the mean to one above, no further than values can be.

    Shares end at 0 and 100 %, losses at 0, unless the values themselves are outside.

    Args:
        values: the first axis is the seeds.
        label: of the axis; one of shares ends in ``, %``, one of losses in ``loss``.
    """
    table = np.asarray(values, dtype=float)
    mean, spread = mean_and_std(table)
    shares = label.endswith(", %")
    least = 0.0 if shares or label.endswith(NOT_NEGATIVE) else -np.inf
    known = np.isfinite(table)
    low = table.min(initial=least, where=known)
    high = table.max(initial=100.0, where=known) if shares else np.inf
    return np.maximum(mean - spread, low), np.minimum(mean + spread, high)


def means_and_whiskers(groups: Sequence[Sequence[float]], label: str) -> tuple[Floats, Floats]:
    """The mean of every group, and how far :func:`band` goes below and above; NaN for one value."""
    means = np.array([np.mean(values) for values in groups])
    ends = np.array([band(values, label) for values in groups]).T
    several = [len(values) > 1 for values in groups]
    return means, np.where(several, np.abs(ends - means), np.nan)


def _table(seeds: Sequence[Mapping[int, float]]) -> tuple[list[int], Floats]:
    """The rounds that all seeds have, and seeds × rounds; seeds without any round are left out."""
    begun = [seed for seed in seeds if seed]
    rounds = sorted(set(begun[0]).intersection(*begun[1:])) if begun else []
    values = np.array([[seed[number] for number in rounds] for seed in begun])
    return rounds, np.where(np.abs(values) < LARGEST, values, np.nan)


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
    means: dict[str, list[float]] = {}
    for values in panels.values():
        for label, seeds in values.items():
            if len(seeds):
                means.setdefault(label, []).append(float(np.mean(seeds)))
    order = sorted(means, key=lambda label: float(np.mean(means[label])))
    one = len(panels) == 1
    size = (6.2 if one else 3.5, 1.2 + 0.34 * max(2, len(order)))
    figure, grid = make_panels(len(panels), columns, size)
    chosen = chosen or colours(means)
    furthest = 0.0
    for axes, (title, values) in zip(grid, panels.items(), strict=True):
        theirs = {k: v for k, v in (paper or {}).get(title, {}).items() if values.get(k)}
        for row, label in enumerate(order):
            if shown := values.get(label):
                reach = _bar(axes, row, shown, chosen[label], theirs.get(label, 0.0))
                furthest = max(furthest, reach)
        if theirs:
            diamond: dict[str, Any] = {"marker": "D", "s": 30, "linewidths": 1.0, "zorder": 4}
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
    mean, std = (float(each) for each in mean_and_std(seeds))
    several = len(seeds) > 1
    axes.barh(row, mean, height=0.68, color=colour)
    if several:
        axes.errorbar(mean, row, xerr=std, fmt="none", ecolor=TEXT, elinewidth=1.4, capsize=3)
    reach = max(mean + std, paper)
    text = f"{_short(mean)} ± {_short(std)}" if several else _short(mean)
    beside: dict[str, Any] = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(text, (reach, row), fontsize="small", color=TEXT, **beside)
    return reach


def _short(value: float) -> str:
    """Accuracies with two digits behind the point, large numbers with none."""
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def confusion_chart(matrix: ArrayLike, title: str = "", names: Sequence[str] = ()) -> "Figure":
    """A confusion matrix: of every true class, the share that each prediction has.

    Args:
        matrix: counts; rows are the truth, columns the prediction.
        names: of the classes; by default, and where there are too many to write, their numbers.
    """
    counts = np.asarray(matrix, dtype=float)
    classes = len(counts)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    figure, (axes,) = make_panels(1, 1, (4.6, 4.2))
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    bar = figure.colorbar(image, ax=axes, shrink=0.85, label="share of the true class")
    grey(bar.ax)
    if classes <= WRITTEN:
        for row, column in np.ndindex(*shares.shape):
            share = shares[row, column]
            axes.text(
                *(column, row, f"{100 * share:.0f}"),
                ha="center",
                va="center",
                fontsize="small",
                color="white" if share > 0.55 else "#303030",
            )
        axes.set(xticks=range(classes), yticks=range(classes))
    if 0 < len(names) <= NAMED:
        names = list(map(literal, names))
        upright: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(range(classes), names, **upright)
        axes.set_yticks(range(classes), names)
    axes.set(xlabel="predicted class", ylabel="true class", title=literal(title))
    axes.grid(visible=False)
    axes.tick_params(length=0)
    return figure
