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
    """Refuses a table that the paper does not have; an empty name is none."""
    names = list(dict.fromkeys(row["table"] for row in paper_rows()))
    require(not table or table in names, "paper", f"one of {', '.join(names)}", table)


def paper_row(table: str, labels: Mapping[str, str], measure: str) -> dict[str, str] | None:
    """The one row of ``paper.csv`` with these labels; None where there is none, or several.

    Args:
        labels: of the cell, by axis; those that the paper's table has must agree.
        measure: ``best``, ``final`` or ``round<N>``.
    """
    rows = [
        row
        for row in paper_rows()
        if row["table"] == table
        and row["measure"] == measure
        and all(_same(row[axis], label) for axis, label in labels.items() if row.get(axis))
    ]
    return rows[0] if len(rows) == 1 else None


def numbers(row: Mapping[str, str]) -> tuple[float, float | None]:
    """A row's mean and standard deviation in percent."""
    return float(row["mean"]), float(row["std"]) if row["std"] else None


def _same(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other
