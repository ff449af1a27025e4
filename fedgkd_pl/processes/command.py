"""Runs a command of the terminal: an error becomes one line and an exit code, a signal a clean end.

The first Ctrl-C, SIGTERM or closed terminal ends a run cleanly, the second at once.
"""

import io
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fedgkd_pl.errors import RunFailed, SettingError, StorageError
from fedgkd_pl.storage.files import DISK
from typing_extensions import override

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


# These speak of epochs, of a cloud service and of Lightning's own deprecations.
_LOUD = ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed")
_WARNINGS = (
    "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
    "Be aware that when using `ckpt_path`, callbacks",
    "Checkpoint directory .* exists and is not empty",
    "Initializing zero-element tensors is a no-op",
)


def run_command(command: Callable[[], int], debug: bool = False) -> int:
    """Runs a command, which returns its exit code.

    Args:
        command: what to run.
        debug: let errors through with their traceback.

    Returns:
        The exit code: 0 done, 2 bad input, 3 the run failed, 4 storage, 129, 130 or 143 stopped.
    """
    _keep_output()
    threading.excepthook = _quiet_if_full
    try:
        with stoppable():
            code = command()
            sys.stdout.flush()  # a full disk is an error, too
            return code
    except Stopped as stop:
        print(stop, file=sys.stderr)
        return stop.exit_code
    except Exception as error:
        if debug:
            raise
        shown, code = _explained(error)
        print(f"error: {' '.join(str(shown).split())}", file=sys.stderr)
        return code


def quiet_libraries() -> None:
    """Silences what Lightning says that does not apply to rounds; for a process of ours."""
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in _WARNINGS:
        warnings.filterwarnings("ignore", text)


def _explained(error: Exception) -> tuple[Exception, int]:
    """The error to show, and the exit code."""
    if isinstance(error, SettingError) or type(error).__name__ == "MisconfigurationException":
        return error, 2
    if isinstance(error, OSError) and (error.errno in DISK or error.filename):
        error = StorageError(error.filename or "output_dir", error)
    if isinstance(error, StorageError):
        return error, 4
    if not isinstance(error, RunFailed):
        error = RunFailed(f"{type(error).__name__}: {error} (--debug shows where)")
    return error, 3


def _quiet_if_full(failed: threading.ExceptHookArgs) -> None:
    """Ignores a full disk in TensorBoard's thread: the main thread reports it."""
    if getattr(failed.exc_value, "errno", None) not in DISK:
        threading.__excepthook__(failed)


class _Unheard(io.FileIO):
    """Drops what is written once nobody reads it, as in ``| head``."""

    @override
    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            return len(data)


def _keep_output() -> None:
    """Has output end no run: a reader may go, and a terminal may show only ASCII.

    Leaves the streams of a notebook or a test, which are no longer the process's own, and those
    that somebody listens to, as ``flwr run --stream`` does.
    """
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and "write" not in vars(stream):
            buffer = io.BufferedWriter(_Unheard(descriptor, "w", closefd=False))
            errors = "backslashreplace"
            kept = io.TextIOWrapper(buffer, stream.encoding, errors, line_buffering=True)
            setattr(sys, name, kept)
