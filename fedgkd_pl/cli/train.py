"""``fit``, ``validate``, ``test``, ``predict``: builds and runs a request. And ``partition``.

What is wrong with flags and files is found before torch is imported, which takes seconds.
"""

from pathlib import Path

from fedgkd_pl.errors import require
from fedgkd_pl.processes.command import quiet_libraries
from fedgkd_pl.settings.help import short_help
from fedgkd_pl.settings.request import Request, read_request

HELP, ALL = ("-h", "--help"), ("--help-all", "--help=all")


def run(command: str, argv: list[str]) -> int:
    """Runs a command of the Trainer: fit, validate, test or predict."""
    if _helps(command, argv):
        return 0
    quiet_libraries()
    request = read_request(command, argv)
    from fedgkd_pl.settings.build import build_request

    getattr(build_request(request), command)()
    return 0


def partition(argv: list[str]) -> int:
    """Shows who would hold what in a ``fit`` with these flags."""
    if _helps("partition", argv):
        return 0
    quiet_libraries()
    argv, export = _take_export(argv)
    request = read_request("fit", argv)
    from fedgkd_pl.cli.partition import show_partition
    from fedgkd_pl.settings.build import build_request

    experiment = build_request(request)
    folder = Path(experiment.settings["output_dir"]) / "partitions"
    try:
        with experiment.whole_keys():
            show_partition(experiment.data, folder, export)
    finally:
        experiment.start.release()
    return 0


def _helps(command: str, argv: list[str]) -> bool:
    """Whether help is asked for, which is then printed: the common flags, or all of them."""
    after = [argv[index + 1 :][:1] for index, word in enumerate(argv) if word in HELP]
    if {*ALL} & {*argv} or ["all"] in after:
        from fedgkd_pl.settings.build import build_request

        build_request(Request("fit" if command == "partition" else command, ["--help"]))
    if after:
        print(short_help(command))
    return bool(after)


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
