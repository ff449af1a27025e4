"""Runs that differ in nothing but the seed, and how such groups differ."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedgkd_pl.errors import CALMER
from fedgkd_pl.experiments.paper import numbers, paper_row
from fedgkd_pl.experiments.protocol import differences, joined, plain_settings, protocol, same
from fedgkd_pl.experiments.runs import Run
from fedgkd_pl.runs.folder import CONFIG
from fedgkd_pl.runs.settings import fixed_settings
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
CLIENTS = "data.init_args.num_clients"
SEED = "data.init_args.seed"
EPOCHS = "model.init_args.local_epochs"
STEPS = "model.init_args.local_steps"
MUST_AGREE = {  # what a run must have in common with the paper's to stand beside its numbers
    CLIENTS: "data.num_clients",
    EPOCHS: "model.local_epochs",
    STEPS: "model.local_steps",
    "rounds": "rounds",
}


def symbol(name: str) -> str:
    """The paper's letter for a setting, or its name."""
    return SYMBOLS.get(name, name)


@dataclass(frozen=True)
class Group:
    """Runs with the same settings, one per seed."""

    method: str  # as the paper calls it
    dataset: str  # likewise
    settings: dict[str, Any]  # those that decide the result, but for the seed
    runs: dict[int, Run]  # by seed
    name: str = ""  # the method, and how it differs from others of the same data
    panel: str = ""  # the data, and how they differ from others

    @property
    def rounds(self) -> int:
        """How many each was to do."""
        return next(iter(self.runs.values())).rounds_asked

    def values(self, measure: str) -> list[float]:
        """An accuracy of every seed that has it, in percent; see :meth:`Run.measure`."""
        values = [run.measure(measure) for run in self.runs.values()]
        return [value for value in values if value is not None]

    @property
    def diverged(self) -> str:
        """Which seeds' clients diverged, and when; empty where none did."""
        return diverged(self.runs)

    @property
    def unknown(self) -> str:
        """A warning where nobody knows whether other runs have the same settings."""
        unknown = f"settings not known (no {CONFIG}): not averaged with others"
        return "" if self.settings else unknown

    @cached_property
    def differs(self) -> str:
        """How the runs differ from the paper's, whose number is shown all the same."""
        row = self._paper_row
        return joined(differences(row, facts(run), "best") for run in self.runs.values() if row)

    @cached_property
    def paper(self) -> tuple[float, float | None] | None:
        """The paper's best accuracy for the same method, data, α, C, N, E and rounds.

        Where something else differs, :attr:`differs` says what.
        """
        return numbers(self._paper_row) if self._paper_row else None

    @cached_property
    def _paper_row(self) -> dict[str, str] | None:
        ours = {CLIENTS: None, EPOCHS: None, STEPS: None} | self.settings
        ours["rounds"] = self.rounds
        share = self.settings.get(PARTICIPATION)
        labels = {"dataset": self.dataset, "method": self.method}
        labels["alpha"] = str(self.settings.get(ALPHA, ""))
        for table in ("overview", "text", "participation"):
            of_table = labels | ({"participation": str(share)} if table == "participation" else {})
            if row := paper_row(table, of_table, "best"):
                theirs = protocol(row)
                pairs = [(ours[key], theirs[short]) for key, short in MUST_AGREE.items()]
                if share is not None:
                    pairs.append((share, theirs["data.participation"]))
                if all(same(*pair) for pair in pairs):
                    return row
        return None


def facts(run: Run) -> dict[str, Any]:
    """What a run was, by the keys of ``protocol.yaml``."""
    names = {"dataset": dataset_name(run), "method": run.title}
    settings = plain_settings(run.settings)
    if settings.get("data.partition") == "AuthorsDirichlet":  # the paper's own draw
        settings |= {"data.partition": "Dirichlet", "data.partition.balanced": True}
    return settings | names | {"rounds": run.summary["rounds"]}


def diverged(runs: Mapping[int, Run]) -> str:
    """Which seeds' clients diverged, and when; empty where none did."""
    rounds = {seed: run.summary.get("diverged_round") for seed, run in runs.items()}
    texts = [f"seed {seed} from round {rounds[seed]} on" for seed in sorted(rounds) if rounds[seed]]
    return f"clients diverged: {', '.join(texts)}; {CALMER}" if texts else ""


def dataset_name(run: Run) -> str:
    """A run's dataset as the paper calls it."""
    name = str(run.summary["dataset"])
    return DATASETS.get(name, name)


def make_groups(runs: Iterable[Run]) -> list[Group]:
    """The runs, grouped and named; in the order of their data, α and other numbers by size."""
    by_key: dict[tuple[Any, ...], Group] = {}
    for run in runs:
        settings = {k: v for k, v in fixed_settings(run.settings).items() if k != "seed_everything"}
        method, dataset = str(run.summary["method"]), dataset_name(run)
        seed = run.seed
        if settings.get(SEED) == seed:
            settings[SEED] = None  # which is the same
        key: tuple[Any, ...] = (method, dataset, run.rounds_asked)
        key += tuple(sorted((k, _comparable(v)) for k, v in settings.items()))
        if not settings:
            key += (run.folder,)  # what else differs is not known
        group = Group(run.title, dataset, settings, {})
        by_key.setdefault(key, group).runs[seed] = run
    groups = list(by_key.values())
    named = [
        Group(
            *(group.method, group.dataset, group.settings, group.runs),
            name=_named(group.method, group, [g for g in groups if _same_line(g, group)], False),
            panel=_named(group.dataset, group, [g for g in groups if _same_data(g, group)], True),
        )
        for group in groups
    ]
    ordered = sorted(named, key=lambda group: by_number(group.panel))
    return [_with_folder(group, ordered) for group in ordered]


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


def _with_folder(group: Group, groups: Sequence[Group]) -> Group:
    """With its folder in its name where nothing else tells it from another."""
    if [(g.name, g.panel) for g in groups].count((group.name, group.panel)) == 1:
        return group
    return replace(group, name=f"{group.name}, {next(iter(group.runs.values())).folder}")


def _comparable(value: Any) -> str:
    """A text that is the same for equal values; Python's 20 is a config's 20.0."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_comparable, value))}]"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(float(value)) if number and abs(value) < 2**53 else str(value)


def _same_data(one: Group, other: Group) -> bool:
    return one.dataset == other.dataset


def _same_line(one: Group, other: Group) -> bool:
    data = [{k: v for k, v in g.settings.items() if k.startswith("data")} for g in (one, other)]
    return one.method == other.method and one.dataset == other.dataset and data[0] == data[1]


def _named(name: str, group: Group, others: Sequence[Group], of_data: bool) -> str:
    """The name, and the settings in which the group differs from others."""
    parts = [name]
    for key, value in group.settings.items():
        differs = any(other.settings.get(key) != value for other in others)
        if differs and key.startswith("data") == of_data:
            shown = str(value).removesuffix(".0") if isinstance(value, float) else value
            shown = "none" if value is None else shown
            parts.append(printable(f"{symbol(key.rpartition('.')[2])} {shown}"))
    if len({other.rounds for other in others}) > 1 and not of_data:
        parts.append(f"{group.rounds} round{'s' * (group.rounds != 1)}")
    return ", ".join(parts)
