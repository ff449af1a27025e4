"""Every command: its line in the help, its flags, and what it does."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fedgkd_pl.cli.flags import (
    Parser,
    add_compare,
    add_completion,
    add_export,
    add_figure,
    add_flower,
    add_new,
    add_personalize,
    add_report,
)
from fedgkd_pl.cli.predict import which_of
from fedgkd_pl.experiments.draw import KINDS


@dataclass(frozen=True)
class Command:
    """A command."""

    help: str
    run: Callable[[Any, list[str]], int]  # takes arguments and settings; returns the exit code
    add: Callable[[Parser], None] | None = None  # adds flags; None where all are settings of fit
    takes_settings: bool = False  # whether flags that are not its own are settings of fit
    parser: dict[str, Any] = field(default_factory=dict)  # arguments of its parser


def _of_trainer(command: str) -> Callable[[Any, list[str]], int]:
    def run(_: Any, argv: list[str]) -> int:
        from fedgkd_pl.cli.train import run

        return run(command, argv)

    return run


def _predict(_: Any, argv: list[str]) -> int:
    from fedgkd_pl.cli.predict import run

    return run(Parser, argv)


def _partition(_: Any, argv: list[str]) -> int:
    from fedgkd_pl.cli.train import partition

    return partition(argv)


def _configs(*_: Any) -> int:
    from fedgkd_pl.settings.files import available

    configs = available()
    for name, text in configs.items():
        print(f"{name:<{max(map(len, configs)) + 2}}{text}")
    return 0


def _completion(arguments: Any, _: Any) -> int:
    from fedgkd_pl.cli.completion import script

    print(script(arguments.shell), end="")
    return 0


def _compare(arguments: Any, settings: list[str]) -> int:
    from fedgkd_pl.experiments.compare import compare

    own = (arguments.output_dir, arguments.jobs, arguments.rounds)
    how = (arguments.only, arguments.dry_run, arguments.quiet)
    result = compare(arguments.study, *own, settings, *how)
    return 0 if arguments.dry_run else result.show(arguments.quiet)


def _report(arguments: Any, _: Any) -> int:
    from fedgkd_pl.experiments.report import print_report

    wanted = (arguments.over_seeds, arguments.format, arguments.output, arguments.all)
    print_report(arguments.runs, *wanted)
    return 0


def _figure(arguments: Any, _: Any) -> int:
    from fedgkd_pl.experiments.draw import draw

    draw(arguments.kind, arguments.runs, arguments.output or f"{arguments.kind}.svg")
    return 0


def _personalize(arguments: Any, settings: list[str]) -> int:
    from fedgkd_pl.errors import SettingError
    from fedgkd_pl.experiments.personalize import personalize, show
    from fedgkd_pl.processes.command import quiet_libraries

    quiet_libraries()
    try:
        named = None if arguments.clients is None else arguments.clients.split(",")
        clients = None if named is None else [int(number) for number in named]
    except ValueError as error:
        text = "must be numbers with commas between them, such as 0,3,7"
        raise SettingError("clients", text, arguments.clients) from error
    own = (arguments.epochs, arguments.lr, clients, arguments.ckpt_path, arguments.output_dir)
    show(personalize(arguments.run, *own, settings, progress=not arguments.quiet))
    print(f"wrote personalized.csv and .svg to {arguments.output_dir or arguments.run}")
    return 0


def _export(arguments: Any, settings: list[str]) -> int:
    from fedgkd_pl.experiments.trained import export
    from fedgkd_pl.processes.command import quiet_libraries

    quiet_libraries()
    which = which_of(arguments)
    file = export(arguments.run, arguments.format, which, False, arguments.output, settings)
    print(f"wrote {file}")
    return 0


def _new(arguments: Any, _: Any) -> int:
    from fedgkd_pl.cli.new import new_project

    new_project(arguments.folder)
    return 0


def _flower(arguments: Any, settings: list[str]) -> int:
    from fedgkd_pl.engines.base import needs

    needs("flwr", "flower")
    from fedgkd_pl.engines.flower.app_folder import write_app
    from fedgkd_pl.processes.command import quiet_libraries

    quiet_libraries()
    write_app(arguments.folder, settings)
    return 0


COMMANDS = {
    "fit": Command(
        "train: every round of the config; --resume DIR goes on with an interrupted run",
        _of_trainer("fit"),
    ),
    "validate": Command(
        "evaluate a run or checkpoint on the server's validation set", _of_trainer("validate")
    ),
    "test": Command("evaluate a run or checkpoint on the test set", _of_trainer("test")),
    "partition": Command(
        "show who would hold what, before anything is trained: table, JSON, chart", _partition
    ),
    "predict": Command(
        "what a run's model says of new inputs (--input FILE_OR_FOLDER), or of its test set",
        _predict,
    ),
    "configs": Command(
        "list the configurations that come with the package", _configs, lambda parser: None
    ),
    "compare": Command(
        "run a study, such as a table of the paper: every cell a run; skips, resumes, tables",
        _compare,
        add_compare,
        takes_settings=True,
        parser={
            "description": "Runs every cell of a study that is not finished, resumes those that "
            "were interrupted, and writes results.csv, table.md, table.tex and report.html beside "
            "them. Any further flag is one of fedgkd-pl fit and holds for all cells, such as "
            "--data.data_dir DIR or --model.engine.workers 1.",
            "allow_abbrev": False,
        },
    ),
    "report": Command(
        "finished runs beside each other: a table, Markdown, or a page with figures",
        _report,
        add_report,
    ),
    "figure": Command(
        "a figure of the paper from finished runs, as SVG, PNG or PDF",
        _figure,
        add_figure,
        parser={
            "description": "\n".join(f"{kind:<14}{text}" for kind, text in KINDS.items()),
            "formatter_class": argparse.RawDescriptionHelpFormatter,
        },
    ),
    "personalize": Command(
        "fine-tune a run's global model for each client, on that client's own samples",
        _personalize,
        add_personalize,
        takes_settings=True,
        parser={
            "description": "Lets each client of a run fine-tune the global model on its own "
            "training samples, as in a round of FedAvg, without teachers, and tests it before and "
            "after on its own test samples, which the run must have kept out of training: "
            "fedgkd-pl fit --data.client_test_fraction 0.2. Prints a table and writes "
            "personalized.csv and personalized.svg. Any further flag is one of fedgkd-pl fit that "
            "does not decide the result, such as --data.data_dir DIR or --import MODULE.",
            "allow_abbrev": False,
        },
    ),
    "export": Command(
        "write a run's model as safetensors, ONNX, TorchScript or torch.export",
        _export,
        add_export,
        takes_settings=True,
        parser={
            "description": "Writes the model of a run, finished or stopped, in a format that other "
            "programs read; docs/model.md shows how. Needs the run's folder alone, not its data. "
            "The net's inputs are what the dataset's transform gives. Any further flag is one of "
            "fedgkd-pl fit that does not decide the result, such as --import MODULE.",
            "allow_abbrev": False,
        },
    ),
    "new": Command(
        "write a project of your own that trains at once: net, data, method, study, test",
        _new,
        add_new,
        parser={
            "description": "Writes a small project: a net, data and a method in three short files "
            "to change, a config, a study that compares the method with FedAvg and FedGKD, and a "
            "test. It trains as it is, without a download. fedgkd-pl new my-project makes the "
            "folder my-project with the module my_project, and prints the commands to go on with."
        },
    ),
    "flower": Command(
        "make a Flower app of a config: flwr run trains it where the data is",
        _flower,
        add_flower,
        takes_settings=True,
        parser={
            "description": "Writes a Flower app that trains a config: a folder for flwr run, which "
            "then simulates it or sends it to a SuperLink and its SuperNodes (docs/flower.md). Any "
            "further flag is one of fedgkd-pl fit, such as --config cifar10_fedgkd.yaml or "
            "--rounds 10.",
            "allow_abbrev": False,
        },
    ),
    "completion": Command(
        "print a script for bash, zsh or fish that completes commands, flags and configs",
        _completion,
        add_completion,
        parser={"description": 'In ~/.bashrc: eval "$(fedgkd-pl completion bash)"'},
    ),
}
