"""Sequences of tasks: what is known of them, and what is forgotten."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedgkd_pl.plots.figures import ACCURACY, Curves, means_and_whiskers
from fedgkd_pl.plots.style import colours, legend, literal, make_panels, style, whole_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def task_panels(panels: Mapping[str, Curves]) -> "Figure":
    """A panel per title, a line per label over the number of tasks learned, in percent.

    Args:
        panels: for every label its seeds, each from the number of tasks to the value. Drawn are the
            mean of the seeds that have a value and, if several have, their standard deviation.
    """
    figure, grid = make_panels(len(panels), 2, (3.6, 3.0), share=False)
    chosen = colours(label for curves in panels.values() for label in curves)
    for axes, (title, curves) in zip(grid, panels.items(), strict=True):
        for label, seeds in curves.items():
            learned = sorted({number for seed in seeds for number in seed})
            found = [[seed[number] for seed in seeds if number in seed] for number in learned]
            if not found:
                continue
            kind = ACCURACY if title.endswith("accuracy") else ""  # forgetting may be below 0
            axes.errorbar(
                *(learned, *means_and_whiskers(found, kind)),
                label=literal(label),
                color=chosen[label],
                linestyle=style(label).dash,
                marker=style(label).symbol,
                markersize=5,
                linewidth=1.6,
                elinewidth=1.2,
                capsize=3,
            )
        axes.set_title(literal(title))
        axes.set_xlabel("tasks learned")
        axes.set_ylabel("%")
        whole_numbers(axes.xaxis)
    legend(figure, grid)
    return figure
