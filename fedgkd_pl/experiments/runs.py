"""What a run left in its folder, read back."""

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, nan
from pathlib import Path
from typing import Any

from fedgkd_pl.errors import SettingError

Summary = dict[str, Any]
ACCURACIES = {
    "best": "best_test_acc",
    "final": "final_test_acc",
    "last10": "mean_last_10_test_acc",
    "at_best_val": "test_acc_at_best_val",
}
KEYS = ("method", "dataset", "seed", "rounds", "bytes_down")


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: of the run.
        summary: its ``summary.json``.
    """

    folder: Path
    summary: Summary

    @cached_property
    def metrics(self) -> dict[str, dict[int, float]]:
        """The columns of ``metrics.csv``, each by round; none where there is no such file."""
        columns: dict[str, dict[int, float]] = {}
        file = self.folder / "metrics.csv"
        if not file.exists():
            return columns
        try:
            with file.open(encoding="utf-8", newline="") as lines:
                for row in csv.DictReader(lines):
                    number = int(row.pop("round"))
                    for name, value in row.items():
                        if value:
                            columns.setdefault(name, {})[number] = float(value)
        except (ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
            raise SettingError("runs", "not a metrics.csv of fedgkd-pl", file) from error
        return columns

    @cached_property
    def accuracy(self) -> dict[int, float]:
        """Test accuracy in percent, by round."""
        return {number: 100 * value for number, value in self.metrics.get("test/acc", {}).items()}

    @cached_property
    def partition(self) -> dict[str, Any]:
        """Who held what; empty where the run does not say."""
        return self._json("partition.json")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings, nested; empty where the run does not say."""
        import yaml

        file = self.folder / "config.yaml"
        try:
            settings = yaml.safe_load(file.read_bytes()) if file.exists() else {}
        except yaml.YAMLError as error:
            raise SettingError("runs", "not a config.yaml of fedgkd-pl", file) from error
        return settings if isinstance(settings, dict) else {}

    @property
    def rounds_asked(self) -> int:
        """How many rounds it was to do; a callback may have ended it before."""
        return int(self.summary.get("rounds_asked") or self.summary["rounds"])

    def measure(self, name: str) -> float | None:
        """An accuracy in percent; None where the run has it not, or it is no number.

        Args:
            name: ``best``, ``final``, ``last10``, ``at_best_val`` or ``round<N>``.
        """
        if name.startswith("round"):
            value = self.accuracy.get(int(name[5:]), nan)
        else:
            told = self.summary[ACCURACIES[name]]
            value = nan if told is None else 100 * float(told)
        return value if isfinite(value) else None

    def table(self, name: str) -> list[dict[str, str]]:
        """The rows of another CSV file of the run; none where it has none.

        Args:
            name: of the file.
        """
        file = self.folder / name
        if not file.exists():
            return []
        try:
            with file.open(encoding="utf-8", newline="") as lines:
                return list(csv.DictReader(lines))
        except (ValueError, csv.Error) as error:
            raise SettingError("runs", f"not a {name} of fedgkd-pl", file) from error

    def _json(self, name: str) -> dict[str, Any]:
        file = self.folder / name
        try:
            content = json.loads(file.read_bytes()) if file.exists() else {}
        except (ValueError, RecursionError) as error:
            raise SettingError("runs", f"not a {name} of fedgkd-pl", file) from error
        return content if isinstance(content, dict) else {}


def read_run(folder: Path) -> Run:
    """A finished run; anything else is refused.

    Args:
        folder: with ``summary.json``.
    """
    file = folder / "summary.json"
    try:
        summary: Summary = json.loads(file.read_bytes())
        whole = {*ACCURACIES.values(), *KEYS} <= summary.keys()
        numbers = (
            *ACCURACIES.values(),
            "wall_seconds",
            "rounds_asked",
            "bytes_up",
            "diverged_round",
        )
        whole = whole and all(_is_number(summary.get(key)) for key in numbers)
        counts = ("rounds", "seed", "bytes_down")
        whole = whole and all(type(summary[key]) is int for key in counts) and summary["rounds"] > 0
    except (OSError, ValueError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise SettingError("runs", "not a summary.json of fedgkd-pl", file)
    return Run(folder, summary)


def find_runs(paths: Sequence[str], newest: bool = False) -> list[Run]:
    """The finished runs below some folders, in the order of their names.

    Args:
        paths: run folders (``runs/<name>/version_k``) or the folders above them.
        newest: only the newest run below each path; otherwise all of them.
    """
    found: dict[Path, Run] = {}
    for path in map(Path, paths):
        files = list(path.rglob("summary.json"))
        if not files:
            continue
        if newest:
            files = [max(files, key=lambda file: file.stat().st_mtime)]
        for file in sorted(files, key=natural):
            found.setdefault(file.parent.resolve(), read_run(file.parent))
    if not found:
        raise SettingError("runs", "no finished run (summary.json) below", ", ".join(paths))
    return list(found.values())


def natural(path: Path) -> list[Any]:
    """A key to sort by, so that version_10 comes after version_9.

    Args:
        path: of a file or folder.
    """
    return [(int(s), "") if s.isdigit() else (-1, s) for s in re.split(r"(\d+)", str(path)) if s]


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
