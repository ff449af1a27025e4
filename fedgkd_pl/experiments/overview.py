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
        summaries = [run.summary for run in group.runs.values()]
        seconds = [s["wall_seconds"] / s["rounds"] for s in summaries if s.get("wall_seconds")]
        rows.append(
            {
                "method": group.name
                + notes.mark(group.unknown)
                + notes.mark(group.diverged)
                + notes.mark(_unit(group.runs.values())),
                "data": group.panel,
                "rounds": _range([summary["rounds"] for summary in summaries]),
                "seeds": ", ".join(map(str, sorted(group.runs))),
                **{measure_name(name): _over_seeds(group, name, notes) for name in measures},
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


def measures_of(runs: Iterable[Run]) -> list[str]:
    """What is shown of runs: those of the averaged model where some have one."""
    return [*ACCURACIES, *(AVERAGES if any(run.average for run in runs) else [])]


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}–{high}"


def _over_seeds(group: Group, measure: str, notes: Footnotes) -> str:
    """Mean ± standard deviation; where some of the seeds have no such number, of how many."""
    values = group.values(measure)
    part = f" ({len(values)} of {len(group.runs)})" if 0 < len(values) < len(group.runs) else ""
    return spread(values) + part + notes.mark(fewer(measure, group.runs.values()))


def _unit(runs: Iterable[Run]) -> str:
    return LOSSES if any(run.has_loss_only for run in runs) else ""


def run_row(run: Run, notes: Footnotes, measures: Sequence[str]) -> Row:
    """The row of a run; adds notes."""
    since = run.summary.get("diverged_round")
    mark = notes.mark(f"clients diverged from round {since} on; {CALMER}" if since else "")
    return {
        "method": f"{run.title}{mark}{notes.mark(_unit([run]))}",
        **{key: str(run.summary[key]) for key in ("dataset", "seed", "rounds")},
        **{
            measure_name(name): spread([] if (v := run.measure(name)) is None else [v])
            + notes.mark(fewer(name, [run]))
            for name in measures
        },
        "MB down": f"{run.summary['bytes_down'] / 1e6:.1f}",
        "run": str(run.folder),
    }
