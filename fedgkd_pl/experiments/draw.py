"""``fedgkd-pl figure``: the paper's figures from finished runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedgkd_pl.errors import StorageError, require
from fedgkd_pl.experiments.gather import Runs, runs_of
from fedgkd_pl.experiments.groups import ALPHA, PARTICIPATION, Group, make_groups
from fedgkd_pl.experiments.runs import (
    CLASSES,
    ROUNDS,
    Run,
    find_runs,
    natural,
    whole,
)
from fedgkd_pl.runs import folder
from fedgkd_pl.runs.accuracy import AVERAGE
from fedgkd_pl.storage.reading import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NETS, NET_ACC = "nets/", "_test_acc"  # what the names of NetAccuracy's columns begin and end with
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
    "toy": "decision boundaries of FedGKD and FedAvg on the 2-D toy, trained now; needs no run",
}


def draw(kind: str, paths: Sequence[str], output: str) -> None:
    """Writes a figure of :data:`KINDS` from run folders, or folders above them."""
    from fedgkd_pl.plots.style import FORMATS, save

    ending = Path(output).suffix.lower()
    require(ending in FORMATS, "output", f"must end in {', '.join(FORMATS)}", output)
    if kind == "toy":
        from fedgkd_pl.experiments.toy import toy_figure

        figure, accuracies = toy_figure()
        for method, values in accuracies.items():
            text = ", ".join(f"{name} {100 * value:.1f}" for name, value in values.items())
            print(f"{method}: {text}")
    else:
        require(len(paths) > 0, "runs", f"{kind} needs at least one run")
        figure = plot(kind, find_runs(paths))
    save(figure, output)
    print(f"wrote {output}")


def plot(kind: str, runs: Runs) -> "Figure":
    """A figure of finished runs.

    Args:
        kind: ``curves``, ``average``, ``nets``, ``participation``, ``partition``, ``features``,
            ``clients``, ``per_client``, ``personalized``, ``confusion`` or ``tasks``; ``clients``
            to ``confusion``, ``nets`` and ``partition`` show the first run.
        runs: as :func:`runs_of` takes them.
    """
    runs = runs_of(runs)
    known = [each for each in KINDS if each != "toy"]
    require(kind in known, "kind", f"must be one of {', '.join(known)}", kind)
    require(len(runs) > 0, "runs", f"{kind} needs at least one run")
    groups = make_groups(runs)
    if kind == "curves":
        return learning_curves(groups)
    if kind == "average":
        return learning_curves(groups, AVERAGE)
    if kind == "nets":
        return nets(runs[0])
    if kind == "participation":
        return participation(groups)
    if kind == "tasks":
        return tasks(groups)
    if kind == "partition":
        return partition(runs[0])
    if kind == "features":
        return features(groups)
    if kind == "clients":
        return clients(runs[0])
    if kind == "per_client":
        return own_models(runs[0])
    if kind == "personalized":
        return personalized(fine_tuned(runs[0]))
    return confusion(runs[0])


def learning_curves(groups: Sequence[Group], column: str = "test/acc") -> "Figure":
    """Curves of all methods, a panel for every kind of data."""
    from fedgkd_pl.plots.figures import curve_panels

    if all(run.has_loss_only for group in groups for run in group.runs.values()):
        column = "test/loss"
    panels = panels_of(groups, column, 100.0 if column.endswith("/acc") else 1.0)
    require(len(panels) > 0, "runs", f"no {folder.METRICS} has {column}")
    labels = {"test/acc": "test accuracy, %", AVERAGE: "test accuracy of the average, %"}
    labels["test/loss"] = "test loss"
    return curve_panels(panels, ylabel=labels.get(column, column))


def nets(run: Run) -> "Figure":
    """The test accuracy of every net by round, and of their ensemble."""
    from fedgkd_pl.plots.figures import curve_panels

    known = {"ensemble": run.columns.get("test/acc", {})}
    known |= {
        printable(name.removeprefix(NETS).removesuffix(NET_ACC)): values
        for name, values in run.columns.items()
        if name.startswith(NETS) and name.endswith(NET_ACC)
    }
    text = f"no {folder.METRICS} with {NETS}…{NET_ACC}: train with NetAccuracy"
    require(len(known) > 1, "runs", text, run.folder)
    curves = {
        name: [{number: 100 * value for number, value in values.items()}]
        for name, values in known.items()
        if values
    }
    return curve_panels({printable(run.title): curves})


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


def tasks(groups: Sequence[Group]) -> "Figure":
    """Accuracy on all tasks so far, and how much of the earlier ones is forgotten, by data."""
    from fedgkd_pl.plots.tasks import task_panels

    found: dict[str, dict[str, list[dict[int, float]]]] = {}
    several = len({group.panel for group in groups}) > 1
    for group in groups:
        for title, column in (("accuracy", "task/acc"), ("forgetting", "task/forgetting")):
            seeds = [run.columns for run in group.runs.values()]
            known = [_by_task(columns, column) for columns in seeds if columns.get(column)]
            if known:
                panel = f"{group.panel}: {title}" if several else title
                found.setdefault(panel, {})[group.name] = known
    require(len(found) > 0, "runs", f"no {folder.METRICS} has task/acc: train with TaskAccuracy")
    return task_panels(found)


def _by_task(columns: dict[str, dict[int, float]], column: str) -> dict[int, float]:
    """A column in percent, by how many tasks are learned when it is logged."""
    ends = {number: learned for learned, number in enumerate(sorted(columns["task/acc"]), start=1)}
    return {
        ends[number]: 100 * value for number, value in columns[column].items() if number in ends
    }


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

    require("counts" in run.partition, "runs", f"no {folder.PARTITION} in", run.folder)
    data = run.partition
    return bubble_chart(data["counts"], str(data.get("dataset", "")), data["class_names"])


def features(groups: Sequence[Group]) -> "Figure":
    """The last feature map of every group."""
    from fedgkd_pl.plots.feature_maps import read_feature_map
    from fedgkd_pl.plots.plane import feature_map

    maps = []
    for group in groups:
        run = next(iter(group.runs.values()))
        if files := sorted(run.folder.glob(folder.FEATURE_MAPS), key=natural):
            try:
                maps.append(read_feature_map(files[-1], group.name))
            except StorageError as error:
                raise run.damaged(files[-1].name) from error
    require(len(maps) > 0, "runs", f"none has {folder.FEATURE_MAPS}: train with FeatureMap")
    return feature_map(maps)


def clients(run: Run) -> "Figure":
    """What each client's model gets right on the test set."""
    from fedgkd_pl.plots.figures import client_accuracies

    rows = run.table(folder.LOCAL_MODELS)
    require(len(rows) > 0, "runs", f"no {folder.LOCAL_MODELS}: train with LocalModels", run.folder)
    try:
        points = [
            (whole(row["round"], ROUNDS), whole(row["client"], ROUNDS), 100 * float(row["acc"]))
            for row in rows
        ]
        require(all(0 <= value <= 100 for *_, value in points), "runs", "has other accuracies")
    except (KeyError, TypeError, ValueError) as error:
        raise run.damaged(folder.LOCAL_MODELS) from error
    return client_accuracies(points)


def own_models(run: Run) -> "Figure":
    """The last global model for every client, and each client's own of when it trained last."""
    from fedgkd_pl.plots.per_client import per_client

    rows = run.table(folder.CLIENTS)
    require(len(rows) > 0, "runs", f"no {folder.CLIENTS}: train with ClientEvaluation", run.folder)
    try:
        numbers = [(whole(row["round"], ROUNDS), whole(row["client"], ROUNDS)) for row in rows]
        last = max(number for number, _ in numbers)
        ours: dict[int, float] = {}
        theirs: dict[int, float] = {}
        for (number, client), row in zip(numbers, rows, strict=True):
            if number == last:
                ours[client] = _percent(row["global_acc"])
            if row["local_acc"]:
                theirs[client] = _percent(row["local_acc"])
        known = {client: value for client, value in theirs.items() if client in ours}
    except (KeyError, TypeError, ValueError) as error:
        raise run.damaged(folder.CLIENTS) from error
    models = {"global model": ours} | ({"own model, when last trained": known} if known else {})
    return per_client(models, f"round {last}")


def fine_tuned(run: Run) -> list[dict[str, float]]:
    """The accuracies of ``personalized.csv``."""
    rows = run.table(folder.PERSONALIZED)
    text = f"no {folder.PERSONALIZED}: run fedgkd-pl personalize"
    require(len(rows) > 0, "runs", text, run.folder)
    names = ("acc_before", "acc_after")
    try:
        return [
            {name: _percent(row[name]) / 100 for name in names}
            | {"client": whole(row["client"], ROUNDS)}
            for row in rows
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise run.damaged(folder.PERSONALIZED) from error


def personalized(rows: Sequence[dict[str, float]]) -> "Figure":
    """Every client before and after it has fine-tuned the global model for itself."""
    from fedgkd_pl.plots.per_client import per_client

    return per_client(
        {
            name: {int(row["client"]): 100 * row[key] for row in rows}
            for name, key in (("global model", "acc_before"), ("personalized", "acc_after"))
        }
    )


def _percent(text: str) -> float:
    """An accuracy of a CSV file; anything else is a ``ValueError``."""
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError("is no accuracy")
    return 100 * value


def confusion(run: Run) -> "Figure":
    """What the model takes for what."""
    import numpy as np
    from fedgkd_pl.plots.figures import confusion_chart

    rows = run.table(folder.PREDICTIONS)
    require(len(rows) > 0, "runs", f"no {folder.PREDICTIONS}: run fedgkd-pl predict", run.folder)
    try:
        columns = ("label", "prediction")
        pairs = np.array([[whole(row[key], CLASSES) for key in columns] for row in rows])
    except (KeyError, TypeError, ValueError) as error:
        raise run.damaged(folder.PREDICTIONS) from error
    names = run.partition.get("class_names", [])
    size = max(len(names), int(pairs.max()) + 1)
    matrix = np.zeros((size, size), dtype=np.int64)
    np.add.at(matrix, tuple(pairs.T), 1)
    return confusion_chart(matrix, names=names if len(names) == size else ())
