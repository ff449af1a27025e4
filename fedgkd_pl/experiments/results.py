"""``make results``: the tables and figures of the pages, from the results the repository keeps.

A page has blocks, and a test fails where one differs from what is written here::

    <!-- results: table digits measures=best,final,last10 -->
    …
    <!-- end -->

The first word is one of :data:`KINDS`, the second a study of ``results/``, or several
(``one+other``). Options follow; ``only=A,B`` chooses methods and their order.
``python -m fedgkd_pl.experiments.results add FOLDER`` keeps the runs of a study.
"""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedgkd_pl.errors import SettingError, StorageError, require
from fedgkd_pl.experiments.paper import check_table
from fedgkd_pl.experiments.protocol import MARKS
from fedgkd_pl.experiments.registry import GIVEN, KeptRun, add, read_registry
from fedgkd_pl.experiments.significance import spread
from fedgkd_pl.experiments.study import Cell, Study, check_measures
from fedgkd_pl.experiments.table import Table
from fedgkd_pl.experiments.tables import LESS_IS_BETTER, make_tables

Options = dict[str, str]
PAGES = ("README.md", "results/README.md", "benchmarks/DIGITS.md", "docs/*.md", "docs/methods/*.md")
BLOCK = re.compile(r"<!-- results: (.*?) -->(\n?).*?<!-- end -->", re.DOTALL)


def generate(top: Path) -> tuple[dict[Path, str], set[str]]:
    """What pages and figures should be, and the studies that ``results/`` does not have."""
    files: dict[Path, str] = {}
    absent: set[str] = set()
    for page in [page for pattern in PAGES for page in sorted(top.glob(pattern))]:
        text = page.read_text(encoding="utf-8")
        blocks = list(BLOCK.finditer(text))
        whole = text.count("<!-- results: ") == len(blocks)  # else one would take what follows it
        require(whole, page.relative_to(top).as_posix(), "a block has no <!-- end --> of its own")
        for block in reversed(blocks):
            try:
                kind, names, options = read_block(block[1])
                studies = {name: read_registry(top / "results" / name) for name in names.split("+")}
                absent |= {name for name, kept in studies.items() if not kept}
                if not all(studies.values()):
                    continue
                runs = choose([run for kept in studies.values() for run in kept], options)
                made = KINDS[kind].make(runs, options)
            except SettingError as error:
                where = page.relative_to(top).as_posix()
                raise SettingError(where, str(error), block[1]) from error
            if kind == "curves":
                figure = top / options.get("file", f"results/{names}/curves.svg")
                files[figure] = made
                link = Path(os.path.relpath(figure, page.parent)).as_posix()
                made = f"![{options.get('alt', 'Learning curves')}]({link})\n"
            start = f"<!-- results: {block[1]} -->{block[2]}"
            text = f"{text[: block.start()]}{start}{made}<!-- end -->{text[block.end() :]}"
        files[page] = text
    return files, absent


def read_block(text: str) -> tuple[str, str, Options]:
    """What a block's comment asks for, with the options that its kind has and needs."""
    try:
        kind, names, *words = shlex.split(text)
    except ValueError as error:  # too few, or a quote without its end
        raise SettingError("block", "needs a kind and a study") from error
    require(kind in KINDS, "block", f"is none of {', '.join(KINDS)}")
    options = {key: value for key, _, value in (word.partition("=") for word in words)}
    known = ("only", *KINDS[kind].needs, *KINDS[kind].takes)
    for key in options:
        require(key in known, key, f"no option of {kind}: {', '.join(dict.fromkeys(known))}")
    for key in KINDS[kind].needs:
        require(options.get(key, "") != "", key, f"{kind} needs it")
    return kind, names, options


def choose(runs: Sequence[KeptRun], options: Options) -> Sequence[KeptRun]:
    """The runs of the methods of ``only``, in its order; all of them without it."""
    if "only" not in options:
        return runs
    chosen, known = options["only"].split(","), dict.fromkeys(run.labels["method"] for run in runs)
    for name in chosen:
        require(name in known, "only", f"no run of {name}; there are {', '.join(known)}")
    return [run for name in chosen for run in runs if run.labels["method"] == name]


def table(runs: Sequence[KeptRun], options: Options) -> str:
    """Accuracies over the seeds.

    Options: ``measures``, with ranges of rounds (``round1-20``); ``paper``, a table of the paper;
    ``rows=measure`` for methods as columns; ``notes=all`` for notes on leads; ``plain`` to mark
    neither the best nor the second.
    """
    measures: list[str] = []
    for word in options.get("measures", "best,final,last10").split(","):
        ends = re.fullmatch(r"(\w*round)(\d+)-(\d+)", word)
        numbers = range(int(ends[2]), int(ends[3]) + 1) if ends else ()
        measures += [f"{ends[1]}{number}" for number in numbers] if ends else [word]
    check_measures("measures", measures)
    check_table(options.get("paper", ""))
    for key, text in (("rows", "measure"), ("notes", "all")):
        require(options.get(key, text) == text, key, f"must be {text}")
    axes = list(runs[0].labels)
    laid_out = [axes, ["measure"]]
    rows, columns = laid_out[::-1] if options.get("rows") == "measure" else laid_out
    study = Study(
        name="",
        axes={axis: {run.labels[axis]: {} for run in runs} for axis in axes},
        seeds=sorted({run.seed for run in runs}),
        paper=options.get("paper", ""),
        measures=measures,
        rows=rows,
        columns=columns,
    )
    (made,) = make_tables(study, [(Cell(run.labels, run.seed, ()), run) for run in runs])
    notes = [n for n in made.notes if options.get("notes") == "all" or n.startswith(tuple(MARKS))]
    if "plain" in options:
        made = replace(made, ranks={})
    return replace(made, title="", notes=notes).to_markdown()


def value(runs: Sequence[KeptRun], options: Options) -> str:
    """One accuracy over the seeds, within a line; option: ``measure``."""
    check_measures("measure", [options["measure"]])
    values = [run.measure(options["measure"]) for run in runs]
    known = [value for value in values if value is not None]
    require(len(known) > 0, "measure", "no run has it")
    return spread(known)


def lead(runs: Sequence[KeptRun], options: Options) -> str:
    """How far the first method of ``only`` is ahead of the second on the same cohorts, in a line.

    Option: ``rounds``, from and to (``2-20``).
    """
    names, ends = options["only"].split(","), re.fullmatch(r"(\d+)-(\d+)", options["rounds"])
    require(len(names) == 2, "only", "must be two methods")
    if ends is None:
        raise SettingError("rounds", "must be FROM-TO, as 2-20")
    first, last = int(ends[1]), int(ends[2])
    one, other = (
        {
            (n, run.seed, *(v for axis, v in run.labels.items() if axis != "method")): accuracy
            for run in runs
            if run.labels["method"] == name
            for n, accuracy in run.accuracy.items()
            if first <= n <= last
        }
        for name in names
    )
    pairs = [key for key in one if key in other]
    require(len(pairs) > 0, "rounds", f"{' and '.join(names)} have none in common there")
    differences = [one[key] - other[key] for key in pairs]
    ahead = sum(difference > 0 for difference in differences)
    mean = sum(differences) / len(differences)
    return f"{mean:.1f} points on average over rounds {first} to {last}, in {ahead} of {len(pairs)}"


def wins(runs: Sequence[KeptRun], options: Options) -> str:
    """In how many seeds the first method of ``only`` is ahead of all others there, in a line.

    Options: ``key``, a measure, or a column of ``rounds.csv`` with an accuracy, of the last round
    (of other columns nobody knows whether more is better); ``where``, an axis and its label
    (``order=same``), for runs that have more axes than ``method``.
    """
    names, key = options["only"].split(","), options["key"]
    require(len(names) > 1, "only", "must be two methods or more")
    if "/" in key:
        is_accuracy = re.search(r"acc(_|$)", key) is not None
        require(is_accuracy, "key", "a measure, or a column of accuracies")
        _check_columns("key", [key], runs)
    else:
        check_measures("key", [key])
    if "where" in options:
        axis, _, label = options["where"].partition("=")
        known = f"the runs are by {', '.join(runs[0].labels)}"
        runs = [run for run in runs if run.labels.get(axis) == label]
        require(len(runs) > 0, "where", f"{known}; none has {label} as its {axis}")
    values: dict[str, dict[int, float]] = {name: {} for name in names}
    for run in runs:
        method, found = run.labels["method"], _last(run, key) if "/" in key else run.measure(key)
        reason = f"{method} has several runs of seed {run.seed}; choose by AXIS=LABEL"
        require(run.seed not in values[method], "where", reason)
        if found is not None:
            values[method][run.seed] = -found if key == LESS_IS_BETTER else found
    first, *others = values.values()
    seeds = [seed for seed in first if all(seed in other for other in others)]
    require(len(seeds) > 0, "key", f"{', '.join(names)} have it in no seed in common")
    ahead = sum(all(first[seed] > other[seed] for other in others) for seed in seeds)
    return f"in {ahead} of {len(seeds)} seed{'s' * (len(seeds) > 1)}"


def _last(run: KeptRun, key: str) -> float | None:
    """A column's value in the last round that was tested."""
    return run.columns.get(key, {}).get(max(run.accuracy))


def _check_columns(option: str, keys: Sequence[str], runs: Sequence[KeptRun]) -> None:
    known = sorted({key for run in runs for key in run.columns})
    for key in keys:
        require(key in known, option, f"no run has {key}; there are {', '.join(known)}")


def columns(runs: Sequence[KeptRun], options: Options) -> str:
    """Kept metrics of the last round in %, over the seeds, a row for a method.

    Options: ``keys``, columns of ``rounds.csv``; ``names``, what the table calls them.
    """
    keys = options["keys"].split(",")
    names = options.get("names", options["keys"]).split(",")
    require(len(names) == len(keys), "names", "must be as many as keys")
    _check_columns("keys", keys, runs)
    rows = []
    for method in dict.fromkeys(run.labels["method"] for run in runs):
        row = {"method": method}
        for key, name in zip(keys, names, strict=True):
            seeds = [run for run in runs if run.labels["method"] == method]
            values = [_last(run, key) for run in seeds]
            row[name] = spread([100 * value for value in values if value is not None])
        rows.append(row)
    return Table.of(rows).to_markdown()


def curves(runs: Sequence[KeptRun], options: Options) -> str:
    """An SVG file of test accuracies by round.

    Options: ``file``, ``alt``, ``title``; ``average`` for the averaged models' curves, too.
    """
    from fedgkd_pl.plots.figures import learning_curves
    from fedgkd_pl.plots.style import render

    lines: dict[str, list[dict[int, float]]] = {}
    for run in runs:
        label = ", ".join(run.labels.values())
        lines.setdefault(label, []).append(run.accuracy)
        if "average" in options and run.average:
            lines.setdefault(f"{label}, average", []).append(run.average)
    return render(learning_curves(lines, options.get("title", "")), "svg").decode()


def origin(runs: Sequence[KeptRun], options: Options) -> str:
    """Where the results come from: a row for a method, then commands, machines and notes."""
    groups: dict[str, list[KeptRun]] = {}
    for run in runs:
        groups.setdefault(", ".join(run.labels.values()), []).append(run)
    rows = []
    for label, group in groups.items():
        row = {"method": label}
        for key in ("seed", "rounds", "precision", "commit", "date"):
            row[key] = ", ".join(dict.fromkeys(run.entry[key] for run in group))
        seconds = sum(run.summary["wall_seconds"] for run in group)
        megabytes = sum(run.summary["bytes_down"] for run in group) / 1e6
        row["seconds"] = f"{seconds:,.0f}" if seconds else "not recorded"
        row["MB down"] = f"{megabytes:.1f}" if megabytes else "not recorded"
        rows.append(row)
    said = [run.entry[key] for key in ("machine", "note") for run in runs if run.entry[key]]
    commands = [f"`{run.entry['command']}`" for run in runs]
    lines = [f"- {text}" for text in dict.fromkeys([*commands, *said])]
    return "\n".join([Table.of(rows).to_markdown(), *lines, ""])


@dataclass(frozen=True)
class Kind:
    """A kind of block: what makes it, and its options besides ``only``."""

    make: Callable[[Sequence[KeptRun], Options], str]
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


KINDS = {
    "table": Kind(table, takes=("measures", "paper", "rows", "notes", "plain")),
    "value": Kind(value, needs=("measure",)),
    "lead": Kind(lead, needs=("only", "rounds")),
    "wins": Kind(wins, needs=("only", "key"), takes=("where",)),
    "columns": Kind(columns, needs=("keys",), takes=("names",)),
    "curves": Kind(curves, takes=("file", "alt", "title", "average")),
    "origin": Kind(origin),
}


def main(argv: Sequence[str]) -> int:
    """Keeps runs, or writes pages and figures; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fedgkd_pl.experiments.results")
    commands = parser.add_subparsers(dest="action", required=True)
    commands.add_parser("write", help="write all blocks and figures")
    adding = commands.add_parser("add", help="keep the runs below a folder")
    adding.add_argument("folder", type=Path)
    adding.add_argument("--study", help="the folder in results/ (default: the name of FOLDER)")
    adding.add_argument("--label", default="", help="put behind the methods' names")
    adding.add_argument("--compact", action="store_true", help="keep accuracies only")
    for name in GIVEN:
        adding.add_argument(f"--{name}", help="instead of what is found")
    given = parser.parse_args(argv)
    try:
        if given.action == "add":
            target = Path("results") / (given.study or given.folder.resolve().name)
            names = add(given.folder, target, vars(given), given.label, given.compact)
            print(f"{target}: {', '.join(names)}")
            return 0
        files, absent = generate(Path())
    except (SettingError, StorageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingError) else 4
    for file, text in files.items():
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file}")
    for name in sorted(absent):
        print(f"left as they are: blocks of {name}, which is not in results/")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
