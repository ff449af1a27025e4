"""Files that others may have written: read without waiting for them, and only so much."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MB = 1_000_000
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def read_bytes(path: str | Path, limit: int) -> bytes:
    """The content of a file.

    Args:
        path: of the file; what is no regular file, such as a pipe, is not read.
        limit: the most bytes that it may have.

    Raises:
        OSError: there is none, it cannot be read, it is no file, or a larger one.
    """
    with open(os.open(path, _FLAGS), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is not a file", str(path))
        content = file.read(limit + 1) or b""
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"is larger than {limit // MB} MB", str(path))
    return content


def read_json(path: str | Path, limit: int = MB) -> Any:
    """The value of a JSON file.

    Args:
        path: of the file.
        limit: the most bytes that it may have.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(read_bytes(path, limit))
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def printable(text: object, length: int = 200) -> str:
    """A text that a terminal, a page or a figure can show: one line without control characters.

    Args:
        text: anything.
        length: the most characters to keep.
    """
    line = " ".join(str(text).split())
    line = line if len(line) <= length else f"{line[:length]} ..."
    return "".join(letter if letter.isprintable() else "?" for letter in line)
