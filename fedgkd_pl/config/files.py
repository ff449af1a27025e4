"""The configurations that come with the package, and what a ``--config`` stands for.

A run is a protocol (``protocols/cifar10.yaml``: data, net, optimizer, rounds) and a method
(``methods/moon.yaml``); ``cifar10_moon`` and ``cifar10/moon`` name both, as with ``.yaml``.
"""

import json
import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.methods import discover, title_of

PROTOCOLS, METHODS, TUNED = "protocols", "methods", "tuned.yaml"


def folder() -> Path:
    """Where they are: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def available() -> dict[str, str]:
    """The names of the files, each with the first line of its header."""
    files = sorted(folder().rglob("*.yaml"))
    names = [file.relative_to(folder()).as_posix() for file in files]
    headers = [file.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for file in files]
    return dict(zip(names, headers, strict=True))


def pairs() -> dict[str, tuple[Path, Path]]:
    """The files of every protocol with every method, by ``<protocol>_<method>``."""
    every = product(*(sorted((folder() / part).glob("*.yaml")) for part in (PROTOCOLS, METHODS)))
    return {f"{protocol.stem}_{method.stem}": (protocol, method) for protocol, method in every}


def methods() -> dict[str, str]:
    """The config of every method by its title, in the order of their colours."""
    configs = {}
    for file in sorted((folder() / METHODS).glob("*.yaml")):
        name = str(_read(file)["model"]["class_path"]).rpartition(".")[2]
        configs[name] = f"{METHODS}/{file.name}"
    order = [name for name in discover() if name in configs]
    return {title_of(name): configs[name] for name in dict.fromkeys([*order, *configs])}


def resolve(name: str, key: str = "config") -> list[str]:
    """The files of a ``--config``, in their order: a path as it is, or ours by their name."""
    require(not os.path.isdir(name), key, "is a folder", name)
    if os.path.exists(name):
        return [name]
    both = pairs()
    for ours in (folder() / name, folder() / f"{name}.yaml"):
        if os.path.isfile(ours):
            return [str(ours)]
    pair = name.removesuffix(".yaml").replace("/", "_")
    if pair in both:
        return [str(file) for file in both[pair]]
    known = [*available(), *(f"{pair}.yaml" for pair in both), *map(str, Path().glob("*.y*ml"))]
    known.remove(TUNED)  # no config, but additions to some
    stems = {each.partition(".y")[0]: each for each in known}
    near = get_close_matches(name.partition(".y")[0], stems, n=1, cutoff=0.75)
    hint = f", did you mean {stems[near[0]]}?" if near else ""
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
                expanded += _tuned(protocol, stem)
                as_typed = name.removesuffix(".yaml").endswith(f"{protocol}/{stem}")
                run = f"{protocol}{'/' if as_typed else '_'}{stem}"
        if run and not named:
            expanded += ["--name", run]
    return expanded


def _ours(file: str) -> tuple[str, str]:
    """The folder and the name of one of our configs; of any other, empty texts."""
    path = Path(os.path.abspath(file))
    return (path.parent.name, path.stem) if path.parent.parent == folder() else ("", "")


def _tuned(protocol: str, method: str) -> Iterator[str]:
    for key, value in _read(folder() / TUNED).get(method, {}).get(protocol, {}).items():
        yield from (f"--{key}", value if isinstance(value, str) else json.dumps(value))


def _read(file: Path) -> dict[str, Any]:
    import yaml

    content: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return content
