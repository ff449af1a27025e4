"""Reads what a run left in its folder; it may be a stranger's, so nothing is trusted."""

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgkd_pl.errors import SettingError
from fedgkd_pl.methods import title_of
from fedgkd_pl.runs.accuracy import AVERAGE, average_summary
from fedgkd_pl.runs.folder import CONFIG, METRICS, PARTITION, SUMMARY, RunFolder
from fedgkd_pl.storage.html import curve, facts
from fedgkd_pl.storage.reading import MB, printable, read_bytes, read_json

if TYPE_CHECKING:
    from torch import nn

Summary = dict[str, Any]
ACCURACIES = {
    "best": "best_test_acc",
    "final": "final_test_acc",
    "last10": "mean_last_10_test_acc",
    "at_best_val": "test_acc_at_best_val",
}
OF_AVERAGE = "average_"  # begins the name of a measure of AveragedModel's model
AVERAGES = [f"{OF_AVERAGE}{name}" for name in ACCURACIES]
OF_TASKS = {f"task_{name}": f"task/{name}" for name in ("acc", "forgetting", "transfer")}
KEYS = ("method", "dataset", "seed", "rounds", "bytes_down")
LARGEST = 64 * MB  # of a file with rows or counts
ROUNDS, COUNT, CLASSES = 2**31, 2**63, 2_000  # numbers are below these


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    summary: Summary  # the content of summary.json

    def metrics(self) -> list[dict[str, float]]:
        """A row for every round, as ``pandas.DataFrame`` takes it; a value may be missing."""
        rows: dict[int, dict[str, float]] = {}
        for name, values in self.columns.items():
            for number, value in values.items():
                rows.setdefault(number, {"round": number})[name] = value
        return [rows[number] for number in sorted(rows)]

    def net(self, imports: Sequence[str] = (), average: bool = False) -> "nn.Module":
        """The trained net in plain torch, in eval mode, as the last round left it.

        Args:
            imports: your modules, where the net or the method is yours.
            average: the model of :class:`~fedgkd_pl.AveragedModel` instead of the global one.
        """
        from fedgkd_pl.experiments.trained import load_net

        flags = [word for module in imports for word in ("--import", module)]
        return load_net(RunFolder(self.folder), "average" if average else "last", flags)

    def __repr__(self) -> str:
        """What it was, how it went and where it is."""
        if not self.summary:
            return f"{type(self).__name__}({str(self.folder)!r})"
        shown = ", ".join(f"{name} {value}" for name, value in self._shown().items())
        return f"{type(self).__name__}({str(self.folder)!r}: {shown})"

    def _shown(self) -> dict[str, str]:
        of = ("dataset", "seed", "rounds")
        values = {name: self.measure(name) for name in ACCURACIES}
        known = {name: f"{value:.2f}" for name, value in values.items() if value is not None}
        return {"method": self.title} | {name: str(self.summary[name]) for name in of} | known

    def _repr_html_(self) -> str:
        """For a notebook: the accuracies, the curve and the folder."""
        if not self.summary:
            return f"<code>{escape(str(self.folder))}</code>"
        loss = self.columns.get("test/loss", {}) if self.has_loss_only else {}
        known = {number: value for number, value in loss.items() if isfinite(value)}
        line = curve(known, "test loss") if loss else curve(self.accuracy, "test accuracy, %")
        where = f"<br><code>{escape(str(self.folder))}</code>"
        return facts(self.title, self._shown(), line, where)

    @cached_property
    def columns(self) -> dict[str, dict[int, float]]:
        """The columns of ``metrics.csv``, each by round; none where there is no such file."""
        columns: dict[str, dict[int, float]] = {}
        rows = self.table(METRICS)
        try:
            for row in rows:
                number = whole(row.pop("round"), ROUNDS)
                for name, value in row.items():
                    if value:
                        columns.setdefault(name, {})[number] = float(value)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self.damaged(METRICS) from error
        return columns

    @cached_property
    def accuracy(self) -> dict[int, float]:
        """Test accuracy in percent, by round."""
        return self._percent("test/acc")

    @cached_property
    def average(self) -> dict[int, float]:
        """Test accuracy of the averaged model in percent, by round; empty where there is none."""
        return self._percent(AVERAGE)

    def _percent(self, column: str) -> dict[int, float]:
        known = self.columns.get(column, {})
        return {number: 100 * value for number, value in known.items() if abs(value) <= MB}

    @cached_property
    def partition(self) -> dict[str, Any]:
        """Who held what; empty where the run does not say."""
        if not (self.folder / PARTITION).exists():
            return {}
        try:
            content = read_json(self.folder / PARTITION, LARGEST)
        except OSError as error:
            raise self.unreadable(PARTITION, error) from error
        except ValueError as error:
            raise self.damaged(PARTITION) from error
        if not isinstance(content, dict) or not _are_counts(content.get("counts", [[1]])):
            raise self.damaged(PARTITION)
        names = content.get("class_names", [])
        if not isinstance(names, list) or len(names) > CLASSES:
            raise self.damaged(PARTITION)
        shown = {"dataset": printable(content.get("dataset", ""))}
        return content | shown | {"class_names": [printable(name, 40) for name in names]}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings, nested; empty where the run does not say."""
        from fedgkd_pl.settings import strict_yaml

        file = self.folder / CONFIG
        try:
            return strict_yaml.read(str(file)) if file.exists() else {}
        except SettingError as error:
            raise self.damaged(file.name) from error

    @property
    def title(self) -> str:
        """The method's name in tables and figures; of its class where the run does not say."""
        return str(self.summary.get("title") or title_of(str(self.summary["method"])))

    @property
    def seed(self) -> int:
        """The seed that all others come from."""
        seed: Any = self.settings.get("seed_everything", False)
        if seed is False:  # all was not seeded, the data was
            seed = self.summary["seed"]
        if not is_count(seed):
            raise self.damaged(CONFIG)
        return int(seed)

    @property
    def rounds_asked(self) -> int:
        """How many rounds it was to do; a callback may have ended it before."""
        return int(self.summary.get("rounds_asked") or self.summary["rounds"])

    def measure(self, name: str) -> float | None:
        """An accuracy in percent, or a loss; None where the run has none, or it is not finite.

        Args:
            name: ``best``, ``final``, ``last10``, ``at_best_val`` or ``round<N>``; with
                ``average_`` before it, of the averaged model. ``task_acc``, ``task_forgetting`` or
                ``task_transfer``: at the end of the last task, by :class:`TaskAccuracy`.
        """
        if name in OF_TASKS:
            by_round = self._percent(OF_TASKS[name])
            value = by_round[max(by_round)] if by_round else nan
            return value if isfinite(value) else None
        kind = name.removeprefix(OF_AVERAGE)
        number = round_of(name)
        if self.has_loss_only:
            value = self._loss(kind, number) if kind == name else nan
        elif number is not None:
            value = (self.average if kind != name else self.accuracy).get(number, nan)
        else:
            summary = self._average_summary if kind != name else self.summary
            saved = summary.get(ACCURACIES[kind])
            value = nan if saved is None else 100 * float(saved)
        return value if isfinite(value) else None

    def tested(self, measure: str) -> int:
        """In how many rounds the model was tested that a measure is of."""
        of_average = measure.startswith(OF_AVERAGE)
        column = AVERAGE if of_average else "test/loss" if self.has_loss_only else "test/acc"
        return len(self.columns.get(column, ())) or int(self.summary["rounds"])

    @property
    def has_loss_only(self) -> bool:
        """Whether it is measured by its test loss: what it learns has no accuracy."""
        return self.summary.get("score") == "loss"

    def _loss(self, kind: str, number: int | None) -> float:
        if number is not None:
            return self.columns.get("test/loss", {}).get(number, nan)
        saved: Any = self.summary.get(ACCURACIES[kind].replace("test_acc", "test_loss"))
        return float(saved) if _is_number(saved) else nan

    @cached_property
    def _average_summary(self) -> Summary:
        rows = self.metrics()
        return average_summary([{k: v for k, v in row.items() if abs(v) < ROUNDS} for row in rows])

    def table(self, name: str) -> list[dict[str, str]]:
        """The rows of a CSV file of the run; none where there is no such file."""
        if not (self.folder / name).exists():
            return []
        try:
            text = read_bytes(self.folder / name, LARGEST).decode()
            return list(csv.DictReader(io.StringIO(text, newline="")))
        except OSError as error:
            raise self.unreadable(name, error) from error
        except (ValueError, csv.Error) as error:
            raise self.damaged(name) from error

    def damaged(self, name: str) -> SettingError:
        """The error of a file that is not what its name says."""
        return SettingError("runs", f"not a {name} of fedgkd-pl", self.folder / name)

    def unreadable(self, name: str, error: OSError) -> SettingError:
        """The error of a file that cannot be read."""
        return SettingError("runs", f"{name}: {error.strerror}", self.folder / name)


def read_run(folder: str | Path) -> Run:
    """A finished run, by its folder; anything else is refused."""
    folder = Path(folder)
    file = folder / SUMMARY
    try:
        summary: Summary = read_json(file)
        sound = isinstance(summary, dict) and {*ACCURACIES.values(), *KEYS} <= summary.keys()
        sound = sound and _is_sound(summary)
    except (OSError, ValueError):
        sound = False
    if not sound:
        raise SettingError("runs", f"not a {SUMMARY} of fedgkd-pl", file)
    return Run(folder, summary)


def _is_sound(summary: Summary) -> bool:
    """Whether all values that are shown or computed with have the right types and ranges."""
    names = [summary["method"], summary["dataset"], summary.get("title", "")]
    measured = [summary.get(key) for key in (*ACCURACIES.values(), "wall_seconds", "bytes_up")]
    rounds = [summary.get(key) for key in ("rounds_asked", "diverged_round")]
    return (
        all(isinstance(name, str) and name == printable(name) for name in names)
        and all(is_count(summary[key]) for key in ("rounds", "seed", "bytes_down"))
        and all(value is None or _is_number(value) for value in measured)
        and 0 < summary["rounds"] < ROUNDS
        and all(each is None or (is_count(each) and each < ROUNDS) for each in rounds)
    )


def find_runs(paths: Sequence[str], newest: bool = False) -> list[Run]:
    """The finished runs below some folders, in the order of their names.

    Args:
        paths: run folders (``runs/<name>/version_k``) or the folders above them.
        newest: of the versions of a name (``runs/<name>/version_k``) only the newest.
    """
    runs: dict[Path, Run] = {}
    for path in map(Path, paths):
        files = list(path.rglob(SUMMARY))
        if not files:
            continue
        if newest:
            versions: dict[Path, Path] = {}
            for file in sorted(files, key=lambda file: file.lstat().st_mtime):
                home = file.parent
                is_version = re.fullmatch(r"version_\d+", home.name) is not None
                versions[home.parent if is_version else home] = file
            files = list(versions.values())
        for file in sorted(files, key=natural):
            runs.setdefault(file.parent.resolve(), read_run(file.parent))
    if not runs:
        raise SettingError("runs", f"no finished run ({SUMMARY}) below", ", ".join(paths))
    return list(runs.values())


def round_of(measure: str) -> int | None:
    """The round that a measure is of; None for one that is over rounds."""
    kind = measure.removeprefix(OF_AVERAGE)
    return int(kind[5:]) if kind.startswith("round") else None


def natural(path: Path) -> list[Any]:
    """A key to sort by, so that version_10 comes after version_9."""
    return [(int(s), "") if s.isdigit() else (-1, s) for s in re.split(r"(\d+)", str(path)) if s]


def whole(text: str, below: int) -> int:
    """A whole number of a CSV file, from 0 to ``below`` - 1; anything else is a ``ValueError``."""
    number = int(text)
    if not 0 <= number < below:
        raise ValueError(f"must be from 0 to {below - 1}")
    return number


def is_count(value: Any) -> bool:
    """Whether a value is a whole number of a size that can be computed with."""
    return type(value) is int and 0 <= value < COUNT


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) < COUNT and math.isfinite(value)


def _are_counts(table: Any) -> bool:
    """Whether a value is a matrix of clients × classes that has samples."""
    return (
        isinstance(table, list)
        and all(isinstance(row, list) and len(row) == len(table[0]) for row in table)
        and all(is_count(count) for row in table for count in row)
        and any(any(row) for row in table)
    )
