"""Runs and their seeds as tables: those of a study, beside the paper's, and overviews."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import product
from statistics import mean, stdev

import pandas as pd
from fedgkd_pl.errors import CALMER
from fedgkd_pl.experiments.paper import differences, joined, numbers, paper_row
from fedgkd_pl.experiments.runs import OF_AVERAGE, Group, Run, make_groups, measures_of, symbol
from fedgkd_pl.experiments.study import Cell, Study
from fedgkd_pl.runs.folder import CONFIG

Labels = dict[str, str]
Results = Sequence[tuple[Cell, Run]]
NAMES = {"last10": "last 10", "at_best_val": "at best val"}
NAMES |= {"task_acc": "tasks", "task_forgetting": "forgetting", "task_transfer": "transfer"}
ENOUGH = 3  # seeds for a test of significance
UNKNOWN = f"settings not known (no {CONFIG}): not averaged with others"
LOSSES = "the test loss, not in %: what it learns has no accuracy"
MARKS = "†‡§¶‖"
TEX = str.maketrans(
    {
        **{letter: f"\\{letter}" for letter in "_%&#{}$"},
        **{"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"},
        **{"α": r"$\alpha$", "γ": r"$\gamma$", "λ": r"$\lambda$", "μ": r"$\mu$", "τ": r"$\tau$"},
    }
)


class Footnotes:
    """Remarks below a table; the same remark has the same mark."""

    def __init__(self) -> None:
        self._marks: dict[str, str] = {}

    def mark(self, remark: str) -> str:
        """The mark to put after a number, with a space before; empty without a remark."""
        if not remark:
            return ""
        times, which = divmod(len(self._marks), len(MARKS))
        return " " + self._marks.setdefault(remark, MARKS[which] * (times + 1))

    @property
    def lines(self) -> list[str]:
        """The marks and what they say."""
        return [f"{mark} {remark}" for remark, mark in self._marks.items()]


@dataclass(frozen=True, repr=False)
class Table:
    """A DataFrame of texts, and what is said of it.

    Attributes:
        left: how many columns are aligned to the left.
        unit: of the numbers, after the title.
        ranks: by row and column of the frame: 1 is shown bold, 2 underlined.
    """

    frame: pd.DataFrame
    left: int
    title: str = ""
    unit: str = ""
    notes: Sequence[str] = ()
    ranks: Mapping[tuple[int, str], int] = field(default_factory=dict)

    def records(self) -> list[dict[Hashable, str]]:
        """A mapping for every row."""
        return list(self.frame.to_dict("records"))

    def to_text(self) -> str:
        """For a terminal: the best between stars, the second between underscores."""
        texts = self._marked(str, "*{}*", "_{}_")
        for number in range(self.left):
            column = texts.iloc[:, number]
            texts.isetitem(number, column.str.ljust(max(map(len, [str(column.name), *column]))))
        title = ", ".join(filter(None, (self.title, self.unit)))
        shown = texts.to_string(index=False, justify="left")
        return "\n".join([*filter(None, [title]), shown, *self.notes])

    __repr__ = to_text

    def to_markdown(self) -> str:
        """The best bold, the second underlined."""
        texts = self._marked(lambda text: text.replace("|", r"\|"), "**{}**", "<u>{}</u>")
        sides = ["---"] * self.left + ["---:"] * (texts.shape[1] - self.left)
        lines = [f"| {' | '.join(row)} |" for row in (texts.columns, *texts.to_numpy())]
        lines.insert(1, f"|{'|'.join(sides)}|")
        title = [f"**{self.title}**, {self.unit}", ""] if self.title else []
        notes = ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join([*title, *lines, *notes]) + "\n"

    def to_latex(self) -> str:
        """With booktabs; the best bold, the second underlined."""
        texts = self._marked(_tex, r"\textbf{{{}}}", r"\underline{{{}}}")
        sides = "l" * self.left + "r" * (texts.shape[1] - self.left)
        caption = f"{_tex(self.title)}, {_tex(self.unit)}"
        table: str = texts.to_latex(index=False, escape=False, column_format=sides, caption=caption)
        notes = "".join(f"\n\\par\\small {_tex(note)}" for note in self.notes)
        table = table.replace(r"\end{tabular}", r"\end{tabular}" + notes)
        return "% needs \\usepackage{booktabs}\n" + table

    def to_html(self) -> str:
        """For a page; with a title, a section of it."""
        texts = self._marked(escape, "<b>{}</b>", "<u>{}</u>")
        left = f"left{self.left}"
        table = texts.to_html(index=False, escape=False, border=0, classes=left)
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        shown = f"<div class=scroll>{table}</div>" + (f"<ul>{notes}</ul>" if notes else "")
        heading = f"<h2>{escape(self.title)}</h2>"
        return f"<section>{heading}{shown}</section>" if self.title else shown

    _repr_html_ = to_html  # for a notebook

    def _marked(self, plain: Callable[[str], str], best: str, second: str) -> pd.DataFrame:
        """The texts in a format's letters; the paper's number, in brackets, is not marked."""
        texts = self.frame.map(plain)
        for (row, column), rank in self.ranks.items():
            ours, bracket, paper = texts.at[row, column].partition(" (")
            texts.at[row, column] = (best, second)[rank - 1].format(ours) + bracket + paper
        return texts.rename(columns=plain)


def _tex(text: str) -> str:
    return text.translate(TEX)


@dataclass
class Entry:
    """A number of a study's table."""

    labels: Labels  # by axis, and of ``measure``
    runs: dict[int, Run]  # those that have it, by seed
    values: dict[int, float]  # in percent, by seed
    paper: dict[str, str] | None  # the row of paper.csv
    failed: int  # seeds that have no run because it failed
    rank: int = 0  # 1 for the best of those compared, 2 for the second, 0 for the others

    def text(self, seeds: int, notes: Footnotes) -> str | None:
        """Mean ± standard deviation, the paper's in brackets; None where nothing is known."""
        if not (self.values or self.paper or self.failed):
            return None
        measure = self.labels["measure"]
        lost = self.failed and not self.values
        text = "failed" if lost else over_seeds(self.runs, measure, seeds, notes)
        text += notes.mark(diverged(self.runs))
        if self.paper is None:
            return text
        of_paper, std = numbers(self.paper)
        differs = joined(differences(self.paper, run.facts, measure) for run in self.runs.values())
        deviation = f" ± {std:.2f}" if std is not None else ""
        return f"{text} ({of_paper:.2f}{deviation}{notes.mark(differs)})"


def every_run(study: Study, results: Results) -> pd.DataFrame:
    """A row per run: labels, seed, all measures in percent, bytes, the folder."""
    measures = list(dict.fromkeys([*measures_of(run for _, run in results), *study.measures]))
    columns = [*study.axes, "seed", "rounds", *measures, "bytes_down", "bytes_up", "cell"]
    rows = [
        run.summary
        | cell.labels
        | {"seed": cell.seed, "cell": cell.name}
        | {measure: run.measure(measure) for measure in measures}
        for cell, run in results
    ]
    return pd.DataFrame(rows, columns=columns).astype({"bytes_up": "Int64"})


def make_tables(study: Study, results: Results, failed: Collection[str] = ()) -> list[Table]:
    """The tables of a study: one, or one per measure where it is neither row nor column.

    Args:
        failed: the names of the cells that were tried and failed.
    """
    title = study.title or study.name
    if "measure" in (*study.rows, *study.columns):
        return [_make_table(study, results, failed, study.measures, title)]
    return [
        _make_table(study, results, failed, [measure], f"{title}: {measure_name(measure)}")
        for measure in study.measures
    ]


def _make_table(
    study: Study, results: Results, failed: Collection[str], measures: Sequence[str], title: str
) -> Table:
    entries = _entries(study, results, failed, measures)
    leads, footnotes = _rank(study, entries), Footnotes()
    texts: dict[tuple[str, ...], dict[str, str | None]] = {}
    ranks = {}
    for entry in entries:
        row = texts.setdefault(tuple(entry.labels[axis] for axis in study.rows), {})
        name = _name(entry.labels, study.columns)
        row[name] = entry.text(len(study.seeds), footnotes)
        if entry.rank:
            ranks[len(texts) - 1, name] = entry.rank
    # rows and columns that were not tried and that the paper has no number for are left out
    body = pd.DataFrame(list(texts.values())).dropna(how="all").dropna(axis=1, how="all")
    heads = [[measure_name(label) for label in row] for row in texts]
    frame = pd.DataFrame(heads, columns=[*map(symbol, study.rows)]).join(body, how="right")
    lost = {_name(entry.labels, study.axes): entry.failed for entry in entries if entry.failed}
    of = _seeds(len(study.seeds))
    failures = [f"{name}: failed in {number} of {of}" for name, number in lost.items()]
    papers = ["In brackets: the paper's."] * any(entry.paper for entry in entries)
    lengths = sorted({run.rounds_asked for _, run in results})
    shown = ", ".join(map(str, lengths))
    unequal = [f"the runs have different numbers of rounds: {shown}"] * (len(lengths) > 1)
    return Table(
        frame.fillna("-"),
        left=len(study.rows),
        title=title,
        unit="test accuracy in %",
        notes=[*papers, *footnotes.lines, *failures, *unequal, *leads],
        ranks=ranks,
    )


def _entries(
    study: Study, results: Results, failed: Collection[str], measures: Sequence[str]
) -> list[Entry]:
    """Row by row: numbers by size, anything else as the study has it."""
    done: dict[tuple[str, ...], dict[int, Run]] = defaultdict(dict)
    for cell, run in results:
        done[tuple(cell.labels.values())][cell.seed] = run
    gone = {*failed} - {cell.name for cell, _ in results}
    lost = Counter(tuple(cell.labels.values()) for cell in study.cells() if cell.name in gone)
    names = {run.dataset for _, run in results}
    of_data = {"dataset": names.pop()} if len(names) == 1 else {}  # where that is no axis
    order = {axis: in_order(labels) for axis, labels in study.axes.items()}
    order["measure"] = list(measures)
    layout = dict.fromkeys([*study.rows, *study.columns, "measure"])
    entries = []
    for chosen in product(*(order[axis] for axis in layout)):
        labels = dict(zip(layout, chosen, strict=True))
        key = tuple(labels[axis] for axis in study.axes)
        values = values_of(done[key], labels["measure"])
        runs = {seed: done[key][seed] for seed in values}
        row = paper_row(study.paper, of_data | labels, labels["measure"])
        entries.append(Entry(labels, runs, values, row, lost[key]))
    return entries


def values_of(runs: Mapping[int, Run], measure: str) -> dict[int, float]:
    """A measure by seed, of the runs that have it."""
    found = {seed: run.measure(measure) for seed, run in runs.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def in_order(labels: Collection[str]) -> list[str]:
    """Numbers by size, as in the figures; anything else as it is."""
    try:
        return sorted(labels, key=float)
    except ValueError:
        return list(labels)


def measure_name(name: str) -> str:
    """How a measure is called in a table."""
    if name.startswith(OF_AVERAGE):
        return f"average {measure_name(name.removeprefix(OF_AVERAGE))}"
    number = name.removeprefix("round")
    return f"round {number}" if number != name and number.isdigit() else NAMES.get(name, name)


def _name(labels: Labels, axes: Iterable[str]) -> str:
    shown = (
        measure_name(labels[axis])
        if axis in ("method", "measure")
        else f"{symbol(axis)} {labels[axis]}"
        for axis in axes
    )
    return ", ".join(shown)


def _rank(study: Study, entries: Sequence[Entry]) -> list[str]:
    """Ranks entries that differ in one axis only; lines on whether the best's lead stands out."""
    groups: dict[str, list[Entry]] = defaultdict(list)
    several = [axis for axis in study.axes if axis != study.compare and len(study.axes[axis]) > 1]
    for entry in entries:
        if entry.values and entry.labels["measure"] != "task_forgetting":  # less is better
            groups[_name(entry.labels, [*several, "measure"])].append(entry)
    lines = []
    for where, group in groups.items():
        if len({frozenset(entry.values) for entry in group}) > 1:
            lines.append(f"{where}: no best is marked, as not all have the same seeds")
        elif len(group) > 1:
            means = pd.Series([mean(entry.values.values()) for entry in group])
            ranks = means.round(2).rank(method="min", ascending=False)
            for entry, rank in zip(group, ranks, strict=True):
                entry.rank = int(rank) if rank <= 2 else 0
            best, second = (group[number] for number in means.nlargest(2).index)
            names = [entry.labels[study.compare] for entry in (best, second)]
            lines.append(f"{where}: {lead(names[0], best.values, names[1], second.values)}")
    return lines


def lead(first: str, best: Mapping[int, float], second: str, other: Mapping[int, float]) -> str:
    """By how much one is ahead of another over the same seeds, and if that is much."""
    # rounded: the last bits differ, and prove nothing
    ahead = [round(value - other[seed], 6) for seed, value in best.items()]
    text = f"{first} is ahead of {second} by {spread(ahead)} points over {_seeds(len(best))}"
    if len(best) < ENOUGH:
        return f"{text}; a test needs {ENOUGH}"
    if len({*ahead}) == 1:
        return f"{text}; without any spread there is no test"
    from scipy.stats import ttest_1samp

    p = float(ttest_1samp(ahead, 0).pvalue)
    shown = f"p = {p:.3f}" if p >= 0.001 else "p < 0.001"
    verdict = "significant" if p < 0.05 else "not significant"
    return f"{text}, paired t-test {shown}: {verdict} at 5 %"


def overview(groups: Sequence[Group], notes: Footnotes) -> pd.DataFrame:
    """A row for every group: accuracies over the seeds, the paper's, bytes, seconds; adds notes."""
    measures = measures_of(run for group in groups for run in group.runs.values())
    rows = []
    for group in groups:
        runs = list(group.runs.values())
        rounds = sorted({run.summary["rounds"] for run in runs})
        seconds = [known for run in runs if (known := run.seconds_per_round) is not None]
        paper = ""
        if row := group.paper:
            differs = joined(differences(row, run.facts, "best") for run in runs)
            paper = f"{numbers(row)[0]:.2f}{notes.mark(differs)}"
        losses = LOSSES if any(run.has_loss_only for run in runs) else ""
        remarks = ("" if group.settings else UNKNOWN, diverged(group.runs), losses)
        rows.append(
            {
                "method": group.name + "".join(map(notes.mark, remarks)),
                "data": group.panel,
                "rounds": "–".join(map(str, dict.fromkeys([rounds[0], rounds[-1]]))),
                "seeds": ", ".join(map(str, sorted(group.runs))),
                **{measure_name(m): over_seeds(group.runs, m, len(runs), notes) for m in measures},
                "paper's best": paper,
                "MB down": f"{mean(run.summary['bytes_down'] for run in runs) / 1e6:.1f}",
                "s/round": f"{mean(seconds):.1f}" if seconds else "",
            }
        )
    table = pd.DataFrame(rows)
    return table.loc[:, (table != "").any()]


def each_run(runs: Sequence[Run], notes: Footnotes) -> pd.DataFrame:
    """A row for every run; adds notes."""
    groups = [group for run in runs for group in make_groups([run])]
    return overview(groups, notes).assign(run=[str(run.folder) for run in runs])


def over_seeds(runs: Mapping[int, Run], measure: str, seeds: int, notes: Footnotes) -> str:
    """Mean ± standard deviation of some percentages; adds notes where it is of less than asked."""
    values = values_of(runs, measure)
    text = spread(list(values.values()))
    if 0 < len(values) < seeds:
        text += notes.mark(f"of seed{'s' * (len(values) > 1)} {', '.join(map(str, values))} only")
    return text


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation (of a sample) of some percentages."""
    if not values:
        return "-"
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def diverged(runs: Mapping[int, Run]) -> str:
    """Which seeds' clients diverged, and when; empty where none did."""
    rounds = {seed: run.summary.get("diverged_round") for seed, run in sorted(runs.items())}
    texts = [f"seed {seed} from round {number} on" for seed, number in rounds.items() if number]
    return f"clients diverged: {', '.join(texts)}; {CALMER}" if texts else ""


def _seeds(number: int) -> str:
    return f"{number} seed{'s' * (number > 1)}"
