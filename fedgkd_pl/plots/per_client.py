"""What two models are worth to every client, side by side."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from fedgkd_pl.plots.style import BLUE, RUST, TEXT, label_panels, legend, literal, make_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUMBERED = 40  # of more clients than this, the axis has no numbers


def per_client(
    values: Mapping[str, Mapping[int, float]],
    title: str = "",
    ylabel: str = "accuracy on own samples, %",
) -> "Figure":
    """A dot for every client and model, sorted by the first model; lines join a client's dots.

    Horizontal lines mark the mean and, dotted, that of the worst tenth of the clients.

    Args:
        values: one or two models by label, each from client to value. The first has every client;
            the other may lack some.
    """
    first, *others = values.items()
    order = sorted(first[1], key=lambda client: (first[1][client], client))
    place = {client: x for x, client in enumerate(order)}
    wide = min(10.0, max(5.6, 2.4 + 0.11 * len(order)))
    figure, (axes,) = make_panels(1, 1, (wide, 3.8))
    for _, other in others:
        for client, value in other.items():
            x = place[client]
            axes.plot([x, x], [first[1][client], value], color=TEXT, alpha=0.5, linewidth=0.9)
    styles = ((BLUE, "o", 1.8), (RUST, "s", 1.0))  # equal ones: a square in a disc
    size = 22 if len(order) <= NUMBERED else 7
    for (label, of_clients), (colour, symbol, larger) in zip(values.items(), styles, strict=False):
        places = [place[client] for client in of_clients]
        y = list(of_clients.values())
        mean, worst = float(np.mean(y)), worst_tenth(y)
        text = f"{label}: mean {mean:.1f} (line), worst 10 % {worst:.1f} (dots)"
        dots: dict[str, Any] = {"color": colour, "marker": symbol, "linewidths": 0, "zorder": 3}
        axes.scatter(places, y, s=larger * size, label=literal(text), **dots)
        for height, dash in ((mean, "-"), (worst, ":")):
            axes.axhline(height, color=colour, linestyle=dash, linewidth=1.3)
    axes.set_title(literal(title))
    shown = list(map(str, order)) if len(order) <= NUMBERED else []
    axes.set_xticks(range(len(shown)), shown, rotation=90 if len(shown) > 20 else 0)
    axes.set_xlim(-0.8, len(order) - 0.2)
    axes.grid(visible=False, axis="x")
    label_panels([axes], 1, f"clients, sorted by {literal(first[0])}", ylabel)
    legend(figure, [axes])
    return figure


def worst_tenth(values: Sequence[float]) -> float:
    """The mean of the worst tenth of the clients, of one at least."""
    return float(np.sort(values)[: max(1, len(values) // 10)].mean())
