"""Runs that differ in nothing but the seed, and how such groups differ."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
SHARE = {PARTICIPATION: "data.participation"}


def symbol(name: str) -> str:
    """The paper's letter for a setting, or its name."""
    return SYMBOLS.get(name, name)


@dataclass
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

    @property
    def differs(self) -> str:
        """How the runs differ from the paper's, whose number is shown all the same."""
        row = self._paper_row
        return joined(differences(row, facts(run), "best") for run in self.runs.values() if row)

    @property
    def paper(self) -> tuple[float, float | None] | None:
        """The paper's best accuracy for the same method, data, α, C, N, E and rounds.

        Where something else differs, :attr:`differs` says what.
        """
        return numbers(self._paper_row) if self._paper_row else None

    @cached_property
    def _paper_row(self) -> dict[str, str] | None:
        ours = self.settings | {"rounds": self.rounds}
        share = self.settings.get(PARTICIPATION)
        labels = {"dataset": self.dataset, "method": self.method}
        labels["alpha"] = str(self.settings.get(ALPHA, ""))
        for table in ("overview", "text", "participation"):
            of_table = labels | ({"participation": str(share)} if table == "participation" else {})
            if row := paper_row(table, of_table, "best"):
                theirs = protocol(row)
                must_agree = MUST_AGREE if share is None else MUST_AGREE | SHARE
                if all(same(ours.get(key), theirs[short]) for key, short in must_agree.items()):
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
    rounds = {seed: run.summary.get("diverged_round") for seed, run in sorted(runs.items())}
    texts = [f"seed {seed} from round {number} on" for seed, number in rounds.items() if number]
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
        dataset = dataset_name(run)
        if settings.get(SEED) == run.seed:
            settings[SEED] = None  # which is the same
        of_settings = sorted((key, _comparable(value)) for key, value in settings.items())
        unknown = () if settings else (run.folder,)
        key = (run.summary["method"], dataset, run.rounds_asked, *of_settings, *unknown)
        group = by_key.setdefault(key, Group(run.title, dataset, settings, {}))
        group.runs[run.seed] = run
    groups = list(by_key.values())
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
            group.name += f", {next(iter(group.runs.values())).folder}"
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


def _comparable(value: Any) -> str:
    """A text that is the same for equal values; Python's 20 is a config's 20.0."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_comparable, value))}]"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(float(value)) if number and abs(value) < 2**53 else str(value)


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
