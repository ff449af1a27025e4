"""Finished runs, read from their folders; nothing in a folder is trusted."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pandas as pd
from fedgkd_pl.errors import SettingError
from fedgkd_pl.methods import title_of
from fedgkd_pl.runs.folder import (
    AVERAGE_ACC,
    CONFIG,
    METRICS,
    PARTITION,
    SUMMARY,
    RunFolder,
    average_summary,
)
from fedgkd_pl.storage.reading import MB, printable, read_json

if TYPE_CHECKING:
    from fedgkd_pl.experiments.study_result import StudyResult
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
NUMBERS = ("seed", "rounds", "bytes_down")  # of summary.json
OPTIONAL = (*ACCURACIES.values(), "bytes_up", "wall_seconds", "rounds_asked", "diverged_round")
LARGEST = 64 * MB  # of a file with rows or counts


@contextmanager
def reading(file: Path, key: str = "runs") -> Iterator[None]:
    """Turns whatever goes wrong while a run's file is read into one line."""
    try:
        yield
    except Exception as error:
        raise SettingError(key, f"damaged: {file}") from error


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    summary: Summary  # the content of summary.json

    def metrics(self) -> list[dict[str, float]]:
        """A row for every round, as ``pandas.DataFrame`` takes it; a value may be missing."""
        rows = self.frame.iterrows()
        return [{"round": number, **row.dropna().to_dict()} for number, row in rows]

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
        """The folder, what was trained, and the accuracies."""
        known = [f"{name} {self.summary[name]}" for name in ("dataset", "seed", "rounds")]
        values = {name: self.measure(name) for name in ACCURACIES}
        known += [f"{name} {value:.2f}" for name, value in values.items() if value is not None]
        return f"Run({str(self.folder)!r}: method {self.title}, {', '.join(known)})"

    @cached_property
    def frame(self) -> pd.DataFrame:
        """``metrics.csv`` by round; without columns where there is no such file."""
        file = self.folder / METRICS
        if not file.exists():
            return pd.DataFrame()
        with reading(file):
            table = pd.read_csv(file, dtype=str, index_col="round").astype("float64")
            table.index = table.index.astype("int64")
            return table.rename(columns=printable).sort_index()

    def by_round(self, column: str) -> pd.Series:
        """The values of a column of ``metrics.csv``, by round; empty where there are none."""
        values: pd.Series = self.frame.get(column, pd.Series(dtype="float64"))
        return values.dropna()

    @property
    def accuracy(self) -> pd.Series:
        """Test accuracy in percent, by round."""
        return 100 * self.by_round("test/acc")

    @property
    def has_average(self) -> bool:
        """Whether it has an averaged model, of :class:`~fedgkd_pl.AveragedModel`."""
        return AVERAGE_ACC in self.frame

    @cached_property
    def partition(self) -> dict[str, Any]:
        """Who holds what; empty where the run does not say."""
        import numpy as np

        file = self.folder / PARTITION
        if not file.exists():
            return {}
        with reading(file):
            content: dict[str, Any] = read_json(file, LARGEST)
            if "counts" in content:
                table = np.array(content["counts"], dtype=np.uint64)
                _clients, _classes = table.shape
                content["counts"] = table.tolist()
            names = [printable(name, 40) for name in content.get("class_names", [])]
            dataset = printable(content.get("dataset", ""))
            return {**content, "dataset": dataset, "class_names": names}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings, nested; empty where the run does not say."""
        from fedgkd_pl.storage.reading import read_yaml

        file = self.folder / CONFIG
        with reading(file):
            return read_yaml(str(file)) if file.exists() else {}

    @property
    def title(self) -> str:
        """The method's name in tables and figures; of its class where the run does not say."""
        return printable(self.summary.get("title") or title_of(self.summary["method"]))

    @property
    def seed(self) -> int:
        """The seed that all others come from."""
        seed: Any = self.settings.get("seed_everything", False)
        with reading(self.folder / CONFIG):
            return int(self.summary["seed"] if seed is False else seed)  # False: only the data was

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
        value: float | None = None
        kind = name.removeprefix(OF_AVERAGE)
        if name in OF_TASKS:
            value = next(iter(self.by_round(OF_TASKS[name])[::-1]), None)
        elif (number := round_of(name)) is not None:
            value = self.by_round(self._tested_column(name)).get(number)
        elif kind != name:
            value = average_summary(self.metrics()).get(ACCURACIES[kind])
        else:
            score = "test_loss" if self.has_loss_only else "test_acc"
            value = self.summary.get(ACCURACIES[kind].replace("test_acc", score))
        if value is None or not isfinite(value):
            return None
        return value if self.has_loss_only else 100 * value

    def tested(self, measure: str) -> int:
        """In how many rounds the model was tested that a measure is of."""
        return len(self.by_round(self._tested_column(measure))) or int(self.summary["rounds"])

    def _tested_column(self, measure: str) -> str:
        if measure.startswith(OF_AVERAGE):
            return AVERAGE_ACC
        return "test/loss" if self.has_loss_only else "test/acc"

    @property
    def has_loss_only(self) -> bool:
        """Whether it is measured by its test loss: what it learns has no accuracy."""
        return self.summary.get("score") == "loss"


def read_run(folder: str | Path) -> Run:
    """A finished run, by its folder; anything else is refused."""
    file = Path(folder) / SUMMARY
    with reading(file):
        summary: Summary = read_json(file)
        numbers = [summary[key] for key in NUMBERS] + [summary.get(key) or 0 for key in OPTIONAL]
        if not all(map(isfinite, numbers)) or summary["rounds"] < 1:
            raise ValueError("has other values")
        texts = {key: printable(summary[key]) for key in ("method", "dataset")}
    return Run(Path(folder), summary | texts)


def find_runs(paths: Sequence[str], newest: bool = False) -> list[Run]:
    """The finished runs below some folders, in the order of their names.

    Args:
        paths: run folders (``runs/<name>/version_k``) or the folders above them.
        newest: of the versions of a name (``runs/<name>/version_k``) only the newest.
    """
    runs: dict[Path, Run] = {}
    for path in paths:
        files = sorted(Path(path).rglob(SUMMARY), key=lambda file: file.lstat().st_mtime)
        if newest:
            files = [*{re.sub(r"version_\d+$", "", str(f.parent)): f for f in files}.values()]
        for file in sorted(files, key=natural):
            runs.setdefault(file.parent.resolve(), read_run(file.parent))
    if not runs:
        raise SettingError("runs", f"no finished run ({SUMMARY}) below", ", ".join(paths))
    return list(runs.values())


Runs: TypeAlias = "Run | RunFolder | str | Path | StudyResult | Sequence[Runs]"


def runs_of(runs: Runs) -> list[Run]:
    """Runs, however they are given.

    Args:
        runs: one or several of: a run, its folder, what ``fit`` gives back, a folder above some,
            and anything that has ``runs``, such as what ``compare`` gives back.
    """
    if isinstance(runs, Run):
        return [runs]
    if isinstance(runs, str | Path | RunFolder):
        return find_runs([str(runs.path if isinstance(runs, RunFolder) else runs)])
    inner: Any = getattr(runs, "runs", runs)
    return [run for each in inner for run in runs_of(each)]


def round_of(measure: str) -> int | None:
    """The round that a measure is of; None for one that is over rounds."""
    kind = measure.removeprefix(OF_AVERAGE)
    return int(kind[5:]) if kind.startswith("round") else None


def natural(path: Path) -> list[Any]:
    """A key to sort by, so that version_10 comes after version_9."""
    return [(int(s), "") if s.isdigit() else (-1, s) for s in re.split(r"(\d+)", str(path)) if s]
