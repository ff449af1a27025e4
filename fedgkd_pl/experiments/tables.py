"""A study's results as tables, beside the paper's."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean

from fedgkd_pl.experiments.groups import dataset_name, diverged, facts, symbol
from fedgkd_pl.experiments.paper import numbers, paper_row
from fedgkd_pl.experiments.protocol import Footnotes, differences, joined
from fedgkd_pl.experiments.runs import ACCURACIES, AVERAGES, OF_AVERAGE, Run, round_of
from fedgkd_pl.experiments.significance import lead, spread
from fedgkd_pl.experiments.study import Cell, Study
from fedgkd_pl.experiments.table import Table, Value

Labels = tuple[str, ...]
Results = Sequence[tuple[Cell, Run]]
NAMES = {"best": "best", "final": "final", "last10": "last 10", "at_best_val": "at best val"}
NAMES |= {"task_acc": "tasks", "task_forgetting": "forgetting", "task_transfer": "transfer"}
LESS_IS_BETTER = "task_forgetting"


@dataclass
class Entry:
    """A number of a table."""

    values: dict[int, float]  # of every seed, in percent
    paper: tuple[float, float | None] | None  # mean and standard deviation
    rank: int = 0  # 1 for the best of those compared, 2 for the second, 0 for the others
    remarks: Sequence[str] = ()  # on our number
    differs: str = ""  # how our runs differ from the paper's
    marks: str = ""  # of the remarks
    paper_mark: str = ""  # of ``differs``
    failed: int = 0  # seeds without a value whose run failed

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return mean(self.values.values())

    @property
    def value(self) -> Value:
        """Mean ± standard deviation, or that there is none; the paper's; marks of both."""
        paper = ""
        if self.paper is not None:
            std = self.paper[1]
            paper = f"{self.paper[0]:.2f}" + (f" ± {std:.2f}" if std is not None else "")
            paper += self.paper_mark
        text = spread(list(self.values.values())) if self.values or not self.failed else "failed"
        return Value(text + self.marks, self.rank, paper)

    def annotate(self, notes: Footnotes) -> None:
        """Takes its marks from the table's footnotes."""
        if self.values:
            self.marks = "".join(map(notes.mark, self.remarks))
            self.paper_mark = notes.mark(self.differs)


def make_tables(study: Study, results: Results, failed: Collection[str] = ()) -> list[Table]:
    """The tables of a study: one, or one per measure where it is neither row nor column.

    Args:
        failed: the names of the cells that were tried and failed.
    """
    lost = _lost(study, results, failed)
    entries = _entries(study, results, lost)
    _rank(study, entries)
    laid_out = (*study.rows, *study.columns)
    groups = [study.measures] if "measure" in laid_out else [[m] for m in study.measures]
    tables = []
    for measures in groups:
        axes = {axis: _in_order(labels) for axis, labels in study.axes.items()}
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
        # rows and columns that were not tried and that the paper has no number for are left out
        known = [[bool(each.values or each.paper or each.failed) for each in line] for line in body]
        shown = [n for n in range(len(columns)) if any(line[n] for line in known)]
        tables.append(
            Table(
                [*map(symbol, study.rows), *(_column(study.columns, columns[n]) for n in shown)],
                [
                    [
                        *(Value(measure_name(label)) for label in row),
                        *(line[n].value for n in shown),
                    ]
                    for row, line, some in zip(rows, body, known, strict=True)
                    if any(some)
                ],
                range(len(study.rows)),
                f"{study.title or study.name}{which}",
                "test accuracy in %",
                [
                    *footnotes.lines,
                    *_failures(study, lost),
                    *_too_short(results, measures),
                    *_not_averaged(results, measures),
                    *_notes(study, entries, measures),
                    *_lengths(results),
                ],
            )
        )
    return tables


def _in_order(labels: Iterable[str]) -> list[str]:
    """Numbers by size, as in the figures; anything else as the study has it."""
    labels = list(labels)
    try:
        return sorted(labels, key=float)
    except ValueError:
        return labels


def _too_short(results: Results, measures: Sequence[str]) -> list[str]:
    """A line for every round that no run has come to."""
    longest = max((run.summary["rounds"] for _, run in results), default=0)
    return [
        f"{measure_name(measure)}: no run has so many rounds, the longest {longest}"
        for measure in measures
        if 0 < longest < (round_of(measure) or 0)
    ]


def _not_averaged(results: Results, measures: Sequence[str]) -> list[str]:
    """A line where an average is asked for that no run has."""
    asked = any(measure.startswith(OF_AVERAGE) for measure in measures)
    none = asked and results and not any(run.average for _, run in results)
    return ["no run has an averaged model: trainer.callbacks+: AveragedModel"] if none else []


def _lengths(results: Results) -> list[str]:
    """A warning where runs of different length stand beside each other."""
    lengths = sorted({run.rounds_asked for _, run in results})
    if len(lengths) < 2:
        return []
    return [f"the runs have different numbers of rounds: {', '.join(map(str, lengths))}"]


def measure_name(name: str) -> str:
    """How a measure is called in a table."""
    if name.startswith(OF_AVERAGE):
        return f"average {measure_name(name.removeprefix(OF_AVERAGE))}"
    number = name.removeprefix("round")
    return f"round {number}" if number != name and number.isdigit() else NAMES.get(name, name)


def every_run(study: Study, results: Results) -> Table:
    """A row per run: labels, seed, all measures in percent, bytes, the folder."""
    averages = AVERAGES if any(run.average for _, run in results) else []
    measures = list(dict.fromkeys([*ACCURACIES, *averages, *study.measures]))
    columns = [*study.axes, "seed", "rounds", *measures, "bytes_down", "bytes_up", "cell"]
    rows = []
    for cell, run in results:
        values = [run.measure(measure) for measure in measures]
        row = [
            *cell.labels.values(),
            cell.seed,
            run.summary["rounds"],
            *("" if value is None else f"{value:.4f}" for value in values),
            run.summary["bytes_down"],
            run.summary.get("bytes_up", ""),
            cell.name,
        ]
        rows.append([Value("" if each is None else str(each)) for each in row])
    return Table(columns, rows, range(len(study.axes)))


def _key(study: Study, labels: Mapping[str, str], measure: str) -> Labels:
    return (*(labels[axis] for axis in study.axes), measure)


def _column(axes: Sequence[str], labels: Labels) -> str:
    shown = [
        measure_name(label) if axis in ("method", "measure") else f"{symbol(axis)} {label}"
        for axis, label in zip(axes, labels, strict=True)
    ]
    return ", ".join(shown)


def _lost(study: Study, results: Results, failed: Collection[str]) -> Counter[Labels]:
    """How many seeds of a cell's labels have no run because it failed."""
    done = {cell.name for cell, _ in results}
    lost: Counter[Labels] = Counter()
    for labels in product(*map(_in_order, study.axes.values())):
        names = [Cell(dict(zip(study.axes, labels, strict=True)), s, ()).name for s in study.seeds]
        lost[labels] += sum(name in failed and name not in done for name in names)
    return +lost


def _failures(study: Study, lost: Mapping[Labels, int]) -> list[str]:
    """A line for all labels of which a run failed."""
    return [
        f"{_column(list(study.axes), labels)}: failed in {number} of {len(study.seeds)} "
        f"seed{'s' * (len(study.seeds) > 1)}"
        for labels, number in lost.items()
    ]


def _entries(study: Study, results: Results, lost: Mapping[Labels, int]) -> dict[Labels, Entry]:
    entries: dict[Labels, Entry] = {}
    names = {dataset_name(run) for _, run in results}
    of_data = {"dataset": names.pop()} if len(names) == 1 else {}  # where that is no axis
    for labels in product(*map(_in_order, study.axes.values())):
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
                failed=lost.get(labels, 0),
            )
    return entries


def _remarks(study: Study, runs: Mapping[int, Run], measure: str) -> list[str]:
    """What a reader must know of a number."""
    remarks = []
    if len(runs) < len(study.seeds):
        remarks.append(f"of seed{'s' * (len(runs) > 1)} {', '.join(map(str, runs))} only")
    return [*remarks, fewer(measure, runs.values()), diverged(runs)]


def fewer(measure: str, runs: Iterable[Run]) -> str:
    """A remark on *last 10* where runs were tested in fewer rounds than ten; otherwise empty."""
    if not measure.endswith("last10"):
        return ""
    numbers = {run.tested(measure) for run in runs if run.measure(measure) is not None}
    short = sorted(number for number in numbers if number < 10)
    if not short:
        return ""
    other = "" if len(short) == len(numbers) else " of some seeds"
    rounds = "round" if short == [1] else "rounds"
    return f"the mean of {' or '.join(map(str, short))} {rounds}{other}: no more were tested"


def _groups(study: Study, entries: Mapping[Labels, Entry]) -> dict[Labels, dict[str, Entry]]:
    """What is compared with each other: entries that differ in one axis only."""
    axis = list(study.axes).index(study.compare)
    groups: dict[Labels, dict[str, Entry]] = {}
    for key, entry in entries.items():
        if entry.values:
            groups.setdefault((*key[:axis], *key[axis + 1 :]), {})[key[axis]] = entry
    return groups


def _have_the_same_seeds(group: Mapping[str, Entry]) -> bool:
    return len({frozenset(entry.values) for entry in group.values()}) == 1


def _rank(study: Study, entries: Mapping[Labels, Entry]) -> None:
    """Finds the best and the second, where all were run with the same seeds."""
    for key, group in _groups(study, entries).items():
        sign = -1 if key[-1] == LESS_IS_BETTER else 1
        means = [sign * round(entry.mean, 2) for entry in group.values()]
        if len(group) < 2 or not _have_the_same_seeds(group):
            continue
        for entry in group.values():
            rank = 1 + sum(other > sign * round(entry.mean, 2) for other in means)
            entry.rank = rank if rank <= 2 else 0


def _notes(study: Study, entries: Mapping[Labels, Entry], measures: Sequence[str]) -> list[str]:
    """For every group, whether the best's lead over the second stands out over the seeds."""
    notes = []
    tests = 0
    others = [axis for axis in study.axes if axis != study.compare]
    for key, group in _groups(study, entries).items():
        if key[-1] not in measures or len(group) < 2 or key[-1] == LESS_IS_BETTER:
            continue
        shown = [
            f"{symbol(axis)} {label}"
            for axis, label in zip(others, key, strict=False)
            if len(study.axes[axis]) > 1
        ]
        where = ", ".join([*shown, measure_name(key[-1])])
        ordered = sorted(group.items(), key=lambda item: -item[1].mean)
        (first, best), (second, next_best) = ordered[:2]
        notes.append(f"{where}: {lead(first, best.values, second, next_best.values)}")
        tests += "t-test" in notes[-1]
        if not _have_the_same_seeds(group):
            notes[-1] += "; no best is marked, as not all have the same seeds"
    if tests > 1:
        notes.append(f"{tests} tests, not corrected for their number")
    return notes
