"""Accuracy per client of one or two models."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from fedgkd_pl.plots.style import BLUE, RUST, TEXT, label_panels, legend, literal, make_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUMBERED = 40  # of more clients than this, the axis has no numbers


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
        dots: dict[str, Any] = {"color": colour, "marker": symbol, "linewidths": 0, "zorder": 3}
        axes.scatter(places, values, s=larger * size, label=literal(text), **dots)
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
