"""The paper's figures, each a pure function from plain data to a figure.

The background is transparent and all text mid-grey, so that one file reads on light and on dark
pages. Colours are Okabe and Ito's (https://jfly.uni-koeln.de/color/) but for black and yellow,
which vanish on one of the two; three more are as far from all others to colour-blind eyes. A method
has the same colour in every figure. Nothing here touches pyplot, which keeps global state.
"""

import io
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from fedgkd_pl.errors import require
from fedgkd_pl.storage.files import commit
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[Mapping[int, float]]]  # label → seeds → round → value
Shares = Mapping[str, Mapping[float, Sequence[float]]]  # label → participation → a value a seed
Floats = NDArray[np.float64]

TEXT = "#7D7D7D"  # the grey with the same contrast, 4:1, to white and to a dark page (#1E1E1E)
COLOURS = {
    "FedAvg": "#5A5A5A",
    "FedProx": "#56B4E9",
    "MOON": "#CC79A7",
    "FedDistill": "#E69F00",
    "FedDistill+": "#7A5C1E",
    "FedGen": "#9030F0",
    "FedGKD": "#0072B2",
    "FedGKD-Vote": "#009E73",
    "FedGKD+": "#D55E00",
}
# Colours that are near each other to some eyes come with different dashes.
DASHES = {"FedProx": "--", "FedDistill": "--", "FedGKD+": "--", "MOON": ":", "FedGKD-Vote": "-."}
SYMBOLS = dict(zip(COLOURS, "osD^v<>Ph", strict=True))
OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7")
PALETTE = (*OKABE_ITO, "#7A5C1E", "#9030F0", "#5A5A5A")
MARKERS = "o^sDvP*X"  # classes beyond the palette take the colours again with the next marker
WRITTEN = 12  # a confusion matrix of more classes than this has no numbers in its cells
LARGEST = 1e100  # a curve has gaps where values are larger, or no numbers
FAR = 300  # times the median: such values need a logarithmic axis
FORMATS = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class FeatureMapData:
    """What a global and a client's model see in the same test samples, embedded in the plane.

    Attributes:
        global_points: of the global model, samples × 2.
        local_points: of the client's model, samples × 2.
        labels: the samples' classes.
        global_acc: accuracy on the whole split, in [0, 1].
        local_acc: the same of the client's model.
        client: its id.
        round: the round after which the global model is taken, from 1.
        name: of the run, such as the method; begins the titles.
    """

    global_points: Floats
    local_points: Floats
    labels: NDArray[np.int64]
    global_acc: float
    local_acc: float
    client: int
    round: int
    name: str = ""


@dataclass(frozen=True)
class Boundary:
    """What a model says of a square of the plane.

    Attributes:
        title: above the panel.
        classes: the predicted class on a regular grid; rows from low to high y.
        points: what the model was trained on, points × 2; may be empty.
        labels: the points' classes.
    """

    title: str
    classes: NDArray[np.int64]
    points: Floats
    labels: NDArray[np.int64]


# -- colours ---------------------------------------------------------------------------------------


def colour(name: str) -> str:
    """The colour of a method in every figure; any other name has one that depends on it alone.

    Args:
        name: as in the paper (``FedGKD-Vote``) or of the class (``FedGKDVote``).
    """
    known = _method(name)
    return COLOURS[known] if known else PALETTE[_place(name)]


def colours(names: Iterable[str]) -> dict[str, str]:
    """Colours for the labels of one figure, different ones as long as there are enough.

    Args:
        names: the labels; methods keep their :func:`colour`, others take the next free one.
    """
    names = list(names)
    chosen = {name: colour(name) for name in names if _method(name)}
    for name in names:
        if name not in chosen:
            start = _place(name)
            cycle = PALETTE[start:] + PALETTE[:start]
            free = [value for value in cycle if value not in chosen.values()]
            chosen[name] = (free or cycle)[0]
    return {name: chosen[name] for name in names}


def _method(name: str) -> str:
    """The paper's name of a method, or nothing."""
    plain = _plain(name)
    return next((known for known in COLOURS if _plain(known) == plain), "")


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower().replace("plus", "+")


def _place(name: str) -> int:
    return zlib.crc32(name.encode()) % len(PALETTE)


def literal(text: str) -> str:
    """A name that Matplotlib shows as it is: between two dollars it would look for a formula.

    Args:
        text: a label or title.
    """
    return text.replace("$", r"\$")


# -- files -----------------------------------------------------------------------------------------


def save(figure: "Figure", path: str | Path) -> None:
    """Writes a figure; the same figure gives the same bytes.

    Args:
        figure: any.
        path: ends in ``.svg``, ``.png`` or ``.pdf``.
    """
    path = Path(path)
    kind = path.suffix.lower()
    require(kind in FORMATS, "path", f"must end in one of {', '.join(FORMATS)}", path)
    commit(path, [_render(figure, kind[1:])])


def to_svg(figure: "Figure", prefix: str) -> str:
    """A figure as an ``<svg>`` element to put into a page.

    Args:
        figure: any.
        prefix: the element's id; all ids inside begin with it, so that two figures of one page
            do not take each other's clip paths.
    """
    require(re.fullmatch(r"[A-Za-z][\w-]*", prefix) is not None, "prefix", "must be an id", prefix)
    text = _render(figure, "svg").decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", text)
    text = text.replace("*{", f"#{prefix} *{{")  # its style sheet is the figure's, not the page's
    return text.replace("<svg ", f'<svg id="{prefix}" ', 1)


def _render(figure: "Figure", kind: str) -> bytes:
    from matplotlib import rc_context

    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    content = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedgkd_pl"}):
        figure.savefig(content, format=kind, dpi=200, metadata=undated.get(kind))
    return content.getvalue()


# -- curves ----------------------------------------------------------------------------------------


def learning_curves(
    curves: Curves, title: str = "", ylabel: str = "test accuracy, %", smooth: int = 1
) -> "Figure":
    """A line per label: the mean over seeds, in a band of one standard deviation to either side.

    Args:
        curves: for every label its seeds, each from round to value, in the unit of ``ylabel``.
            Only rounds that all seeds of a label have are drawn, lest the mean jump where one ends.
        title: above the chart.
        ylabel: of the values.
        smooth: each seed's value is the mean of its last so many ones.
    """
    return curve_panels({title: curves}, 1, ylabel, smooth)


def curve_panels(
    panels: Mapping[str, Curves],
    columns: int = 3,
    ylabel: str = "test accuracy, %",
    smooth: int = 1,
) -> "Figure":
    """Learning curves side by side, such as one panel per α; they share the y-axis.

    Where one line is far above the others, as that of a run that diverges, the axis is logarithmic.

    Args:
        panels: :func:`learning_curves`' data by the panel's title.
        columns: panels in a row.
        ylabel: of the values.
        smooth: see :func:`learning_curves`.
    """
    require(smooth >= 1, "smooth", "must be at least 1", smooth)
    size = (5.6, 3.6) if len(panels) == 1 else (3.1, 2.6)
    figure, grid = _panels(len(panels), columns, size)
    chosen = colours(label for curves in panels.values() for label in curves)
    for axes, (title, curves) in zip(grid, panels.items(), strict=True):
        for label, seeds in curves.items():
            rounds, values = _table(seeds, smooth)
            if not len(rounds):
                continue
            mean, spread = mean_and_std(values)
            axes.plot(
                *(rounds, mean),
                label=literal(label),
                color=chosen[label],
                linestyle=DASHES.get(_method(label), "-"),
                linewidth=1.6,
                zorder=3,
            )
            if len(values) > 1:
                band = (mean - spread, mean + spread)
                axes.fill_between(rounds, *band, color=chosen[label], alpha=0.18, linewidth=0)
        axes.set_title(literal(title))
        _whole_numbers(axes.xaxis)
    shown = np.concatenate([line.get_ydata() for axes in grid for line in axes.lines] or [[1.0]])
    shown = shown[np.isfinite(shown)]
    if len(shown) and shown.min() > 0 and shown.max() > FAR * np.median(shown):
        for axes in grid:
            axes.set_yscale("log", nonpositive="clip")
            axes.set_ylim(shown.min() / 2, 2 * shown.max())
    _label_panels(grid, columns, "communication round", ylabel)
    _legend(figure, grid)
    return figure


def participation_chart(values: Shares, title: str = "") -> "Figure":
    """Accuracy over the participation ratio: the mean over seeds and its standard deviation.

    Args:
        values: for every label and participation ratio C, an accuracy in percent per seed.
        title: above the chart.
    """
    return participation_panels({title: values}, 1)


def participation_panels(panels: Mapping[str, Shares], columns: int = 3) -> "Figure":
    """Accuracy over participation side by side, such as one panel per α; they share the y-axis.

    Args:
        panels: :func:`participation_chart`'s data by the panel's title.
        columns: panels in a row.
    """
    size = (4.6, 3.4) if len(panels) == 1 else (3.1, 2.6)
    figure, grid = _panels(len(panels), columns, size)
    chosen = colours(label for values in panels.values() for label in values)
    for axes, (title, values) in zip(grid, panels.items(), strict=True):
        for label, by_ratio in values.items():
            ratios = sorted(ratio for ratio, seeds in by_ratio.items() if len(seeds))
            if not ratios:
                continue
            pairs = [mean_and_std(np.array([by_ratio[ratio]]).T) for ratio in ratios]
            mean, spread = (np.concatenate(part) for part in zip(*pairs, strict=True))
            several = [len(by_ratio[ratio]) > 1 for ratio in ratios]
            spread = np.where(several, spread, np.nan)  # one seed has no whiskers
            known = _method(label)
            axes.errorbar(
                *(ratios, mean, spread),
                label=literal(label),
                color=chosen[label],
                linestyle=DASHES.get(known, "-"),
                marker=SYMBOLS.get(known, "o"),
                markersize=5,
                linewidth=1.6,
                elinewidth=1.2,
                capsize=3,
            )
        axes.set_title(literal(title))
        axes.set_xticks(sorted({ratio for by_ratio in values.values() for ratio in by_ratio}))
    _label_panels(grid, columns, "participation ratio C", "test accuracy, %")
    _legend(figure, grid)
    return figure


def client_accuracies(
    rows: Iterable[tuple[int, int, float]], title: str = "", ylabel: str = "accuracy of clients, %"
) -> "Figure":
    """How far the clients of a round are apart: a dot each, their mean, and from worst to best.

    Args:
        rows: round, client and its accuracy, in the unit of ``ylabel``.
        title: above the chart.
        ylabel: of the values.
    """
    by_round: dict[int, list[float]] = {}
    for number, _, value in rows:
        by_round.setdefault(int(number), []).append(float(value))
    rounds = sorted(by_round)
    values = [by_round[number] for number in rounds]
    figure, (axes,) = _panels(1, 1, (5.6, 3.4))
    blue = COLOURS["FedGKD"]
    low, high = [min(found) for found in values], [max(found) for found in values]
    axes.fill_between(rounds, low, high, color=blue, alpha=0.15, linewidth=0, label="min to max")
    x = np.repeat(np.array(rounds, dtype=float), [len(found) for found in values])
    y = np.array([value for found in values for value in found])
    axes.scatter(x, y, s=12, color=blue, alpha=0.55, linewidths=0, label="a client")
    mean = [float(np.mean(found)) for found in values]
    axes.plot(rounds, mean, color=COLOURS["FedGKD+"], linewidth=1.8, label="mean")
    axes.set_title(literal(title))
    _whole_numbers(axes.xaxis)
    _label_panels([axes], 1, "communication round", ylabel)
    _legend(figure, [axes])
    return figure


def mean_and_std(values: ArrayLike) -> tuple[Floats, Floats]:
    """The mean over seeds and the standard deviation (ddof 1), which is 0 for one seed.

    Args:
        values: seeds × anything.
    """
    table = np.asarray(values, dtype=float)
    mean: Floats = table.mean(axis=0)
    return mean, table.std(axis=0, ddof=1) if len(table) > 1 else np.zeros_like(mean)


def _table(seeds: Sequence[Mapping[int, float]], smooth: int) -> tuple[list[int], Floats]:
    """The rounds that all seeds have, and seeds × rounds; seeds without any round are left out."""
    begun = [seed for seed in seeds if seed]
    if not begun:
        return [], np.empty((0, 0))
    rounds = sorted(set(begun[0]).intersection(*begun[1:]))
    rows = []
    for seed in begun:
        values = [seed[number] for number in sorted(seed)]
        values = [value if abs(value) < LARGEST else np.nan for value in values]
        places = {number: place for place, number in enumerate(sorted(seed), 1)}
        ends = (places[number] for number in rounds)
        rows.append([float(np.mean(values[max(0, end - smooth) : end])) for end in ends])
    return rounds, np.array(rows)


# -- tables ----------------------------------------------------------------------------------------


def bars(
    values: Mapping[str, Sequence[float]],
    title: str = "",
    xlabel: str = "test accuracy, %",
    paper: Mapping[str, float] | None = None,
) -> "Figure":
    """A table at a glance: a bar per label, the best on top, with its standard deviation.

    Args:
        values: for every label a value per seed; labels without any are left out.
        title: above the chart.
        xlabel: of the values.
        paper: the paper's number of a label, drawn as a diamond.
    """
    numbers = {
        label: mean_and_std(np.array([seeds]).T) for label, seeds in values.items() if len(seeds)
    }
    order = sorted(numbers, key=lambda label: float(numbers[label][0][0]))
    mean = np.array([numbers[label][0][0] for label in order])
    spread = np.array([numbers[label][1][0] for label in order])
    told = {label: value for label, value in (paper or {}).items() if label in numbers}
    figure, (axes,) = _panels(1, 1, (6.2, 1.2 + 0.34 * max(2, len(order))))
    chosen = colours(values)
    several = [len(values[label]) > 1 for label in order]
    y = np.arange(len(order))
    axes.barh(y, mean, height=0.68, color=[chosen[label] for label in order], alpha=0.85)
    if any(several):
        reach = np.where(several, spread, np.nan)
        axes.errorbar(mean, y, xerr=reach, fmt="none", ecolor=TEXT, elinewidth=1.4, capsize=3)
    if told:
        places = [order.index(label) for label in told]
        style: dict[str, Any] = {
            "marker": "D",
            "s": 30,
            "facecolors": "white",
            "edgecolors": "black",
            "zorder": 4,
        }
        axes.scatter(list(told.values()), places, linewidths=1.0, label="paper", **style)
        _legend(figure, [axes])
    furthest = [max(m + s, told.get(n, 0.0)) for m, s, n in zip(mean, spread, order, strict=True)]
    for place, reach_to in enumerate(furthest):
        deviation = f" ± {_short(spread[place])}" if several[place] else ""
        axes.annotate(
            f"{_short(mean[place])}{deviation}",
            (reach_to, place),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
            color=TEXT,
        )
    axes.set(yticks=y, yticklabels=list(map(literal, order)), xlabel=xlabel, title=literal(title))
    axes.set_xlim(0, max(furthest, default=1.0) * 1.24 or 1.0)  # room for the numbers
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    return figure


def _short(value: float) -> str:
    """Accuracies with two digits behind the point, large numbers with none."""
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def confusion_chart(
    matrix: ArrayLike, title: str = "", names: Sequence[str] | None = None
) -> "Figure":
    """A confusion matrix: of every true class, the share that each prediction has.

    Args:
        matrix: counts; rows are the truth, columns the prediction.
        title: above the chart.
        names: of the classes; by default their numbers.
    """
    counts = np.asarray(matrix, dtype=float)
    classes = len(counts)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    figure, (axes,) = _panels(1, 1, (4.6, 4.2))
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    bar = figure.colorbar(image, ax=axes, shrink=0.85, label="share of the true class")
    _grey(bar.ax)
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
    if names is not None:
        names = list(map(literal, names))
        upright: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(range(classes), names, **upright)
        axes.set_yticks(range(classes), names)
    axes.set(xlabel="predicted class", ylabel="true class", title=literal(title))
    axes.grid(visible=False)
    axes.tick_params(length=0)
    return figure


# -- points in the plane ---------------------------------------------------------------------------


def feature_map(maps: Sequence[FeatureMapData]) -> "Figure":
    """t-SNE of features, coloured by class: the global models, and below each a client's.

    Of one run, the two stand side by side.

    Args:
        maps: a column each.
    """
    columns = len(maps)
    figure, grid = _panels(2 * columns, max(2, columns), (3.0, 3.0), share=False)
    classes = max((int(data.labels.max()) + 1 for data in maps), default=0)
    for column, data in enumerate(maps):
        name = f"{data.name}, " if data.name else ""
        panels = {
            f"{name}global, round {data.round}: {100 * data.global_acc:.1f} %": data.global_points,
            f"{name}client {data.client}: {100 * data.local_acc:.1f} %": data.local_points,
        }
        for axes, (title, points) in zip(grid[column::columns], panels.items(), strict=True):
            for number in range(classes):
                mine = points[data.labels == number]
                axes.scatter(
                    mine[:, 0], mine[:, 1], s=7, linewidths=0, alpha=0.8, **_class_style(number)
                )
            axes.set(title=literal(title), xticks=[], yticks=[])
            _boxed(axes)
    if classes <= 2 * len(PALETTE):
        _legend(figure, grid, title="class", scale=2.2)
    return figure


def decision_boundaries(
    rows: Mapping[str, Sequence[Boundary]], extent: tuple[float, float] = (-4.0, 4.0)
) -> "Figure":
    """What models say of a square of the plane, and the points that they were trained on.

    Args:
        rows: a row of panels by its name, such as the method; all of the same length.
        extent: of the square, from and to, along both axes.
    """
    from matplotlib.colors import to_rgb

    columns = len(next(iter(rows.values())))
    shades = np.array([to_rgb(value) for value in PALETTE])
    figure, grid = _panels(len(rows) * columns, columns, (2.3, 2.3))
    flat = [(name, place, panel) for name, row in rows.items() for place, panel in enumerate(row)]
    for axes, (name, place, panel) in zip(grid, flat, strict=True):
        image = np.dstack([shades[panel.classes], np.full(panel.classes.shape, 0.38)])
        low, high = extent
        box = (low, high, low, high)
        axes.imshow(image, origin="lower", extent=box, interpolation="nearest", zorder=0)
        for number in np.unique(panel.labels):
            mine = panel.points[panel.labels == number]
            axes.scatter(
                mine[:, 0], mine[:, 1], s=5, linewidths=0, zorder=3, **_class_style(int(number))
            )
        axes.axhline((low + high) / 2, color=TEXT, linewidth=0.9, linestyle="--", zorder=2)
        axes.axvline((low + high) / 2, color=TEXT, linewidth=0.9, linestyle="--", zorder=2)
        axes.set(title=literal(panel.title), xticks=[], yticks=[], xlim=extent, ylim=extent)
        axes.grid(visible=False)
        _boxed(axes)
        if not place:
            axes.set_ylabel(literal(name), fontsize="large", fontweight="bold")
    return figure


def _class_style(number: int) -> dict[str, Any]:
    again, place = divmod(number, len(PALETTE))
    marker = MARKERS[again % len(MARKERS)]
    return {"color": PALETTE[place], "marker": marker, "label": str(number)}


# -- what all have in common -----------------------------------------------------------------------


def _panels(
    number: int, columns: int, size: tuple[float, float], share: bool = True
) -> "tuple[Figure, list[Axes]]":
    """A figure with panels of this size, row by row."""
    from matplotlib.figure import Figure

    require(columns >= 1, "columns", "must be at least 1", columns)
    columns = min(columns, max(1, number))
    rows = -(-number // columns)
    width, height = size
    figure = Figure(
        figsize=(width * columns, height * rows), layout="constrained", facecolor="none"
    )
    grid: list[Axes] = []
    for place in range(number):
        first = grid[0] if share and grid else None
        axes = figure.add_subplot(rows, columns, place + 1, sharey=first)
        _grey(axes)
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(color=TEXT, alpha=0.22, linewidth=0.7)
        grid.append(axes)
    return figure, grid


def _grey(axes: "Axes") -> None:
    axes.tick_params(colors=TEXT, which="both", labelsize="small")
    for part in (axes.title, axes.xaxis.label, axes.yaxis.label):
        part.set_color(TEXT)
    axes.title.set_fontsize("medium")
    for spine in axes.spines.values():
        spine.set_color(TEXT)


def _boxed(axes: "Axes") -> None:
    for spine in axes.spines.values():
        spine.set_visible(True)
    axes.title.set_fontsize("small")


def _label_panels(grid: "Sequence[Axes]", columns: int, xlabel: str, ylabel: str) -> None:
    """Names the axes on the left and below only."""
    for place, axes in enumerate(grid):
        if place % columns == 0:
            axes.set_ylabel(ylabel)
        else:
            axes.tick_params(labelleft=False)
        if place + columns >= len(grid):
            axes.set_xlabel(xlabel)


def _legend(figure: "Figure", grid: "Sequence[Axes]", title: str = "", scale: float = 1.0) -> None:
    """One legend for all panels, below them."""
    entries: dict[str, Any] = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if not entries:
        return
    width = figure.get_figwidth()
    longest = max(len(label) for label in entries)
    rows = -(-len(entries) // max(1, int(width / (0.62 + 0.085 * longest))))
    legend = figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        ncols=-(-len(entries) // rows),
        frameon=False,
        fontsize="small",
        labelcolor=TEXT,
        markerscale=scale,
        title=title or None,
        title_fontsize="small",
    )
    legend.get_title().set_color(TEXT)


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
