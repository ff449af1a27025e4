"""Finished runs beside each other: tables, figures (``fedgkd-pl figure``), Markdown, one page.

The page of ``fedgkd-pl report`` has the tables and every figure, and needs nothing beside it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Literal, NamedTuple

import fedgkd_pl
import numpy as np
import pandas as pd
from fedgkd_pl.errors import require
from fedgkd_pl.experiments.paper import TITLE, numbers
from fedgkd_pl.experiments.runs import (
    Group,
    Run,
    Runs,
    find_runs,
    make_groups,
    natural,
    reading,
    runs_of,
)
from fedgkd_pl.experiments.tables import Footnotes, Table, each_run, overview, values_of
from fedgkd_pl.plots import figures as charts
from fedgkd_pl.plots.style import FORMATS, colours, save, to_svg
from fedgkd_pl.runs import folder
from fedgkd_pl.runs.folder import AVERAGE_ACC
from fedgkd_pl.storage.files import printable, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Format = Literal["table", "md", "html"]
SHOWN = 6  # a page shows no more charts of partitions, feature maps and clients than this
WIDE = 8  # inches; such figures take the whole width of a page
LEAST = 0.6  # of its size; on a narrow screen a figure is made no smaller, and scrolls
CURVES = (  # column of metrics.csv, name, title, label of the axis; shares of 1 are shown in %
    ("test/acc", "curves", "Learning curves", "test accuracy, %"),
    ("average/acc", "average", "Mean of past models", "test accuracy, %"),
    ("test/loss", "test_loss", "Test loss of the global model", "test loss"),
    ("client/loss_mean", "loss", "Local loss, mean of clients", "clients' training loss"),
    ("client/kd_mean", "kd", "Distillation", "clients' distillation loss"),
    ("drift/norm_mean", "drift", "Client drift ‖w_k − w_t‖", "distance from global"),
    ("drift/cosine", "cosine", "Agreement of updates", "cosine of two updates"),
    ("local/acc_mean", "local", "Clients' models, test set", "clients' test accuracy, %"),
    ("clients/global_acc_mean", "own", "Clients' own samples", "accuracy on own samples, %"),
    ("clients/global_acc_worst10", "worst", "Worst tenth", "accuracy on own samples, %"),
    ("teacher/agreement_mean", "agreement", "Client and teacher agree", "same class, %"),
    ("forgetting/mean", "forgetting", "Forgetting of a class", "accuracy lost, % points"),
)
OF_CLIENTS = (  # name, kind of plot, file, title
    ("clients", "clients", folder.LOCAL_MODELS, "Each client's model on the test set"),
    ("own", "per_client", folder.CLIENTS, "Models on each client's own samples"),
    ("tuned", "personalized", folder.PERSONALIZED, "Before and after each client's fine-tuning"),
)
Panels = dict[str, dict[str, list[pd.Series]]]  # by data, method and seed
NET_ACC = "_test_acc"  # what the names of NetAccuracy's columns, nets/…, end with
CLASSES = 2_000  # of a confusion matrix


class Section(NamedTuple):
    """A figure of the page."""

    name: str  # for ids
    title: str
    text: str  # what it shows
    figure: "Figure"


def report(runs: Runs, over_seeds: bool = True) -> Table:
    """Finished runs beside each other, as a table that a notebook shows.

    Args:
        runs: as :func:`runs_of` takes them.
        over_seeds: mean ± std of runs that differ in the seed alone; otherwise a row for each.
    """
    found, notes = runs_of(runs), Footnotes()
    frame = overview(make_groups(found), notes) if over_seeds else each_run(found, notes)
    unit = "test loss" if all(run.has_loss_only for run in found) else "test accuracy, %"
    return Table(frame, 2, unit=unit, notes=notes.lines)


def print_report(
    paths: Sequence[str],
    over_seeds: bool = False,
    format: Format = "table",
    output: str | None = None,
) -> None:
    """Prints a table, or writes a page.

    Args:
        paths: run folders, or folders above them.
        output: the file; by default Markdown is printed and the page is ``report.html`` in the
            first folder.
    """
    over_seeds = over_seeds or format != "table"
    file = Path(output or Path(paths[0]) / "report.html")
    if output is not None or format == "html":
        folder.check_output(file)
    runs = find_runs(paths)
    missing = []
    if over_seeds and (repeated := len(runs) - sum(len(g.runs) for g in make_groups(runs))):
        missing.append(f"not shown: {repeated} with settings and seed of another")
    for path in dict.fromkeys(paths):
        begun = [file.parent for file in Path(path).rglob(f"version_*/{folder.CONFIG}")]
        if rest := sum(not (each / folder.SUMMARY).exists() for each in begun):
            missing.append(f"not shown: {rest} unfinished of {path}")
    if format == "html":
        write_page(runs, file, notes=missing)
        print(f"wrote {file}")
        return
    table = report(runs, over_seeds)
    table = replace(table, notes=[*table.notes, *missing])
    text = f"{table}\n"
    if format == "md":
        text = table.to_markdown()
        if shared := shared_settings(make_groups(runs)):
            lines = (f"- `{key}`: {value}\n" for key, value in shared.items())
            text += "\nSettings that all share:\n\n" + "".join(lines)
    if format == "md" and output is not None:
        write_text(file, text)
        print(f"wrote {file}")
    else:
        print(text, end="")


def write_page(
    runs: Sequence[Run], file: Path, title: str = "", table: str = "", notes: Sequence[str] = ()
) -> None:
    """Writes a page that needs nothing beside it; it begins with ``table``, in HTML, if given."""
    groups, every = make_groups(runs), report(runs)
    every = replace(every, title="All runs", notes=[*every.notes, *notes])
    page = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    settings = [{"setting": k, "value": v} for k, v in shared_settings(groups).items()]
    content = page.substitute(
        title=escape(title or ", ".join(dict.fromkeys(group.dataset for group in groups))),
        runs=len(runs),
        rounds=f"{sum(run.summary['rounds'] for run in runs):,}",
        version=fedgkd_pl.__version__,
        paper=escape(TITLE),
        table=table + every.to_html(),
        figures="\n".join(map(_to_html, figures(groups))),
        settings=Table(pd.DataFrame(settings), 2).to_html() if settings else "",
    )
    write_text(file, content)


def shared_settings(groups: Sequence[Group]) -> dict[str, str]:
    """The settings that all groups have alike, as they are shown."""
    first, *others = [group.settings for group in groups]
    return {
        printable(key.replace("init_args.", "")): printable(value, 1000)
        for key, value in first.items()
        if value is not None and all(other.get(key) == value for other in others)
    }


def _to_html(section: Section) -> str:
    width = section.figure.get_figwidth()
    wide = " class=wide" if width > WIDE else ""
    return (
        f"<section{wide}><h2>{escape(section.title)}</h2><p>{escape(section.text)}</p>"
        f'<figure data-name="{section.name}" style="--least: {LEAST * width:.2f}in">'
        f"{to_svg(section.figure, f'figure-{section.name}')}</figure></section>"
    )


def figures(groups: Sequence[Group]) -> Iterator[Section]:
    """Every figure that the runs have data for; a method has one colour in all of them."""
    chosen = colours(group.name for group in groups)
    for column, name, title, label in CURVES:
        if curves := panels_of(groups, column, label):
            figure = charts.curve_panels(curves, ylabel=label, chosen=chosen)
            yield Section(name, title, "By round, mean over seeds; bands: ± one std.", figure)
    yield from _bars(groups, chosen)
    for name, kind, file, title in OF_CLIENTS:
        known = [group for group in groups if (group.first.folder / file).exists()]
        for number, group in enumerate(known[:SHOWN], 1):
            text = f"{group.name}, {group.panel}, seed {group.first.seed}"
            yield Section(f"{name}{number}", title, text, plot(kind, group.first))
    if with_maps := [group for group in groups if [*group.first.folder.glob(folder.FEATURE_MAPS)]]:
        text = "Penultimate features of test samples by class: the global model and a client's."
        yield Section("features", "Features (t-SNE)", text, features(with_maps[:SHOWN]))
    parts: dict[str, Group] = {}
    for group in groups:
        if counts := group.first.partition.get("counts"):
            parts.setdefault(str(counts), group)
    for number, group in enumerate([*parts.values()][:SHOWN], 1):
        title = f"Who holds what: {group.panel}, seed {group.first.seed}"
        text = "Clients × classes; the area is the number of samples."
        yield Section(f"partition{number}", title, text, partition(group.first))


def _bars(groups: Sequence[Group], chosen: dict[str, str]) -> Iterator[Section]:
    """A bar for every group, where there are several: accuracy, time, bytes."""
    loss = all(run.has_loss_only for group in groups for run in group.runs.values())
    paper: dict[str, dict[str, float]] = {}
    for group in groups:
        if group.paper:
            paper.setdefault(group.panel, {})[group.name] = numbers(group.paper)[0]
    text = "Best test accuracy; whiskers: ± one std."
    text += " ◆: the paper's, see the table's notes." * bool(paper)
    time = "Wall time of a round on the machine that ran it, evaluation included."
    sent = "Sent down and up by all clients over the run."
    label = "test loss" if loss else "test accuracy, %"
    bars = [
        ("best", "Best accuracy", text, label),
        ("seconds", "Time", time, "seconds per round"),
        ("bytes", "Bytes", sent, "MB"),
    ]
    for name, title, text, label in bars:
        panels: dict[str, dict[str, list[float]]] = {}
        for group in groups:
            known = [_of_bars(run)[name] for run in group.runs.values()]
            if values := [value for value in known if value is not None]:
                panels.setdefault(group.panel, {})[group.name] = values
        if sum(map(len, panels.values())) > 1:
            theirs = paper if name == "best" else None
            figure = charts.bar_panels(panels, xlabel=label, paper=theirs, chosen=chosen)
            yield Section(name, title, text, figure)


def _of_bars(run: Run) -> dict[str, float | None]:
    sent = (run.summary["bytes_down"] + run.summary.get("bytes_up", 0)) / 1e6
    return {"best": run.measure("best"), "seconds": run.seconds_per_round, "bytes": sent}


def draw(kind: str, paths: Sequence[str], output: str) -> None:
    """Writes a figure of :data:`KINDS` from run folders, or folders above them."""
    ending = Path(output).suffix.lower()
    require(ending in FORMATS, "output", f"must end in {', '.join(FORMATS)}", output)
    folder.check_output(output)
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
    (label,) = (label for name, _, _, label in CURVES if name == column)
    panels = panels_of(groups, column, label)
    require(len(panels) > 0, "runs", f"no {folder.METRICS} has {column}")
    return charts.curve_panels(panels, ylabel=label)


def panels_of(groups: Sequence[Group], column: str, label: str) -> Panels:
    """A column of ``metrics.csv``, in the unit of its label."""
    panels: Panels = {}
    factor = 100 if "%" in label else 1
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
    return charts.curve_panels({run.title: {k: [100 * run.by_round(v)] for k, v in names.items()}})


def tasks(groups: Sequence[Group]) -> "Figure":
    """Accuracy on all tasks so far, and how much of the earlier ones is forgotten, by data."""
    found: Panels = {}
    for group in groups:
        for title, column in (("accuracy", "task/acc"), ("forgetting", "task/forgetting")):
            seeds = [_by_task(run, column) for run in group.runs.values()]
            if known := [values for values in seeds if len(values)]:
                found.setdefault(f"{group.panel}: {title}", {})[group.name] = known
    require(len(found) > 0, "runs", f"no {folder.METRICS} has task/acc: train with TaskAccuracy")
    return charts.task_panels(found)


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
            of_method[share] = [*values_of(group.runs, "best").values()]
    require(len(panels) > 0, "runs", f"no {folder.CONFIG} has data.participation")
    return charts.participation_panels(panels)


def partition(run: Run) -> "Figure":
    """The paper's bubbles."""
    data = run.partition
    require("counts" in data, "runs", f"no {folder.PARTITION} in", run.folder)
    return charts.bubble_chart(data["counts"], data["dataset"], data["class_names"])


def features(groups: Sequence[Group]) -> "Figure":
    """The last feature map of every group."""
    maps = []
    for group in groups:
        for file in sorted(group.first.folder.glob(folder.FEATURE_MAPS), key=natural)[-1:]:
            with reading(file):
                maps.append(charts.read_feature_map(file, group.name))
    require(len(maps) > 0, "runs", f"none has {folder.FEATURE_MAPS}: train with FeatureMap")
    return charts.feature_map(maps)


def clients(run: Run) -> "Figure":
    """What each client's model gets right on the test set."""
    rows = _rows(run, folder.LOCAL_MODELS, "train with LocalModels", "round", "acc")
    return charts.client_accuracies(rows)


def own_models(run: Run) -> "Figure":
    """The last global model for every client, and each client's own of when it trained last."""
    columns = ("round", "client", "global_acc", "local_acc")
    rows = _rows(run, folder.CLIENTS, "train with ClientEvaluation", *columns)
    last = rows["round"].max()
    ours = rows[rows["round"] == last].set_index("client")["global_acc"]
    theirs = rows.groupby("client")["local_acc"].last().dropna()  # the last one that is known
    models = pd.DataFrame({"global model": ours, "own model, when last trained": theirs})
    return charts.per_client(models.loc[ours.index].dropna(axis=1, how="all"), f"round {last}")


def personalized(run: Run) -> "Figure":
    """Every client before and after it has fine-tuned the global model for itself."""
    names = {"acc_before": "global model", "acc_after": "personalized"}
    rows = _rows(run, folder.PERSONALIZED, "run fedgkd-pl personalize", "client", *names)
    return charts.per_client(rows.set_index("client").rename(columns=names)[list(names.values())])


def confusion(run: Run) -> "Figure":
    """What the model takes for what."""
    rows = _rows(run, folder.PREDICTIONS, "run fedgkd-pl predict", "label", "prediction")
    names = run.partition.get("class_names", [])
    every = range(max(len(names), int(rows.max(axis=None)) + 1))
    damaged = f"damaged: {run.folder / folder.PREDICTIONS}"  # a matrix must fit into memory
    require(len(every) <= CLASSES and rows.min(axis=None) >= 0, "runs", damaged)
    counts = pd.crosstab(rows["label"], rows["prediction"])
    matrix = counts.reindex(index=every, columns=every, fill_value=0)
    return charts.confusion_chart(matrix, names=names if len(names) == len(every) else ())


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
    "average": partial(learning_curves, column=AVERAGE_ACC),
    "participation": participation,
    "features": features,
    "tasks": tasks,
}
OF_RUN = {
    "nets": nets,
    "partition": partition,
    "clients": clients,
    "per_client": own_models,
    "personalized": personalized,
    "confusion": confusion,
}
KINDS = (*OF_GROUPS, *OF_RUN)
