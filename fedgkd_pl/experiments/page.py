"""A page with the tables and every figure of some runs, which needs nothing beside it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, NamedTuple

import fedgkd_pl
from fedgkd_pl.experiments.draw import features, panels_of, partition, plot
from fedgkd_pl.experiments.groups import Group, make_groups, shared_settings
from fedgkd_pl.experiments.paper import TITLE, numbers
from fedgkd_pl.experiments.runs import Run
from fedgkd_pl.experiments.table import Footnotes, Table
from fedgkd_pl.experiments.tables import overview, seconds_per_round
from fedgkd_pl.plots.figures import bar_panels, curve_panels
from fedgkd_pl.plots.style import colours, to_svg
from fedgkd_pl.runs.folder import CLIENTS, FEATURE_MAPS, LOCAL_MODELS, PERSONALIZED
from fedgkd_pl.storage.files import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Panels = dict[str, dict[str, list[float]]]  # by data and line, a value a seed
SHOWN = 6  # a page shows no more charts of partitions, feature maps and clients than this
WIDE = 8  # inches; such figures take the whole width of a page
LEAST = 0.6  # of its size; on a narrow screen a figure is made no smaller, and scrolls


class Curve(NamedTuple):
    """A column of ``metrics.csv`` by round."""

    column: str
    name: str
    title: str
    label: str  # of the axis; shares of 1 are shown in %


CURVES = (
    Curve("test/acc", "curves", "Learning curves", "test accuracy, %"),
    Curve("average/acc", "average", "Mean of past models", "test accuracy, %"),
    Curve("test/loss", "test_loss", "Test loss of the global model", "test loss"),
    Curve("client/loss_mean", "loss", "Local loss, mean of clients", "clients' training loss"),
    Curve("client/kd_mean", "kd", "Distillation", "clients' distillation loss"),
    Curve("drift/norm_mean", "drift", "Client drift ‖w_k − w_t‖", "distance from global"),
    Curve("drift/cosine", "cosine", "Agreement of updates", "cosine of two updates"),
    Curve("local/acc_mean", "local", "Clients' models, test set", "clients' test accuracy, %"),
    Curve("clients/global_acc_mean", "own", "Clients' own samples", "accuracy on own samples, %"),
    Curve("clients/global_acc_worst10", "worst", "Worst tenth", "accuracy on own samples, %"),
    Curve("teacher/agreement_mean", "agreement", "Client and teacher agree", "same class, %"),
    Curve("forgetting/mean", "forgetting", "Forgetting of a class", "accuracy lost, % points"),
)
OF_CLIENTS = (  # name, kind of plot, file, title
    ("clients", "clients", LOCAL_MODELS, "Each client's model on the test set"),
    ("own", "per_client", CLIENTS, "Models on each client's own samples"),
    ("tuned", "personalized", PERSONALIZED, "Before and after each client's fine-tuning"),
)


@dataclass
class Section:
    """A figure of the page."""

    name: str  # for ids
    title: str
    text: str  # what it shows
    figure: "Figure"


def write_page(
    runs: Sequence[Run], file: Path, title: str = "", table: str = "", notes: Sequence[str] = ()
) -> None:
    """Writes a page that needs nothing beside it; it begins with ``table``, in HTML, if given."""
    groups, footnotes = make_groups(runs), Footnotes()
    page = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    heading = title or ", ".join(dict.fromkeys(group.dataset for group in groups))
    rounds = sum(run.summary["rounds"] for run in runs)
    settings = [{"setting": k, "value": str(v)} for k, v in shared_settings(groups).items()]
    every = Table(overview(groups, footnotes), 2, "All runs")
    every = replace(every, notes=[*footnotes.lines, *notes])
    write_text(
        file,
        page.substitute(
            title=escape(heading),
            lead=f"{len(runs)} runs, {rounds:,} rounds; fedgkd_pl {fedgkd_pl.__version__}. "
            f"Accuracies are those of the global model on the test set, in percent, as mean ± "
            f"standard deviation over seeds; <i>best</i> picks its round on the test set, as the "
            f"paper ({escape(TITLE)}) does, <i>at best val</i> on the validation set; "
            f"<i>average</i> is that of the averaged model, where there is one.",
            table=table + every.to_html(),
            figures="\n".join(map(_to_html, figures(groups))),
            settings=Table.of(settings).to_html() if settings else "",
        ),
    )


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
    for curve in CURVES:
        if curves := panels_of(groups, curve.column, 100.0 if "%" in curve.label else 1.0):
            figure = curve_panels(curves, ylabel=curve.label, chosen=chosen)
            text = "By round, mean over seeds; bands: ± one std."
            yield Section(curve.name, curve.title, text, figure)
    paper: dict[str, dict[str, float]] = {}
    for group in groups:
        if group.paper:
            paper.setdefault(group.panel, {})[group.name] = numbers(group.paper)[0]
    for name, title, text, label, values in _bars(groups):
        if sum(map(len, values.values())) > 1:
            theirs = paper if name == "best" else None
            figure = bar_panels(values, xlabel=label, paper=theirs, chosen=chosen)
            yield Section(name, title, text, figure)
    for name, kind, file, title in OF_CLIENTS:
        known = [group for group in groups if (group.first.folder / file).exists()]
        for number, group in enumerate(known[:SHOWN], 1):
            text = f"{group.name}, {group.panel}, seed {group.first.seed}"
            yield Section(f"{name}{number}", title, text, plot(kind, group.first))
    if with_maps := [group for group in groups if [*group.first.folder.glob(FEATURE_MAPS)]]:
        text = "Penultimate features of test samples by class: the global model and a client's."
        yield Section("features", "Features (t-SNE)", text, features(with_maps[:SHOWN]))
    parts = {str(group.first.partition.get("counts")): group for group in reversed(groups)}
    parts.pop("None", None)
    for number, group in enumerate([*reversed(parts.values())][:SHOWN], 1):
        title = f"Who holds what: {group.panel}, seed {group.first.seed}"
        text = "Clients × classes; the area is the number of samples."
        yield Section(f"partition{number}", title, text, partition(group.first))


def _bars(groups: Sequence[Group]) -> Iterator[tuple[str, str, str, str, Panels]]:
    """Name, title, text, label and values."""
    loss = all(run.has_loss_only for group in groups for run in group.runs.values())
    text = "Best test accuracy; whiskers: ± one std."
    text += " ◆: the paper's, see the table's notes." * any(group.paper for group in groups)
    best = _panels(groups, lambda run: run.measure("best"))
    yield "best", "Best accuracy", text, "test loss" if loss else "test accuracy, %", best
    text = "Wall time of a round on the machine that ran it, evaluation included."
    yield "seconds", "Time", text, "seconds per round", _panels(groups, seconds_per_round)
    sent = _panels(groups, _megabytes)
    first, *others = sent.values()
    if all(other == first for other in others):  # other samples are as many bytes
        sent = {"": first}
    yield "bytes", "Bytes", "Sent down and up by all clients over the run.", "MB", sent


def _panels(groups: Sequence[Group], value: Callable[[Run], float | None]) -> Panels:
    panels: Panels = {}
    for group in groups:
        values = [known for run in group.runs.values() if (known := value(run)) is not None]
        if values:
            panels.setdefault(group.panel, {})[group.name] = values
    return panels


def _megabytes(run: Run) -> float:
    return float(run.summary["bytes_down"] + run.summary.get("bytes_up", 0)) / 1e6
