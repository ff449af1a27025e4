"""``fit``, ``validate``, ``test``, ``predict``: builds and runs a request. And ``partition``."""

from pathlib import Path

from fedgkd_pl.errors import require
from fedgkd_pl.processes.command import quiet_libraries
from fedgkd_pl.settings.build import build_request
from fedgkd_pl.settings.request import read_request


def run(command: str, argv: list[str]) -> int:
    """Runs a command of the Trainer: fit, validate, test or predict."""
    quiet_libraries()
    experiment = build_request(read_request(command, argv))
    getattr(experiment, command)()
    return 0


def partition(argv: list[str]) -> int:
    """Shows who would hold what in a ``fit`` with these flags."""
    from fedgkd_pl.cli.partition import show_partition

    quiet_libraries()
    argv, export = _take_export(argv)
    experiment = build_request(read_request("fit", argv))
    folder = Path(experiment.settings["output_dir"]) / "partitions"
    try:
        with experiment.whole_keys():
            show_partition(experiment.data, folder, export)
    finally:
        experiment.start.release()
    return 0


def _take_export(argv: list[str]) -> tuple[list[str], Path | None]:
    """The flags without ``--export FILE``, and the file."""
    for index, word in enumerate(argv):
        flag, equals, name = word.partition("=")
        if flag == "--export":
            name = name if equals else "".join(argv[index + 1 : index + 2])
            fits = name.endswith((".json", ".npz"))
            require(fits, "export", "must be a file name that ends in .json or .npz", name)
            return [*argv[:index], *argv[index + (1 if equals else 2) :]], Path(name)
    return argv, None
