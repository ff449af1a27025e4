"""A page with the tables and every figure of some runs, which needs nothing beside it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

import fedgkd_pl
from fedgkd_pl.experiments.draw import (
    clients,
    features,
    fine_tuned,
    own_models,
    panels_of,
    personalized,
)
from fedgkd_pl.experiments.groups import Group, make_groups, shared_settings
from fedgkd_pl.experiments.overview import overview
from fedgkd_pl.experiments.paper import TITLE
from fedgkd_pl.experiments.protocol import Footnotes
from fedgkd_pl.experiments.runs import Run
from fedgkd_pl.experiments.table import Table
from fedgkd_pl.runs.folder import CLIENTS, FEATURE_MAPS, LOCAL_MODELS, PERSONALIZED
from fedgkd_pl.storage.files import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Panels = dict[str, dict[str, list[float]]]  # by data and line, a value a seed
Paper = Mapping[str, Mapping[str, float]]
Bars = tuple[str, str, str, str, Panels, Paper]  # name, title, text, label, values, paper's
SHOWN = 6  # a page shows no more charts of partitions, feature maps and clients than this
WIDE = 8  # inches; such figures take the whole width of a page
LEAST = 0.6  # of its size; on a narrow screen a figure is made no smaller, and scrolls


class Curve(NamedTuple):
    """A column of ``metrics.csv`` by round."""

    column: str
    name: str
    title: str
    text: str
    label: str  # of the axis; shares of 1 are shown in %


CURVES = (
    Curve(
        *("test/acc", "curves", "Learning curves"),
        *("Test accuracy by round; bands: ± one std.", "test accuracy, %"),
    ),
    Curve(
        *("average/acc", "average", "Averaged model"),
        *("Test accuracy of the mean of past models.", "test accuracy, %"),
    ),
    Curve("test/loss", "test_loss", "Test loss", "Of the global model, by round.", "test loss"),
    Curve(
        *("client/loss_mean", "loss", "Local loss"),
        *("Mean over the clients of a round.", "clients' training loss"),
    ),
    Curve(
        *("client/kd_mean", "kd", "Distillation"),
        *("How far clients are from their teacher.", "clients' distillation loss"),
    ),
    Curve(
        *("drift/norm_mean", "drift", "Client drift"),
        *("‖w_k − w_t‖, mean over a round's clients.", "distance from global"),
    ),
    Curve(
        *("drift/cosine", "cosine", "Agreement of updates"),
        *("Mean cosine between two updates.", "cosine of two updates"),
    ),
    Curve(
        *("local/acc_mean", "local", "Local models"),
        *("Clients' models on the global test set.", "clients' test accuracy, %"),
    ),
    Curve(
        *("clients/global_acc_mean", "own", "Clients' own samples"),
        *("Global model, mean of clients.", "accuracy on own samples, %"),
    ),
    Curve(
        *("clients/global_acc_worst10", "worst", "Worst tenth of clients"),
        *("Global model on their own samples.", "accuracy on own samples, %"),
    ),
    Curve(
        *("teacher/agreement_mean", "agreement", "Agreement with the teacher"),
        *("Samples that client and teacher give the same class.", "same class, %"),
    ),
    Curve(
        *("forgetting/mean", "forgetting", "Forgetting"),
        *(
            "Best accuracy of a class so far, less now's; mean of classes.",
            "accuracy lost, % points",
        ),
    ),
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
    from fedgkd_pl.plots.style import to_svg

    groups = make_groups(runs)
    sections = []
    for section in figures(groups):
        svg = to_svg(section.figure, f"figure-{section.name}")
        width = section.figure.get_figwidth()
        wide = " class=wide" if width > WIDE else ""
        sections.append(
            f"<section{wide}><h2>{escape(section.title)}</h2><p>{escape(section.text)}</p>"
            f'<figure data-name="{section.name}" style="--least: {LEAST * width:.2f}in">{svg}'
            "</figure></section>"
        )
    page = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    heading = title or ", ".join(dict.fromkeys(group.dataset for group in groups))
    rounds = sum(run.summary["rounds"] for run in runs)
    settings = [{"setting": k, "value": str(v)} for k, v in shared_settings(groups).items()]
    footnotes = Footnotes()
    rows = replace(Table.of(overview(groups, footnotes)), left=range(2)).to_html()
    averaged = any(run.average for run in runs)
    below = "".join(f"<li>{escape(line)}</li>" for line in (*footnotes.lines, *notes))
    write_text(
        file,
        page.substitute(
            title=escape(heading),
            lead=f"{len(runs)} runs, {rounds:,} rounds; fedgkd_pl {fedgkd_pl.__version__}. "
            f"Accuracies are those of the global model on the test set, in percent, as mean ± "
            f"standard deviation over seeds; <i>best</i> picks its round on the test set, as the "
            f"paper ({escape(TITLE)}) does, <i>at best val</i> on the validation set."
            + (" <i>average</i> is that of the averaged model." if averaged else ""),
            table=f"{table}<section><h2>All runs</h2>{rows}<ul>{below}</ul></section>",
            figures="\n".join(sections),
            settings=Table.of(settings).to_html() if settings else "",
        ),
    )


def figures(groups: Sequence[Group]) -> Iterator[Section]:
    """Every figure that the runs have data for; a method has one colour in all of them."""
    from fedgkd_pl.plots.figures import bar_panels, curve_panels
    from fedgkd_pl.plots.partition import bubble_chart
    from fedgkd_pl.plots.style import colours

    chosen = colours(dict.fromkeys(group.name for group in groups))
    for curve in CURVES:
        if curves := panels_of(groups, curve.column, 100.0 if "%" in curve.label else 1.0):
            figure = curve_panels(curves, ylabel=curve.label, chosen=chosen)
            yield Section(curve.name, curve.title, curve.text, figure)
    for name, title, text, label, values, paper in (_best(groups), *_costs(groups)):
        if sum(map(len, values.values())) > 1:
            figure = bar_panels(values, xlabel=label, paper=paper, chosen=chosen)
            yield Section(name, title, text, figure)
    yield from _clients(groups)
    shown: list[Any] = []
    for group in groups:
        partition = next(iter(group.runs.values())).partition
        if "counts" in partition and partition["counts"] not in shown and len(shown) < SHOWN:
            shown.append(partition["counts"])
            seed = next(iter(group.runs))
            yield Section(
                f"partition{len(shown)}",
                f"Who holds what: {group.panel}, seed {seed}",
                "Clients × classes; the area is the number of samples.",
                bubble_chart(partition["counts"], names=partition["class_names"]),
            )


def _best(groups: Sequence[Group]) -> Bars:
    values: Panels = {}
    paper: dict[str, dict[str, float]] = {}
    for group in groups:
        if best := group.values("best"):
            values.setdefault(group.panel, {})[group.name] = best
            if group.paper:
                paper.setdefault(group.panel, {})[group.name] = group.paper[0]
    differ = any(group.differs for group in groups)
    other = ", of another protocol where the table marks it" if differ else ""
    text = "Best test accuracy; whiskers: ± one std." + f" ◆: the paper's{other}." * bool(paper)
    loss = all(run.has_loss_only for group in groups for run in group.runs.values())
    label = "test loss" if loss else "test accuracy, %"
    return "best", "Best accuracy", text, label, values, paper


def _costs(groups: Sequence[Group]) -> Iterator[Bars]:
    sent: Panels = {}
    seconds: Panels = {}
    for group in groups:
        found = [run.summary for run in group.runs.values()]
        sent.setdefault(group.panel, {})[group.name] = [
            (each["bytes_down"] + each.get("bytes_up", 0)) / 1e6 for each in found
        ]
        if all(each.get("wall_seconds") for each in found):
            per_round = [each["wall_seconds"] / each["rounds"] for each in found]
            seconds.setdefault(group.panel, {})[group.name] = per_round
    text = "Wall time of a round on the machine that ran it, evaluation included."
    yield "seconds", "Time", text, "seconds per round", seconds, {}
    first, *others = sent.values()
    if all(other == first for other in others):  # other samples are as many bytes
        sent = {"": first}
    yield "bytes", "Bytes", "Sent down and up by all clients over the run.", "MB", sent, {}


def _clients(groups: Sequence[Group]) -> Iterator[Section]:
    firsts = [(group, next(iter(group.runs.values()))) for group in groups]
    with_clients = [each for each in firsts if each[1].table(LOCAL_MODELS)]
    for number, (group, run) in enumerate(with_clients[:SHOWN], 1):
        yield Section(
            f"clients{number}",
            f"Each client's model: {group.name}, {group.panel}, seed {run.summary['seed']}",
            "Accuracy on the global test set after local training.",
            clients(run),
        )
    for name, file, title, text, make in (
        ("own", CLIENTS, "For each client", "Accuracy on the client's own samples.", own_models),
        (
            *("tuned", PERSONALIZED, "Personalized", "Before and after each client's fine-tuning."),
            lambda run: personalized(fine_tuned(run)),
        ),
    ):
        with_file = [each for each in firsts if each[1].table(file)]
        for number, (group, run) in enumerate(with_file[:SHOWN], 1):
            where = f"{group.name}, {group.panel}, seed {run.summary['seed']}"
            yield Section(f"{name}{number}", f"{title}: {where}", text, make(run))
    with_maps = [group for group, run in firsts if [*run.folder.glob(FEATURE_MAPS)]]
    if with_maps:
        yield Section(
            "features",
            "Features (t-SNE)",
            "Penultimate features of test samples by class: the global model and a client's.",
            features(with_maps[:SHOWN]),
        )
