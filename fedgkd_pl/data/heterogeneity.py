"""How far the clients' data are apart: figures, a table, and the paper's bubble chart."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Counts = Sequence[Sequence[int]]  # samples of each class, for every client
CLASSES = 1_000  # and this many classes
SHOWN = 60  # a chart of more clients than this shows the first ones


def effective_classes(counts: Counts) -> list[float]:
    """For every client the exponential of its label entropy: 1 for one class, C for C equal ones.

    Args:
        counts: samples of each class, for every client; empty clients are left out.
    """
    p = _shares(counts)
    entropy = -np.sum(p * np.log(np.where(p > 0, p, 1)), axis=1)
    return [float(value) for value in np.exp(entropy)]


def heterogeneity(counts: Counts) -> dict[str, float]:
    """The figures of a partition.

    Args:
        counts: samples of each class, for every client.

    Returns:
        ``effective_classes``: mean over clients of the exponential of the label entropy.
        ``total_variation``: mean distance of a client's label distribution to that of all, in
        [0, 1]. ``size_min``, ``size_max``, ``size_std``: of the clients' sizes.
    """
    table = np.asarray(counts, dtype=float)
    sizes = table.sum(axis=1)
    everyone = table.sum(axis=0) / table.sum()
    distance = np.abs(_shares(counts) - everyone).sum(axis=1) / 2
    return {
        "effective_classes": float(np.mean(effective_classes(counts))),
        "total_variation": float(distance.mean()),
        "size_min": float(sizes.min()),
        "size_max": float(sizes.max()),
        "size_std": float(sizes.std()),
    }


def bubble_chart(counts: Counts, title: str = "") -> "Figure":
    """Clients × classes, the area of a bubble being the number of samples.

    Args:
        counts: samples of each class, for every client.
        title: above the chart.
    """
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


def _shares(counts: Counts) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    table = np.asarray(counts, dtype=float)
    table = table[table.sum(axis=1) > 0]
    return table / table.sum(axis=1, keepdims=True)  # type: ignore[no-any-return]
