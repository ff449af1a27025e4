"""A page with the tables and every figure of some runs, which needs nothing beside it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

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

SHOWN = 6  # a page shows no more charts of partitions, feature maps and clients than this
WIDE = 8  # inches; such figures take the whole width of a page


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
        wide = " class=wide" if section.figure.get_figwidth() > WIDE else ""
        sections.append(
            f"<section{wide}><h2>{escape(section.title)}</h2><p>{escape(section.text)}</p>"
            f'<figure data-name="{section.name}">{svg}</figure></section>'
        )
    page = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    heading = title or ", ".join(dict.fromkeys(group.dataset for group in groups))
    rounds = sum(run.summary["rounds"] for run in runs)
    settings = [{"setting": k, "value": str(v)} for k, v in shared_settings(groups).items()]
    footnotes = Footnotes()
    rows = Table.of(overview(groups, footnotes)).to_html()
    below = "".join(f"<li>{escape(line)}</li>" for line in (*footnotes.lines, *notes))
    write_text(
        file,
        page.substitute(
            title=escape(heading),
            lead=f"{len(runs)} runs, {rounds:,} rounds; fedgkd_pl {fedgkd_pl.__version__}. "
            f"Accuracies are those of the global model on the test set, in percent, as mean ± "
            f"standard deviation over seeds; <i>best</i> picks its round on the test set, as the "
            f"paper ({escape(TITLE)}) does, <i>at best val</i> on the validation set. "
            f"<i>average</i> is that of the averaged model.",
            table=table + rows + (f"<ul>{below}</ul>" if below else ""),
            figures="\n".join(sections),
            settings=Table.of(settings).to_html() if settings else "",
        ),
    )


def figures(groups: Sequence[Group]) -> Iterator[Section]:
    """Every figure that the runs have data for."""
    from fedgkd_pl.plots import figures as draw
    from fedgkd_pl.plots.partition import bubble_chart

    single = len({group.panel for group in groups}) == 1
    for column, name, title, text in (
        ("test/acc", "curves", "Learning curves", "Test accuracy by round; bands: ± one std."),
        ("average/acc", "average", "Averaged model", "Test accuracy of the mean of past models."),
        ("test/loss", "test_loss", "Test loss", "Of the global model, by round."),
        ("client/loss_mean", "loss", "Local loss", "Mean over the clients of a round."),
        ("client/kd_mean", "kd", "Distillation", "How far clients are from their teacher."),
        ("drift/norm_mean", "drift", "Client drift", "‖w_k − w_t‖, mean over a round's clients."),
        ("drift/cosine", "cosine", "Agreement of updates", "Mean cosine between two updates."),
        ("local/acc_mean", "local", "Local models", "Clients' models on the global test set."),
        (
            "clients/global_acc_mean",
            "own",
            "Clients' own samples",
            "Global model, mean of clients.",
        ),
        ("clients/global_acc_worst10", "worst", "Worst tenth of clients", "The same, of these."),
        ("teacher/agreement_mean", "agreement", "Agreement with the teacher", "Same top class."),
        ("forgetting/mean", "forgetting", "Forgetting", "Best accuracy of a class, less now's."),
    ):
        accuracy = name in ("curves", "average")
        shares = ("local", "own", "worst", "agreement", "forgetting")
        percent = 100.0 if accuracy or name in shares else 1.0
        curves = panels_of(groups, column, percent)
        if curves:
            label = "%" if percent == 100 else column
            label = "test accuracy, %" if accuracy else label
            yield Section(name, title, text, draw.curve_panels(curves, ylabel=label))
    best = {g.name: g.values("best") for g in groups if g.values("best")}
    if single and len(best) > 1:
        paper = {g.name: g.paper[0] for g in groups if g.paper}
        differ = any(group.differs for group in groups)
        other = ", of another protocol where the table marks it" if differ else ""
        text = "Best test accuracy; whiskers: ± one std." + f" ◆: the paper's{other}." * bool(paper)
        yield Section("best", "Best accuracy", text, draw.bars(best, paper=paper or None))
    yield from _cost(groups, draw.bars)
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


def _cost(groups: Sequence[Group], bars: Callable[..., "Figure"]) -> Iterator[Section]:
    sent = {
        g.name: [
            (r.summary["bytes_down"] + r.summary.get("bytes_up", 0)) / 1e6 for r in g.runs.values()
        ]
        for g in groups
    }
    if len({g.panel for g in groups}) == 1 and len(sent) > 1:
        text = "Sent down and up by all clients over the run."
        yield Section("bytes", "Bytes", text, bars(sent, xlabel="MB"))
        seconds = {
            g.name: [r.summary["wall_seconds"] / r.summary["rounds"] for r in g.runs.values()]
            for g in groups
            if all(r.summary.get("wall_seconds") for r in g.runs.values())
        }
        if seconds:
            text = "Wall time of a round on the machine that ran it, evaluation included."
            yield Section("seconds", "Time", text, bars(seconds, xlabel="seconds per round"))


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
