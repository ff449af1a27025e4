"""Ctrl-C, SIGTERM and a closed terminal: the first ends a run cleanly, the second at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal has asked the run to end; what is committed stays."""

    def __init__(self, number: int) -> None:
        self.name = signal.Signals(number).name
        self.hint = ""  # how to resume
        self.exit_code = 128 + number
        super().__init__(self.name)

    def __str__(self) -> str:
        """Which signal, and how to go on."""
        return f"stopped by {self.name}" + (f"; {self.hint}" if self.hint else "")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or a notebook's stop button, has ended a run in order; the text says how to go on."""


class CtrlC:
    """Turns Ctrl-C into :class:`Stopped` while a Trainer of the user's program runs.

    Lightning answers a ``KeyboardInterrupt`` by ignoring every later Ctrl-C of the process, and by
    ending it. A handler of the user's own stays.
    """

    def __init__(self) -> None:
        self.is_ending = False

    def begin(self) -> None:
        """Answers Ctrl-C from now on; does nothing outside the main thread."""
        if _handles_interrupts(signal.default_int_handler):
            self.is_ending = False
            signal.signal(signal.SIGINT, self._answer)

    def _answer(self, number: int, frame: Any) -> None:
        if not self.is_ending:
            raise Stopped(number)

    def end(self, error: BaseException | None = None) -> None:
        """Lets Python answer Ctrl-C again; also where Lightning has answered ``error``."""
        ignored = isinstance(error, KeyboardInterrupt) and _handles_interrupts(signal.SIG_IGN)
        if ignored or _handles_interrupts(self._answer):
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _handles_interrupts(handler: Any) -> bool:
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) == handler


def stop_behind(error: BaseException | None) -> Stopped | None:
    """The Stopped that caused an error: extension modules wrap what a signal handler raises."""
    while error is not None and not isinstance(error, Stopped):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def stoppable() -> Iterator[None]:
    """Turns the signals inside into :class:`Stopped`; does nothing outside the main thread.

    The second one ends the process at once, which harms no committed file.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [n for n in STOPS if signal.getsignal(n) != signal.SIG_IGN]  # nohup ignores one

    def handle(number: int, frame: Any) -> None:
        for each in numbers:
            signal.signal(each, lambda number, _: os._exit(128 + number))
        raise Stopped(number)

    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
