"""The paper's numbers, from ``paper.csv``; how they were made; how a run differs."""

import csv
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fedgkd_pl.runs.folder import CONFIG

TITLE = "Yao et al., Local-Global Knowledge Distillation in Heterogeneous Federated Learning"
HERE = Path(__file__).parent
LABELS = {  # the settings behind the columns of paper.csv
    "alpha": "data.partition.alpha",
    "participation": "data.participation",
    "buffer_size": "model.buffer_size",
    "loss": "model.distance",
}
OFF = (None, "", False, "none")
UNKNOWN = f"settings not known: the run has no {CONFIG}"
PaperRow = Mapping[str, str]


@cache
def paper_rows() -> list[dict[str, str]]:
    """All of them, as printed."""
    with (HERE / "paper.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def paper_row(table: str, labels: Mapping[str, str], measure: str) -> dict[str, str] | None:
    """The one row of ``paper.csv`` with these labels; None where there is none, or several.

    Args:
        labels: of the cell, by axis; those that the paper's table has must agree.
        measure: ``best``, ``final`` or ``round<N>``.
    """
    rows = [
        row
        for row in paper_rows()
        if (row["table"], row["measure"]) == (table, measure)
        and all(_same(label, row[axis]) for axis, label in labels.items() if row.get(axis))
    ]
    return rows[0] if len(rows) == 1 else None


def numbers(row: PaperRow) -> tuple[float, float | None]:
    """A row's mean and standard deviation in percent."""
    return float(row["mean"]), float(row["std"]) if row["std"] else None


def differences(row: PaperRow, ours: Mapping[str, Any], measure: str) -> dict[str, str]:
    """How a run differs from the paper's, whose number is shown beside it, by key.

    Args:
        ours: the run's settings by the keys of ``protocol.yaml``, and its ``dataset``, ``method``
            and ``rounds``.
        measure: what is compared; how long a run is makes no difference to an earlier round of it.
    """
    known = {"data", "model"} <= {key.partition(".")[0] for key in ours}
    theirs = {key: row[key] for key in ("dataset", "method")} | _protocol(row)
    if measure.startswith("round"):
        del theirs["rounds"]
    texts = {}
    for key, value in theirs.items():
        whole = any(other.startswith(f"{key}.") for other in ours)
        mine = ours.get(key, "given" if whole else None)
        if not any(_same(mine, each) for each in _any_of(value)) and (known or key in ours):
            shown = ["none" if each is None else each for each in (mine, _any_of(value)[0])]
            texts[key] = f"{key.partition('.')[2] or key} {shown[0]} instead of {shown[1]}"
    return texts if known else texts | {"": UNKNOWN}


def joined(remarks: Iterable[Mapping[str, str]]) -> str:
    """The :func:`differences` of several runs, each once."""
    return ", ".join(dict.fromkeys(text for each in remarks for text in each.values()))


def _protocol(row: PaperRow) -> dict[str, Any]:
    """The settings of a number of the paper, by key."""
    settings: dict[str, Any] = {}
    for rule in _rules():
        if all(row[axis] in _any_of(label) for axis, label in rule["where"].items()):
            settings |= rule["set"]
    labels = {key: row[label] for label, key in LABELS.items() if row[label]}
    if labels.get("model.distance") == "none":  # which is FedAvg
        del labels["model.distance"]
    return settings | labels


@cache
def _rules() -> list[dict[str, Any]]:
    import yaml

    rules: list[dict[str, Any]] = yaml.safe_load((HERE / "protocol.yaml").read_text("utf-8"))
    return rules


def _same(one: Any, other: Any) -> bool:
    """Whether two settings mean the same: equal numbers, both off, folders of the same name."""
    if one in OFF or other in OFF:
        return all(each in (*OFF, 0, "0") for each in (one, other))
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return Path(str(one)).name == str(other)


def _any_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
