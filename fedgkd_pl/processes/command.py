"""Runs a command of the terminal: an error becomes one line and an exit code."""

import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

from fedgkd_pl.errors import RunFailed, SettingError, StorageError
from fedgkd_pl.processes.signals import Stopped, stoppable
from fedgkd_pl.storage.files import DISK
from typing_extensions import override

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

    Leaves the streams of a notebook or a test, which are no longer the process's own.
    """
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            buffer = io.BufferedWriter(_Unheard(descriptor, "w", closefd=False))
            errors = "backslashreplace"
            kept = io.TextIOWrapper(buffer, stream.encoding, errors, line_buffering=True)
            setattr(sys, name, kept)
