"""The command line: each command is a function, and its signature makes its flags and its help.

What needs no training does not import torch.
"""

import inspect
import sys
from collections import deque
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NoReturn, get_type_hints

import fedgkd_pl
from fedgkd_pl.config.messages import argument_error
from fedgkd_pl.errors import ArgumentError, require
from fedgkd_pl.processes.command import quiet_libraries, run_command
from typing_extensions import override

Format = Literal["safetensors", "onnx", "torchscript", "torch_export"]


def fit(settings: list[str]) -> None:
    """Train: every round of the config; --resume DIR goes on with an interrupted run."""
    _with_trainer("fit", settings)


def validate(settings: list[str]) -> None:
    """Evaluate a run or checkpoint on the server's validation set."""
    _with_trainer("validate", settings)


def test(settings: list[str]) -> None:
    """Evaluate a run or checkpoint on the test set."""
    _with_trainer("test", settings)


def predict(
    run: str,
    settings: list[str],
    input: str | None = None,
    output: str | None = None,
    ckpt_path: str = "last",
    client: int | None = None,
) -> None:
    """Predict new inputs (--input FILE_OR_FOLDER) with a run's model, or its test set.

    With --input, needs the run's folder alone, finished or stopped: images, .txt files, tables
    (.csv, .tsv, .parquet) or arrays (.npy, .npz), as the kind of data allows. Without, writes the
    predictions on the run's test set to predictions.csv in the run's folder.

    Args:
        run: the folder of a run.
        input: a file or folder.
        output: INPUT.predictions.csv by default, in the current folder.
        ckpt_path: the model of the last round, of the best by validation, the average of
            AveragedModel (last, best or average), or that of a checkpoint file of the run.
        client: whose model, where clients have parts of their own.
    """
    if input is None:
        require(output is None, "output", "needs --input FILE_OR_FOLDER")
        return _with_trainer("predict", [run, "--ckpt_path", ckpt_path, *settings])
    from fedgkd_pl.experiments.trained import load_run, predict_files, show

    source = Path(input).expanduser()
    require(source.exists(), "input", "there is no such file or folder", input)
    file = output or f"{source.resolve().name}.predictions.csv"
    show(predict_files(load_run(run, ckpt_path, settings=settings, client=client), source, file))
    print(f"wrote {file}")
    return None


def partition(settings: list[str], export: str | None = None) -> None:
    """Show who would hold what, before anything is trained: table, JSON, chart.

    Any further flag is one of fedgkd-pl fit, such as --config cifar10_fedgkd.yaml.

    Args:
        export: write who owns which sample (.json), for --data.partition FromFile.
    """
    file = None if export is None else Path(export)
    require(file is None or file.suffix == ".json", "export", "must end in .json", export)
    from fedgkd_pl.cli.partition import show_partition
    from fedgkd_pl.config.build import build_command

    experiment = build_command("fit", settings)
    folder = Path(experiment.settings["output_dir"]) / "partitions"
    try:
        with experiment.whole_keys():
            show_partition(experiment.data, folder, file)
    finally:
        experiment.start.release()


def configs() -> None:
    """List the configurations that come with the package."""
    from fedgkd_pl.config.request import available

    found = available()
    for name, text in found.items():
        print(f"{name:<{max(map(len, found)) + 2}}{text}")


def compare(
    study: str,
    settings: list[str],
    output_dir: str = "runs",
    jobs: int = 1,
    rounds: int | None = None,
    only: list[str] | None = None,
    dry_run: bool = False,
    quiet: bool = False,
) -> int:
    """Run a study, such as a table of the paper: every cell a run; skips, resumes, tables.

    Writes results.csv, table.md, table.tex and report.html beside the cells. Any further flag is
    one of fedgkd-pl fit and holds for all cells.

    Args:
        study: a study file; fedgkd-pl configs lists ours.
        output_dir: where studies are kept.
        jobs: cells side by side.
        rounds: instead of the configs'; cells that have fewer go on.
        only: a part of the study, such as method=FedAvg,FedGKD; may be repeated.
        dry_run: only check and list the cells.
        quiet: show no progress.
    """
    from fedgkd_pl.experiments.compare import compare

    result = compare(study, output_dir, jobs, rounds, settings, only or [], dry_run, quiet)
    return 0 if dry_run else result.show(quiet)


def report(
    runs: list[str],
    over_seeds: bool = False,
    format: Literal["table", "md", "html"] = "table",
    output: str | None = None,
) -> None:
    """Show finished runs beside each other: a table, Markdown, or a page with figures.

    Args:
        runs: run folders, or folders above them.
        over_seeds: mean ± std over a method's seeds.
        format: md and html are over seeds; html is one page with every figure.
        output: the file; for html, report.html in the first folder by default.
    """
    from fedgkd_pl.experiments.report import print_report

    print_report(runs, over_seeds, format, output)


def figure(kind: str, runs: list[str], output: str | None = None) -> None:
    """Draw a figure of the paper from finished runs, as SVG, PNG or PDF.

    Args:
        kind: curves, average, nets, participation, partition, features, clients, per_client,
            personalized, tasks or confusion.
        runs: run folders, or folders above them.
        output: the file; KIND.svg by default.
    """
    from fedgkd_pl.experiments.report import draw

    draw(kind, runs, output or f"{kind}.svg")


def personalize(
    run: str,
    settings: list[str],
    epochs: int | None = None,
    lr: float | None = None,
    ckpt_path: str = "last",
    output_dir: str | None = None,
    quiet: bool = False,
) -> None:
    """Fine-tune a run's global model for each client, on that client's own samples.

    Each client trains as in a round of FedAvg and is tested before and after on its own test
    samples: train with --data.client_test_fraction 0.2. Writes personalized.csv and .svg. Any
    further flag is one of fedgkd-pl fit that does not decide the result.

    Args:
        run: the folder of a run, finished or stopped.
        epochs: of each client; by default as in the run's rounds.
        lr: of each client; by default that of the run.
        ckpt_path: last, best, or a checkpoint file of the run.
        output_dir: where to write; the run's folder by default.
        quiet: show no progress.
    """
    from fedgkd_pl.experiments import personalize as module

    own = (epochs, lr, ckpt_path, output_dir, settings)
    module.show(module.personalize(run, *own, progress=not quiet))
    print(f"wrote personalized.csv and .svg to {output_dir or run}")


def export(
    run: str,
    settings: list[str],
    format: Format = "safetensors",
    ckpt_path: str = "last",
    output: str | None = None,
    client: int | None = None,
) -> None:
    """Write a run's model as safetensors, ONNX, TorchScript or torch.export.

    Needs the run's folder alone, not its data. Any further flag is one of fedgkd-pl fit that does
    not decide the result, such as --import MODULE.

    Args:
        run: the folder of a run, finished or stopped.
        format: weights alone (safetensors), or the net itself.
        ckpt_path: the model of the last round, of the best by validation, the average of
            AveragedModel (last, best or average), or that of a checkpoint file of the run.
        output: the file; model.… in the run's folder by default.
        client: whose model, where clients have parts of their own.
    """
    from fedgkd_pl.experiments.trained import export

    print(f"wrote {export(run, format, ckpt_path, output, settings, client)}")


def new(folder: str) -> None:
    """Write a project of your own that trains at once: net, data, method, study, test.

    Args:
        folder: of the project, and its name; must be new or empty.
    """
    from fedgkd_pl.cli.new import new_project

    new_project(folder)


def flower(folder: str, settings: list[str]) -> None:
    """Make a Flower app of a config: flwr run trains it where the data is.

    Any further flag is one of fedgkd-pl fit, such as --config cifar10_fedgkd.yaml or --rounds 10.

    Args:
        folder: of the app; must not exist yet.
    """
    from fedgkd_pl.engines.base import needs

    needs("flwr", "flower")
    from fedgkd_pl.engines.flower.apps import write_app

    write_app(folder, settings)


COMMANDS: dict[str, Callable[..., int | None]] = {
    each.__name__: each
    for each in (
        *(fit, validate, test, predict, partition, configs, compare, report, figure),
        *(personalize, export, new, flower),
    )
}
HELP = ("-h", "--help", "--help=all")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; see :func:`fedgkd_pl.processes.command.run_command` for the exit codes.

    Args:
        argv: what follows ``fedgkd-pl``; by default the process's. ``--debug`` among it lets
            errors through whole.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    rest = [word for word in given if word != "--debug"]
    return run_command(lambda: _dispatch(rest), "--debug" in given)


def _dispatch(argv: list[str]) -> int:
    name, words = argv[0] if argv else "--help", argv[1:]
    if name in HELP:
        width = max(map(len, COMMANDS)) + 2
        docs = {command: str(each.__doc__) for command, each in COMMANDS.items()}
        lines = [f"  {each:<{width}}{text.splitlines()[0]}" for each, text in docs.items()]
        print("usage: fedgkd-pl COMMAND ...\n\ncommands:", *lines, sep="\n")
        print("\nTry: fedgkd-pl fit --config quickstart.yaml")
        print("Each command explains itself: fedgkd-pl fit --help")
        return 0 if argv else 2
    if name == "--version":
        print(fedgkd_pl.__version__)
        return 0
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean fedgkd-pl {near[0]}?" if near else "fedgkd-pl --help lists them"
        raise ArgumentError("command", f"no such command; {hint}", name)
    quiet_libraries()
    return COMMANDS[name](**arguments(name, words)) or 0


def arguments(command: str, words: Sequence[str]) -> dict[str, Any]:
    """What a command's function is called with.

    ``settings`` gets all flags that the function does not have, each with its value.
    """
    function = COMMANDS[command]
    hints = get_type_hints(function)
    if command in ("fit", "validate", "test"):  # all of their words are settings
        return {"settings": list(words)}
    own, alone, settings = list[str](), list[str](), list[str]()
    waiting = deque(words)
    while waiting:
        word = waiting.popleft()
        word = "--config" if word == "-c" else word
        key, equals, _ = word.removeprefix("--").partition("=")
        if not _is_flag(word):
            alone.append(word)
            continue
        if hints.get(key) is bool and not equals:
            word = f"{word}=true"
        elif not equals and waiting and not _is_flag(waiting[0]):
            word = f"{word}={waiting.popleft()}"
        word = word.replace("=", "+=", 1) if key == "only" else word
        (own if key in hints or "settings" not in hints else settings).append(word)
    from jsonargparse import ArgumentParser  # which --version need not wait for

    class Parser(ArgumentParser):
        """A parser whose errors are one line."""

        @override
        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            raise argument_error(message, [action.dest for action in self._actions])

    about = str(inspect.getdoc(function)).partition("\n\nArgs:")[0]
    parser = Parser(prog=f"fedgkd-pl {command}", description=about)
    skip: set[str | int] = {"settings", "runs"}
    parser.add_function_arguments(function, as_group=False, as_positional=True, skip=skip)
    if "runs" in hints:
        parser.add_argument("runs", nargs="+", help="run folders, or folders above them")
    given = ["--help"] if {*HELP} & {*words} else [*own, *alone]
    values = parser.parse_args(given).as_dict()
    return values | ({"settings": settings} if "settings" in hints else {})


def _is_flag(word: str) -> bool:
    return word.startswith("--") or word in ("-c", "-h")


def _with_trainer(command: str, settings: list[str]) -> None:
    """Runs a command of the Trainer; or prints its help, by default the common flags alone."""
    asks = bool({*HELP} & {*settings})
    if asks:
        from fedgkd_pl.config.messages import short_help

        print(short_help(command))
    if not asks or settings[-1] in ("all", "--help=all"):
        from fedgkd_pl.config.build import build_command

        getattr(build_command(command, ["--help"] if asks else settings), command)()
