"""What a command asks for: the user's modules, config files, a run to go on with."""

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import isfile  # Path.is_file raises on very long names
from pathlib import Path
from traceback import extract_tb

from fedgkd_pl.config.files import expand
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.runs.folder import CONFIG, RunFolder

EVALUATES = ("validate", "test", "predict")
OTHERS = "belongs to another user: add --trust if you trust its content"


@dataclass(frozen=True)
class Request:
    """A command of the Trainer, ready for the parser.

    Attributes:
        command: fit, validate, test or predict.
        argv: its flags, with paths for the names of config files.
        run: the run whose config is among them.
        resumes: whether that run goes on in its folder.
        modules: the user's, imported; a config may name their classes.
    """

    command: str
    argv: list[str]
    run: RunFolder | None = None
    resumes: bool = False
    modules: tuple[str, ...] = ()


def read_request(command: str, argv: Sequence[str], modules: Sequence[str] = ()) -> Request:
    """Imports what ``--import`` names, finds what ``--config``, ``--resume`` and ``RUN`` name."""
    first = next(iter(argv), "--")
    run, resumes, trusted = None, False, False
    if not first.startswith("-"):
        text = f"unexpected argument: settings are written --KEY VALUE, such as --config {first}"
        require(command in EVALUATES, "config", text, first)
        run = open_run("run", first)
    waiting = iter(argv if run is None else argv[1:])
    flags, which, imported = list[str](), list[str](), list(modules)
    for word in waiting:
        flag, equals, value = word.partition("=")
        if word == "--trust":
            trusted = True
        elif flag == "--import":
            imported.append(import_module_of_user(value if equals else next(waiting, "")))
        elif flag == "--resume" and command == "fit":
            require(run is None, "resume", "must be one run")
            run, resumes = open_run("resume", value if equals else next(waiting, "")), True
        elif word in ("--last", "--best") and run is not None:
            which.append(word[2:])
        elif flag == "--ckpt_path" and run is not None and not resumes:
            which.append(value if equals else next(waiting, ""))
        else:
            flags.append(word)
    if run is not None:
        flags = ["--config", str(run.config), *flags]
    if run is not None and resumes:
        text = "was trained in Python: go on with trainer.fit(model, data, ckpt_path=...)"
        require(not run.is_of_python(), "resume", text, run.path)
        require(trusted or run.path.stat().st_uid == os.getuid(), "resume", OTHERS, run.path)
    elif run is not None:
        from fedgkd_pl.runs.resume import checkpoint_of  # which imports torch

        require(len(which) <= 1, "ckpt_path", "must be one model", " and ".join(which))
        flags += ["--ckpt_path", str(checkpoint_of(run, [*which, "last"][0]))]
    return Request(command, expand(flags), run, resumes, tuple(imported))


def open_run(key: str, path: str) -> RunFolder:
    """The folder of a run that was begun."""
    require(path != "", key, "missing: the folder of a run")
    folder = RunFolder(Path(path))
    newest = [other for other in RunFolder.versions(folder.path) if isfile(other.config)][-1:]
    hint = f"; did you mean {newest[0].path}?" if newest else ""
    require(isfile(folder.config), key, f"no run was begun there: no {CONFIG}{hint}", folder.path)
    return folder


def import_module_of_user(module: str, folder: Path | None = None) -> str:
    """Imports the user's module, so that a config may name its classes; gives its name back."""
    home = folder or Path.cwd()
    sys.path.insert(0, str(home))
    is_name = all(map(str.isidentifier, module.split(".")))
    require(is_name, "import", "must be the name of a module", module)
    try:
        importlib.import_module(module)
    except Exception as error:  # it is the user's code
        frames = [each for each in extract_tb(error.__traceback__) if str(home) in each.filename]
        place = f" (line {frames[-1].lineno} of {Path(frames[-1].filename).name})" if frames else ""
        raise SettingError("import", f"{type(error).__name__}: {error}{place}", module) from error
    return module
