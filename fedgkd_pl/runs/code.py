"""Names of classes and functions, and digests of what those of a notebook or a script do."""

import hashlib
import json
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

PLAIN = (bool, int, float, str)
Describe = Callable[[Any], Any]  # a value as plain data


def path_of(thing: Any) -> str:
    """The shortest dotted name that a class or function can be imported by."""
    module, name = str(thing.__module__), str(thing.__qualname__)
    parts = module.split(".")
    for end in range(1, len(parts)):
        above = ".".join(parts[:end])
        if getattr(sys.modules.get(above), name, None) is thing:
            return f"{above}.{name}"
    return f"{module}.{name}"


def is_importable(thing: Any) -> bool:
    """Whether a class or function is a module's, which counts as the same as long as its name."""
    return thing.__module__ != "__main__" and "<" not in thing.__qualname__


def code_of(thing: Any, describe: Describe) -> str:
    """A digest of what a class or function does; comments and empty lines do not count."""
    if isinstance(thing, type):
        return sha([_class(cls, describe) for cls in thing.__mro__])
    return sha(_function(thing, describe, ()))


def _class(cls: type, describe: Describe) -> list[Any]:
    if is_importable(cls):
        return [path_of(cls)]
    parts: list[Any] = []
    for name, value in sorted(vars(cls).items()):
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if isinstance(function, FunctionType):
            parts.append([name, _function(function, describe, ())])
        elif isinstance(value, (*PLAIN, tuple)) and not name.startswith("__"):
            parts.append([name, describe(value)])
    return parts


def _function(function: FunctionType, describe: Describe, outer: tuple[Any, ...]) -> list[Any]:
    """Instructions, constants, and the values that a function takes from around it."""
    if function in outer:
        return []
    known = function.__globals__
    around = [known[name] for name in function.__code__.co_names if name in known]
    taken = [each for each in around if isinstance(each, (*PLAIN, FunctionType))]
    taken += [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
    values: list[Any] = [describe(function.__defaults__), describe(function.__kwdefaults__)]
    for each in taken:
        if isinstance(each, FunctionType) and not is_importable(each):
            values.append(_function(each, describe, (*outer, function)))
        elif not isinstance(each, type) or is_importable(each):  # the class that is described
            values.append(describe(each))
    return [*_instructions(function.__code__, describe), *values]


def _is_set(cell: Any) -> bool:
    """Whether a cell has a value; a class's own name has none while the class is made."""
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _instructions(code: CodeType, describe: Describe) -> list[Any]:
    constants = [
        _instructions(each, describe) if isinstance(each, CodeType) else describe(each)
        for each in code.co_consts
    ]
    return [code.co_code.hex(), list(code.co_names), constants]


def sha(content: Any) -> str:
    """A short digest of bytes, or of plain data."""
    if not isinstance(content, bytes):
        content = json.dumps(content, sort_keys=True, default=repr).encode()
    return hashlib.sha256(content).hexdigest()[:12]
