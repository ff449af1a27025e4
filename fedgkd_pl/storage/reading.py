"""Readers for files that others may have written: they never block and have a limit.

YAML may be written as a config is: small, without aliases and tags, every key once.
"""

import errno
import json
import os
import stat
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from fedgkd_pl.errors import SettingError, require
from typing_extensions import override

MB = 1_000_000


def read_bytes(path: str | Path, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes; OSError for any other."""
    info = Path(path).stat()
    if not stat.S_ISREG(info.st_mode) or info.st_size > limit:
        text = f"must be a file of at most {limit // MB} MB"
        raise OSError(errno.EINVAL, text, str(path))
    return Path(path).read_bytes()


def read_json(path: str | Path, limit: int = MB) -> Any:
    """The value of a JSON file; OSError if it cannot be read, ValueError if it is not JSON."""
    try:
        return json.loads(read_bytes(path, limit))
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def printable(text: object, length: int = 200) -> str:
    """The first ``length`` characters of a text, as one line without control characters."""
    line = " ".join(str(text).split())
    line = line if len(line) <= length else f"{line[:length]} ..."
    return "".join(letter if letter.isprintable() else "?" for letter in line)


@cache
def _loader() -> type[yaml.SafeLoader]:
    from jsonargparse._loaders_dumpers import get_yaml_default_loader

    default: Any = get_yaml_default_loader()  # type: ignore[no-untyped-call]

    class Strict(yaml.SafeLoader):
        """PyYAML's safe loader; an alias could repeat a text until memory is full."""

        # jsonargparse's, which know that 1e-3 is a number
        yaml_implicit_resolvers = default.yaml_implicit_resolvers

        @override
        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) not in (None, "!"):
                text = "aliases and tags are not allowed"
                raise yaml.MarkedYAMLError(None, None, text, event.start_mark)
            return super().compose_node(parent, index)

        @override
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = set[str]()
            for key, _ in node.value:
                if str(key.value) in keys:
                    text = f"{key.value} is given twice"
                    raise yaml.MarkedYAMLError(None, None, text, key.start_mark)
                keys.add(str(key.value))
            return super().construct_mapping(node, deep)

    return Strict


def load_yaml(text: str) -> Any:
    """The value of a YAML text; raises a ``YAMLError`` if it has none."""
    try:
        require(len(text) <= MB, "config", "is larger than 1 MB")
        return yaml.load(text, Loader=_loader())
    except (RecursionError, TypeError, ValueError) as error:
        raise yaml.YAMLError(str(error)) from error


def read_yaml(path: str) -> dict[str, Any]:
    """The settings of a config file; raises a clear error if it holds none."""
    require(os.path.isfile(path), "config", "is not a file", path)
    try:
        settings = load_yaml(read_bytes(path, MB).decode())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        reason = getattr(error, "problem", None) or getattr(error, "strerror", None) or error
        raise SettingError("config", f"{line}{reason}", path) from error
    is_mapping = isinstance(settings, dict) and len(settings) > 0
    require(is_mapping, "config", "must be a mapping, lines of key: value", path)
    return settings  # type: ignore[no-any-return]
