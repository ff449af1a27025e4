"""``make results``: writes the tables and figures of the pages from the results that are kept.

A page has blocks, and a test fails where one differs from what is written here::

    <!-- results: table digits measures=best,final,last10 -->
    …
    <!-- end -->

The first word is one of :data:`KINDS`, the second a study of ``results/``, or several
(``one+other``). Options follow; ``only=A,B`` chooses methods and their order.
``python -m tools.results add FOLDER`` keeps the runs of a study.
"""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from fedgkd_pl.errors import SettingError, StorageError, require
from fedgkd_pl.experiments.paper import numbers, paper_row
from fedgkd_pl.experiments.tables import spread
from fedgkd_pl.plots.figures import learning_curves
from fedgkd_pl.plots.style import render

from tools.registry import GIVEN, KeptRun, add, read_registry

Runs = Sequence[KeptRun]
Options = dict[str, str]
PAGES = ("README.md", "results/README.md", "benchmarks/*.md", "docs/*.md", "docs/methods/*.md")
BLOCK = re.compile(r"<!-- results: (.*?) -->(\n?).*?<!-- end -->", re.DOTALL)
NAMES = {"last10": "last 10", "at_best_val": "at best val", "task/acc": "tasks"}
NAMES |= {"task/forgetting": "forgetting", "test/acc": "accuracy"}


def generate(top: Path) -> dict[Path, str]:
    """What pages and figures should be."""
    files: dict[Path, str] = {}
    for page in (page for pattern in PAGES for page in sorted(top.glob(pattern))):
        text, where = page.read_text(encoding="utf-8"), page.relative_to(top).as_posix()
        blocks = list(BLOCK.finditer(text))
        whole = text.count("<!-- results: ") == len(blocks)  # else one would take what follows it
        require(whole, where, "a block has no <!-- end --> of its own")
        for block in reversed(blocks):
            try:
                kind, names, options = read_block(block[1])
                runs = [run for name in names for run in read_registry(top / "results" / name)]
                made = KINDS[kind](choose(runs, options), options)
            except SettingError as error:
                raise SettingError(where, str(error), block[1]) from error
            if kind == "curves":
                figure = top / options.get("file", f"results/{names[0]}/curves.svg")
                files[figure] = made
                link = Path(os.path.relpath(figure, page.parent)).as_posix()
                made = f"![{options.get('alt', 'Learning curves')}]({link})\n"
            start = f"<!-- results: {block[1]} -->{block[2]}"
            text = f"{text[: block.start()]}{start}{made}<!-- end -->{text[block.end() :]}"
        files[page] = text
    return files


def read_block(text: str) -> tuple[str, list[str], Options]:
    """The kind, the studies and the options of a block's comment."""
    try:
        kind, names, *words = shlex.split(text)
    except ValueError as error:  # too few, or a quote without its end
        raise SettingError("block", "needs a kind and a study") from error
    require(kind in KINDS, "block", f"must be one of {', '.join(KINDS)}")
    options = {key: value for key, _, value in (word.partition("=") for word in words)}
    for key in options:
        require(key in OPTIONS[kind], key, f"must be one of {', '.join(OPTIONS[kind])}")
    return kind, names.split("+"), options


def choose(runs: Runs, options: Options) -> Runs:
    """The runs of the methods of ``only``, in its order; all of them without it."""
    known = list(dict.fromkeys(run.labels["method"] for run in runs))
    chosen = options["only"].split(",") if "only" in options else known
    require(len(runs) > 0, "study", "has no runs in results/")
    for name in chosen:
        require(name in known, "only", f"has no run of {name}; there are {', '.join(known)}")
    return [run for name in chosen for run in runs if run.labels["method"] == name]


def table(runs: Runs, options: Options) -> str:
    """Measures in percent over the seeds, a row for each method (and other axes).

    Options: ``measures``, also columns of ``rounds.csv`` and ranges (``round1-20``); ``names``,
    what the table calls them; ``paper``, a table of the paper, whose numbers stand in brackets;
    ``rows=measure`` for methods as columns; ``plain`` to mark neither the best nor the second.
    """
    measures: list[str] = []
    for word in options.get("measures", "best,last10,at_best_val").split(","):
        ends = re.fullmatch(r"round(\d+)-(\d+)", word)
        span = range(int(ends[1]), int(ends[2]) + 1) if ends else ()
        measures += [f"round{number}" for number in span] if ends else [word]
    names = [_name(measure) for measure in measures]
    if "names" in options:
        names = options["names"].split(",")
    require(len(names) == len(measures), "names", "must be as many as measures")
    groups: dict[tuple[str, ...], list[KeptRun]] = {}
    for run in runs:
        groups.setdefault(tuple(run.labels.values()), []).append(run)
    values = [
        [[v for run in group if (v := run.measure(m)) is not None] for m in measures]
        for group in groups.values()
    ]
    body = [[spread(cell) for cell in row] for row in values]
    for column in range(len(measures)) if "plain" not in options else ():
        means = [round(mean(row[column]), 2) if row[column] else -1.0 for row in values]
        for row, value in zip(body, means, strict=True):
            rank = sum(other > value for other in means)
            row[column] = {0: "**{}**", 1: "<u>{}</u>"}.get(rank, "{}").format(row[column])
    for row, group in zip(body, groups.values(), strict=True):
        for n, measure in enumerate(measures):
            found = paper_row(options.get("paper", ""), group[0].labels, measure)
            if found is not None:
                row[n] += " ({:.2f} ± {:.2f})".format(*numbers(found))
    heads = [list(runs[0].labels), names]
    lines = [[*labels, *row] for labels, row in zip(groups, body, strict=True)]
    if options.get("rows") == "measure":
        heads = [["measure"], [" ".join(labels) for labels in groups]]
        lines = [
            [name, *column] for name, column in zip(names, zip(*body, strict=True), strict=True)
        ]
    rule = f"|{'---|' * len(heads[0])}{'---:|' * len(heads[1])}"
    shown = [f"| {' | '.join(line)} |" for line in [heads[0] + heads[1], *lines]]
    return "\n".join([shown[0], rule, *shown[1:], ""])


def _name(measure: str) -> str:
    kind = re.sub(r"^round(\d+)$", r"round \1", measure.removeprefix("average_"))
    return ("average " if measure.startswith("average_") else "") + NAMES.get(kind, kind)


def value(runs: Runs, options: Options) -> str:
    """One measure over the seeds, within a line; option: ``measure``."""
    values = [run.measure(options.get("measure", "")) for run in runs]
    known = [value for value in values if value is not None]
    require(len(known) > 0, "measure", "no run has it")
    return spread(known)


def curves(runs: Runs, options: Options) -> str:
    """An SVG file of test accuracies by round.

    Options: ``file``, ``alt``; ``average`` for the averaged models' curves, too; ``bottom=60``
    begins the axis at 60 %.
    """
    lines: dict[str, list[dict[int, float]]] = {}
    for run in runs:
        label, average = ", ".join(run.labels.values()), run.by_round("average/acc")
        lines.setdefault(label, []).append(run.by_round("test/acc"))
        if "average" in options and average:
            lines.setdefault(f"{label}, average", []).append(average)
    figure = learning_curves(lines)
    if "bottom" in options:
        figure.axes[0].set_ylim(float(options["bottom"]), 100)
    return render(figure, "svg").decode()


KINDS = {"table": table, "value": value, "curves": curves}
OPTIONS = {
    "table": ("only", "measures", "names", "paper", "rows", "plain"),
    "value": ("only", "measure"),
    "curves": ("only", "file", "alt", "average", "bottom"),
}


def main(argv: Sequence[str]) -> int:
    """Keeps runs, or writes pages and figures; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.results")
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
        files = generate(Path())
    except (SettingError, StorageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for file, text in files.items():
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
