"""The paper's figures of finished runs, ``fedgkd-pl figure``."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from fedgkd_pl.errors import require
from fedgkd_pl.experiments.runs import Group, Run, Runs, make_groups, natural, reading, runs_of
from fedgkd_pl.plots import figures
from fedgkd_pl.plots.style import FORMATS, save
from fedgkd_pl.runs import folder
from fedgkd_pl.runs.accuracy import AVERAGE
from fedgkd_pl.storage.files import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Panels = dict[str, dict[str, list[pd.Series]]]  # by data, method and seed
NET_ACC = "_test_acc"  # what the names of NetAccuracy's columns, nets/…, end with
CLASSES = 2_000  # of a confusion matrix
LABELS = {
    "test/acc": "test accuracy, %",
    AVERAGE: "test accuracy of the average, %",
    "test/loss": "test loss",
}


def draw(kind: str, paths: Sequence[str], output: str) -> None:
    """Writes a figure of :data:`KINDS` from run folders, or folders above them."""
    ending = Path(output).suffix.lower()
    require(ending in FORMATS, "output", f"must end in {', '.join(FORMATS)}", output)
    save(plot(kind, paths), output)
    print(f"wrote {output}")


def plot(kind: str, runs: Runs) -> "Figure":
    """A figure of finished runs.

    Args:
        kind: ``curves``, ``average``, ``participation``, ``features`` or ``tasks``; of the first
            run ``nets``, ``partition``, ``clients``, ``per_client``, ``personalized`` or
            ``confusion``.
        runs: as :func:`runs_of` takes them.
    """
    require(kind in KINDS, "kind", f"must be one of {', '.join(KINDS)}", kind)
    found = runs_of(runs)
    require(len(found) > 0, "runs", f"{kind} needs at least one run")
    return OF_RUN[kind](found[0]) if kind in OF_RUN else OF_GROUPS[kind](make_groups(found))


def learning_curves(groups: Sequence[Group], column: str = "test/acc") -> "Figure":
    """Curves of all methods, a panel for every kind of data."""
    if all(run.has_loss_only for group in groups for run in group.runs.values()):
        column = "test/loss"
    panels = panels_of(groups, column, 100.0 if column.endswith("/acc") else 1.0)
    require(len(panels) > 0, "runs", f"no {folder.METRICS} has {column}")
    return figures.curve_panels(panels, ylabel=LABELS.get(column, column))


def panels_of(groups: Sequence[Group], column: str, factor: float = 1.0) -> Panels:
    """A column of ``metrics.csv``, times a factor."""
    panels: Panels = {}
    for group in groups:
        seeds = [factor * run.by_round(column) for run in group.runs.values()]
        if known := [values for values in seeds if len(values)]:
            panels.setdefault(group.panel, {})[group.name] = known
    return panels


def nets(run: Run) -> "Figure":
    """The test accuracy of every net by round, and of their ensemble."""
    columns = [name for name in run.frame if name.startswith("nets/") and name.endswith(NET_ACC)]
    text = f"no {folder.METRICS} with nets/…{NET_ACC}: train with NetAccuracy"
    require(len(columns) > 0, "runs", text, run.folder)
    names = {"ensemble": "test/acc"}
    names |= {name.removeprefix("nets/").removesuffix(NET_ACC): name for name in columns}
    return figures.curve_panels({run.title: {k: [100 * run.by_round(v)] for k, v in names.items()}})


def tasks(groups: Sequence[Group]) -> "Figure":
    """Accuracy on all tasks so far, and how much of the earlier ones is forgotten, by data."""
    found: Panels = {}
    for group in groups:
        for title, column in (("accuracy", "task/acc"), ("forgetting", "task/forgetting")):
            seeds = [_by_task(run, column) for run in group.runs.values()]
            if known := [values for values in seeds if len(values)]:
                found.setdefault(f"{group.panel}: {title}", {})[group.name] = known
    require(len(found) > 0, "runs", f"no {folder.METRICS} has task/acc: train with TaskAccuracy")
    return figures.task_panels(found)


def _by_task(run: Run, column: str) -> pd.Series:
    """A column in percent, by how many tasks are learned when it is logged."""
    values = 100 * run.by_round(column)
    return values.set_axis(1 + run.by_round("task/acc").index.get_indexer(values.index))


def participation(groups: Sequence[Group]) -> "Figure":
    """Best accuracy over C, a panel for every α: the bottom of the paper's first figure."""
    panels: dict[str, dict[str, dict[float, list[float]]]] = {}
    for group in groups:
        share = group.first.facts.get("data.participation")
        if isinstance(share, int | float):
            alpha = group.first.facts.get("data.partition.alpha")
            panel = printable(f"{group.dataset}, α {alpha}")
            of_method = panels.setdefault(panel, {}).setdefault(group.name, {})
            twice = "two kinds of runs at the same C, which differ in more than the seed"
            require(share not in of_method, "runs", twice, f"{group.name}, {group.panel}")
            of_method[share] = group.values("best")
    require(len(panels) > 0, "runs", f"no {folder.CONFIG} has data.participation")
    return figures.participation_panels(panels)


def partition(run: Run) -> "Figure":
    """The paper's bubbles."""
    data = run.partition
    require("counts" in data, "runs", f"no {folder.PARTITION} in", run.folder)
    return figures.bubble_chart(data["counts"], data["dataset"], data["class_names"])


def features(groups: Sequence[Group]) -> "Figure":
    """The last feature map of every group."""
    maps = []
    for group in groups:
        for file in sorted(group.first.folder.glob(folder.FEATURE_MAPS), key=natural)[-1:]:
            with reading(file):
                maps.append(figures.read_feature_map(file, group.name))
    require(len(maps) > 0, "runs", f"none has {folder.FEATURE_MAPS}: train with FeatureMap")
    return figures.feature_map(maps)


def clients(run: Run) -> "Figure":
    """What each client's model gets right on the test set."""
    rows = _rows(run, folder.LOCAL_MODELS, "train with LocalModels", "round", "acc")
    return figures.client_accuracies(rows)


def own_models(run: Run) -> "Figure":
    """The last global model for every client, and each client's own of when it trained last."""
    columns = ("round", "client", "global_acc", "local_acc")
    rows = _rows(run, folder.CLIENTS, "train with ClientEvaluation", *columns)
    last = rows["round"].max()
    ours = rows[rows["round"] == last].set_index("client")["global_acc"]
    theirs = rows.groupby("client")["local_acc"].last().dropna()  # the last one that is known
    models = pd.DataFrame({"global model": ours, "own model, when last trained": theirs})
    return figures.per_client(models.loc[ours.index].dropna(axis=1, how="all"), f"round {last}")


def personalized(run: Run) -> "Figure":
    """Every client before and after it has fine-tuned the global model for itself."""
    names = {"acc_before": "global model", "acc_after": "personalized"}
    rows = _rows(run, folder.PERSONALIZED, "run fedgkd-pl personalize", "client", *names)
    return figures.per_client(rows.set_index("client").rename(columns=names)[list(names.values())])


def confusion(run: Run) -> "Figure":
    """What the model takes for what."""
    rows = _rows(run, folder.PREDICTIONS, "run fedgkd-pl predict", "label", "prediction")
    names = run.partition.get("class_names", [])
    every = range(max(len(names), int(rows.max(axis=None)) + 1))
    damaged = f"damaged: {run.folder / folder.PREDICTIONS}"  # a matrix must fit into memory
    require(len(every) <= CLASSES and rows.min(axis=None) >= 0, "runs", damaged)
    counts = pd.crosstab(rows["label"], rows["prediction"])
    matrix = counts.reindex(index=every, columns=every, fill_value=0)
    return figures.confusion_chart(matrix, names=names if len(names) == len(every) else ())


def _rows(run: Run, name: str, how: str, *columns: str) -> pd.DataFrame:
    """A CSV file of a run, whose ``columns`` must be numbers."""
    file = run.folder / name
    require(file.exists(), "runs", f"no {name}: {how}", run.folder)
    with reading(file):
        rows = pd.read_csv(file, usecols=columns)
        if rows.empty or not np.isfinite(rows.fillna(0)).all(axis=None):
            raise ValueError("has other values")
    return rows


OF_GROUPS: dict[str, Callable[[Sequence[Group]], "Figure"]] = {
    "curves": learning_curves,
    "average": partial(learning_curves, column=AVERAGE),
    "participation": participation,
    "features": features,
    "tasks": tasks,
}
OF_RUN: dict[str, Callable[[Run], "Figure"]] = {
    "nets": nets,
    "partition": partition,
    "clients": clients,
    "per_client": own_models,
    "personalized": personalized,
    "confusion": confusion,
}
KINDS = (*OF_GROUPS, *OF_RUN)
