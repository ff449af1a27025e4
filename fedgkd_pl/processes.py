"""Processes of our own: forked from a server that has everything imported, ended with us."""

import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


def context(*modules: str) -> Any:
    """How to start processes: forked from a server process where there is such a thing.

    So they cost an import once, and nothing of this process's threads or accelerators comes along.

    Args:
        modules: what the server process imports before.
    """
    fork = "forkserver" in multiprocessing.get_all_start_methods()
    chosen = multiprocessing.get_context("forkserver" if fork else "spawn")
    if fork:
        chosen.set_forkserver_preload(list(modules))
    return chosen


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


def wait_for_parent() -> None:
    """Returns when the process that started this one has ended, however it did."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
