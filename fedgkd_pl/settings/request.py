"""What a command asks for: the user's modules, config files, a run to go on with."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from os.path import isfile  # which, unlike Path's, takes a name of any length
from pathlib import Path

from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.runs.folder import CONFIG, RunFolder
from fedgkd_pl.settings import strict_yaml
from fedgkd_pl.settings.files import expand
from fedgkd_pl.settings.suggest import check_file, check_flags
from fedgkd_pl.storage.files import check_folder

EVALUATES = ("validate", "test", "predict")


@dataclass(frozen=True)
class Request:
    """A command of the Trainer, ready for the parser."""

    command: str  # fit, validate, test or predict
    argv: list[str]  # names of config files are paths
    resume: RunFolder | None = None
    modules: tuple[str, ...] = ()  # the user's, imported; a config may name their classes


def read_request(command: str, argv: Sequence[str], modules: Sequence[str] = ()) -> Request:
    """Imports what ``--import`` names, finds what ``--config`` and ``--resume`` name."""
    argv = _of_run(argv) if command in EVALUATES and argv[:1] else argv
    file = next(iter(argv), "-")
    forgot = command == "fit" and not file.startswith("-")
    require(not forgot, "config", f"is a flag: --config {file}", file)
    rest: list[str] = []
    named: list[str] = []
    resume: RunFolder | None = None
    waiting = iter(argv)
    for word in waiting:
        flag, _, value = word.partition("=")
        if flag == "--import":
            named.append(value or next(waiting, ""))
        elif flag == "--resume" and command == "fit":
            require(resume is None, "resume", "one run at a time", resume and resume.path)
            resume = RunFolder(Path(value or next(waiting, "")))
            begun = isfile(resume.config)
            require(begun, "resume", f"no run was begun there: no {CONFIG}", resume.path)
            text = "was trained in Python: go on with trainer.fit(model, data, ckpt_path=...)"
            require(not resume.is_of_python(), "resume", text, resume.path)
            check_folder(resume.path)
            rest[0:0] = ["--config", str(resume.config)]
        else:
            rest.append(word)
    rest = expand(rest)
    _check_early(rest)
    imported = [import_module_of_user(name) for name in named]  # which may import torch
    return Request(command, rest, resume, (*modules, *imported))


def _check_early(argv: Sequence[str]) -> None:
    """Refuses, before torch is imported, files that cannot be read and settings of no group."""
    check_flags(argv)
    for word, value in pairwise(argv):
        if word == "--config" and not value.startswith("-"):
            check_file(strict_yaml.read(value))


def _of_run(argv: Sequence[str]) -> Sequence[str]:
    """``RUN [--last|--best|--ckpt_path FILE]`` as flags: the run's own settings, and the file."""
    if argv[0].startswith("-"):
        return argv
    folder = RunFolder(Path(argv[0]))
    require(isfile(folder.config), "run", f"no run was begun there: no {CONFIG}", argv[0])
    from fedgkd_pl.runs.resume import checkpoint_of  # which imports torch

    rest: list[str] = []
    names: list[str] = []
    waiting = iter(argv[1:])
    for word in waiting:
        flag, _, value = word.partition("=")
        if flag == "--ckpt_path":
            names.append(value or next(waiting, ""))
        elif word in ("--last", "--best"):
            names.append(word[2:])
        else:
            rest.append(word)
    require(len(names) <= 1, "ckpt_path", "one model at a time", " and ".join(names))
    file = checkpoint_of(folder, names[0] if names else "last")
    return ["--config", str(folder.config), "--ckpt_path", str(file), *rest]


def import_module_of_user(module: str, folder: Path | None = None) -> str:
    """Imports the user's module, so that a config may name its classes; gives its name back."""
    sys.path.insert(0, str(folder or Path.cwd()))
    require(all(map(str.isidentifier, module.split("."))), "import", "which module?", module)
    try:
        import_module(module)
    except ImportError as error:
        raise SettingError("import", str(error), module) from error
    except Exception as error:  # it is the user's code
        raise SettingError("import", f"{type(error).__name__}: {error}", module) from error
    return module
