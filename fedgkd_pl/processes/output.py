"""Output that nobody reads, or that cannot be shown, stops no run; nor do libraries' warnings."""

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
    """Standard output that is dropped once it cannot be written any more."""

    failed: OSError | None = None

    def write(self, data: Any) -> int:
        while True:
            try:
                written = super().write(data)
            except OSError as error:  # a broken pipe, a closed terminal, a full disk
                self.failed = self.failed or error
                _to_nowhere(self.fileno())
                return len(data)
            if written is not None:
                return written
            select.select([], [self], [])  # a non-blocking stream that is full


def _to_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def keep_output() -> list[_Tolerant]:
    """Makes this process's standard output and error tolerant, and opens closed descriptors.

    Otherwise the first file that is opened would get the number of a closed one. Streams that
    replace the process's own, such as a notebook's, stay.
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
    """Marks the streams of :func:`keep_output`."""


@contextmanager
def kept_output() -> Iterator[list[_Tolerant]]:
    """:func:`keep_output` within a block."""
    before = sys.stdout, sys.stderr
    try:
        yield keep_output()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _Text):
                stream.flush()
    finally:
        sys.stdout, sys.stderr = before


def lost(streams: list[_Tolerant]) -> OSError | None:
    """Why printed output was lost; None too if the reader has gone (``| head``)."""
    for stream in streams:
        if stream.failed is not None and stream.failed.errno != errno.EPIPE:
            return stream.failed
    return None


def only_our_warnings() -> None:
    """Limits ``python -W error`` to our own code: libraries warn about one another."""
    if any(action == "error" for action, *_ in warnings.filters):
        warnings.filterwarnings("default", module=r"(?!fedgkd_pl|__main__)")
