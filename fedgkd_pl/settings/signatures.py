"""What constructors of this package take, read from its source: importing it would import torch."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
NONE: Any = object()  # where a default is no plain value


def parameters(path: str) -> dict[str, str]:
    """Documentation and default of every constructor argument, inherited ones included.

    Args:
        path: of a class of this package, such as ``fedgkd_pl.methods.fedgkd.FedGKD``.
    """
    from docstring_parser import parse

    texts: dict[str, str] = {}
    for node in _with_bases(path):
        documented = {
            p.arg_name: p.description for p in parse(ast.get_docstring(node) or "").params
        }
        for name, default in _arguments(node):
            text = (documented.get(name) or "").replace("``", "")
            text = " ".join(text.split()).rstrip(".")
            if default is not NONE and "(default:" not in text:
                text += f" (default: {default})"
            texts.setdefault(name, text)
    return texts


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


def _arguments(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    """The names of what ``__init__`` takes, each with its default if that is a plain value."""
    for function in node.body:
        if isinstance(function, ast.FunctionDef) and function.name == "__init__":
            given = function.args
            names = [argument.arg for argument in given.args]
            defaults = [*[None] * (len(names) - len(given.defaults)), *given.defaults]
            names += [argument.arg for argument in given.kwonlyargs]
            for name, default in zip(names, [*defaults, *given.kw_defaults], strict=True):
                if name not in ("self", "net"):
                    yield name, _value(default)


def _value(default: ast.expr | None) -> Any:
    try:
        value = NONE if default is None else ast.literal_eval(default)
    except ValueError:  # an expression
        return NONE
    return value if isinstance(value, str | int | float) else NONE
