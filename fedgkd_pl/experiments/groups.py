"""Runs that differ in nothing but the seed, and how such groups differ."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedgkd_pl.experiments.paper import PaperRow, differences, paper_row
from fedgkd_pl.experiments.runs import Run
from fedgkd_pl.runs.folder import fixed_settings, flatten
from fedgkd_pl.storage.reading import printable

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
ALPHA = "data.init_args.partition.init_args.alpha"
PARTICIPATION = "data.init_args.participation"
SEED = "data.init_args.seed"
# What a run must have in common with the paper's to stand beside its numbers.
MUST_AGREE = {"rounds", "data.num_clients", "data.participation", "model.local_epochs"}
MUST_AGREE |= {"model.local_steps"}


def symbol(name: str) -> str:
    """The paper's letter for a setting, or its name."""
    return SYMBOLS.get(name, name)


@dataclass
class Group:
    """Runs with the same settings, one per seed."""

    method: str  # as the paper calls it
    dataset: str  # likewise
    rounds: int  # that each was to do
    settings: dict[str, Any]  # those that decide the result, but for the seed
    runs: dict[int, Run]  # by seed
    name: str = ""  # the method, and how it differs from others of the same data
    panel: str = ""  # the data, and how they differ from others

    @property
    def first(self) -> Run:
        """The run of one seed."""
        return next(iter(self.runs.values()))

    def values(self, measure: str) -> list[float]:
        """An accuracy of every seed that has it, in percent; see :meth:`Run.measure`."""
        values = [run.measure(measure) for run in self.runs.values()]
        return [value for value in values if value is not None]

    @cached_property
    def paper(self) -> PaperRow | None:
        """The paper's best accuracy for the same method, data, α, C, N, E and rounds.

        Where something else differs, :func:`differences` says what.
        """
        labels = {"dataset": self.dataset, "method": self.method}
        labels |= {"alpha": str(self.settings.get(ALPHA, ""))}
        for table in ("overview", "text", "participation"):
            if table == "participation":
                labels["participation"] = str(self.settings.get(PARTICIPATION))
            if row := paper_row(table, labels, "best"):
                ours = facts(self.first) | {"rounds": self.rounds}
                if not MUST_AGREE & differences(row, ours, "best").keys():
                    return row
        return None


def facts(run: Run) -> dict[str, Any]:
    """What a run was, by the keys of ``protocol.yaml``; no settings where they are not known."""
    plain: dict[str, Any] = {}
    for key, value in flatten(run.settings).items():
        short = key.replace("init_args.", "")
        if short.endswith(".class_path"):
            value = str(value).rpartition(".")[2]
        plain[short.removesuffix(".class_path")] = value
    if plain.get("data.partition") == "AuthorsDirichlet":  # the paper's own draw
        plain |= {"data.partition": "Dirichlet", "data.partition.balanced": True}
    names = {"dataset": dataset_name(run), "method": run.title}
    return plain | names | {"rounds": run.summary["rounds"]}


def dataset_name(run: Run) -> str:
    """A run's dataset as the paper calls it."""
    name = str(run.summary["dataset"])
    return DATASETS.get(name, name)


def make_groups(runs: Iterable[Run]) -> list[Group]:
    """The runs, grouped and named; in the order of their data, α and other numbers by size."""
    groups = list[Group]()
    for run in runs:
        settings = {k: v for k, v in fixed_settings(run.settings).items() if k != "seed_everything"}
        if settings.get(SEED) == run.seed:
            settings[SEED] = None  # which is the same
        new = Group(run.title, dataset_name(run), run.rounds_asked, settings, {})
        known = (group for group in groups if settings and replace(group, runs={}) == new)
        group = next(known, new)
        group.runs[run.seed] = run
        groups += [new] if group is new else []
    for group in groups:
        of_dataset = [other for other in groups if other.dataset == group.dataset]
        alike = [g for g in of_dataset if g.method == group.method and _data(g) == _data(group)]
        group.panel = ", ".join([group.dataset, *_differing(group, of_dataset, True)])
        group.name = ", ".join([group.method, *_differing(group, alike, False)])
        if len({other.rounds for other in alike}) > 1:
            group.name += f", {group.rounds} round{'s' * (group.rounds != 1)}"
    times = Counter((group.name, group.panel) for group in groups)
    for group in groups:
        if times[group.name, group.panel] > 1:  # nothing else tells it from another
            group.name += f", {group.first.folder}"
    return sorted(groups, key=lambda group: by_number(group.panel))


def by_number(text: str) -> list[Any]:
    """A key to sort by, so that α 0.5 comes before α 2, and α 2 before α 10."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", text)
    return [(float(part), "") if n % 2 else (-1.0, part) for n, part in enumerate(parts) if part]


def shared_settings(groups: Sequence[Group]) -> dict[str, Any]:
    """The settings that all groups have alike, as they are shown."""
    first, *others = [group.settings for group in groups]
    return {
        printable(key.replace("init_args.", "")): printable(value, 1000)
        for key, value in first.items()
        if value is not None and all(other.get(key) == value for other in others)
    }


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
