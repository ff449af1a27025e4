"""How the paper's numbers were made, from ``protocol.yaml``, and how a run differs; footnotes."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fedgkd_pl.runs.folder import CONFIG
from fedgkd_pl.runs.settings import flatten

MARKS = "†‡§¶‖"
LABELS = {  # the settings behind the columns of paper.csv
    "alpha": "data.partition.alpha",
    "participation": "data.participation",
    "buffer_size": "model.buffer_size",
    "loss": "model.distance",
}
OFF = (None, "", False, "none")
UNKNOWN = f"settings not known: the run has no {CONFIG}"


class Footnotes:
    """Remarks below a table; the same remark has the same mark."""

    def __init__(self) -> None:
        self._marks: dict[str, str] = {}

    def mark(self, remark: str) -> str:
        """The mark to put after a number, with a space before; empty without a remark."""
        if not remark:
            return ""
        times, which = divmod(len(self._marks), len(MARKS))
        return " " + self._marks.setdefault(remark, MARKS[which] * (times + 1))

    @property
    def lines(self) -> list[str]:
        """The marks and what they say."""
        return [f"{mark} {remark}" for remark, mark in self._marks.items()]


def protocol(row: Mapping[str, str]) -> dict[str, Any]:
    """The settings of a number of the paper, by key."""
    settings: dict[str, Any] = {}
    for rule in _rules():
        if all(row[axis] in _any_of(label) for axis, label in rule["where"].items()):
            settings |= rule["set"]
    labels = {key: row[label] for label, key in LABELS.items() if row[label]}
    if labels.get("model.distance") == "none":  # which is FedAvg
        del labels["model.distance"]
    return settings | labels


def plain_settings(settings: Any) -> dict[str, Any]:
    """A run's settings by the keys of ``protocol.yaml``; classes without their module."""
    plain: dict[str, Any] = {}
    for key, value in flatten(settings).items():
        short = key.replace("init_args.", "")
        if short.endswith(".class_path"):
            value = str(value).rpartition(".")[2]
        plain[short.removesuffix(".class_path")] = value
    return plain


def differences(row: Mapping[str, str], ours: Mapping[str, Any], measure: str) -> list[str]:
    """How a run differs from the paper's, whose number is shown beside it.

    Args:
        ours: the run's :func:`plain_settings`, and its ``dataset``, ``method`` and ``rounds``.
        measure: what is compared; how long a run is makes no difference to an earlier round of it.
    """
    known = {"data", "model"} <= {key.partition(".")[0] for key in ours}
    theirs = {key: row[key] for key in ("dataset", "method")} | protocol(row)
    if measure.startswith("round"):
        del theirs["rounds"]
    texts = []
    for key, value in theirs.items():
        whole = any(other.startswith(f"{key}.") for other in ours)
        mine = ours.get(key, "given" if whole else None)
        if not any(same(mine, each) for each in _any_of(value)) and (known or key in ours):
            name = key.partition(".")[2] or key
            shown = ["none" if each is None else each for each in (mine, _any_of(value)[0])]
            texts.append(f"{name} {shown[0]} instead of {shown[1]}")
    return texts if known else [*texts, UNKNOWN]


def same(one: Any, other: Any) -> bool:
    """Whether two settings mean the same: equal numbers, both off, folders of the same name."""
    if one in OFF or other in OFF:
        return all(each in (*OFF, 0, "0") for each in (one, other))
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return Path(str(one)).name == str(other)


def joined(remarks: Iterable[Iterable[str]]) -> str:
    """The :func:`differences` of several runs, each once."""
    return ", ".join(dict.fromkeys(remark for each in remarks for remark in each))


@cache
def _rules() -> list[dict[str, Any]]:
    import yaml

    text = (Path(__file__).parent / "protocol.yaml").read_text(encoding="utf-8")
    rules: list[dict[str, Any]] = yaml.safe_load(text)
    return rules


def _any_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
