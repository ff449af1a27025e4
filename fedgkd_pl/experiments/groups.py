"""Runs that differ in nothing but the seed, and what tells such groups apart."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedgkd_pl.experiments.paper import paper_value
from fedgkd_pl.experiments.runs import Run
from fedgkd_pl.reading import printable
from fedgkd_pl.settings import fixed_settings

METHODS = {
    "FedDistillPlus": "FedDistill+",
    "FedGKDPlus": "FedGKD+",
    "FedGKDVote": "FedGKD-Vote",
}
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
# What a run must have in common with the paper's to stand beside its numbers: N, rounds, E.
PROTOCOL = {
    "AG News": (20, 10, 1),
    "CIFAR-10": (20, 100, 20),
    "CIFAR-100": (20, 100, 20),
    "SST-5": (10, 10, 3),
    "Tiny-ImageNet": (20, 30, 20),
}
ALPHA = "data.init_args.partition.init_args.alpha"
PARTICIPATION = "data.init_args.participation"
CLIENTS = "data.init_args.num_clients"
EPOCHS = "model.init_args.local_epochs"
STEPS = "model.init_args.local_steps"


def symbol(name: str) -> str:
    """The paper's letter for a setting, or its name.

    Args:
        name: the last word of its key.
    """
    return SYMBOLS.get(name, name)


@dataclass(frozen=True)
class Group:
    """Runs with the same settings, one per seed.

    Attributes:
        method: as the paper calls it.
        dataset: as the paper calls it.
        settings: those that decide the result, but for the seed.
        runs: by seed.
        name: the method, and what tells it from others of the same data.
        panel: the data, and what tells them from others.
    """

    method: str
    dataset: str
    settings: dict[str, Any]
    runs: dict[int, Run]
    name: str = ""
    panel: str = ""

    @property
    def rounds(self) -> int:
        """How many each was to do."""
        return next(iter(self.runs.values())).rounds_asked

    def values(self, measure: str) -> list[float]:
        """An accuracy of every seed, in percent.

        Args:
            measure: as for :meth:`Run.measure`.
        """
        found = [run.measure(measure) for run in self.runs.values()]
        return [value for value in found if value is not None]

    @cached_property
    def paper(self) -> tuple[float, float | None] | None:
        """The paper's best accuracy for the same method, data, α, C, N, E and rounds."""
        settings = self.settings
        ours = (settings.get(CLIENTS), self.rounds, settings.get(EPOCHS))
        if ours != PROTOCOL.get(self.dataset) or settings.get(STEPS) is not None:
            return None
        labels = {"dataset": self.dataset, "method": self.method}
        labels["alpha"] = str(self.settings.get(ALPHA, ""))
        share = self.settings.get(PARTICIPATION)
        for table in ("overview", "text") if share == 0.2 or share is None else ():
            if found := paper_value(table, labels, "best"):
                return found
        labels["participation"] = str(share)
        return paper_value("participation", labels, "best")


def dataset_name(run: Run) -> str:
    """A run's dataset as the paper calls it.

    Args:
        run: any.
    """
    name = str(run.summary["dataset"])
    return DATASETS.get(name, name)


def make_groups(runs: Iterable[Run]) -> list[Group]:
    """The runs, grouped and named.

    Args:
        runs: of any methods and data.
    """
    found: dict[tuple[Any, ...], Group] = {}
    for run in runs:
        settings = {k: v for k, v in fixed_settings(run.settings).items() if k != "seed_everything"}
        method, dataset = str(run.summary["method"]), dataset_name(run)
        seed = run.seed
        key: tuple[Any, ...] = (method, dataset, run.rounds_asked)
        key += tuple(sorted((k, str(v)) for k, v in settings.items()))
        if key in found and seed in found[key].runs and not settings:
            key += (run.folder,)  # which cannot tell what else differs
        group = Group(METHODS.get(method, method), dataset, settings, {})
        found.setdefault(key, group).runs[seed] = run
    groups = list(found.values())
    return [
        Group(
            *(group.method, group.dataset, group.settings, group.runs),
            name=_named(group.method, group, [g for g in groups if _same_line(g, group)], False),
            panel=_named(group.dataset, group, [g for g in groups if _same_data(g, group)], True),
        )
        for group in groups
    ]


def _same_data(one: Group, other: Group) -> bool:
    return one.dataset == other.dataset


def _same_line(one: Group, other: Group) -> bool:
    data = [{k: v for k, v in g.settings.items() if k.startswith("data")} for g in (one, other)]
    return one.method == other.method and one.dataset == other.dataset and data[0] == data[1]


def _named(name: str, group: Group, others: Sequence[Group], of_data: bool) -> str:
    """The name, and the settings in which the group differs from others."""
    told = []
    for key, value in group.settings.items():
        differs = any(other.settings.get(key) != value for other in others)
        if differs and key.startswith("data") == of_data:
            told.append(printable(f"{symbol(key.rpartition('.')[2])} {value}"))
    if len({other.rounds for other in others}) > 1 and not of_data:
        told.append(f"{group.rounds} rounds")
    return ", ".join([name, *told])
