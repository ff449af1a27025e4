"""``predict``: of files where ``--input`` is given, otherwise of the run's test set."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from fedgkd_pl.errors import require

DESCRIPTION = """\
Says what a run's model makes of new inputs: images, texts, tables or arrays, as the kind of data
allows. Needs the run's folder alone, finished or stopped, and not its data.

  fedgkd-pl predict runs/cifar10/version_0 --input photos/
  fedgkd-pl predict runs/cars/version_0 --input new.csv --best --output kinds.csv

Without --input: writes the predictions on the run's test set, which must be there, to
predictions.csv in the run's folder."""
EPILOG = """\
images     image files or a folder of them, of the size that the run has, unless its data is resized
tables     .csv, .tsv or .parquet with the columns of inputs; rows are counted from 1
texts      .txt files, each one text, a folder of them, or a table with the column of texts
all but texts: .npy and .npz, one row per sample, as the dataset stores them

Any further flag is one of fedgkd-pl fit that does not decide the result (fedgkd-pl test --help)."""


def run(parser_class: type[ArgumentParser], argv: list[str]) -> int:
    """Predicts of files, or hands over to the Trainer's ``predict``."""
    flags = {word.partition("=")[0] for word in argv}
    if not flags & {"--input", "--output", "-h", "--help"}:
        from fedgkd_pl.cli.train import run

        text = "is for --input; what it says of the test set is average/acc of metrics.csv"
        require("--average" not in flags, "average", text)
        return run("predict", argv)
    parser = parser_class(
        prog="fedgkd-pl predict",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser)
    return predict(*parser.parse_known_args(argv))


def add_flags(parser: ArgumentParser) -> None:
    """Adds the command's own flags."""
    parser.add_argument("run", help="the folder of a run, finished or stopped")
    parser.add_argument("--input", metavar="FILE_OR_FOLDER", help="what to predict; see below")
    parser.add_argument("--output", metavar="FILE.csv", help="INPUT.predictions.csv, here")
    add_which(parser)


def add_which(parser: ArgumentParser) -> None:
    """Adds the flags that choose one of a run's models."""
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--last", action="store_true", help="the model of the last round (default)")
    one.add_argument("--best", action="store_true", help="that of the best round by validation")
    one.add_argument("--average", action="store_true", help="that of AveragedModel")
    one.add_argument(
        "--ckpt_path", metavar="last|best|FILE", help="last, best, or a checkpoint file of the run"
    )


def which_of(arguments: Any) -> str:
    """The model that the flags of :func:`add_which` choose."""
    named = [name for name in ("best", "average") if getattr(arguments, name)]
    return named[0] if named else arguments.ckpt_path or "last"


def predict(arguments: Any, settings: list[str]) -> int:
    """Predicts, writes and shows the first rows."""
    from fedgkd_pl.experiments.predict import predict_files
    from fedgkd_pl.experiments.trained import load_run
    from fedgkd_pl.processes.command import quiet_libraries

    require(arguments.input is not None, "input", "which file or folder? --output is for --input")
    quiet_libraries()
    source = Path(arguments.input).expanduser()
    require(source.exists(), "input", "there is no such file or folder", arguments.input)
    output = arguments.output or f"{source.resolve().name}.predictions.csv"
    trained = load_run(arguments.run, which_of(arguments), settings=settings)
    table = predict_files(trained, source, output, progress=True)
    print(table)
    print(f"wrote {output}")
    return 0
