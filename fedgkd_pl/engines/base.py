"""The interface between methods and engines, which know nothing else of each other."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from fedgkd_pl.data.partition import largest_first
from fedgkd_pl.errors import installs, require
from fedgkd_pl.federation.client_trainer import Job
from fedgkd_pl.federation.message import Answer, Message, Specs
from fedgkd_pl.storage.recorded import Recorded

if TYPE_CHECKING:
    from fedgkd_pl.federation.server import FederatedServer


class Session(ABC):
    """A running engine: workers that hold the job's data and net."""

    @abstractmethod
    def run(self, message: Message, cohort: Sequence[int]) -> Iterator[Answer]:
        """Trains the clients of a round; a client that fails does not disturb the others.

        The answers come in an order that depends on the cohort's members and their sizes alone
        (see :func:`schedule`), so that sums do not depend on who answered first.
        """

    def in_order(self, order: Sequence[int], answers: Iterator[Answer]) -> Iterator[Answer]:
        """The answers of clients in this order, whoever answers first."""
        done: dict[int, Answer] = {}
        try:
            for client in order:
                while client not in done:
                    answer = next(answers)
                    done[answer.client] = answer
                yield done.pop(client)
        except BaseException:  # a stopped round leaves workers in the middle of something
            self.close()
            raise

    def close(self) -> None:  # noqa: B027  (an engine without workers has nothing to end)
        """Ends the workers; may be called twice."""


class Engine(Recorded, ABC):
    """The settings of an engine, which opens sessions.

    ``threads``: intra-op threads of each client's training; ``timeout``: seconds it may take.
    """

    states_stay = False  # whether clients' states stay with them; the server has marks
    max_samples: int | None = None  # the largest n_k; None where the data is the server's own

    def __init__(self, threads: int = 1, timeout: float | None = None) -> None:
        require(threads >= 1, "threads", "must be at least 1", threads)
        require(timeout is None or timeout > 0, "timeout", "must be positive", timeout)
        self.threads = threads
        self.timeout = timeout

    def states(self, declared: Specs) -> Specs:
        """What the server gets of clients' states, given those that the method ``declared``."""
        return declared

    def check(self, server: "FederatedServer") -> None:
        """Raises a clear error if clients of a method cannot be trained here."""

    @abstractmethod
    def open(self, job: Job, cohort_size: int) -> Session:
        """Starts workers for a job.

        ``cohort_size``, the clients per round, bounds the workers that make sense.
        """


def schedule(job: Job, cohort: Sequence[int]) -> list[int]:
    """The order of a round: the largest client first, so that no long one starts last."""
    return largest_first(job.data.index, cohort)


def needs(package: str, extra: str) -> None:
    """Raises an error with what installs our ``extra`` where an engine's package is missing."""
    text = f"needs {package}, which is not installed: {installs(extra)}"
    require(find_spec(package) is not None, "engine", text)


def devices_like(device: torch.device) -> int:
    """How many accelerators of a device's kind this process can use."""
    return int(torch.get_device_module(device).device_count())


def cores() -> int:
    """The cores this process may use, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
