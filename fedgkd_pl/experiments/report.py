"""``fedgkd-pl report``: finished runs beside each other, as a table, Markdown, or one page."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import mean
from string import Template
from typing import TYPE_CHECKING, Any, Literal

import fedgkd_pl
from fedgkd_pl.errors import CALMER
from fedgkd_pl.experiments.groups import Group, make_groups
from fedgkd_pl.experiments.paper import TITLE
from fedgkd_pl.experiments.protocol import Footnotes
from fedgkd_pl.experiments.runs import Run, find_runs
from fedgkd_pl.experiments.tables import FEWER, measure_name, spread
from fedgkd_pl.storage.files import write_text
from fedgkd_pl.storage.reading import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Format = Literal["table", "md", "html"]
MEASURES = ("best", "final", "last10", "at_best_val")
SHOWN = 6  # a page shows no more charts of partitions, feature maps and clients than this
WIDE = 8  # inches; such figures take the whole width of a page
LEFT = ("method", "dataset", "data", "run")
Row = dict[str, str]


@dataclass
class Section:
    """A figure of the page.

    Attributes:
        name: for ids and files.
        title: above it.
        text: what it shows.
        figure: the figure.
    """

    name: str
    title: str
    text: str
    figure: "Figure"


def report(
    paths: Sequence[str],
    over_seeds: bool = False,
    format: Format = "table",
    output: str | None = None,
    every: bool = False,
) -> None:
    """Prints a table, or writes a page.

    Args:
        paths: run folders, or folders above them; of a table that is not over seeds, the newest
            run below each counts, otherwise all do.
        over_seeds: mean ± standard deviation over the seeds of a method.
        format: ``table`` for the terminal, ``md`` for Markdown, ``html`` for a page of its own.
        output: the file; by default Markdown is printed and the page is ``report.html`` in the
            first folder.
        every: a row of the table for every run, not only the newest below each path.
    """
    if format == "html":
        file = Path(output or Path(paths[0]) / "report.html")
        runs = find_runs(paths)
        write_page(runs, file, notes=not_shown(paths, runs, over_seeds=True))
        print(f"wrote {file}")
    elif format == "md":
        runs = find_runs(paths)
        text = to_markdown(runs, not_shown(paths, runs, over_seeds=True))
        if output is None:
            print(text, end="")
        else:
            write_text(Path(output), text)
            print(f"wrote {output}")
    else:
        runs = find_runs(paths, newest=not over_seeds and not every)
        notes = Footnotes()
        groups = make_groups(runs) if over_seeds else []
        _print(overview(groups, notes) if over_seeds else [_row(run, notes) for run in runs])
        for line in (*notes.lines, *not_shown(paths, runs, over_seeds)):
            print(line)


def not_shown(paths: Sequence[str], runs: Sequence[Run], over_seeds: bool) -> list[str]:
    """What lies below the folders and is in no row, a line each.

    Args:
        paths: folders.
        runs: those that were read.
        over_seeds: whether runs of the same settings and seed are one.
    """
    lines = []
    known = {run.folder.resolve() for run in runs}
    if over_seeds and (repeated := len(runs) - sum(len(g.runs) for g in make_groups(runs))):
        lines.append(f"{_count(repeated, 'run')} with settings and seed of another not shown")
    for path in dict.fromkeys(paths):
        finished = {file.parent.resolve() for file in Path(path).rglob("summary.json")}
        if older := len(finished - known):
            lines.append(f"{_count(older, 'older run')} of {path} not shown: --all")
        begun = {file.parent.resolve() for file in Path(path).rglob("version_*/config.yaml")}
        if rest := len(begun - finished):
            lines.append(f"{_count(rest, 'unfinished run')} of {path} not shown")
    return lines


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number > 1)}"


def overview(groups: Sequence[Group], notes: Footnotes | None = None) -> list[Row]:
    """A row for every group: accuracies over the seeds, the paper's, bytes, seconds.

    Args:
        groups: named.
        notes: gets what a reader must know, marked in the rows.
    """
    notes = notes or Footnotes()
    rows = []
    for group in sorted(groups, key=lambda group: group.panel):
        summaries = [run.summary for run in group.runs.values()]
        seconds = [s["wall_seconds"] / s["rounds"] for s in summaries if s.get("wall_seconds")]
        rows.append(
            {
                "method": group.name + notes.mark(group.unknown) + notes.mark(group.diverged),
                "data": group.panel,
                "rounds": _range([summary["rounds"] for summary in summaries]),
                "seeds": ", ".join(map(str, sorted(group.runs))),
                **{measure_name(name): _over_seeds(group, name, notes) for name in MEASURES},
                "paper's best": f"{group.paper[0]:.2f}{notes.mark(group.differs)}"
                if group.paper
                else "",
                "MB down": f"{mean(s['bytes_down'] for s in summaries) / 1e6:.1f}",
                "s/round": f"{mean(seconds):.1f}" if seconds else "",
            }
        )
    for name in ("paper's best", "s/round"):
        if not any(row[name] for row in rows):
            for row in rows:
                del row[name]
    return rows


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}–{high}"


def _over_seeds(group: Group, measure: str, notes: Footnotes) -> str:
    """Mean ± standard deviation; where some of the seeds have no such number, of how many."""
    values = group.values(measure)
    part = f" ({len(values)} of {len(group.runs)})" if 0 < len(values) < len(group.runs) else ""
    return spread(values) + part + notes.mark(_fewer(measure, list(group.runs.values())))


def _fewer(measure: str, runs: Sequence[Run]) -> str:
    short = any(run.summary["rounds"] < 10 and run.measure(measure) is not None for run in runs)
    return FEWER if measure == "last10" and short else ""


def to_markdown(runs: Sequence[Run], notes: Sequence[str] = ()) -> str:
    """The overview, and the settings that all runs share, in Markdown.

    Args:
        runs: finished ones.
        notes: to put below the table.
    """
    groups = make_groups(runs)
    footnotes = Footnotes()
    rows = overview(groups, footnotes)
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(v.replace("|", r"\|") for v in row.values()) + " |" for row in rows]
    if told := [*footnotes.lines, *notes]:
        lines += ["", *(f"- {line}" for line in told)]
    shared = _shared(groups)
    if shared:
        lines += ["", "Settings that all share:", ""]
        lines += [f"- `{key}`: {value}" for key, value in shared.items()]
    return "\n".join(lines) + "\n"


def write_page(
    runs: Sequence[Run], file: Path, title: str = "", table: str = "", notes: Sequence[str] = ()
) -> None:
    """Writes a page that needs nothing beside it.

    Args:
        runs: finished ones.
        file: where to.
        title: of the page.
        table: a table in HTML to begin with, such as a study's.
        notes: to put below the table of all.
    """
    from fedgkd_pl.plots.figures import to_svg

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
    settings = _shared(groups)
    footnotes = Footnotes()
    rows = html_table(overview(groups, footnotes))
    below = "".join(f"<li>{escape(line)}</li>" for line in (*footnotes.lines, *notes))
    write_text(
        file,
        page.substitute(
            title=escape(heading),
            lead=f"{len(runs)} runs, {rounds:,} rounds; fedgkd_pl {fedgkd_pl.__version__}. "
            f"Accuracies are those of the global model on the test set, in percent, as mean ± "
            f"standard deviation over seeds; <i>best</i> picks its round on the test set, as the "
            f"paper ({escape(TITLE)}) does, <i>at best val</i> on the validation set.",
            table=table + rows + (f"<ul>{below}</ul>" if below else ""),
            figures="\n".join(sections),
            settings=html_table([{"setting": k, "value": str(v)} for k, v in settings.items()]),
        ),
    )


def figures(groups: Sequence[Group]) -> Iterator[Section]:
    """Every figure that the runs have data for.

    Args:
        groups: named.
    """
    from fedgkd_pl.plots import figures as draw
    from fedgkd_pl.plots.partition import bubble_chart

    single = len({group.panel for group in groups}) == 1
    for column, name, title, text in (
        ("test/acc", "curves", "Learning curves", "Test accuracy by round; bands: ± one std."),
        ("client/loss_mean", "loss", "Local loss", "Mean over the clients of a round."),
        ("client/kd_mean", "kd", "Distillation", "How far clients are from their teacher."),
        ("drift/norm_mean", "drift", "Client drift", "‖w_k − w_t‖, mean over a round's clients."),
        ("drift/cosine", "cosine", "Agreement of updates", "Mean cosine between two updates."),
        ("local/acc_mean", "local", "Local models", "Clients' models on the global test set."),
        ("teacher/agreement_mean", "agreement", "Agreement with the teacher", "Same top class."),
        ("forgetting/mean", "forgetting", "Forgetting", "Best accuracy of a class, less now's."),
    ):
        percent = 100.0 if name in ("curves", "local", "agreement", "forgetting") else 1.0
        curves = panels_of(groups, column, percent)
        if curves:
            label = "%" if percent == 100 else column
            label = "test accuracy, %" if name == "curves" else label
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
                bubble_chart(partition["counts"]),
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
    from fedgkd_pl.experiments import draw

    firsts = [(group, next(iter(group.runs.values()))) for group in groups]
    with_clients = [each for each in firsts if each[1].table("local_models.csv")]
    for number, (group, run) in enumerate(with_clients[:SHOWN], 1):
        yield Section(
            f"clients{number}",
            f"Each client's model: {group.name}, {group.panel}, seed {run.summary['seed']}",
            "Accuracy on the global test set after local training.",
            draw.clients(run),
        )
    with_maps = [group for group, run in firsts if [*run.folder.glob("features-round*.npz")]]
    if with_maps:
        yield Section(
            "features",
            "Features (t-SNE)",
            "Penultimate features of test samples by class: the global model and a client's.",
            draw.features(with_maps[:SHOWN]),
        )


def panels_of(
    groups: Sequence[Group], column: str, factor: float = 1.0
) -> dict[str, dict[str, list[dict[int, float]]]]:
    """A column of ``metrics.csv`` by data, method and seed, for the groups that have it.

    Args:
        groups: named.
        column: its name.
        factor: on the values.
    """
    panels: dict[str, dict[str, list[dict[int, float]]]] = {}
    for group in sorted(groups, key=lambda group: group.panel):
        seeds = [run.metrics.get(column, {}) for run in group.runs.values()]
        known = [{number: factor * value for number, value in s.items()} for s in seeds if s]
        if known:
            panels.setdefault(group.panel, {})[group.name] = known
    return panels


def _shared(groups: Sequence[Group]) -> dict[str, Any]:
    """The settings that all groups have alike."""
    first, *others = [group.settings for group in groups]
    return {
        printable(key.replace("init_args.", "")): printable(value, 1000)
        for key, value in first.items()
        if value is not None and all(other.get(key) == value for other in others)
    }


def html_table(rows: Sequence[Row]) -> str:
    """A table in HTML; numbers stand to the right.

    Args:
        rows: with the same keys.
    """
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row.values()) + "</tr>"
        for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class=scroll>{table}</div>"


def _row(run: Run, notes: Footnotes) -> Row:
    since = run.summary.get("diverged_round")
    mark = notes.mark(f"clients diverged from round {since} on; {CALMER}" if since else "")
    return {
        "method": f"{run.summary['method']}{mark}",
        **{key: str(run.summary[key]) for key in ("dataset", "seed", "rounds")},
        **{
            measure_name(name): spread([] if (v := run.measure(name)) is None else [v])
            + notes.mark(_fewer(name, [run]))
            for name in MEASURES
        },
        "MB down": f"{run.summary['bytes_down'] / 1e6:.1f}",
        "run": str(run.folder),
    }


def _print(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.markup import escape as plain
    from rich.table import Table

    table = Table(title="test accuracy, %")
    for name in rows[0]:
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=name != "run")
    for row in rows:
        table.add_row(*map(plain, row.values()))
    console = Console()
    console.print(table) if console.is_terminal else Console(width=140).print(table)
