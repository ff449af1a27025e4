"""Starts processes that are forked from a server with everything imported, and end with us."""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import util
from multiprocessing.connection import wait
from types import ModuleType
from typing import Any

from fedgkd_pl.processes.output import keep_output

PRELOAD = "_FEDGKD_PL_PRELOAD"  # for fedgkd_pl.processes.preload: our id, then modules
SOCKET_NAME = 70  # bytes of a folder that leave room for a socket's name; some systems take 92


def context(*modules: str) -> Any:
    """How to start processes: forked from a server, which imports ``modules`` once, if possible.

    Nothing of this process's threads or accelerators is inherited.
    """
    fork = "forkserver" in multiprocessing.get_all_start_methods()
    chosen = multiprocessing.get_context("forkserver" if fork else "spawn")
    if fork:
        chosen.set_forkserver_preload(["fedgkd_pl.processes.preload"])
        os.environ[PRELOAD] = " ".join([str(os.getpid()), *modules])
        _short_socket_names()
    return chosen


def context_of_helpers(*modules: str) -> Any:
    """How this process starts helpers, such as those that read samples.

    A process that :func:`context` started would start a server of its own, which imports everything
    again. Where it says that it :func:`may_be_forked`, its helpers are forked from it.
    """
    return multiprocessing.get_context("fork") if _may_be_forked else context(*modules)


def may_be_forked() -> None:
    """Says that this process holds nothing that a fork of it must not have: no lock, no device."""
    global _may_be_forked
    _may_be_forked = sys.platform == "linux"


_may_be_forked = False


def _short_socket_names() -> None:
    """Uses another folder for multiprocessing's sockets where TMPDIR is too long for them."""
    if len(os.fsencode(tempfile.gettempdir())) <= SOCKET_NAME:
        return
    before = tempfile.tempdir
    for folder in ("/tmp", "/var/tmp", os.getcwd()):
        tempfile.tempdir = folder
        try:
            with suppress(OSError):  # not writable
                util.get_temp_dir()  # makes the folder of all sockets
                return
        finally:
            tempfile.tempdir = before


@contextmanager
def without_main() -> Iterator[None]:
    """Starts a process that does not import the user's script again.

    multiprocessing would, and a script without an ``if __name__ == "__main__"`` would then start
    processes of its own. What a process needs of ``__main__`` must travel by value (cloudpickle).
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def ending_with_parent(target: Callable[..., None], *args: Any) -> dict[str, Any]:
    """The arguments of a Process that ends with this one, even before it has imported anything.

    ``target`` must be a function of a module, imported in the process; ``args`` should need few
    imports to be unpickled.
    """
    return {"target": _watched, "args": (target.__module__, target.__qualname__, args)}


def _watched(module: str, name: str, args: tuple[Any, ...]) -> None:
    end_with_parent()
    keep_output()
    getattr(import_module(module), name)(*args)


def end_with_parent() -> None:
    """Has this process killed when the one that started it ends, for whatever reason.

    On Linux the kernel does it, by a signal for the closed pipe, also during a long call that lets
    no other thread run. The thread is for other systems, and for a pipe that another fork of the
    parent holds open.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    sentinel = parent.sentinel
    if sys.platform == "linux":
        import fcntl

        fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(sentinel, fcntl.F_GETFL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
    watched = [sentinel]
    if hasattr(os, "pidfd_open"):
        try:
            watched.append(os.pidfd_open(parent.pid))
        except ProcessLookupError:
            os._exit(1)
        except OSError:  # a sandbox without it
            pass
    if wait(watched, 0):  # it has already ended
        os._exit(1)

    def end() -> None:
        wait(watched)
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
