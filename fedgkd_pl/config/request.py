"""What a command asks for: the user's modules, config files, a run to go on with."""

import importlib
import os
import sys
from argparse import ArgumentParser
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
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--trust", action="store_true")
    parser.add_argument("--import", dest="modules", action="append", nargs="?", const="")
    run, words = None, [*argv]
    if words and not words[0].startswith("-"):
        first = words.pop(0)
        text = f"unexpected argument: settings are written --KEY VALUE, such as --config {first}"
        require(command in EVALUATES, "config", text, first)
        run = open_run("run", first)
        parser.add_argument("--last", dest="which", action="append_const", const="last")
        parser.add_argument("--best", dest="which", action="append_const", const="best")
        parser.add_argument("--ckpt_path", dest="which", action="append", nargs="?", const="")
    elif command == "fit":
        parser.add_argument("--resume", nargs="?", const="")
    own, flags = parser.parse_known_args(words)
    modules = [*modules, *map(import_module_of_user, own.modules or [])]
    resumes = getattr(own, "resume", None) is not None
    if resumes:
        run = open_run("resume", own.resume)
        text = "was trained in Python: go on with trainer.fit(model, data, ckpt_path=...)"
        require(not run.is_of_python(), "resume", text, run.path)
        is_own = run.path.stat().st_uid == os.getuid()
        require(own.trust or is_own, "resume", OTHERS, run.path)
    elif run is not None:
        from fedgkd_pl.runs.resume import checkpoint_of  # which imports torch

        which = own.which or ["last"]
        require(len(which) == 1, "ckpt_path", "must be one model", " and ".join(which))
        flags += ["--ckpt_path", str(checkpoint_of(run, which[0]))]
    if run is not None:
        flags = ["--config", str(run.config), *flags]
    return Request(command, expand(flags), run, resumes, tuple(modules))


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
