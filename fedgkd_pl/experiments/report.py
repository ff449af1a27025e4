"""``fedgkd-pl report``: finished runs beside each other, as a table, Markdown, or one page."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fedgkd_pl.experiments.groups import make_groups, shared_settings
from fedgkd_pl.experiments.page import write_page
from fedgkd_pl.experiments.runs import Run, Runs, find_runs, runs_of
from fedgkd_pl.experiments.table import Footnotes, Table
from fedgkd_pl.experiments.tables import each_run, overview
from fedgkd_pl.runs.folder import CONFIG, SUMMARY
from fedgkd_pl.storage.files import write_text

Format = Literal["table", "md", "html"]


def report(runs: Runs, over_seeds: bool = True) -> Table:
    """Finished runs beside each other, as a table that a notebook shows.

    Args:
        runs: as :func:`runs_of` takes them.
        over_seeds: mean ± std of runs that differ in the seed alone; otherwise a row for each.
    """
    found, notes = runs_of(runs), Footnotes()
    frame = overview(make_groups(found), notes) if over_seeds else each_run(found, notes)
    unit = "test loss" if all(run.has_loss_only for run in found) else "test accuracy, %"
    return Table(frame, 2, unit=unit, notes=notes.lines)


def print_report(
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
        output: the file; by default Markdown is printed and the page is ``report.html`` in the
            first folder.
        every: a row of the table for every run, not only the newest below each path.
    """
    over_seeds = over_seeds or format != "table"
    runs = find_runs(paths, newest=not over_seeds and not every)
    missing = not_shown(paths, runs, over_seeds)
    if format == "html":
        output = output or str(Path(paths[0]) / "report.html")
        write_page(runs, Path(output), notes=missing)
    else:
        table = report(runs, over_seeds)
        table = replace(table, notes=[*table.notes, *missing])
        text = _to_markdown(table, runs) if format == "md" else f"{table}\n"
        if format == "md" and output is not None:
            write_text(Path(output), text)
        else:
            output = None
            print(text, end="")
    if output is not None:
        print(f"wrote {output}")


def not_shown(paths: Sequence[str], runs: Sequence[Run], over_seeds: bool) -> list[str]:
    """The runs below the folders that are in no row, a line for each reason."""
    lines = []
    known = {run.folder.resolve() for run in runs}
    if over_seeds and (repeated := len(runs) - sum(len(g.runs) for g in make_groups(runs))):
        lines.append(f"{_count(repeated, 'run')} with settings and seed of another not shown")
    for path in dict.fromkeys(paths):
        finished = {file.parent.resolve() for file in Path(path).rglob(SUMMARY)}
        if older := len(finished - known):
            lines.append(f"{_count(older, 'older run')} of {path} not shown: --all")
        begun = {file.parent.resolve() for file in Path(path).rglob(f"version_*/{CONFIG}")}
        if rest := len(begun - finished):
            lines.append(f"{_count(rest, 'unfinished run')} of {path} not shown")
    return lines


def _to_markdown(table: Table, runs: Sequence[Run]) -> str:
    """The overview, and the settings that all runs share, in Markdown."""
    text = table.to_markdown()
    if shared := shared_settings(make_groups(runs)):
        lines = (f"- `{key}`: {value}\n" for key, value in shared.items())
        text += "\nSettings that all share:\n\n" + "".join(lines)
    return text


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number > 1)}"
