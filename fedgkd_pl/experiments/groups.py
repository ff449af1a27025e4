"""Runs that differ in nothing but the seed, and what tells such groups apart."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedgkd_pl.experiments.paper import paper_value
from fedgkd_pl.experiments.runs import Run
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
ALPHA = "data.init_args.partition.init_args.alpha"
PARTICIPATION = "data.init_args.participation"


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

    def values(self, measure: str) -> list[float]:
        """An accuracy of every seed, in percent.

        Args:
            measure: as for :meth:`Run.measure`.
        """
        found = [run.measure(measure) for run in self.runs.values()]
        return [value for value in found if value is not None]

    @cached_property
    def paper(self) -> tuple[float, float | None] | None:
        """The paper's best accuracy for the same method, data, α and C."""
        labels = {"dataset": self.dataset, "method": self.method}
        labels["alpha"] = str(self.settings.get(ALPHA, ""))
        share = self.settings.get(PARTICIPATION)
        for table in ("overview", "text") if share == 0.2 or share is None else ():
            if found := paper_value(table, labels, "best"):
                return found
        labels["participation"] = str(share)
        return paper_value("participation", labels, "best")


def make_groups(runs: Iterable[Run]) -> list[Group]:
    """The runs, grouped and named.

    Args:
        runs: of any methods and data.
    """
    found: dict[tuple[Any, ...], Group] = {}
    for run in runs:
        settings = {k: v for k, v in fixed_settings(run.settings).items() if k != "seed_everything"}
        method, dataset = str(run.summary["method"]), str(run.summary["dataset"])
        rounds = run.summary["rounds"]
        key = (method, dataset, rounds, *sorted((k, str(v)) for k, v in settings.items()))
        group = Group(METHODS.get(method, method), DATASETS.get(dataset, dataset), settings, {})
        found.setdefault(key, group).runs[run.summary["seed"]] = run
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
            told.append(f"{symbol(key.rpartition('.')[2])} {value}")
    rounds = {run.summary["rounds"] for other in others for run in other.runs.values()}
    if len(rounds) > 1 and not of_data:
        told.append(f"{next(iter(group.runs.values())).summary['rounds']} rounds")
    return ", ".join([name, *told])
