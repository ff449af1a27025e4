"""The paper's figures of finished runs, ``fedgkd-pl figure``."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedgkd_pl.errors import require
from fedgkd_pl.experiments.groups import ALPHA, PARTICIPATION, Group, make_groups
from fedgkd_pl.experiments.runs import Run, Runs, find_runs, natural, reading, runs_of
from fedgkd_pl.runs import folder
from fedgkd_pl.runs.accuracy import AVERAGE
from fedgkd_pl.storage.reading import printable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

OWN_MODEL = "own model, when last trained"
NETS, NET_ACC = "nets/", "_test_acc"  # what the names of NetAccuracy's columns begin and end with
CLASSES, MOST = 2_000, 2**31  # labels of predictions, and other numbers, are below these
LABELS = {
    "test/acc": "test accuracy, %",
    AVERAGE: "test accuracy of the average, %",
    "test/loss": "test loss",
}
KINDS = {
    "curves": "test accuracy by round, mean ± std over seeds; a panel for each α",
    "average": "the same of the averaged model; needs the AveragedModel callback",
    "nets": "test accuracy of each net by round, of the first run; needs the NetAccuracy callback",
    "participation": "best accuracy over the share C of clients in a round; a panel for each α",
    "partition": "who holds what: clients × classes as bubbles, of the first run",
    "features": "t-SNE of penultimate features, global and local; needs the FeatureMap callback",
    "clients": "each client's model on the test set; needs the LocalModels callback",
    "per_client": "global and own model on each client's own samples; needs ClientEvaluation",
    "personalized": "each client before and after fine-tuning; needs fedgkd-pl personalize",
    "tasks": "accuracy and forgetting by the number of tasks learned; needs TaskAccuracy",
    "confusion": f"truth × prediction of a model; needs {folder.PREDICTIONS} (fedgkd-pl predict)",
}


def draw(kind: str, paths: Sequence[str], output: str) -> None:
    """Writes a figure of :data:`KINDS` from run folders, or folders above them."""
    from fedgkd_pl.plots.style import FORMATS, save

    ending = Path(output).suffix.lower()
    require(ending in FORMATS, "output", f"must end in {', '.join(FORMATS)}", output)
    require(len(paths) > 0, "runs", f"{kind} needs at least one run")
    save(plot(kind, find_runs(paths)), output)
    print(f"wrote {output}")


def plot(kind: str, runs: Runs) -> "Figure":
    """A figure of finished runs.

    Args:
        kind: ``curves``, ``average``, ``nets``, ``participation``, ``partition``, ``features``,
            ``clients``, ``per_client``, ``personalized``, ``confusion`` or ``tasks``; ``clients``
            to ``confusion``, ``nets`` and ``partition`` show the first run.
        runs: as :func:`runs_of` takes them.
    """
    of_groups: dict[str, Callable[[Sequence[Group]], Figure]] = {
        "curves": learning_curves,
        "average": partial(learning_curves, column=AVERAGE),
        "participation": participation,
        "features": features,
        "tasks": tasks,
    }
    of_run: dict[str, Callable[[Run], Figure]] = {
        "nets": nets,
        "partition": partition,
        "clients": clients,
        "per_client": own_models,
        "personalized": personalized,
        "confusion": confusion,
    }
    require(kind in KINDS, "kind", f"must be one of {', '.join(KINDS)}", kind)
    runs = runs_of(runs)
    require(len(runs) > 0, "runs", f"{kind} needs at least one run")
    return of_run[kind](runs[0]) if kind in of_run else of_groups[kind](make_groups(runs))


def learning_curves(groups: Sequence[Group], column: str = "test/acc") -> "Figure":
    """Curves of all methods, a panel for every kind of data."""
    from fedgkd_pl.plots.figures import curve_panels

    if all(run.has_loss_only for group in groups for run in group.runs.values()):
        column = "test/loss"
    panels = panels_of(groups, column, 100.0 if column.endswith("/acc") else 1.0)
    require(len(panels) > 0, "runs", f"no {folder.METRICS} has {column}")
    return curve_panels(panels, ylabel=LABELS.get(column, column))


def panels_of(
    groups: Sequence[Group], column: str, factor: float = 1.0
) -> dict[str, dict[str, list[dict[int, float]]]]:
    """A column of ``metrics.csv``, times a factor, by data, method and seed."""
    panels: dict[str, dict[str, list[dict[int, float]]]] = {}
    for group in groups:
        seeds = [run.columns.get(column, {}) for run in group.runs.values()]
        known = [{number: factor * value for number, value in s.items()} for s in seeds if s]
        if known:
            panels.setdefault(group.panel, {})[group.name] = known
    return panels


def nets(run: Run) -> "Figure":
    """The test accuracy of every net by round, and of their ensemble."""
    from fedgkd_pl.plots.figures import curve_panels

    names = [name for name in run.columns if name.startswith(NETS) and name.endswith(NET_ACC)]
    text = f"no {folder.METRICS} with {NETS}…{NET_ACC}: train with NetAccuracy"
    require(len(names) > 0, "runs", text, run.folder)
    curves = {"ensemble": [run.accuracy]} if run.accuracy else {}
    for name in names:
        curves[name.removeprefix(NETS).removesuffix(NET_ACC)] = [run.percent(name)]
    return curve_panels({run.title: curves})


def tasks(groups: Sequence[Group]) -> "Figure":
    """Accuracy on all tasks so far, and how much of the earlier ones is forgotten, by data."""
    from fedgkd_pl.plots.figures import task_panels

    found: dict[str, dict[str, list[dict[int, float]]]] = {}
    several = len({group.panel for group in groups}) > 1
    for group in groups:
        for title, column in (("accuracy", "task/acc"), ("forgetting", "task/forgetting")):
            known = [_by_task(run, column) for run in group.runs.values() if column in run.columns]
            if known:
                panel = f"{group.panel}: {title}" if several else title
                found.setdefault(panel, {})[group.name] = known
    require(len(found) > 0, "runs", f"no {folder.METRICS} has task/acc: train with TaskAccuracy")
    return task_panels(found)


def _by_task(run: Run, column: str) -> dict[int, float]:
    """A column in percent, by how many tasks are learned when it is logged."""
    ends = {number: learned for learned, number in enumerate(sorted(run.columns["task/acc"]), 1)}
    return {ends[n]: value for n, value in run.percent(column).items() if n in ends}


def participation(groups: Sequence[Group]) -> "Figure":
    """Best accuracy over C, a panel for every α: the bottom of the paper's first figure."""
    from fedgkd_pl.plots.figures import participation_panels

    panels: dict[str, dict[str, dict[float, list[float]]]] = {}
    for group in groups:
        share = group.settings.get(PARTICIPATION)
        if isinstance(share, int | float) and 0 < share <= 1:
            alpha = printable(f"{group.dataset}, α {group.settings.get(ALPHA)}")
            of_method = panels.setdefault(alpha, {}).setdefault(group.name, {})
            twice = "two kinds of runs at the same C, which differ in more than the seed"
            require(float(share) not in of_method, "runs", twice, f"{group.name}, {group.panel}")
            of_method[float(share)] = group.values("best")
    require(len(panels) > 0, "runs", f"no {folder.CONFIG} has data.participation")
    return participation_panels(panels)


def partition(run: Run) -> "Figure":
    """The paper's bubbles."""
    from fedgkd_pl.plots.partition import bubble_chart

    data = run.partition
    require("counts" in data, "runs", f"no {folder.PARTITION} in", run.folder)
    return bubble_chart(data["counts"], data["dataset"], data["class_names"])


def features(groups: Sequence[Group]) -> "Figure":
    """The last feature map of every group."""
    from fedgkd_pl.plots.plane import feature_map, read_feature_map

    maps = []
    for group in groups:
        run = next(iter(group.runs.values()))
        for file in sorted(run.folder.glob(folder.FEATURE_MAPS), key=natural)[-1:]:
            with reading(file):
                maps.append(read_feature_map(file, group.name))
    require(len(maps) > 0, "runs", f"none has {folder.FEATURE_MAPS}: train with FeatureMap")
    return feature_map(maps)


def clients(run: Run) -> "Figure":
    """What each client's model gets right on the test set."""
    from fedgkd_pl.plots.figures import client_accuracies

    limits = {"round": MOST, "client": MOST, "acc": 1}
    rows = _rows(run, folder.LOCAL_MODELS, "train with LocalModels", limits)
    return client_accuracies(zip(rows["round"], rows["client"], 100 * rows["acc"], strict=True))


def own_models(run: Run) -> "Figure":
    """The last global model for every client, and each client's own of when it trained last."""
    from fedgkd_pl.plots.per_client import per_client

    limits = {"round": MOST, "client": MOST, "global_acc": 1, "local_acc": 1}
    rows = _rows(run, folder.CLIENTS, "train with ClientEvaluation", limits)
    last = rows["round"].max()
    ours = rows[rows["round"] == last].set_index("client")["global_acc"]
    theirs = rows.groupby("client")["local_acc"].last().dropna()  # the last one that is known
    theirs = theirs[theirs.index.isin(ours.index)]
    models = {"global model": ours} | ({} if theirs.empty else {OWN_MODEL: theirs})
    return per_client(
        {name: (100 * accs).to_dict() for name, accs in models.items()}, f"round {last}"
    )


def personalized(run: Run) -> "Figure":
    """Every client before and after it has fine-tuned the global model for itself."""
    from fedgkd_pl.plots.per_client import per_client

    limits = {"client": MOST, "acc_before": 1, "acc_after": 1}
    rows = _rows(run, folder.PERSONALIZED, "run fedgkd-pl personalize", limits)
    accs = 100 * rows.set_index("client")
    names = {"global model": "acc_before", "personalized": "acc_after"}
    return per_client({name: accs[column].to_dict() for name, column in names.items()})


def confusion(run: Run) -> "Figure":
    """What the model takes for what."""
    import pandas as pd
    from fedgkd_pl.plots.figures import confusion_chart

    limits = {"label": CLASSES, "prediction": CLASSES}
    rows = _rows(run, folder.PREDICTIONS, "run fedgkd-pl predict", limits)
    names = run.partition.get("class_names", [])
    every = range(max(len(names), int(rows.max(axis=None)) + 1))
    counts = pd.crosstab(rows["label"], rows["prediction"])
    matrix = counts.reindex(index=every, columns=every, fill_value=0).to_numpy()
    return confusion_chart(matrix, names=names if len(names) == len(every) else ())


def _rows(run: Run, name: str, how: str, limits: Mapping[str, float]) -> "pd.DataFrame":
    """The columns of a CSV file that a run must have; values are from 0 to a limit."""
    import pandas as pd

    file = run.folder / name
    require(file.exists(), "runs", f"no {name}: {how}", run.folder)
    with reading(file):
        rows = pd.read_csv(file, usecols=list(limits))
        if rows.empty or not all(
            rows[key].dropna().between(0, limits[key]).all() for key in limits
        ):
            raise ValueError("has other values")
    return rows
