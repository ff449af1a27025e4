"""What a command asks for: the user's modules, config files, a run to go on with.

Of the configs that come with the package, a run is a protocol (``protocols/cifar10.yaml``: data,
net, optimizer, rounds) and a method (``methods/moon.yaml``); ``cifar10_moon`` and ``cifar10/moon``
name both, as with ``.yaml``.
"""

import importlib
import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from os.path import isfile  # Path.is_file raises on very long names
from pathlib import Path
from typing import Any

from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.methods import discover, title_of
from fedgkd_pl.runs.folder import CONFIG, RunFolder
from fedgkd_pl.storage.files import read_yaml

PROTOCOLS, METHODS, TUNED = "protocols", "methods", "tuned.yaml"


def folder() -> Path:
    """Where they are: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def available() -> dict[str, str]:
    """The names of the files, each with the first line of its header."""
    return {
        file.relative_to(folder()).as_posix(): file.read_text("utf-8").splitlines()[0].lstrip("# ")
        for file in sorted(folder().rglob("*.yaml"))
    }


def methods() -> dict[str, str]:
    """The config of every method by its title, in the order of their colours."""
    configs = {}
    for file in sorted((folder() / METHODS).glob("*.yaml")):
        name = str(read_yaml(str(file))["model"]["class_path"]).rpartition(".")[2]
        configs[name] = f"{METHODS}/{file.name}"
    return {title_of(name): configs[name] for name in [*discover(), *configs] if name in configs}


def resolve(name: str, key: str = "config") -> list[str]:
    """The files of a ``--config``, in their order: a path as it is, or ours by their name."""
    require(not os.path.isdir(name), key, "is a folder", name)
    if os.path.exists(name):
        return [name]
    pairs = product(*(sorted((folder() / part).glob("*.yaml")) for part in (PROTOCOLS, METHODS)))
    both = {f"{protocol.stem}_{method.stem}": [protocol, method] for protocol, method in pairs}
    for ours in (folder() / name, folder() / f"{name}.yaml"):
        if os.path.isfile(ours):
            return [str(ours)]
    pair = name.removesuffix(".yaml").replace("/", "_")
    if pair in both:
        return [*map(str, both[pair])]
    known = [*available(), *(f"{pair}.yaml" for pair in both), *map(str, Path().glob("*.y*ml"))]
    near = get_close_matches(name, known, n=1, cutoff=0.75)
    hint = f", did you mean {near[0]}?" if near else ""
    raise SettingError(key, f"no such file{hint} (fedgkd-pl configs lists ours)", name)


def expand(argv: Sequence[str]) -> list[str]:
    """The arguments of a command with files for the names after ``--config``.

    After a protocol and a method come what they take only together (``tuned.yaml``) and, unless
    the arguments have one, a name for the run.
    """
    expanded: list[str] = []
    protocol = ""
    named = any(word.partition("=")[0] == "--name" for word in argv)
    waiting = iter(argv)
    for word in waiting:
        if word not in ("-c", "--config") and not word.startswith("--config="):
            expanded.append(word)
            continue
        name = word.partition("=")[2] if "=" in word else next(waiting, "")
        run = ""
        for file in resolve(name):
            expanded += ["--config", file]
            category, stem = _ours(file)
            if category == PROTOCOLS:
                protocol = run = stem
            elif category == METHODS and protocol:
                tuned = read_yaml(str(folder() / TUNED)).get(stem, {})
                expanded += flags(tuned.get(protocol, {}))
                as_typed = name.removesuffix(".yaml").endswith(f"{protocol}/{stem}")
                run = f"{protocol}{'/' if as_typed else '_'}{stem}"
        if run and not named:
            expanded += ["--name", run]
    return expanded


def _ours(file: str) -> tuple[str, str]:
    """The folder and the name of one of our configs; of any other, empty texts."""
    path = Path(os.path.abspath(file))
    return (path.parent.name, path.stem) if path.parent.parent == folder() else ("", "")


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as flags, which have the same names."""
    return [f"--{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in settings.items()]


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
        parser.add_argument("--ckpt_path", default="last", nargs="?", const="")
    elif command == "fit":
        parser.add_argument("--resume", nargs="?", const="")
    own, rest = parser.parse_known_args(words)
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

        rest += ["--ckpt_path", str(checkpoint_of(run, own.ckpt_path))]
    if run is not None:
        rest = ["--config", str(run.config), *rest]
    return Request(command, expand(rest), run, resumes, tuple(modules))


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
    sys.path.insert(0, str(folder or Path.cwd()))
    is_name = all(map(str.isidentifier, module.split(".")))
    require(is_name, "import", "must be the name of a module", module)
    try:
        importlib.import_module(module)
    except Exception as error:  # it is the user's code
        text = f"{type(error).__name__}: {error} (--debug shows where)"
        raise SettingError("import", text, module) from error
    return module
