"""What constructors of this package take, read from its source: importing it would import torch."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
NONE: Any = object()  # where a default is no plain value


@dataclass(frozen=True)
class Argument:
    """One argument of a constructor.

    Attributes:
        text: its documentation; empty if there is none.
        default: as it stands in the source; None where there is none.
    """

    text: str
    default: ast.expr | None


def parameters(path: str) -> dict[str, str]:
    """Documentation and default of every constructor argument, inherited ones included.

    Args:
        path: of a class of this package, such as ``fedgkd_pl.methods.fedgkd.FedGKD``.
    """
    texts: dict[str, str] = {}
    for node in _with_bases(path):
        for name, argument in _documented(node).items():
            text, default = argument.text.replace("``", ""), _value(argument.default)
            if default is not NONE and "(default:" not in text:
                text += f" (default: {default})"
            texts.setdefault(name, text)
    return texts


def own_arguments(path: str) -> tuple[dict[str, Argument], str]:
    """The arguments of a class's own constructor, or of the nearest one above it, and its rest.

    The rest is the class whose arguments ``**kwargs`` are, by the documentation of ``kwargs``;
    empty if there is none.
    """
    nodes = list(_with_bases(path))
    owner = next((node for node in nodes if _constructor(node)), None)
    arguments = {} if owner is None else _documented(owner)
    rest = ""
    for node in reversed(nodes[: nodes.index(owner) + 1] if owner else []):
        texts = _texts(node)
        arguments = {
            name: replace(each, text=texts.get(name, each.text)) for name, each in arguments.items()
        }
        rest = next(iter(re.findall(r":class:`(\w+)`", texts.get("kwargs", ""))), rest)
    return arguments, rest


def class_value(path: str, name: str) -> Any:
    """What a class or the nearest one above it assigns to a name in its body, if that is plain.

    None where nobody does, or what is assigned is an expression.
    """
    for node in _with_bases(path):
        for line in node.body:
            targets = line.targets if isinstance(line, ast.Assign) else [_target(line)]
            if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                value = getattr(line, "value", None)
                try:
                    return None if value is None else ast.literal_eval(value)
                except ValueError:  # an expression
                    return None
    return None


def _target(line: ast.stmt) -> ast.expr | None:
    return line.target if isinstance(line, ast.AnnAssign) else None


def _with_bases(path: str) -> Iterator[ast.ClassDef]:
    """A class and those above it, as far as they are this package's."""
    module, _, name = path.rpartition(".")
    classes, imported = _module(module)
    if name not in classes:
        return
    yield classes[name]
    for base in map(ast.unparse, classes[name].bases):
        above = f"{module}.{base}" if base in classes else imported.get(base, "")
        if above.startswith("fedgkd_pl."):
            yield from _with_bases(above)


@cache
def _module(module: str) -> tuple[dict[str, ast.ClassDef], dict[str, str]]:
    """The classes of a module, and where its other names are from."""
    file = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    body = ast.parse(file.read_bytes(), str(file)).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    names = {alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}, names


def _documented(node: ast.ClassDef) -> dict[str, Argument]:
    """What a class's own ``__init__`` takes."""
    texts = _texts(node)
    return {name: Argument(texts.get(name, ""), default) for name, default in _arguments(node)}


def _texts(node: ast.ClassDef) -> dict[str, str]:
    from docstring_parser import parse

    found = {p.arg_name: p.description or "" for p in parse(ast.get_docstring(node) or "").params}
    return {name: " ".join(text.split()).rstrip(".") for name, text in found.items()}


def _constructor(node: ast.ClassDef) -> ast.FunctionDef | None:
    functions = (each for each in node.body if isinstance(each, ast.FunctionDef))
    return next((each for each in functions if each.name == "__init__"), None)


def _arguments(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    """The names of what ``__init__`` takes, each with its default."""
    function = _constructor(node)
    if function is None:
        return
    given = function.args
    names = [argument.arg for argument in given.args]
    defaults = [*[None] * (len(names) - len(given.defaults)), *given.defaults]
    names += [argument.arg for argument in given.kwonlyargs]
    for name, default in zip(names, [*defaults, *given.kw_defaults], strict=True):
        if name not in ("self", "net"):
            yield name, default


def _value(default: ast.expr | None) -> Any:
    try:
        value = NONE if default is None else ast.literal_eval(default)
    except ValueError:  # an expression
        return NONE
    return value if isinstance(value, str | int | float) else NONE
