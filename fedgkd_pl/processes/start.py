"""Worker processes: forked from a server that has everything imported, ended with their parent."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG = 1
_may_be_forked = False


def context(*modules: str) -> Any:
    """How to start processes: forked from a server, which imports ``modules`` once, if possible.

    Nothing of this process's threads or accelerators is inherited.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload(list(modules))
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


def end_with_parent() -> None:
    """Has this process end when the one that it works for ends, for whatever reason.

    The fork server ends when nobody holds its pipe any more: this process must not. On Linux, the
    kernel then kills what the server has forked. Elsewhere a worker ends when it next waits.
    """
    server: Any = getattr(forkserver, "_forkserver", None)
    if server is not None and server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it ended before that
        os._exit(1)
