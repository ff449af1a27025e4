"""The federated learning algorithms, a file each.

Three attributes of a method's class say how it is shown; each may be left out: ``title`` (by
default the name of the class), ``citation``, and ``colour``, its index among the methods and in the
palette of the figures (by default after all others).
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedgkd_pl.storage.files import printable

BASE = "FederatedServer"


@dataclass(frozen=True)
class MethodInfo:
    """What is known of a method without importing it, and torch with it.

    Attributes:
        title: its name in tables and figures, as in the paper.
        citation: empty where it has none.
        colour: different for every method, from 0.
    """

    name: str
    module: str
    title: str
    citation: str
    colour: int


@cache
def discover() -> dict[str, MethodInfo]:
    """Every method of this package by the name of its class, in the order of their colours."""
    classes = {
        node.name: (f"{__name__}.{file.stem}", node)
        for file in sorted(Path(__file__).parent.glob("*.py"))
        for node in ast.parse(file.read_bytes(), str(file)).body
        if isinstance(node, ast.ClassDef)
    }

    def is_method(name: str) -> bool:
        bases = [ast.unparse(base).rpartition(".")[2] for base in classes[name][1].bases]
        return any(b == BASE or (b in classes and b != name and is_method(b)) for b in bases)

    declared = {
        name: (module, _attributes(node))
        for name, (module, node) in classes.items()
        if not name.startswith("_") and is_method(name)
    }

    def place(name: str) -> tuple[int, str]:
        return declared[name][1].get("colour", len(declared)), name

    methods: dict[str, MethodInfo] = {}
    for colour, name in enumerate(sorted(declared, key=place)):
        module, attributes = declared[name]
        title, citation = attributes.get("title", name), attributes.get("citation", "")
        if title in (other.title for other in methods.values()):  # copied with the rest of a file
            title = name
        methods[name] = MethodInfo(name, module, title, citation, colour)
    return methods


def title_of(name: str) -> str:
    """A method's name in tables and figures; a class that is not ours keeps its own."""
    info = discover().get(name)
    return info.title if info else name


def title_of_class(method: type) -> str:
    """The same of a class that may be a user's, by its own ``title``, not by one it inherits."""
    title = vars(method).get("title")
    others = [info.title for name, info in discover().items() if name != method.__name__]
    if not isinstance(title, str) or not title.strip() or title in others:
        return title_of(method.__name__)
    return printable(title)


def _attributes(node: ast.ClassDef) -> dict[str, Any]:
    """The class attributes that are plain values."""
    lines = [line for line in node.body if isinstance(line, ast.Assign)]
    return {
        ast.unparse(a.targets[0]): a.value.value for a in lines if isinstance(a.value, ast.Constant)
    }
