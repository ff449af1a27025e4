"""Output that nobody reads, or that cannot be shown, ends no run; nor do the warnings of others."""

import errno
import io
import os
import select
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class _Tolerant(io.FileIO):
    """Standard output that goes to nowhere when it cannot be written any more."""

    failed: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes, or drops what nobody takes.

        Args:
            data: bytes.
        """
        while True:
            try:
                written = super().write(data)
            except OSError as error:  # a broken pipe, a closed terminal, a full disk
                self.failed = self.failed or error
                _to_nowhere(self.fileno())
                return len(data)
            if written is not None:
                return written
            select.select([], [self], [])  # it does not block, but is full


def _to_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def keep_output() -> list[_Tolerant]:
    """Makes this process's standard output and error tolerant, and opens what is closed.

    A descriptor that is closed when a process starts would be that of its first file. Streams that
    somebody has put in place of the process's own, such as a notebook's, stay.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            _to_nowhere(descriptor)
    kept = []
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        own: Any = getattr(sys, name)
        if own is not getattr(sys, f"__{name}__") or isinstance(own, _Text):
            continue
        if own is not None:
            with suppress(OSError, ValueError):
                own.flush()
        raw = _Tolerant(descriptor, "w", closefd=False)
        text = _Text(
            io.BufferedWriter(raw),
            encoding=getattr(own, "encoding", "utf-8"),
            errors="backslashreplace",  # a character that it cannot show
            line_buffering=name == "stderr" or getattr(own, "line_buffering", False),
            write_through=getattr(own, "write_through", False),
        )
        setattr(sys, name, text)
        kept.append(raw)
    return kept


class _Text(io.TextIOWrapper):
    """What :func:`keep_output` puts in place."""


@contextmanager
def kept_output() -> Iterator[list[_Tolerant]]:
    """:func:`keep_output` for a while."""
    before = sys.stdout, sys.stderr
    try:
        yield keep_output()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _Text):
                stream.flush()
    finally:
        sys.stdout, sys.stderr = before


def lost(streams: list[_Tolerant]) -> OSError | None:
    """Why something that was printed is lost; a reader who has gone (``| head``) wanted no more.

    Args:
        streams: of :func:`keep_output`.
    """
    for stream in streams:
        if stream.failed is not None and stream.failed.errno != errno.EPIPE:
            return stream.failed
    return None


def only_our_warnings() -> None:
    """Of ``python -W error``, the errors for our own code: libraries warn of one another."""
    if any(action == "error" for action, *_ in warnings.filters):
        warnings.filterwarnings("default", module=r"(?!fedgkd_pl|__main__)")
