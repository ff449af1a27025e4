"""The command line: from argv to an exit code. What needs no training does not import torch."""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

import fedgkd_pl
from fedgkd_pl.cli.commands import COMMANDS
from fedgkd_pl.cli.flags import Parser
from fedgkd_pl.errors import SettingError
from fedgkd_pl.processes.command import run_command

# they do not mind if nobody reads their output
RESULTS_ARE_FILES = ("fit", "compare", "personalize", "export")
OTHER_WORDS = {"train": "fit", "run": "fit", "resume": "fit", "evaluate": "test", "eval": "test"}
OTHER_WORDS |= {"list": "configs", "plot": "figure", "study": "compare", "help": "--help"}
# the flags of compare, and whether a value follows
_COMPARE = {name: True for name in ("--output_dir", "--jobs", "--rounds", "--only")}
_COMPARE |= {name: False for name in ("--dry_run", "--quiet", "--help", "-h")}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; see :func:`fedgkd_pl.processes.command.run_command` for the exit codes.

    Args:
        argv: what follows ``fedgkd-pl``; by default the process's. ``--debug`` among it lets
            errors through whole.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    rest = [word for word in given if word != "--debug"]
    prints = rest[:1] not in [[name] for name in RESULTS_ARE_FILES]
    return run_command(lambda: _dispatch(rest), "--debug" in given, prints)


def _dispatch(argv: list[str]) -> int:
    command = COMMANDS.get(argv[0]) if argv else None
    if command is None and argv and argv[0] not in ("-h", "--help", "--version"):
        _refuse(argv[0])
    if command is not None and command.add is None:  # all its flags are settings
        return command.run(None, argv[1:])
    parser = Parser(
        prog="fedgkd-pl",
        description="Federated learning with FedGKD and its baselines, on PyTorch Lightning.",
        epilog="Try: fedgkd-pl fit --config quickstart.yaml      "
        "Each command explains itself: fedgkd-pl fit --help",
    )
    parser.add_argument("--version", action="version", version=fedgkd_pl.__version__)
    parsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, each in COMMANDS.items():
        added = parsers.add_parser(name, help=each.help, **each.parser)
        if each.add is not None:
            each.add(added)
    arguments, rest = parser.parse_known_args(_study_first(argv))
    if arguments.command is None:
        parser.print_help()
        return 2
    command = COMMANDS[arguments.command]
    if rest and not command.takes_settings:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return command.run(arguments, rest)


def _study_first(argv: list[str]) -> list[str]:
    """The arguments of ``compare``, settings last: argparse would take their values as its own."""
    if argv[:1] != ["compare"]:
        return argv
    ours, cells, study = ["compare"], list[str](), False
    waiting = iter(argv[1:])
    for word in waiting:
        flag, given, _ = word.partition("=")
        target = ours if flag in _COMPARE or not word.startswith("-") else cells
        target.append(word)
        study |= not word.startswith("-")
        if word.startswith("-") and not given and _COMPARE.get(flag, True):
            target += [value] if (value := next(waiting, "")) else []
    return [*ours, *cells] if study else argv


def _refuse(word: str) -> NoReturn:
    if word.startswith("-"):
        raise SettingError("command", "comes first: fedgkd-pl fit, or another", word)
    near = [OTHER_WORDS[word]] if word in OTHER_WORDS else get_close_matches(word, COMMANDS, n=1)
    hint = f"did you mean fedgkd-pl {near[0]}?" if near else "fedgkd-pl --help lists them"
    raise SettingError("command", f"no such command, {hint}", word)
