"""The paper's numbers, from ``paper.csv``."""

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from fedgkd_pl.errors import require

TITLE = "Yao et al., Local-Global Knowledge Distillation in Heterogeneous Federated Learning"


@cache
def paper_rows() -> list[dict[str, str]]:
    """All of them, as printed."""
    with (Path(__file__).parent / "paper.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def check_table(table: str) -> None:
    """Refuses a table that the paper has not.

    Args:
        table: its name in ``paper.csv``; empty for none.
    """
    names = list(dict.fromkeys(row["table"] for row in paper_rows()))
    require(not table or table in names, "paper", f"one of {', '.join(names)}", table)


def paper_value(
    table: str, labels: Mapping[str, str], measure: str
) -> tuple[float, float | None] | None:
    """Mean and standard deviation in percent; None where the paper has no such number.

    Args:
        table: its name in ``paper.csv``.
        labels: of the cell, by axis; those that the paper's table has must agree.
        measure: ``best``, ``final`` or ``round<N>``.
    """
    found = [
        row
        for row in paper_rows()
        if row["table"] == table
        and row["measure"] == measure
        and all(_same(row[axis], label) for axis, label in labels.items() if row.get(axis))
    ]
    if len(found) != 1:  # the cell does not say which of them it is
        return None
    std = found[0]["std"]
    return float(found[0]["mean"]), float(std) if std else None


def _same(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other
