"""Reads files that others may have written: never blocks, and never reads more than a limit."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MB = 1_000_000
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def read_bytes(path: str | Path, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes; OSError for any other."""
    with open(os.open(path, _FLAGS), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is not a file", str(path))
        content = file.read(limit + 1) or b""
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"is larger than {limit // MB} MB", str(path))
    return content


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
