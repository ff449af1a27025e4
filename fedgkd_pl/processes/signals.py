"""Ctrl-C, SIGTERM and a closed terminal: the first ends a run cleanly, the second at once."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

GRACE = 8.0  # seconds to end cleanly


class Stopped(BaseException):
    """A signal has asked the run to end; what is committed stays."""

    def __init__(self, number: int) -> None:
        self.name = signal.Signals(number).name
        self.hint = ""  # how to resume
        self.exit_code = 128 + number
        super().__init__(self.name)


def stop_behind(error: BaseException | None) -> Stopped | None:
    """The Stopped that caused an error: extension modules wrap what a signal handler raises."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, Stopped):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def stoppable() -> Iterator[None]:
    """Turns the signals inside into :class:`Stopped`; does nothing outside the main thread.

    On a second signal, or if the run has not ended :data:`GRACE` seconds after the first, the
    process exits at once, which harms no committed file. Python drops what is raised in a
    destructor; in that case the signal is sent once more.
    """
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    known = [getattr(signal, name) for name in names if hasattr(signal, name)]
    numbers = [n for n in known if signal.getsignal(n) != signal.SIG_IGN]  # nohup ignores one
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    timers: list[threading.Timer] = []
    dropped: list[Stopped] = []
    default_hook = sys.unraisablehook

    def later(seconds: float, call: Callable[..., object], *args: Any) -> None:
        timer = threading.Timer(seconds, call, args)
        timer.daemon = True
        timers.append(timer)
        timer.start()

    def handle(number: int, frame: Any) -> None:
        if dropped:
            raise dropped.pop()
        if timers:
            os._exit(128 + number)
        later(GRACE, os._exit, 128 + number)
        raise Stopped(number)

    def unraisable(failed: Any) -> None:
        if not isinstance(failed.exc_value, Stopped):
            default_hook(failed)
            return
        dropped.append(failed.exc_value)
        number = failed.exc_value.exit_code - 128
        later(0.01, signal.pthread_kill, threading.main_thread().ident, number)

    before = {number: signal.signal(number, handle) for number in numbers}
    sys.unraisablehook = unraisable
    try:
        yield
    finally:
        sys.unraisablehook = default_hook
        for timer in timers:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
