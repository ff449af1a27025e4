"""Runs and groups of runs as the rows of a table."""

from collections.abc import Iterable, Sequence
from statistics import mean

from fedgkd_pl.errors import CALMER
from fedgkd_pl.experiments.groups import Group
from fedgkd_pl.experiments.protocol import Footnotes
from fedgkd_pl.experiments.runs import ACCURACIES, AVERAGES, Run
from fedgkd_pl.experiments.significance import spread
from fedgkd_pl.experiments.tables import fewer, measure_name

Row = dict[str, str]
LOSSES = "the test loss, not in %: what it learns has no accuracy"


def overview(groups: Sequence[Group], notes: Footnotes | None = None) -> list[Row]:
    """A row for every group: accuracies over the seeds, the paper's, bytes, seconds; adds notes."""
    notes = notes or Footnotes()
    measures = measures_of(run for group in groups for run in group.runs.values())
    rows = []
    for group in groups:
        runs = list(group.runs.values())
        rounds = sorted({run.summary["rounds"] for run in runs})
        timed = [run.summary for run in runs if run.summary.get("wall_seconds")]
        seconds = [summary["wall_seconds"] / summary["rounds"] for summary in timed]
        method = group.name + notes.mark(group.unknown) + notes.mark(group.diverged)
        row = {
            "method": method + notes.mark(_unit(runs)),
            "data": group.panel,
            "rounds": "–".join(map(str, rounds if len(rounds) < 2 else [rounds[0], rounds[-1]])),
            "seeds": ", ".join(map(str, sorted(group.runs))),
            **_accuracies(runs, measures, notes),
        }
        paper = f"{group.paper[0]:.2f}{notes.mark(group.differs)}" if group.paper else ""
        row["paper's best"] = paper
        row["MB down"] = f"{mean(run.summary['bytes_down'] for run in runs) / 1e6:.1f}"
        row["s/round"] = f"{mean(seconds):.1f}" if seconds else ""
        rows.append(row)
    empty = [name for name in ("paper's best", "s/round") if not any(row[name] for row in rows)]
    return [{name: text for name, text in row.items() if name not in empty} for row in rows]


def measures_of(runs: Iterable[Run]) -> list[str]:
    """What is shown of runs: those of the averaged model where some have one."""
    return [*ACCURACIES, *(AVERAGES if any(run.average for run in runs) else [])]


def run_row(run: Run, notes: Footnotes, measures: Sequence[str]) -> Row:
    """The row of a run; adds notes."""
    since = run.summary.get("diverged_round")
    mark = notes.mark(f"clients diverged from round {since} on; {CALMER}" if since else "")
    return {
        "method": f"{run.title}{mark}{notes.mark(_unit([run]))}",
        **{key: str(run.summary[key]) for key in ("dataset", "seed", "rounds")},
        **_accuracies([run], measures, notes),
        "MB down": f"{run.summary['bytes_down'] / 1e6:.1f}",
        "run": str(run.folder),
    }


def _accuracies(runs: Sequence[Run], measures: Sequence[str], notes: Footnotes) -> Row:
    """Mean ± standard deviation; where some runs have no such number, of how many."""
    row = {}
    for measure in measures:
        found = [run.measure(measure) for run in runs]
        values = [value for value in found if value is not None]
        part = f" ({len(values)} of {len(runs)})" if 0 < len(values) < len(runs) else ""
        row[measure_name(measure)] = spread(values) + part + notes.mark(fewer(measure, runs))
    return row


def _unit(runs: Iterable[Run]) -> str:
    return LOSSES if any(run.has_loss_only for run in runs) else ""
