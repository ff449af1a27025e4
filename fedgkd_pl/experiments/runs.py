"""Finished runs, read from their folders, and groups of them that differ in nothing but the seed.

Nothing in a folder is trusted.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pandas as pd
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.experiments.paper import LABELS, PaperRow, differences, paper_row
from fedgkd_pl.methods import title_of
from fedgkd_pl.runs.folder import (
    AVERAGE_ACC,
    CONFIG,
    METRICS,
    PARTITION,
    SUMMARY,
    RunFolder,
    average_summary,
    fixed_settings,
    flatten,
)
from fedgkd_pl.storage.files import MB, printable, read_json, read_yaml

if TYPE_CHECKING:
    from fedgkd_pl.experiments.compare import StudyResult
    from torch import nn

ACCURACIES = {
    "best": "best_test_acc",
    "final": "final_test_acc",
    "last10": "mean_last_10_test_acc",
    "at_best_val": "test_acc_at_best_val",
}
OF_AVERAGE = "average_"  # begins the name of a measure of AveragedModel's model
OF_TASKS = {f"task_{name}": f"task/{name}" for name in ("acc", "forgetting", "transfer")}
NUMBERS = ("seed", "rounds", "bytes_down")  # of summary.json
OPTIONAL = (*ACCURACIES.values(), "bytes_up", "wall_seconds", "rounds_asked", "diverged_round")
LARGEST = 64 * MB  # of a file with rows or counts
DATASETS = {
    "ag_news": "AG News",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "sst5": "SST-5",
    "tiny_imagenet": "Tiny-ImageNet",
}
SYMBOLS = {
    "alpha": "α",
    "buffer_size": "M",
    "gamma": "γ",
    "lam": "λ",
    "local_epochs": "E",
    "mu": "μ",
    "num_clients": "N",
    "participation": "C",
    "temperature": "τ",
}
SEED = "data.init_args.seed"
# What a run must have in common with the paper's to stand beside its numbers.
MUST_AGREE = {"rounds", "data.num_clients", "data.participation", "model.local_epochs"}
MUST_AGREE |= {"model.local_steps"}


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
    summary: dict[str, Any]  # the content of summary.json

    def metrics(self) -> list[dict[str, float]]:
        """A row for every round, as ``pandas.DataFrame`` takes it; a value may be missing."""
        return [{"round": n, **row.dropna().to_dict()} for n, row in self.frame.iterrows()]

    def net(self, imports: Sequence[str] = (), average: bool = False) -> "nn.Module":
        """The trained net in plain torch, in eval mode, as the last round left it.

        Args:
            imports: your modules, where the net or the method is yours.
            average: the model of :class:`~fedgkd_pl.AveragedModel` instead of the global one.
        """
        from fedgkd_pl.experiments.trained import load_run

        return load_run(self.folder, "average" if average else "last", imports).net

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

    @cached_property
    def partition(self) -> dict[str, Any]:
        """Who holds what; empty where the run does not say."""
        import numpy as np

        file = self.folder / PARTITION
        if not file.exists():
            return {}
        with reading(file):
            content = read_json(file, LARGEST)
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
        file = self.folder / CONFIG
        with reading(file):
            return read_yaml(str(file)) if file.exists() else {}

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What it was, by the keys of ``protocol.yaml``; no settings where they are not known."""
        plain = {}
        for key, value in flatten(self.settings).items():
            short = key.replace("init_args.", "")
            if short.endswith(".class_path"):
                value = str(value).rpartition(".")[2]
            plain[short.removesuffix(".class_path")] = value
        if plain.get("data.partition") == "AuthorsDirichlet":  # the paper's own draw
            plain |= {"data.partition": "Dirichlet", "data.partition.balanced": True}
        names = {"dataset": self.dataset, "method": self.title}
        return plain | names | {"rounds": self.summary["rounds"]}

    @property
    def dataset(self) -> str:
        """Its name, as the paper calls it."""
        name: str = self.summary["dataset"]
        return DATASETS.get(name, name)

    @property
    def title(self) -> str:
        """The method's name in tables and figures; of its class where the run does not say."""
        return printable(self.summary.get("title") or title_of(self.summary["method"]))

    @property
    def seed(self) -> int:
        """The seed that all others come from."""
        seed = self.settings.get("seed_everything", False)
        with reading(self.folder / CONFIG):
            return int(self.summary["seed"] if seed is False else seed)  # False: only the data was

    @property
    def seconds_per_round(self) -> float | None:
        """Of wall time; None where the run does not say."""
        seconds = self.summary.get("wall_seconds")
        return seconds / self.summary["rounds"] if seconds else None

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
        value: float | None
        kind = name.removeprefix(OF_AVERAGE)
        if name in OF_TASKS:
            value = next(iter(self.by_round(OF_TASKS[name])[::-1]), None)
        elif (number := round_of(name)) is not None:
            column = "test/loss" if self.has_loss_only else "test/acc"
            value = self.by_round(column if kind == name else AVERAGE_ACC).get(number)
        elif kind != name:
            value = average_summary(self.metrics()).get(ACCURACIES[kind])
        else:
            score = "test_loss" if self.has_loss_only else "test_acc"
            value = self.summary.get(ACCURACIES[kind].replace("test_acc", score))
        if value is None or not isfinite(value):
            return None
        return value if self.has_loss_only else 100 * value

    @property
    def has_loss_only(self) -> bool:
        """Whether it is measured by its test loss: what it learns has no accuracy."""
        return self.summary.get("score") == "loss"


def read_run(folder: str | Path) -> Run:
    """A finished run, by its folder; anything else is refused."""
    file = Path(folder) / SUMMARY
    with reading(file):
        summary = read_json(file)
        numbers = [summary[key] for key in NUMBERS] + [summary.get(key) or 0 for key in OPTIONAL]
        if not all(map(isfinite, numbers)) or summary["rounds"] < 1:
            raise ValueError("has other values")
        texts = {key: printable(summary[key]) for key in ("method", "dataset")}
    return Run(Path(folder), summary | texts)


def find_runs(paths: Sequence[str]) -> list[Run]:
    """The finished runs below some folders, in the order of their names.

    Args:
        paths: run folders (``runs/<name>/version_k``) or the folders above them.
    """
    runs: dict[Path, Run] = {}
    for path in paths:
        for file in sorted(Path(path).rglob(SUMMARY), key=natural):
            runs.setdefault(file.parent.resolve(), read_run(file.parent))
    require(len(runs) > 0, "runs", f"no finished run ({SUMMARY}) below", ", ".join(paths))
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


def measures_of(runs: Iterable[Run]) -> list[str]:
    """What is shown of runs: those of the averaged model where some have one."""
    averages = [f"{OF_AVERAGE}{name}" for name in ACCURACIES]
    return [*ACCURACIES, *(averages if any(AVERAGE_ACC in run.frame for run in runs) else [])]


def round_of(measure: str) -> int | None:
    """The round that a measure is of; None for one that is over rounds."""
    kind = measure.removeprefix(OF_AVERAGE)
    return int(kind[5:]) if kind.startswith("round") else None


def symbol(name: str) -> str:
    """The paper's letter for a setting, or its name."""
    return SYMBOLS.get(name, name)


@dataclass
class Group:
    """Runs with the same settings, one per seed."""

    method: str  # as the paper calls it
    dataset: str  # likewise
    settings: dict[str, Any]  # those that decide the result, but for the seed; empty: not known
    runs: dict[int, Run]  # by seed
    name: str = ""  # the method, and how it differs from others of the same data
    panel: str = ""  # the data, and how they differ from others

    @property
    def first(self) -> Run:
        """The run of one seed."""
        return next(iter(self.runs.values()))

    @cached_property
    def paper(self) -> PaperRow | None:
        """The paper's best accuracy for the same method, data, α, C, N, E and rounds.

        Where something else differs, :func:`differences` says what.
        """
        ours = self.first.facts | {"rounds": self.first.rounds_asked}
        labels = {axis: str(ours.get(key) or "") for axis, key in LABELS.items()}
        labels |= {"dataset": self.dataset, "method": self.method}
        for table in ("overview", "text", "participation"):
            row = paper_row(table, labels, "best")
            if row and not MUST_AGREE & differences(row, ours, "best").keys():
                return row
        return None


def make_groups(runs: Iterable[Run]) -> list[Group]:
    """The runs, grouped and named; in the order of their data, α and other numbers by size."""
    groups = list[Group]()
    for run in runs:
        settings = {k: v for k, v in fixed_settings(run.settings).items() if k != "seed_everything"}
        if settings.get(SEED) == run.seed:
            settings[SEED] = None  # which is the same
        if settings:
            settings["rounds"] = run.rounds_asked
        new = Group(run.title, run.dataset, settings, {})
        known = (group for group in groups if settings and replace(group, runs={}) == new)
        group = next(known, new)
        group.runs[run.seed] = run
        groups += [new] if group is new else []
    for group in groups:
        of_dataset = [other for other in groups if other.dataset == group.dataset]
        alike = [g for g in of_dataset if g.method == group.method and _data(g) == _data(group)]
        group.panel = ", ".join([group.dataset, *_differing(group, of_dataset, True)])
        group.name = ", ".join([group.method, *_differing(group, alike, False)])
    times = Counter((group.name, group.panel) for group in groups)
    for group in groups:
        if times[group.name, group.panel] > 1:  # nothing else tells it from another
            group.name += f", {group.first.folder}"
    return sorted(groups, key=lambda group: natural(group.panel))


def natural(text: object) -> list[Any]:
    """A key to sort by, so that version_10 comes after version_9, and α 0.5 before α 2."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", str(text))
    return [(float(part), "") if n % 2 else (-1.0, part) for n, part in enumerate(parts) if part]


def _data(group: Group) -> dict[str, Any]:
    return {key: value for key, value in group.settings.items() if key.startswith("data")}


def _differing(group: Group, others: Sequence[Group], of_data: bool) -> list[str]:
    """The settings in which a group differs from others, as they are shown."""
    shown = []
    for key, value in group.settings.items():
        differs = any(other.settings.get(key) != value for other in others)
        if differs and key.startswith("data") == of_data:
            text = "none" if value is None else str(value)
            text = text.removesuffix(".0") if isinstance(value, float) else text
            shown.append(printable(f"{symbol(key.rpartition('.')[2])} {text}"))
    return shown
