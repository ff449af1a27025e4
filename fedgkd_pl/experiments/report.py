"""``fedgkd-pl report``: finished runs beside each other, as a table, Markdown, or one page.

The page has the tables and every figure, and needs nothing beside it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Literal

import fedgkd_pl
from fedgkd_pl.experiments.draw import features, panels_of, partition, plot
from fedgkd_pl.experiments.paper import TITLE, numbers
from fedgkd_pl.experiments.runs import Group, Run, Runs, find_runs, make_groups, runs_of
from fedgkd_pl.experiments.tables import Footnotes, Table, each_run, overview, seconds_per_round
from fedgkd_pl.plots.figures import bar_panels, curve_panels
from fedgkd_pl.plots.style import colours, to_svg
from fedgkd_pl.runs import folder
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


@dataclass
class Section:
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
    runs = find_runs(paths)
    missing = not_shown(paths, runs, over_seeds)
    if format == "html":
        output = output or str(Path(paths[0]) / "report.html")
        write_page(runs, Path(output), notes=missing)
        print(f"wrote {output}")
        return
    table = report(runs, over_seeds)
    table = replace(table, notes=[*table.notes, *missing])
    if format == "md" and output is not None:
        write_text(Path(output), _to_markdown(table, runs))
        print(f"wrote {output}")
    else:
        print(_to_markdown(table, runs) if format == "md" else f"{table}\n", end="")


def not_shown(paths: Sequence[str], runs: Sequence[Run], over_seeds: bool) -> list[str]:
    """The runs below the folders that are in no row, a line for each reason."""
    lines = []
    if over_seeds and (repeated := len(runs) - sum(len(g.runs) for g in make_groups(runs))):
        lines.append(f"not shown: {repeated} with settings and seed of another")
    for path in dict.fromkeys(paths):
        begun = [file.parent for file in Path(path).rglob(f"version_*/{folder.CONFIG}")]
        if rest := sum(not (each / folder.SUMMARY).exists() for each in begun):
            lines.append(f"not shown: {rest} unfinished of {path}")
    return lines


def _to_markdown(table: Table, runs: Sequence[Run]) -> str:
    """The overview, and the settings that all runs share, in Markdown."""
    text = table.to_markdown()
    if shared := shared_settings(make_groups(runs)):
        lines = (f"- `{key}`: {value}\n" for key, value in shared.items())
        text += "\nSettings that all share:\n\n" + "".join(lines)
    return text


def write_page(
    runs: Sequence[Run], file: Path, title: str = "", table: str = "", notes: Sequence[str] = ()
) -> None:
    """Writes a page that needs nothing beside it; it begins with ``table``, in HTML, if given."""
    groups, every = make_groups(runs), report(runs)
    every = replace(every, title="All runs", notes=[*every.notes, *notes])
    page = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    heading = title or ", ".join(dict.fromkeys(group.dataset for group in groups))
    settings = [{"setting": k, "value": v} for k, v in shared_settings(groups).items()]
    content = page.substitute(
        title=escape(heading),
        runs=len(runs),
        rounds=f"{sum(run.summary['rounds'] for run in runs):,}",
        version=fedgkd_pl.__version__,
        paper=escape(TITLE),
        table=table + every.to_html(),
        figures="\n".join(map(_to_html, figures(groups))),
        settings=Table.of(settings).to_html() if settings else "",
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
    chosen = colours(dict.fromkeys(group.name for group in groups))
    for column, name, title, label in CURVES:
        if curves := panels_of(groups, column, 100.0 if "%" in label else 1.0):
            figure = curve_panels(curves, ylabel=label, chosen=chosen)
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
    bars: list[tuple[str, str, str, str, Callable[[Run], float | None]]] = [
        ("best", "Best accuracy", text, label, lambda run: run.measure("best")),
        ("seconds", "Time", time, "seconds per round", seconds_per_round),
        ("bytes", "Bytes", sent, "MB", _megabytes),
    ]
    for name, title, text, label, value in bars:
        panels: dict[str, dict[str, list[float]]] = {}
        for group in groups:
            if values := [v for run in group.runs.values() if (v := value(run)) is not None]:
                panels.setdefault(group.panel, {})[group.name] = values
        if sum(map(len, panels.values())) > 1:
            theirs = paper if name == "best" else None
            figure = bar_panels(panels, xlabel=label, paper=theirs, chosen=chosen)
            yield Section(name, title, text, figure)


def _megabytes(run: Run) -> float:
    return float(run.summary["bytes_down"] + run.summary.get("bytes_up", 0)) / 1e6
