"""Ctrl-C and SIGTERM: the first ends a run in order, the second at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

GRACE = 8.0  # seconds to end in order


class Stopped(BaseException):
    """The run was asked to end; what is committed stays.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        self.name = signal.Signals(number).name
        self.folder: Path | None = None  # of the run to resume
        self.exit_code = 128 + number
        super().__init__(self.name)


@contextmanager
def stoppable() -> Iterator[None]:
    """Turns SIGINT and SIGTERM inside into :class:`Stopped`; does nothing outside the main thread.

    Where that does not get through within :data:`GRACE` seconds, and on a second signal, the
    process ends at once: a commit needs no farewell.
    """
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    timers: list[threading.Timer] = []

    def answer(number: int, frame: Any) -> None:
        if timers:
            os._exit(128 + number)
        timer = threading.Timer(GRACE, os._exit, (128 + number,))
        timer.daemon = True
        timers.append(timer)
        timer.start()
        raise Stopped(number)

    before = {number: signal.signal(number, answer) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for timer in timers:
            timer.cancel()
