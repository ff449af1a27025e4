"""Standard output that stops no run: a reader that has gone, a terminal that shows only ASCII."""

import io
import sys
from typing import Any

from typing_extensions import override


class _Kept(io.FileIO):
    """Drops what is written once nobody reads it, as in ``| head``."""

    @override
    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            return len(data)


def keep_output() -> None:
    """Replaces the process's standard streams, unless a notebook or a test has already."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        kept = io.TextIOWrapper(
            io.BufferedWriter(_Kept(descriptor, "w", closefd=False)),
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=stream.line_buffering or name == "stderr",
        )
        setattr(sys, name, kept)
