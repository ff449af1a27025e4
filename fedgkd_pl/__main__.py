"""The command line. What needs no training is answered without importing torch."""

import argparse
import sys
from collections.abc import Sequence
from shlex import quote

import fedgkd_pl
from fedgkd_pl.errors import SettingError
from fedgkd_pl.signals import Stopped, stoppable

TRAINER_COMMANDS = {
    "fit": "train: every round of the config; --resume DIR goes on with an interrupted run",
    "validate": "evaluate a checkpoint on the server's validation set",
    "test": "evaluate a checkpoint on the test set",
    "partition": "show who would hold what, before anything is trained: table, JSON, chart",
    "predict": "write a checkpoint's predictions on the test set beside it",
}


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        args: the words after ``fedgkd-pl``; by default those of the process.

    Returns:
        The exit code: 0 done, 2 bad input, 3 the run failed, 4 storage, 130 or 143 stopped.
    """
    words = list(sys.argv[1:] if args is None else args)
    try:
        with stoppable():
            return _command(words)
    except Stopped as stop:
        hint = (
            f"; go on with: fedgkd-pl fit --resume {quote(str(stop.folder))}" if stop.folder else ""
        )
        print(f"stopped by {stop.name}{hint}", file=sys.stderr)
        return stop.exit_code


def _command(words: list[str]) -> int:
    if words and words[0] in TRAINER_COMMANDS:
        from fedgkd_pl.commands import run

        return run(words)
    try:
        return _other(words)
    except SettingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _other(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
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
    report = commands.add_parser("report", help="the accuracies of finished runs in one table")
    report.add_argument("runs", nargs="+", help="run folders, or folders above them")
    report.add_argument(
        "--over_seeds", action="store_true", help="all runs, as mean ± std over a method's seeds"
    )
    report.add_argument("--markdown", action="store_true", help="a Markdown table")
    arguments = parser.parse_args(words)
    if arguments.command == "configs":
        from fedgkd_pl.config_files import available

        configs = available()
        for name, text in configs.items():
            print(f"{name:<{max(map(len, configs)) + 2}}{text}")
    elif arguments.command == "report":
        from fedgkd_pl.report import report as show

        show(arguments.runs, arguments.over_seeds, arguments.markdown)
    else:
        parser.print_help()
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
