"""YAML as a config may be written: small, plain, every key once."""

import os
from dataclasses import dataclass, field
from typing import Any

import yaml
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.storage.reading import read_bytes
from jsonargparse import get_loader

MAX_BYTES = 1_000_000
MAX_WRITTEN_OUT = 2 * MAX_BYTES  # characters and values, with every alias repeated
MAX_TEXT = 10_000  # jsonargparse's time for a dotted name grows with the square of its length
MAX_DEPTH = 50  # libyaml ends the process at some ten thousand
TAGS = {"!"} | {f"tag:yaml.org,2002:{t}" for t in "map seq str int float bool null".split()}

_lenient = get_loader("yaml")  # knows that 1e-3 is a number
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_text(path: Any) -> str:
    """How jsonargparse reads a file that a text in a config names: as carefully as the config."""
    try:
        return read_bytes(str(path.absolute), MAX_BYTES).decode()
    except (OSError, ValueError) as error:
        raise yaml.YAMLError(getattr(error, "strerror", None) or "is not UTF-8") from error


def load(text: str) -> Any:
    """The value of a YAML text.

    Args:
        text: of a file, a flag or a variable. A flag or variable that raises a ``YAMLError`` is
            a plain text to jsonargparse; a ``ValueError`` is an error.
    """
    texts = [text]
    for inner in texts:  # texts in texts too: jsonargparse may read a text as YAML
        try:
            texts += _scan(inner)
        except yaml.YAMLError:
            if inner is text:
                raise
    try:
        return _lenient(text)
    except (TypeError, ValueError) as error:  # such as a number of 5000 digits
        raise yaml.YAMLError(str(error)) from error


def read(path: str) -> dict[str, Any]:
    """The settings of a config file; raises a clear error if it holds none."""
    require(os.path.isfile(path), "config", "is not a file", path)
    try:
        settings = load(read_bytes(path, MAX_BYTES).decode())
    except OSError as error:
        raise SettingError("config", str(error.strerror), path) from error
    except UnicodeDecodeError as error:
        raise SettingError("config", "is not UTF-8", path) from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise SettingError("config", f"line {line}: {error.problem}", path) from error
    except SettingError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise SettingError("config", str(error), path) from error
    require(settings is not None, "config", "is empty", path)
    if not isinstance(settings, dict) or not settings:
        raise SettingError("config", "must be a mapping, lines of key: value", path)
    return settings


@dataclass
class _Collection:
    """A list or mapping that is being read."""

    anchor: str | None
    before: int  # size of the text before it
    is_mapping: bool
    children: int = 0
    keys: dict[str, None] = field(default_factory=dict)  # in order


def _add_child(outer: list[_Collection], event: yaml.NodeEvent, line: str) -> None:
    """Refuses a key that its mapping has."""
    parent = outer[-1]
    parent.children += 1
    if parent.is_mapping and parent.children % 2:
        key = getattr(event, "value", None)
        if key is None:
            raise yaml.YAMLError(f"{line} a key must be a word")
        if key in parent.keys:
            above = [
                next(reversed(collection.keys)) for collection in outer[:-1] if collection.keys
            ]
            name = ".".join(word for word in [*above, key] if word != "init_args")
            raise SettingError(name, f"is given twice, again in {line[:-1]}")
        parent.keys[key] = None


def _scan(text: str) -> list[str]:
    """The long texts within a text; raises unless its value is safe to construct and to print.

    Nothing is constructed here. A text no longer than the depth allowed can do no harm.
    """
    if len(text) > MAX_BYTES:
        raise ValueError("is larger than 1 MB")
    size = 0
    sizes: dict[str | None, int] = {}  # of what has an anchor
    outer: list[_Collection] = []
    long: list[str] = []
    for event in yaml.parse(text, Loader=_Loader):
        line = f"line {event.start_mark.line + 1}:"
        if isinstance(event, yaml.CollectionEndEvent):
            done = outer.pop()
            sizes[done.anchor] = size - done.before
        if not isinstance(event, yaml.NodeEvent):
            continue
        if outer:
            _add_child(outer, event, line)
        tag: str = getattr(event, "tag", None) or "!"
        if tag not in TAGS:
            name = tag.replace("tag:yaml.org,2002:", "!!")
            raise yaml.YAMLError(f"{line} the tag {name} is not allowed")
        if isinstance(event, yaml.CollectionStartEvent):
            is_mapping = isinstance(event, yaml.MappingStartEvent)
            outer.append(_Collection(event.anchor, size, is_mapping))
            size += 1
        elif isinstance(event, yaml.ScalarEvent):
            if len(event.value) > MAX_TEXT:
                raise ValueError(f"{line} a value is longer than {MAX_TEXT} characters")
            sizes[event.anchor] = 1 + len(event.value)
            size += sizes[event.anchor]
            if len(event.value) > MAX_DEPTH and event.value != text:
                long.append(event.value)
        elif any(collection.anchor for collection in outer):
            raise ValueError(f"{line} an alias (*) within an anchor (&) is not allowed")
        else:
            size += sizes.get(event.anchor, 0)
        if size > MAX_WRITTEN_OUT or len(outer) > MAX_DEPTH:
            raise ValueError(f"{line} nested too deeply, or too many aliases")
    return long
