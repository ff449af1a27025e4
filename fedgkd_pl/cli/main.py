"""The command line. What needs no training is answered without importing torch."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

import fedgkd_pl
from fedgkd_pl.errors import RunFailed, SettingError, StorageError
from fedgkd_pl.processes.output import kept_output, lost, only_our_warnings
from fedgkd_pl.processes.signals import Stopped, stoppable

TRAINER_COMMANDS = {
    "fit": "train: every round of the config; --resume DIR goes on with an interrupted run",
    "validate": "evaluate a checkpoint on the server's validation set",
    "test": "evaluate a checkpoint on the test set",
    "partition": "show who would hold what, before anything is trained: table, JSON, chart",
    "predict": "write a checkpoint's predictions on the test set beside it",
}

# the flags of compare, and whether a value follows
COMPARE = {name: True for name in ("--output_dir", "--jobs", "--rounds", "--only")}
COMPARE |= {name: False for name in ("--dry_run", "--help", "-h")}


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        args: the words after ``fedgkd-pl``; by default those of the process.

    Returns:
        The exit code: 0 done, 2 bad input, 3 the run failed, 4 storage, 129, 130 or 143 stopped.
    """
    words = list(sys.argv[1:] if args is None else args)
    only_our_warnings()
    ended: SystemExit | None = None
    with kept_output() as streams:
        try:
            with stoppable():
                code = _command(words)
        except Stopped as stop:
            hint = f"; {stop.hint}" if stop.hint else ""
            print(f"stopped by {stop.name}{hint}", file=sys.stderr)
            code = stop.exit_code
        except SystemExit as stop:  # a parser's
            ended = stop
    failed = lost(streams)
    if failed is not None and words[:1] not in (["fit"], ["compare"]):  # whose results are files
        return _tell(StorageError("the output", failed))
    if ended is not None:
        raise ended
    return code


def _command(words: list[str]) -> int:
    if words and words[0] in TRAINER_COMMANDS:
        from fedgkd_pl.cli.commands import run

        return run(words)
    try:
        return _other(words)
    except (SettingError, RunFailed, StorageError) as error:
        return _tell(error)
    except OSError as error:
        return _tell(StorageError(error.filename or type(error).__name__, error))


def _tell(error: SettingError | RunFailed | StorageError) -> int:
    with suppress(OSError):
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return {SettingError: 2, RunFailed: 3, StorageError: 4}[type(error)]


class _Parser(argparse.ArgumentParser):
    """A parser that answers bad input in one line."""

    any_order = False  # whether flags may stand between words of one argument

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if not self.any_order:
            return super().parse_known_args(args, namespace)
        self.any_order = False  # which that calls again
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self.any_order = True

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} ({self.prog} --help)\n")


def _other(words: list[str]) -> int:
    parser = _Parser(
        prog="fedgkd-pl",
        description="Federated learning with FedGKD and its baselines, on PyTorch Lightning.",
        epilog="Try: fedgkd-pl fit --config quickstart.yaml      "
        "Each command explains itself: fedgkd-pl fit --help",
    )
    parser.add_argument("--version", action="version", version=fedgkd_pl.__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, text in TRAINER_COMMANDS.items():
        commands.add_parser(name, help=text)
    commands.add_parser("configs", help="list the configurations that come with the package")
    _add_compare(commands)
    _add_report(commands)
    _add_figure(commands)
    _add_flower(commands)
    arguments, rest = parser.parse_known_args(_study_first(words))
    if rest and arguments.command not in ("compare", "flower"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if arguments.command == "configs":
        from fedgkd_pl.settings.files import available

        configs = available()
        for name, text in configs.items():
            print(f"{name:<{max(map(len, configs)) + 2}}{text}")
    elif arguments.command == "compare":
        from fedgkd_pl.experiments.compare import compare

        settings = (arguments.output_dir, arguments.jobs, arguments.rounds)
        return compare(arguments.study, *settings, rest, arguments.only, arguments.dry_run)
    elif arguments.command == "flower":
        from fedgkd_pl.engines.base import needs

        needs("flwr", "flower")
        from fedgkd_pl.cli.commands import run
        from fedgkd_pl.engines.flower.app_folder import app_writer, over_flower

        return run(["fit", *over_flower(rest)], app_writer(arguments.folder))
    elif arguments.command == "figure":
        from fedgkd_pl.experiments.draw import draw

        draw(arguments.kind, arguments.runs, arguments.output or f"{arguments.kind}.svg")
    elif arguments.command == "report":
        from fedgkd_pl.experiments.report import report as show

        wanted = (arguments.over_seeds, arguments.format, arguments.output, arguments.all)
        show(arguments.runs, *wanted)
    else:
        parser.print_help()
        return 2
    return 0


def _study_first(words: list[str]) -> list[str]:
    """The words of ``compare`` with flags of ``fit`` last: argparse takes their values for ours."""
    if words[:1] != ["compare"]:
        return words
    ours, cells, study = ["compare"], list[str](), False
    waiting = iter(words[1:])
    for word in waiting:
        flag, given, _ = word.partition("=")
        place = ours if flag in COMPARE or not word.startswith("-") else cells
        place.append(word)
        study |= not word.startswith("-")
        if word.startswith("-") and not given and COMPARE.get(flag, True):
            place += [value] if (value := next(waiting, "")) else []
    return [*ours, *cells] if study else words


def _add_compare(commands: Any) -> None:
    compare = commands.add_parser(
        "compare",
        help="run a study, such as a table of the paper: every cell a run; skips, resumes, tables",
        description="Runs every cell of a study that is not finished, resumes those that were "
        "interrupted, and writes results.csv, table.md, table.tex and report.html beside them. "
        "Any further flag is one of fedgkd-pl fit and holds for all cells, such as "
        "--data.data_dir DIR or --model.engine.workers 1.",
        allow_abbrev=False,
    )
    compare.add_argument("study", help="a study file; fedgkd-pl configs lists ours")
    compare.add_argument("--output_dir", default="runs", help="where studies are kept (runs)")
    compare.add_argument("--jobs", type=int, default=1, help="cells side by side (1)")
    compare.add_argument(
        "--rounds", type=int, help="instead of the configs'; cells that have fewer go on"
    )
    compare.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="AXIS=LABEL,...",
        help="a part of the study, such as --only method=FedAvg,FedGKD --only seed=0",
    )
    compare.add_argument("--dry_run", action="store_true", help="only check and list the cells")


def _add_flower(commands: Any) -> None:
    flower = commands.add_parser(
        "flower",
        help="make a Flower app of a config: flwr run trains it where the data is",
        description="Writes a Flower app that trains a config: a folder for flwr run, which then "
        "simulates it or sends it to a SuperLink and its SuperNodes (docs/flower.md). Any further "
        "flag is one of fedgkd-pl fit, such as --config cifar10_fedgkd.yaml or --rounds 10.",
        allow_abbrev=False,
    )
    flower.add_argument("folder", help="of the app; must not exist yet")


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report", help="finished runs beside each other: a table, Markdown, or a page with figures"
    )
    report.any_order = True
    report.add_argument("runs", nargs="+", help="run folders, or folders above them")
    report.add_argument(
        "--over_seeds", action="store_true", help="all runs, as mean ± std over a method's seeds"
    )
    report.add_argument(
        "--all", action="store_true", help="a line for every run, not the newest of each folder"
    )
    report.add_argument(
        "--format",
        choices=("table", "md", "html"),
        default="table",
        help="md and html take all runs, over seeds; html is one page with every figure",
    )
    report.add_argument("--output", help="the file; html: report.html in the first folder")


def _add_figure(commands: Any) -> None:
    from fedgkd_pl.experiments.draw import KINDS

    figure = commands.add_parser(
        "figure",
        help="a figure of the paper from finished runs, as SVG, PNG or PDF",
        description="\n".join(f"{kind:<14}{text}" for kind, text in KINDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    figure.any_order = True
    figure.add_argument("kind", choices=KINDS, help="see above")
    figure.add_argument("runs", nargs="*", help="run folders, or folders above them")
    figure.add_argument("--output", help="the file; KIND.svg by default")
