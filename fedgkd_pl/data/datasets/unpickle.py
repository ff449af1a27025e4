"""A reader for CIFAR's pickles that calls nothing.

``pickle`` itself, even held to NumPy's names, can be told to fill the memory, to hash a tuple for
ever or to lie to NumPy about a type. The files are dictionaries of strings, lists of integers and
arrays of bytes: the few opcodes that these are made of are read here, and nothing else.
"""

import pickletools
from typing import Any

import numpy as np
from fedgkd_pl.errors import SettingError
from numpy.typing import NDArray

MOST_OPCODES = 1_000_000  # CIFAR-100's training file has about 200,000
MOST_CALLS = 8  # each may copy all pixels; the files make four

_RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_HARMLESS = (*_RECONSTRUCT, "numpy ndarray", "numpy dtype", "_codecs encode")
_BYTE = object()  # the type of an array of bytes
_ARRAY = object()  # an array that is still to be filled


def unpickle_arrays(content: bytes, name: str) -> Any:
    """A pickle of byte arrays, strings, integers, lists and dictionaries; all else is refused.

    Args:
        content: the pickle.
        name: the file's name, for the error.
    """
    try:
        return _read(content)
    except (ValueError, TypeError, LookupError) as error:
        reason = f"{name} cannot be read ({error!s:.200}): delete it and fetch it again"
        raise SettingError("data_dir", reason) from error


def _read(content: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        mark = marks.pop()
        items = stack[mark:]
        del stack[mark:]
        return items

    value: Any
    calls = 0
    for count, (opcode, value, _) in enumerate(pickletools.genops(content)):
        calls += opcode.name in ("REDUCE", "BUILD")
        if count > MOST_OPCODES or calls > MOST_CALLS:
            raise ValueError("it is too long")
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "BININT" | "BININT1" | "BININT2" | "SHORT_BINSTRING" | "BINSTRING":
                stack.append(value)
            case "SHORT_BINUNICODE" | "BINUNICODE" | "SHORT_BINBYTES" | "BINBYTES":
                stack.append(value)
            case "NONE":
                stack.append(None)
            case "NEWFALSE" | "NEWTRUE":
                stack.append(opcode.name == "NEWTRUE")
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "MARK":
                marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT":
                memo[value] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "GLOBAL":
                stack.append(_harmless(value))
            case "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                stack.append(_harmless(str.__add__(module, " ") + str.__str__(attribute)))
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = [stack.pop() for _ in range(int(opcode.name[-1]))]
                stack.append(tuple(reversed(items)))
            case "APPEND":
                item = stack.pop()
                list.append(stack[-1], item)
            case "APPENDS":
                items = since_mark()
                list.extend(stack[-1], items)
            case "SETITEM":
                item, key = stack.pop(), stack.pop()
                _set(stack[-1], [key, item])
            case "SETITEMS":
                items = since_mark()
                _set(stack[-1], items)
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(_called(function, arguments))
            case "BUILD":
                state, empty = stack.pop(), stack.pop()
                stack.append(_filled(state) if empty is _ARRAY else empty)
            case "STOP":
                return stack.pop()
            case other:
                raise ValueError(f"it has the opcode {other}")
    raise ValueError("it has no end")


def _harmless(name: str) -> str:
    if name not in _HARMLESS:
        raise ValueError(f"it names {ascii(name.replace(' ', '.', 1))[1:-1]:.80}")
    return name


def _set(target: Any, items: list[Any]) -> None:
    for key, item in zip(items[::2], items[1::2], strict=True):
        if type(key) is not str:  # a tuple of tuples of … takes for ever to hash
            raise ValueError("a key is not a string")
        dict.__setitem__(target, key, item)


def _called(function: Any, arguments: Any) -> Any:
    match function, arguments:
        case "numpy dtype", ("u1", *_):
            return _BYTE
        case "_codecs encode", (str(text), "latin1"):
            return text.encode("latin1")
        case str(name), _ if name in _RECONSTRUCT:
            return _ARRAY
    raise ValueError("it calls what it should not")


def _filled(state: Any) -> NDArray[np.uint8]:
    match state:
        case (1, (int(rows), int(columns)), kind, 0, str() | bytes() as data) if kind is _BYTE:
            data = data.encode("latin1") if isinstance(data, str) else data
            return np.frombuffer(bytearray(data), np.uint8).reshape(rows, columns)
    raise ValueError("it has an array that is not rows of bytes")
