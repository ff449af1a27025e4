"""The flags of the commands that are not settings of ``fit``."""

import argparse
from typing import Any, NoReturn

from fedgkd_pl.cli.predict import add_which
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


def add_compare(compare: Parser) -> None:
    """Flags of ``compare``."""
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
    add_quiet(compare)


def add_report(report: Parser) -> None:
    """Flags of ``report``."""
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


def add_figure(figure: Parser) -> None:
    """Flags of ``figure``."""
    figure.any_order = True
    figure.add_argument("kind", choices=KINDS, help="see above")
    figure.add_argument("runs", nargs="*", help="run folders, or folders above them")
    figure.add_argument("--output", help="the file; KIND.svg by default")


def add_personalize(parser: Parser) -> None:
    """Flags of ``personalize``."""
    parser.add_argument("run", help="the folder of a run, finished or stopped")
    parser.add_argument("--epochs", type=int, help="of each client; as in the run's rounds")
    parser.add_argument("--lr", type=float, help="of each client; that of the run")
    parser.add_argument("--clients", metavar="0,3,7", help="whose; all with test samples")
    add_checkpoint(parser)
    parser.add_argument("--output_dir", help="where to write; the run's folder")
    add_quiet(parser)


def add_checkpoint(parser: Parser) -> None:
    """The flag that chooses a checkpoint of a run."""
    parser.add_argument(
        "--ckpt_path",
        default="last",
        metavar="last|best|FILE",
        help="the global model: of the last round (default), of the best by validation, or a file",
    )


def add_quiet(parser: Parser) -> None:
    """The flag that hides progress."""
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def add_export(parser: Parser) -> None:
    """Flags of ``export``."""
    parser.add_argument("run", help="the folder of a run, finished or stopped")
    parser.add_argument(
        "--format",
        choices=("safetensors", "onnx", "torchscript", "torch_export"),
        default="safetensors",
        help="weights alone (safetensors, default), or the net itself",
    )
    add_which(parser)
    parser.add_argument("--output", help="the file; model.… in the run's folder")


def add_completion(parser: Parser) -> None:
    """Flags of ``completion``."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="of which shell")


def add_flower(flower: Parser) -> None:
    """Flags of ``flower``."""
    flower.add_argument("folder", help="of the app; must not exist yet")


def add_new(new: Parser) -> None:
    """Flags of ``new``."""
    new.add_argument("folder", help="of the project, and its name; must be new or empty")
