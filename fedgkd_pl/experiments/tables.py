"""A study's results as tables, beside the paper's."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean

import pandas as pd
from fedgkd_pl.experiments.groups import dataset_name, diverged, facts, symbol
from fedgkd_pl.experiments.paper import numbers, paper_row
from fedgkd_pl.experiments.protocol import Footnotes, differences, joined
from fedgkd_pl.experiments.runs import ACCURACIES, AVERAGES, OF_AVERAGE, Run, round_of
from fedgkd_pl.experiments.significance import lead, spread
from fedgkd_pl.experiments.study import Cell, Study
from fedgkd_pl.experiments.table import Table

Labels = dict[str, str]
Results = Sequence[tuple[Cell, Run]]
NAMES = {"last10": "last 10", "at_best_val": "at best val"}
NAMES |= {"task_acc": "tasks", "task_forgetting": "forgetting", "task_transfer": "transfer"}
LESS_IS_BETTER = "task_forgetting"


@dataclass
class Entry:
    """A number of a table."""

    labels: Labels  # by axis, and of ``measure``
    runs: dict[int, Run]  # those that have a value, by seed
    values: dict[int, float]  # in percent, by seed
    paper: dict[str, str] | None  # the row of paper.csv
    failed: int  # seeds without a value whose run failed
    rank: int = 0  # 1 for the best of those compared, 2 for the second, 0 for the others

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return mean(self.values.values())

    def text(self, study: Study, notes: Footnotes) -> str | None:
        """Mean ± standard deviation, the paper's in brackets; None where nothing is known."""
        if not (self.values or self.paper or self.failed):
            return None
        measure = self.labels["measure"]
        text = "failed" if self.failed and not self.values else spread(list(self.values.values()))
        if 0 < len(self.runs) < len(study.seeds):
            of = f"of seed{'s' * (len(self.runs) > 1)} {', '.join(map(str, self.runs))} only"
            text += notes.mark(of)
        text += notes.mark(fewer(measure, self.runs.values())) + notes.mark(diverged(self.runs))
        if self.paper is None:
            return text
        of_paper, std = numbers(self.paper)
        differs = joined(differences(self.paper, facts(r), measure) for r in self.runs.values())
        deviation = f" ± {std:.2f}" if std is not None else ""
        return f"{text} ({of_paper:.2f}{deviation}{notes.mark(differs)})"


def every_run(study: Study, results: Results) -> pd.DataFrame:
    """A row per run: labels, seed, all measures in percent, bytes, the folder."""
    averages = AVERAGES if any(run.average for _, run in results) else []
    measures = list(dict.fromkeys([*ACCURACIES, *averages, *study.measures]))
    columns = [*study.axes, "seed", "rounds", *measures, "bytes_down", "bytes_up", "cell"]
    rows = [
        {
            **{"bytes_up": None, **run.summary, **cell.labels},
            **{measure: run.measure(measure) for measure in measures},
            **{"seed": cell.seed, "cell": cell.name},
        }
        for cell, run in results
    ]
    return pd.DataFrame(rows, columns=columns).astype({"bytes_up": "Int64"})


def make_tables(study: Study, results: Results, failed: Collection[str] = ()) -> list[Table]:
    """The tables of a study: one, or one per measure where it is neither row nor column.

    Args:
        failed: the names of the cells that were tried and failed.
    """
    entries = _entries(study, results, failed)
    in_one = "measure" in (*study.rows, *study.columns)
    title, tables = study.title or study.name, []
    for measures in [study.measures] if in_one else [[measure] for measure in study.measures]:
        chosen = [entry for entry in entries if entry.labels["measure"] in measures]
        leads, footnotes = _rank(study, chosen), Footnotes()
        texts: dict[tuple[str, ...], dict[str, str | None]] = {}
        ranks: dict[tuple[int, str], int] = {}
        for entry in sorted(chosen, key=lambda entry: _place(study, entry.labels)):
            row = texts.setdefault(tuple(entry.labels[axis] for axis in study.rows), {})
            name = _name({axis: entry.labels[axis] for axis in study.columns})
            row[name] = entry.text(study, footnotes)
            ranks[len(texts) - 1, name] = entry.rank
        # rows and columns that were not tried and that the paper has no number for are left out
        body = pd.DataFrame(list(texts.values())).dropna(how="all").dropna(axis=1, how="all")
        heads = [[measure_name(label) for label in row] for row in texts]
        frame = pd.DataFrame(heads, columns=[*map(symbol, study.rows)]).join(body, how="right")
        notes = [*footnotes.lines, *_failures(study, chosen), *_warnings(results, measures), *leads]
        tables.append(
            Table(
                frame.fillna("-"),
                left=range(len(study.rows)),
                title=title if in_one else f"{title}: {measure_name(measures[0])}",
                unit="test accuracy in %",
                notes=notes,
                ranks={place: rank for place, rank in ranks.items() if rank},
                has_paper=any(entry.paper for entry in chosen),
            )
        )
    return tables


def _place(study: Study, labels: Labels) -> list[int]:
    """Where an entry stands, row by row: numbers by size, anything else as the study has it."""
    order = {axis: in_order(study.axes[axis]) for axis in study.axes} | {"measure": study.measures}
    return [order[axis].index(labels[axis]) for axis in (*study.rows, *study.columns)]


def in_order(labels: Iterable[str]) -> list[str]:
    """Numbers by size, as in the figures; anything else as it is."""
    labels = list(labels)
    try:
        return sorted(labels, key=float)
    except ValueError:
        return labels


def measure_name(name: str) -> str:
    """How a measure is called in a table."""
    if name.startswith(OF_AVERAGE):
        return f"average {measure_name(name.removeprefix(OF_AVERAGE))}"
    number = name.removeprefix("round")
    return f"round {number}" if number != name and number.isdigit() else NAMES.get(name, name)


def fewer(measure: str, runs: Iterable[Run]) -> str:
    """A remark on *last 10* where runs were tested in fewer rounds than ten; otherwise empty."""
    tested = {run.tested(measure) for run in runs if run.measure(measure) is not None}
    short = sorted(number for number in tested if number < 10)
    if not short or not measure.endswith("last10"):
        return ""
    of_some = "" if len(short) == len(tested) else " of some seeds"
    rounds = "round" if short == [1] else "rounds"
    return f"the mean of {' or '.join(map(str, short))} {rounds}{of_some}: no more were tested"


def _name(labels: Labels) -> str:
    shown = (
        measure_name(label) if axis in ("method", "measure") else f"{symbol(axis)} {label}"
        for axis, label in labels.items()
    )
    return ", ".join(shown)


def _entries(study: Study, results: Results, failed: Collection[str]) -> list[Entry]:
    done = {cell.name for cell, _ in results}
    lost = Counter(
        tuple(cell.labels.values())
        for cell in study.cells()
        if cell.name in failed and cell.name not in done
    )
    names = {dataset_name(run) for _, run in results}
    of_data = {"dataset": names.pop()} if len(names) == 1 else {}  # where that is no axis
    entries = []
    for chosen in product(*map(in_order, study.axes.values()), study.measures):
        *_, measure = chosen
        labels = dict(zip(study.axes, chosen, strict=False))
        runs = {cell.seed: run for cell, run in results if cell.labels == labels}
        found = {seed: run.measure(measure) for seed, run in runs.items()}
        values = {seed: value for seed, value in found.items() if value is not None}
        row = paper_row(study.paper, of_data | labels, measure) if study.paper else None
        runs = {seed: runs[seed] for seed in values}
        number = lost[chosen[:-1]]
        entries.append(Entry(labels | {"measure": measure}, runs, values, row, number))
    return entries


def _failures(study: Study, entries: Sequence[Entry]) -> list[str]:
    """A line for all labels of which a run failed."""
    of = f"{len(study.seeds)} seed{'s' * (len(study.seeds) > 1)}"
    lines = {_name({a: e.labels[a] for a in study.axes}): e.failed for e in entries if e.failed}
    return [f"{name}: failed in {number} of {of}" for name, number in lines.items()]


def _warnings(results: Results, measures: Sequence[str]) -> list[str]:
    """Lines on rounds that no run came to, on averages that none has, on runs' lengths."""
    longest = max((run.summary["rounds"] for _, run in results), default=0)
    lines = [
        f"{measure_name(measure)}: no run has so many rounds, the longest {longest}"
        for measure in measures
        if 0 < longest < (round_of(measure) or 0)
    ]
    of_average = any(measure.startswith(OF_AVERAGE) for measure in measures)
    if of_average and results and not any(run.average for _, run in results):
        lines.append("no run has an averaged model: trainer.callbacks+: AveragedModel")
    lengths = sorted({run.rounds_asked for _, run in results})
    if len(lengths) > 1:
        shown = ", ".join(map(str, lengths))
        lines.append(f"the runs have different numbers of rounds: {shown}")
    return lines


def _rank(study: Study, entries: Sequence[Entry]) -> list[str]:
    """Ranks entries that differ in one axis only; lines on whether the best's lead stands out.

    None is ranked where not all have the same seeds.
    """
    groups: dict[str, list[Entry]] = {}
    several = [axis for axis in study.axes if axis != study.compare and len(study.axes[axis]) > 1]
    for entry in entries:
        if entry.values:
            where = _name({axis: entry.labels[axis] for axis in (*several, "measure")})
            groups.setdefault(where, []).append(entry)
    lines = []
    for where, group in groups.items():
        if len(group) < 2:
            continue
        less = group[0].labels["measure"] == LESS_IS_BETTER
        same_seeds = len({frozenset(entry.values) for entry in group}) == 1
        means = sorted((round(entry.mean, 2) for entry in group), reverse=not less)
        for entry in group if same_seeds else ():
            ahead = means.index(round(entry.mean, 2))
            entry.rank = ahead + 1 if ahead < 2 else 0
        if not less:
            best, second, *_ = sorted(group, key=lambda entry: entry.mean, reverse=True)
            names = [entry.labels[study.compare] for entry in (best, second)]
            line = f"{where}: {lead(names[0], best.values, names[1], second.values)}"
            unlike = "; no best is marked, as not all have the same seeds"
            lines.append(line if same_seeds else line + unlike)
    tests = sum("t-test" in line for line in lines)
    return [*lines, *([f"{tests} tests, not corrected for their number"] if tests > 1 else [])]
