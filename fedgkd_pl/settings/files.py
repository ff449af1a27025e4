"""The configurations that come with the package."""

import os
from difflib import get_close_matches
from pathlib import Path

from fedgkd_pl.errors import SettingError, require


def folder() -> Path:
    """Where they are: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def available() -> dict[str, str]:
    """Their names, each with the first line of its header."""
    files = sorted(folder().rglob("*.yaml"))
    names = [file.relative_to(folder()).as_posix() for file in files]
    headers = [file.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for file in files]
    return dict(zip(names, headers, strict=True))


def resolve(name: str) -> list[str]:
    """The file of a ``--config``: a path as it is, or one of ours by its name.

    Args:
        name: what was typed.
    """
    require(not os.path.isdir(name), "config", "is a folder", name)
    if os.path.exists(name):
        return [name]
    for ours in (folder() / name, folder() / f"{name}.yaml"):
        if os.path.isfile(ours):
            return [str(ours)]
    near = get_close_matches(name, available(), n=1)
    hint = f", did you mean {near[0]}?" if near else ""
    raise SettingError("config", f"no such file{hint} (fedgkd-pl configs lists ours)", name)
