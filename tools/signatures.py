"""What constructors take, with types and defaults as they stand in the source."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fedgkd_pl.settings.signatures import _with_bases


@dataclass(frozen=True)
class Setting:
    """A constructor argument.

    Attributes:
        kind: the annotation; empty where there is none.
        default: the expression; None where a value must be given.
        owner: the class whose constructor has it.
    """

    name: str
    kind: str
    default: str | None
    text: str
    owner: str


def settings(path: str) -> list[Setting]:
    """What a class's constructor takes, of the classes above it as far as it hands that on."""
    found: dict[str, Setting] = {}
    texts: dict[str, str] = {}
    hands_on = True  # whether the class below does
    for depth, node in enumerate(_with_bases(path)):
        texts = _documented(node) | texts
        own = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
        if not own or not hands_on:
            continue
        hands_on = own[0].args.kwarg is not None
        for argument, default in _with_defaults(own[0].args):
            kind = ast.unparse(argument.annotation) if argument.annotation else ""
            value = None if default is None else ast.unparse(default)
            if default is not None or depth == 0 or not found:  # else the class below gives it
                new = Setting(argument.arg, kind, value, "", node.name)
                found.setdefault(argument.arg, new)
    return [replace(one, text=texts.get(name, "")) for name, one in found.items()]


def _documented(node: ast.ClassDef) -> dict[str, str]:
    """The text of every argument that a class's docstring names."""
    from docstring_parser import DocstringStyle, parse

    found = parse(ast.get_docstring(node) or "", DocstringStyle.GOOGLE).params
    return {one.arg_name: " ".join((one.description or "").split()) for one in found}


def _with_defaults(given: ast.arguments) -> Iterator[tuple[ast.arg, ast.expr | None]]:
    """Each argument but ``self`` with its default; None where it has none."""
    missing = [None] * (len(given.args) - len(given.defaults))
    defaults = [*missing, *given.defaults, *given.kw_defaults]
    yield from list(zip([*given.args, *given.kwonlyargs], defaults, strict=True))[1:]
