"""How every figure looks: colours of methods, panels, legends, files.

The background is transparent and all text mid-grey, so that one file reads on light and on dark
pages. Every colour has a contrast of 3:1 or more to both, and any two are as far from each other to
colour-blind eyes as those of Okabe and Ito (https://jfly.uni-koeln.de/color/), some of which vanish
on one of the two. A method has the same colour in every figure. Nothing here touches pyplot, which
keeps global state.
"""

import io
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedgkd_pl.methods import discover
from fedgkd_pl.storage.files import commit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEXT = "#7D7D7D"  # the grey with the same contrast, 4:1, to white and to a dark page (#1E1E1E)
BLUE, AMBER, GREEN, RUST, VIOLET = "#2070B0", "#C88000", "#40A070", "#B84810", "#8080E8"
PINK, BROWN, PURPLE, GREY = "#C078A8", "#886840", "#9830F0", "#707070"
PALETTE = (BLUE, AMBER, GREEN, RUST, VIOLET, PINK, BROWN, PURPLE, GREY)
NAMED = 40  # of more classes than this, a figure shows the numbers
FORMATS = (".svg", ".png", ".pdf")


class Style(NamedTuple):
    """How a method is drawn."""

    colour: str
    dash: str = "-"
    symbol: str = "o"


# By the ``colour`` of a method. Colours that are near each other to some eyes have other dashes.
STYLES = (
    Style(GREY),
    Style(VIOLET, "--", "s"),
    Style(PINK, ":", "D"),
    Style(AMBER, "--", "^"),
    Style(BROWN, "-", "v"),
    Style(PURPLE, "-", "<"),
    Style(BLUE, "-", ">"),
    Style(GREEN, "-.", "P"),
    Style(RUST, "-.", "h"),
)
DASHES = ("-", "--", ":", "-.")
SYMBOLS = "*Xpd8"  # of methods beyond STYLES


def style(name: str) -> Style:
    """How a method is drawn; any other name has a colour that depends on it alone.

    When all colours are taken, further methods have them again with other dashes and symbols.

    Args:
        name: as in the paper (``FedGKD-Vote``) or of the class (``FedGKDVote``).
    """
    index = _index(name)
    if index is None:
        return Style(PALETTE[zlib.crc32(name.encode()) % len(PALETTE)])
    again, slot = divmod(index, len(STYLES))
    first = STYLES[slot]
    if not again:
        return first
    dash = DASHES[(DASHES.index(first.dash) + again) % len(DASHES)]
    return Style(first.colour, dash, SYMBOLS[(index - len(STYLES)) % len(SYMBOLS)])


def colours(names: Iterable[str]) -> dict[str, str]:
    """Colours for the labels of one figure, different ones as long as there are enough.

    Methods with a colour of their own keep it, other labels take the next free one.
    """
    names, own = list(names), range(len(STYLES))
    chosen = {name: style(name).colour for name in names if _index(name) in own}
    for name in names:
        if name not in chosen:
            start = PALETTE.index(style(name).colour)
            cycle = PALETTE[start:] + PALETTE[:start]
            free = [value for value in cycle if value not in chosen.values()]
            chosen[name] = (free or cycle)[0]
    return chosen


def _index(name: str) -> int | None:
    """The number of a method among all; None of another name."""
    methods = discover().values()
    known = {_plain(text): each.colour for each in methods for text in (each.title, each.name)}
    return known.get(_plain(name))


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower().replace("plus", "+")


def literal(text: str) -> str:
    """A text that Matplotlib shows as it is: between two dollars it would expect a formula."""
    return text.replace("$", r"\$")


def save(figure: "Figure", path: str | Path) -> None:
    """Writes a figure; the same figure gives the same bytes."""
    commit(Path(path), [render(figure, Path(path).suffix[1:].lower())])


def to_svg(figure: "Figure", prefix: str) -> str:
    """A figure as an ``<svg>`` element to put into a page.

    Its text takes the page's colour ``--figure``, if there is one.

    Args:
        prefix: the element's id; all ids inside begin with it, so that two figures of one page
            do not take each other's clip paths.
    """
    text = render(figure, "svg").decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", text)
    text = text.replace("*{", f"#{prefix} *{{")  # its style sheet is the figure's, not the page's
    text = re.sub(TEXT, f"var(--figure, {TEXT.lower()})", text, flags=re.IGNORECASE)
    return text.replace("<svg ", f'<svg id="{prefix}" ', 1)


def opaque(figure: "Figure") -> "Figure":
    """The figure on white, for TensorBoard: letters are jagged where it drops the alpha channel."""
    figure.set_facecolor("white")
    return figure


def render(figure: "Figure", format: str) -> bytes:
    """The bytes of a file, without a date: the same figure gives the same ones."""
    from matplotlib import rc_context

    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    content = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedgkd_pl"}):
        figure.savefig(content, format=format, dpi=200, metadata=undated.get(format))
    return content.getvalue()


def make_panels(
    number: int, columns: int, size: tuple[float, float], share: bool = True
) -> "tuple[Figure, list[Axes]]":
    """A figure with panels of this size, row by row."""
    from matplotlib.figure import Figure

    columns = min(columns, number)
    rows = -(-number // columns)
    whole = (size[0] * columns, size[1] * rows)
    figure = Figure(figsize=whole, layout="constrained", facecolor="none")
    places = figure.subplots(rows, columns, sharey=share, squeeze=False).flat
    for axes in places[number:]:
        axes.remove()
    grid = list(places[:number])
    for axes in grid:
        grey(axes)
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(color=TEXT, alpha=0.22, linewidth=0.7)
    return figure, grid


def grey(axes: "Axes") -> None:
    """Draws everything but the data in mid-grey."""
    axes.tick_params(colors=TEXT, which="both", labelsize="small")
    for part in (axes.title, axes.xaxis.label, axes.yaxis.label):
        part.set_color(TEXT)
    axes.title.set_fontsize("medium")
    axes.spines[:].set_color(TEXT)


def boxed(axes: "Axes") -> None:
    """Draws a line all around, for panels whose axes mean nothing."""
    axes.spines[:].set_visible(True)
    axes.title.set_fontsize("small")


def label_panels(grid: "Sequence[Axes]", columns: int, xlabel: str, ylabel: str) -> None:
    """Names the axes on the left and below only."""
    for index, axes in enumerate(grid):
        if index % columns == 0:
            axes.set_ylabel(ylabel)
        else:
            axes.tick_params(labelleft=False)
        if index + columns >= len(grid):
            axes.set_xlabel(xlabel)


def legend(figure: "Figure", grid: "Sequence[Axes]", title: str = "", scale: float = 1.0) -> None:
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
    how: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "labelcolor": TEXT}
    how |= {"fontsize": "small", "title_fontsize": "small", "markerscale": scale}
    columns = -(-len(entries) // rows)
    legend = figure.legend(
        [*entries.values()], [*entries], ncols=columns, title=title or None, **how
    )
    legend.get_title().set_color(TEXT)


def whole_numbers(axis: Any) -> None:
    """Puts ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
