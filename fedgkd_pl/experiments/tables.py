"""A study's results as CSV, Markdown and LaTeX, beside the paper's."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import product
from statistics import mean, stdev
from typing import TYPE_CHECKING

from fedgkd_pl.experiments.groups import dataset_name, diverged, facts, symbol
from fedgkd_pl.experiments.paper import numbers, paper_row
from fedgkd_pl.experiments.protocol import Footnotes, differences, joined
from fedgkd_pl.experiments.runs import ACCURACIES, Run
from fedgkd_pl.experiments.study import Cell, Study

if TYPE_CHECKING:
    import rich.table

Labels = tuple[str, ...]
Results = Sequence[tuple[Cell, Run]]
ENOUGH = 3  # seeds for a test of significance
FEWER = "of runs with fewer than ten rounds, the mean of all they have"
NAMES = {"best": "best", "final": "final", "last10": "last 10", "at_best_val": "at best val"}


@dataclass
class Entry:
    """A cell of a table.

    Attributes:
        values: the accuracy of every seed, in percent.
        paper: the paper's mean and standard deviation.
        rank: 1 for the best of those compared, 2 for the second, 0 for the others.
        remarks: what a reader must know of our number.
        differs: in what our runs differ from the paper's.
        marks: of the remarks below the table.
        paper_mark: of what differs.
    """

    values: dict[int, float]
    paper: tuple[float, float | None] | None
    rank: int = 0
    remarks: Sequence[str] = ()
    differs: str = ""
    marks: str = ""
    paper_mark: str = ""

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return mean(self.values.values())

    @property
    def text(self) -> str:
        """Mean ± standard deviation, and marks; a dash where there is no run."""
        return spread(list(self.values.values())) + self.marks

    @property
    def paper_text(self) -> str:
        """The paper's mean ± standard deviation, and a mark; empty where there is none."""
        if self.paper is None:
            return ""
        std = self.paper[1]
        text = f"{self.paper[0]:.2f}" + (f" ± {std:.2f}" if std is not None else "")
        return text + self.paper_mark

    def annotate(self, notes: Footnotes) -> None:
        """Takes marks for what is to be said of it.

        Args:
            notes: of its table.
        """
        if self.values:
            self.marks = "".join(map(notes.mark, self.remarks))
            self.paper_mark = notes.mark(self.differs)


@dataclass
class Table:
    """A laid-out table.

    Attributes:
        title: above it.
        corner: what the rows are labelled by.
        rows: the labels of every row.
        columns: the label of every column.
        entries: row by row.
        notes: below it.
    """

    title: str
    corner: Labels
    rows: list[Labels]
    columns: list[str]
    entries: list[list[Entry]]
    notes: list[str]


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation (of a sample) of some percentages.

    Args:
        values: one per seed.
    """
    if not values:
        return "-"
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def make_tables(study: Study, results: Results) -> list[Table]:
    """The tables of a study: one, or one per measure where it is neither row nor column.

    Args:
        study: how they are laid out.
        results: the runs there are.
    """
    entries = _entries(study, results)
    _rank(study, entries)
    laid_out = (*study.rows, *study.columns)
    groups = [study.measures] if "measure" in laid_out else [[m] for m in study.measures]
    tables = []
    for measures in groups:
        axes = {axis: list(labels) for axis, labels in study.axes.items()}
        axes["measure"] = list(measures)
        rows = list(product(*(axes[axis] for axis in study.rows)))
        columns = list(product(*(axes[axis] for axis in study.columns)))
        body: list[list[Entry]] = []
        footnotes = Footnotes()
        for row in rows:
            line = []
            for column in columns:
                chosen = dict(zip(laid_out, (*row, *column), strict=True))
                chosen.setdefault("measure", measures[0])
                line.append(entries[_key(study, chosen, chosen["measure"])])
                line[-1].annotate(footnotes)
            body.append(line)
        which = f": {measure_name(measures[0])}" if "measure" not in laid_out else ""
        tables.append(
            Table(
                f"{study.title or study.name}{which}",
                tuple(map(symbol, study.rows)),
                [tuple(map(measure_name, row)) for row in rows],
                [_column(study.columns, column) for column in columns],
                body,
                [
                    *footnotes.lines,
                    *_too_short(results, measures),
                    *_notes(study, entries, measures),
                    *_lengths(results),
                ],
            )
        )
    return [_without_empty(table) for table in tables]


def _without_empty(table: Table) -> Table:
    """Without rows and columns that neither we nor the paper have a number for."""
    known = [[bool(entry.values or entry.paper) for entry in line] for line in table.entries]
    rows = [n for n, line in enumerate(known) if any(line)]
    columns = [n for n in range(len(table.columns)) if any(line[n] for line in known)]
    return replace(
        table,
        rows=[table.rows[n] for n in rows],
        columns=[table.columns[n] for n in columns],
        entries=[[table.entries[row][column] for column in columns] for row in rows],
    )


def _too_short(results: Results, measures: Sequence[str]) -> list[str]:
    """A line for every round that no run has come to."""
    longest = max((run.summary["rounds"] for _, run in results), default=0)
    return [
        f"{measure_name(measure)}: no run has so many rounds, the longest {longest}"
        for measure in measures
        if measure.startswith("round") and 0 < longest < int(measure[5:])
    ]


def _lengths(results: Results) -> list[str]:
    """A warning where runs of different length stand beside each other."""
    lengths = sorted({run.rounds_asked for _, run in results})
    if len(lengths) < 2:
        return []
    return [f"the runs have different numbers of rounds: {', '.join(map(str, lengths))}"]


def measure_name(name: str) -> str:
    """How a measure is called in a table.

    Args:
        name: as a study file has it; other words stay as they are.
    """
    number = name.removeprefix("round")
    return f"round {number}" if number != name and number.isdigit() else NAMES.get(name, name)


def to_markdown(table: Table) -> str:
    """The table in Markdown, the best bold, the second underlined.

    Args:
        table: laid out.
    """
    lines = [f"**{table.title}**, test accuracy in %", ""]
    names = (name.replace("|", r"\|") for name in (*table.corner, *table.columns))
    lines.append("| " + " | ".join(names) + " |")
    lines.append("|" + "---|" * len(table.corner) + "---:|" * len(table.columns))
    for labels, entries in zip(table.rows, table.entries, strict=True):
        cells = []
        for entry in entries:
            text = ("{}", "**{}**", "<u>{}</u>")[entry.rank].format(entry.text)
            cells.append(text + (f" ({entry.paper_text})" if entry.paper else ""))
        plain = (label.replace("|", r"\|") for label in labels)
        lines.append("| " + " | ".join([*plain, *cells]) + " |")
    if any(entry.paper for entries in table.entries for entry in entries):
        lines += ["", "In brackets: the paper's."]
    lines += ["", *(f"- {note}" for note in table.notes)] if table.notes else []
    return "\n".join(lines) + "\n"


def to_rich(table: Table) -> "rich.table.Table":
    """The table for a terminal.

    Args:
        table: laid out.
    """
    from rich.markup import escape as plain
    from rich.table import Table as RichTable

    shown = RichTable(title=plain(f"{table.title}, test accuracy in %"))
    for name in table.corner:
        shown.add_column(plain(name))
    for name in table.columns:
        shown.add_column(plain(name), justify="right")
    for labels, entries in zip(table.rows, table.entries, strict=True):
        cells = []
        for entry in entries:
            text = ("{}", "[bold]{}[/bold]", "[underline]{}[/underline]")[entry.rank]
            paper = f"\n[dim]({entry.paper_text})[/dim]" if entry.paper else ""
            cells.append(text.format(entry.text) + paper)
        shown.add_row(*map(plain, labels), *cells)
    return shown


def to_latex(table: Table) -> str:
    """The table in LaTeX (booktabs), the best bold, the second underlined.

    Args:
        table: laid out.
    """
    width = len(table.corner) + len(table.columns)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_tex(table.title)}. Test accuracy in \%"
        + (", the paper's in brackets" if _has_paper(table) else "")
        + ".}",
        rf"\begin{{tabular}}{{{'l' * len(table.corner)}{'r' * len(table.columns)}}}",
        r"\toprule",
        " & ".join(map(_tex, (*table.corner, *table.columns))) + r" \\",
        r"\midrule",
    ]
    for labels, entries in zip(table.rows, table.entries, strict=True):
        cells = [_tex(label) for label in labels]
        for entry in entries:
            text = _tex(entry.text)
            text = (text, rf"\textbf{{{text}}}", rf"\underline{{{text}}}")[entry.rank]
            cells.append(text + (f" ({_tex(entry.paper_text)})" if entry.paper else ""))
        lines.append(" & ".join(cells) + r" \\")
    lines.append(r"\bottomrule")
    lines += [rf"\multicolumn{{{width}}}{{l}}{{\small {_tex(note)}}} \\" for note in table.notes]
    return "\n".join([*lines, r"\end{tabular}", r"\end{table}", ""])


def to_html(table: Table) -> str:
    """The table for a page, the best bold, the second underlined.

    Args:
        table: laid out.
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in (*table.corner, *table.columns))
    lines = []
    for labels, entries in zip(table.rows, table.entries, strict=True):
        cells = [escape(label) for label in labels]
        for entry in entries:
            text = ("{}", "<b>{}</b>", "<u>{}</u>")[entry.rank].format(escape(entry.text))
            paper = f"<br><small>paper {entry.paper_text}</small>" if entry.paper else ""
            cells.append(text + paper)
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    return (
        f"<section><h2>{escape(table.title)}</h2><div class=scroll><table><thead><tr>{head}</tr>"
        f"</thead><tbody>{''.join(lines)}</tbody></table></div><ul>{notes}</ul></section>"
    )


def to_csv(study: Study, results: Results) -> str:
    """A row per run: labels, seed, all measures in percent, bytes, the folder.

    Args:
        study: of the runs.
        results: the runs there are.
    """
    measures = list(dict.fromkeys([*ACCURACIES, *study.measures]))
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*study.axes, "seed", "rounds", *measures, "bytes_down", "bytes_up", "cell"])
    for cell, run in results:
        values = [run.measure(measure) for measure in measures]
        writer.writerow(
            [
                *cell.labels.values(),
                cell.seed,
                run.summary["rounds"],
                *("" if value is None else f"{value:.4f}" for value in values),
                run.summary["bytes_down"],
                run.summary.get("bytes_up", ""),
                cell.name,
            ]
        )
    return text.getvalue()


def _key(study: Study, labels: Mapping[str, str], measure: str) -> Labels:
    return (*(labels[axis] for axis in study.axes), measure)


def _column(axes: Sequence[str], labels: Labels) -> str:
    shown = [
        measure_name(label) if axis in ("method", "measure") else f"{symbol(axis)} {label}"
        for axis, label in zip(axes, labels, strict=True)
    ]
    return ", ".join(shown)


def _entries(study: Study, results: Results) -> dict[Labels, Entry]:
    entries: dict[Labels, Entry] = {}
    names = {dataset_name(run) for _, run in results}
    of_data = {"dataset": names.pop()} if len(names) == 1 else {}  # where that is no axis
    for labels in product(*study.axes.values()):
        for measure in study.measures:
            chosen = dict(zip(study.axes, labels, strict=True))
            runs = {cell.seed: run for cell, run in results if cell.labels == chosen}
            values = {
                seed: value
                for seed, run in runs.items()
                if (value := run.measure(measure)) is not None
            }
            runs = {seed: runs[seed] for seed in values}
            row = paper_row(study.paper, of_data | chosen, measure) if study.paper else None
            entries[_key(study, chosen, measure)] = Entry(
                values,
                numbers(row) if row else None,
                remarks=_remarks(study, runs, measure),
                differs=joined(differences(row, facts(r), measure) for r in runs.values() if row),
            )
    return entries


def _remarks(study: Study, runs: Mapping[int, Run], measure: str) -> list[str]:
    """What a reader must know of a number."""
    told = []
    if len(runs) < len(study.seeds):
        told.append(f"of seed{'s' * (len(runs) > 1)} {', '.join(map(str, runs))} only")
    if measure == "last10" and any(run.summary["rounds"] < 10 for run in runs.values()):
        told.append(FEWER)
    return [*told, diverged(runs)]


def _groups(study: Study, entries: Mapping[Labels, Entry]) -> dict[Labels, dict[str, Entry]]:
    """What is compared with each other: entries that differ in one axis only."""
    place = list(study.axes).index(study.compare)
    groups: dict[Labels, dict[str, Entry]] = {}
    for key, entry in entries.items():
        if entry.values:
            groups.setdefault((*key[:place], *key[place + 1 :]), {})[key[place]] = entry
    return groups


def _have_the_same_seeds(group: Mapping[str, Entry]) -> bool:
    return len({frozenset(entry.values) for entry in group.values()}) == 1


def _rank(study: Study, entries: Mapping[Labels, Entry]) -> None:
    """Finds the best and the second, where all were run with the same seeds."""
    for group in _groups(study, entries).values():
        means = [round(entry.mean, 2) for entry in group.values()]
        if len(group) < 2 or not _have_the_same_seeds(group):
            continue
        for entry in group.values():
            place = 1 + sum(other > round(entry.mean, 2) for other in means)
            entry.rank = place if place <= 2 else 0


def _notes(study: Study, entries: Mapping[Labels, Entry], measures: Sequence[str]) -> list[str]:
    """For every group, whether the best's lead over the second stands out over the seeds."""
    notes = []
    tests = 0
    others = [axis for axis in study.axes if axis != study.compare]
    for key, group in _groups(study, entries).items():
        if key[-1] not in measures or len(group) < 2:
            continue
        shown = [
            f"{symbol(axis)} {label}"
            for axis, label in zip(others, key, strict=False)
            if len(study.axes[axis]) > 1
        ]
        where = ", ".join([*shown, measure_name(key[-1])])
        (first, best), (second, next_best) = sorted(group.items(), key=lambda item: -item[1].mean)[
            :2
        ]
        notes.append(f"{where}: {lead(first, best.values, second, next_best.values)}")
        tests += "t-test" in notes[-1]
        if not _have_the_same_seeds(group):
            notes[-1] += "; no best is marked, as not all have the same seeds"
    if tests > 1:
        notes.append(f"{tests} tests, not corrected for their number")
    return notes


def lead(first: str, best: Mapping[int, float], second: str, other: Mapping[int, float]) -> str:
    """By how much one is ahead of another over the seeds they share, and if that is much.

    Args:
        first: the name of the one ahead.
        best: its values by seed.
        second: the name of the other.
        other: its values.
    """
    seeds = sorted(best.keys() & other.keys())
    ahead = [best[seed] - other[seed] for seed in seeds]
    if not seeds:
        return f"{first} and {second} have no seed in common"
    if not any(round(each, 6) for each in ahead):
        return f"{first} and {second} are equal"
    if round(mean(ahead), 2) == 0:
        apart = spread(ahead).removeprefix("-")
        return f"{first} and {second} are level: {apart} points apart over {_seeds(seeds)}"
    if mean(ahead) < 0:  # over the seeds that both have
        return lead(second, other, first, best)
    text = f"{first} is ahead of {second} by {spread(ahead)} points"
    if len(seeds) < 2:
        return f"{text}; one seed says nothing of its significance"
    if len({round(each, 6) for each in ahead}) == 1:  # the last bits differ, and prove nothing
        no_test = "; without any spread there is no test" if len(seeds) >= ENOUGH else ""
        return f"{text} in each of {len(seeds)} seeds{no_test}"
    if len(seeds) < ENOUGH:
        return f"{text} over {_seeds(seeds)}; a test needs {ENOUGH}"
    from scipy.stats import ttest_1samp

    p = float(ttest_1samp(ahead, 0).pvalue)
    shown = f"p = {p:.3f}" if p >= 0.001 else "p < 0.001"
    verdict = "significant" if p < 0.05 else "not significant"
    return f"{text} over {len(seeds)} seeds, paired t-test {shown}: {verdict} at 5 %"


def _seeds(seeds: Sequence[int]) -> str:
    return f"{len(seeds)} seed{'s' * (len(seeds) > 1)}"


def _has_paper(table: Table) -> bool:
    return any(entry.paper for entries in table.entries for entry in entries)


TEX: dict[str, str | int | None] = {
    **{letter: f"\\{letter}" for letter in "_%&#{}$"},
    **{"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"},
    **{"α": r"$\alpha$", "γ": r"$\gamma$", "λ": r"$\lambda$", "μ": r"$\mu$", "τ": r"$\tau$"},
    **{"±": r"$\pm$", "†": r"\dag{}", "‡": r"\ddag{}", "§": r"\S{}", "¶": r"\P{}"},
    "‖": r"$\|$",
}


def _tex(text: str) -> str:
    return text.replace(" ± ", "±").translate(str.maketrans(TEX))
