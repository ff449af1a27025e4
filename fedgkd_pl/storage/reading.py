"""Readers for files that others may have written: they never block and have a limit."""

import errno
import json
import stat
from pathlib import Path
from typing import Any

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
