"""Ctrl-C, SIGTERM and a closed terminal: the first ends a run in order, the second at once."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

GRACE = 8.0  # seconds to end in order


class Stopped(BaseException):
    """The run was asked to end; what is committed stays.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        self.name = signal.Signals(number).name
        self.hint = ""  # how to go on
        self.exit_code = 128 + number
        super().__init__(self.name)


def stop_behind(error: BaseException | None) -> Stopped | None:
    """The stop that an error comes from; extension modules wrap what a signal's handler raises.

    Args:
        error: what came of it, perhaps a SystemError.
    """
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

    Where that does not get through within :data:`GRACE` seconds, and on a second signal, the
    process ends at once: a commit needs no farewell. Python drops what is raised in a destructor;
    there the signal is sent once more.
    """
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    known = [getattr(signal, name) for name in names if hasattr(signal, name)]
    numbers = [n for n in known if signal.getsignal(n) != signal.SIG_IGN]  # nohup ignores one
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    timers: list[threading.Timer] = []
    dropped: list[Stopped] = []
    tell = sys.unraisablehook

    def later(seconds: float, call: Callable[..., object], *args: Any) -> None:
        timer = threading.Timer(seconds, call, args)
        timer.daemon = True
        timers.append(timer)
        timer.start()

    def answer(number: int, frame: Any) -> None:
        if dropped:
            raise dropped.pop()
        if timers:
            os._exit(128 + number)
        later(GRACE, os._exit, 128 + number)
        raise Stopped(number)

    def unraisable(failed: Any) -> None:
        if not isinstance(failed.exc_value, Stopped):
            tell(failed)
            return
        dropped.append(failed.exc_value)
        number = failed.exc_value.exit_code - 128
        later(0.01, signal.pthread_kill, threading.main_thread().ident, number)

    before = {number: signal.signal(number, answer) for number in numbers}
    sys.unraisablehook = unraisable
    try:
        yield
    finally:
        sys.unraisablehook = tell
        for timer in timers:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
