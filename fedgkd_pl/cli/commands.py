"""Every command: its line in the help, its flags, and what it does."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from fedgkd_pl.experiments.draw import KINDS


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    any_order = False  # whether flags may stand between the values of one argument

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like argparse's, with flags in any order where that is set."""
        if not self.any_order:
            return super().parse_known_args(args, namespace)
        self.any_order = False  # the method below calls this one
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self.any_order = True

    def error(self, message: str) -> NoReturn:
        """Ends with exit code 2."""
        self.exit(2, f"error: {message} ({self.prog} --help)\n")


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
    return compare(arguments.study, *own, settings, *how)


def _report(arguments: Any, _: Any) -> int:
    from fedgkd_pl.experiments.report import report

    wanted = (arguments.over_seeds, arguments.format, arguments.output, arguments.all)
    report(arguments.runs, *wanted)
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
    own = (arguments.format, arguments.ckpt_path, arguments.average, arguments.output)
    print(f"wrote {export(arguments.run, *own, settings)}")
    return 0


def _flower(arguments: Any, settings: list[str]) -> int:
    from fedgkd_pl.engines.base import needs

    needs("flwr", "flower")
    from fedgkd_pl.engines.flower.app_folder import write_app
    from fedgkd_pl.processes.command import quiet_libraries

    quiet_libraries()
    write_app(arguments.folder, settings)
    return 0


def _add_compare(compare: Parser) -> None:
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
    _add_quiet(compare)


def _add_report(report: Parser) -> None:
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


def _add_figure(figure: Parser) -> None:
    figure.any_order = True
    figure.add_argument("kind", choices=KINDS, help="see above")
    figure.add_argument("runs", nargs="*", help="run folders, or folders above them")
    figure.add_argument("--output", help="the file; KIND.svg by default")


def _add_personalize(parser: Parser) -> None:
    parser.add_argument("run", help="the folder of a run, finished or stopped")
    parser.add_argument("--epochs", type=int, help="of each client; as in the run's rounds")
    parser.add_argument("--lr", type=float, help="of each client; that of the run")
    parser.add_argument("--clients", metavar="0,3,7", help="whose; all with test samples")
    _add_checkpoint(parser)
    parser.add_argument("--output_dir", help="where to write; the run's folder")
    _add_quiet(parser)


def _add_checkpoint(parser: Parser) -> None:
    parser.add_argument(
        "--ckpt_path",
        default="last",
        metavar="last|best|FILE",
        help="the global model: of the last round (default), of the best by validation, or a file",
    )


def _add_quiet(parser: Parser) -> None:
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def _add_export(parser: Parser) -> None:
    parser.add_argument("run", help="the folder of a run, finished or stopped")
    parser.add_argument(
        "--format",
        choices=("safetensors", "onnx", "torchscript", "torch_export"),
        default="safetensors",
        help="weights alone (safetensors, default), or the net itself",
    )
    _add_checkpoint(parser)
    parser.add_argument("--average", action="store_true", help="what AveragedModel made, instead")
    parser.add_argument("--output", help="the file; model.… in the run's folder")


def _add_completion(parser: Parser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="of which shell")


def _add_flower(flower: Parser) -> None:
    flower.add_argument("folder", help="of the app; must not exist yet")


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
        "write the predictions of a run or checkpoint on the test set beside it",
        _of_trainer("predict"),
    ),
    "configs": Command(
        "list the configurations that come with the package", _configs, lambda parser: None
    ),
    "compare": Command(
        "run a study, such as a table of the paper: every cell a run; skips, resumes, tables",
        _compare,
        _add_compare,
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
        _add_report,
    ),
    "figure": Command(
        "a figure of the paper from finished runs, as SVG, PNG or PDF",
        _figure,
        _add_figure,
        parser={
            "description": "\n".join(f"{kind:<14}{text}" for kind, text in KINDS.items()),
            "formatter_class": argparse.RawDescriptionHelpFormatter,
        },
    ),
    "personalize": Command(
        "fine-tune a run's global model for each client, on that client's own samples",
        _personalize,
        _add_personalize,
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
        _add_export,
        takes_settings=True,
        parser={
            "description": "Writes the model of a run, finished or stopped, in a format that other "
            "programs read. Its inputs are what the dataset's transform gives. Any further flag is "
            "one of fedgkd-pl fit that does not decide the result, such as --data.data_dir DIR or "
            "--import MODULE.",
            "allow_abbrev": False,
        },
    ),
    "flower": Command(
        "make a Flower app of a config: flwr run trains it where the data is",
        _flower,
        _add_flower,
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
        _add_completion,
        parser={"description": 'In ~/.bashrc: eval "$(fedgkd-pl completion bash)"'},
    ),
}
