"""Who holds what, as the paper's bubble chart."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from fedgkd_pl.plots.style import NAMED, RUST, literal, make_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Counts = Sequence[Sequence[int]]  # samples of each class, for every client
CLASSES = 1_000  # a chart of more classes than this shows the first ones
SHOWN = 60  # likewise of clients


def bubble_chart(counts: Counts, title: str = "", names: Sequence[str] = ()) -> "Figure":
    """Clients × classes, the area of a bubble being the number of samples.

    Args:
        names: of the classes; by default, and where there are too many to write, their numbers.
    """
    from matplotlib.ticker import MaxNLocator

    table = np.asarray(counts)[:SHOWN, :CLASSES]
    clients, classes = table.shape
    width, height = max(4.0, 0.3 * clients + 1.5), max(3.0, 0.3 * min(classes, 40) + 1.2)
    figure, (axes,) = make_panels(1, 1, (width, height))
    x, y = np.nonzero(table)
    area = table[x, y] / max(1, table.max()) * min(260.0, 20000 / max(clients, classes))
    axes.scatter(x, y, s=area, color=RUST, linewidths=0)
    axes.set(
        xlabel="client" if clients == len(counts) else f"client (first {clients})",
        ylabel="class",
        xlim=(-0.8, clients - 0.2),
        ylim=(-0.8, classes - 0.2),
    )
    axes.set_title(literal(title))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    if len(names) == classes <= NAMED:
        axes.set_yticks(range(classes), list(map(literal, names)))
    return figure
