"""What a command asks for: the user's modules, config files, a run to go on with."""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from os import environ
from os.path import isfile  # which, unlike Path's, takes a name of any length
from pathlib import Path
from traceback import extract_tb

from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.runs.folder import CONFIG, RunFolder
from fedgkd_pl.settings import strict_yaml
from fedgkd_pl.settings.files import expand
from fedgkd_pl.settings.suggest import NO_VALUE, check_file, check_flags

EVALUATES = ("validate", "test", "predict")
NOTHING = {
    "config": ("config", "which? --config quickstart.yaml, or another of fedgkd-pl configs"),
    "run": ("run", "which? give the folder of a run, such as runs/quickstart/version_0"),
}


@dataclass(frozen=True)
class Request:
    """A command of the Trainer, ready for the parser."""

    command: str  # fit, validate, test or predict
    argv: list[str]  # names of config files are paths
    resume: RunFolder | None = None
    modules: tuple[str, ...] = ()  # the user's, imported; a config may name their classes


def read_request(command: str, argv: Sequence[str], modules: Sequence[str] = ()) -> Request:
    """Imports what ``--import`` names, finds what ``--config`` and ``--resume`` name."""
    empty = not argv and not any(name.startswith(f"FEDGKD_{command.upper()}_") for name in environ)
    require(not empty, *NOTHING["run" if command in EVALUATES else "config"])
    argv = _of_run(argv) if command in EVALUATES else argv
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
            resume = _begun("resume", value or next(waiting, ""))
            text = "was trained in Python: go on with trainer.fit(model, data, ckpt_path=...)"
            require(not resume.is_of_python(), "resume", text, resume.path)
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
    places = [place for place, word in enumerate(argv) if _is_alone(argv, place)]
    if not places:
        return argv
    folder = _begun("run", argv[places[0]])
    from fedgkd_pl.runs.resume import checkpoint_of  # which imports torch

    rest: list[str] = []
    names: list[str] = []
    waiting = iter([*argv[: places[0]], *argv[places[0] + 1 :]])
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


def _is_alone(argv: Sequence[str], place: int) -> bool:
    """Whether a word is neither a flag nor the value of one."""
    before = argv[place - 1] if place else ""
    takes = before.startswith("-") and "=" not in before and before.lstrip("-") not in NO_VALUE
    return not takes and not argv[place].startswith("-")


def _begun(key: str, path: str) -> RunFolder:
    """The folder of a run that was begun."""
    require(path != "", key, "which run? give its folder")
    folder = RunFolder(Path(path))
    newest = [other for other in RunFolder.versions(folder.path) if isfile(other.config)][-1:]
    hint = f"; did you mean {newest[0].path}?" if newest else ""
    text = f"no run was begun there: no {CONFIG}{hint}"
    require(isfile(folder.config), key, text, folder.path)
    return folder


def import_module_of_user(module: str, folder: Path | None = None) -> str:
    """Imports the user's module, so that a config may name its classes; gives its name back."""
    home = folder or Path.cwd()
    sys.path.insert(0, str(home))
    require(all(map(str.isidentifier, module.split("."))), "import", "which module?", module)
    try:
        importlib.import_module(module)
    except Exception as error:  # it is the user's code
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            text = "no such module in the current folder, nor installed"
            raise SettingError("import", text, module) from error
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        place = "" if isinstance(error, SyntaxError) else _place(error, home)
        raise SettingError("import", f"{place}{kind}{error}", module) from error
    return module


def _place(error: Exception, home: Path) -> str:
    """``line 3 of nets.py: ``, the last in the user's folder; empty where there is none."""
    for frame in reversed(extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(home) and "site-packages" not in file.parts:
            return f"line {frame.lineno} of {file.relative_to(home)}: "
    return ""
