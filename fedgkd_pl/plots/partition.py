"""Who holds what, as the paper's bubble chart."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Counts = Sequence[Sequence[int]]  # samples of each class, for every client
CLASSES = 1_000  # a chart of more classes than this shows the first ones
SHOWN = 60  # likewise of clients


def bubble_chart(counts: Counts, title: str = "") -> "Figure":
    """Clients × classes, the area of a bubble being the number of samples."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    table = np.asarray(counts)[:SHOWN, :CLASSES]
    clients, classes = table.shape
    width, height = max(4.0, 0.3 * clients + 1.5), max(3.0, 0.3 * min(classes, 40) + 1.2)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    x, y = np.nonzero(table)
    area = table[x, y] / max(1, table.max()) * min(260.0, 20000 / max(clients, classes))
    axes.scatter(x, y, s=area, color="tab:red", alpha=0.75, linewidths=0)
    axes.set(
        xlabel="client" if clients == len(counts) else f"client (first {clients})",
        ylabel="class",
        xlim=(-0.8, clients - 0.2),
        ylim=(-0.8, classes - 0.2),
    )
    if title:
        axes.set_title(title.replace("$", r"\$"), fontsize="medium")  # which is no formula
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.set_axisbelow(True)
    axes.grid(alpha=0.2)
    return figure
