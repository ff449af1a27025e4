"""``fedgkd-pl new``: a project of the user's own, which trains as it is written.

``template/`` is that project under the name ``my-project``; its files end in ``.tpl``, so that
nothing takes them for modules of this package.
"""

import os
import re
import shlex
import sys
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path

from fedgkd_pl.errors import require
from fedgkd_pl.storage.files import write_text

TEMPLATE = Path(__file__).parent / "template"
PROJECT, MODULE, SUFFIX = "my-project", "my_project", ".tpl"  # as the template has them
NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_-]{,38}[A-Za-z0-9])?")
FOLDERS = ("runs", "tests")  # which the project has beside its module


def new_project(folder: str) -> None:
    """Writes a project to a folder that is new or empty, and prints what to do next.

    Args:
        folder: its last part is the project's name, from which the module's follows.
    """
    target = Path(os.path.abspath(folder))
    module = module_of(target.name if folder else "")
    empty = target.is_dir() and not any(target.iterdir())
    empty = empty or not os.path.lexists(target)
    require(empty, "folder", "there is one already, and it is not empty", folder)
    names = {PROJECT: target.name, MODULE: module}

    def renamed(text: str) -> str:
        return re.sub("|".join(names), lambda found: names[found[0]], text)

    for file in sorted(TEMPLATE.rglob(f"*{SUFFIX}")):
        name = renamed(file.relative_to(TEMPLATE).as_posix().removesuffix(SUFFIX))
        write_text(target / name, renamed(file.read_text(encoding="utf-8")))
    print(f"wrote {folder}; net.py, data.py and method.py in {module}/ are yours to change\n")
    change = [f"cd {shlex.quote(folder)}"] * (target != Path.cwd())
    train = f"fedgkd-pl fit --import {module} --config config.yaml"
    study = f"fedgkd-pl compare study.yaml --import {module}"
    test = "pytest" if find_spec("pytest") else "pip install pytest && pytest"
    print(*(f"  {command}" for command in (*change, train, study, test)), sep="\n")


def module_of(name: str) -> str:
    """The module of a project, ``my_project`` of ``my-project``; refuses what cannot be one."""
    text = "a project's name has at most 40 letters, digits, - and _, and begins with a letter"
    require(NAME.fullmatch(name) is not None, "folder", text, name)
    module = name.lower().replace("-", "_")
    taken = iskeyword(module) or module in (*sys.stdlib_module_names, *FOLDERS)
    taken = taken or getattr(find_spec(module), "origin", None) is not None
    text = f"Python, an installed package or the project has a {module} already: take another name"
    require(not taken, "folder", text, name)
    return module
