"""What methods and engines know of each other, and the engine of one machine.

For engines that train in other processes there is their worker: a Trainer that is kept, and answers
as bytes.
"""

import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch
from fedgkd_pl.data.partition import largest_first
from fedgkd_pl.errors import at_least, installs, require
from fedgkd_pl.federation.client_trainer import ClientTrainer, Job, quiet
from fedgkd_pl.federation.hardware import keep_memory, threads
from fedgkd_pl.federation.message import (
    Answer,
    ClientFailure,
    ClientUpdate,
    Message,
    Specs,
    State,
    decode_state,
    failure,
    plain_seconds,
)
from fedgkd_pl.storage.recorded import Recorded
from typing_extensions import override

if TYPE_CHECKING:
    from fedgkd_pl.federation.server import FederatedServer


log = logging.getLogger("fedgkd_pl")


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
        at_least(1, threads=threads)
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


class Worker:
    """Trains one client after the other; an error, also of ``load`` (the job), is an answer."""

    def __init__(self, load: Callable[[], Job]) -> None:
        self.load = load
        self.trainer: ClientTrainer | None = None

    def prepare(self) -> None:
        """Makes the Trainer; what goes wrong is the answer of the next client."""
        with suppress(Exception):
            self._ready()

    def close(self) -> None:
        """Ends the Trainer; the next client gets another."""
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = None

    def train(self, message: Message, client: int, state: bytes, part: bytes = b"") -> bytes:
        """The answer of a client, for :func:`read`.

        Args:
            state: what it kept, encoded.
            part: its examples' content, encoded, if the job does not have it.
        """
        try:
            trainer = self._ready()
            if part:
                data, own = trainer.data, decode_state(part)
                trainer.load_data(data.only(client, replace(data.examples, **own)))  # type: ignore[arg-type]
            return b"=" + trainer.update(message, client, decode_state(state)).encode()
        except Exception as error:  # a user's net or loss may fail in any way
            self.close()  # nothing of the failed fit stays
            failed = failure(client, error)
            return b"!" + json.dumps([failed.reason, failed.traceback]).encode()

    def _ready(self) -> ClientTrainer:
        self.trainer = self.trainer or ClientTrainer(self.load())
        return self.trainer


def read(answer: bytes, client: int, took: float) -> Answer:
    """The answer of :meth:`Worker.train`, decoded; ``took``: seconds of training and transfer."""
    try:
        if answer[:1] == b"!":
            reason, traceback = json.loads(answer[1:])
            return ClientFailure(client, str(reason), str(traceback))
        update = ClientUpdate.decode(answer[1:])
    except Exception as error:  # bytes may be anything
        failed = failure(client, error)
        return replace(failed, reason=f"its answer cannot be read: {failed.reason}")
    if update.client != client:  # for whose answer the round would wait for ever
        return ClientFailure(client, f"answers as client {update.client!r:.50}, not as itself")
    update.seconds = plain_seconds(update.seconds)
    update.seconds["transfer"] = max(0.0, took - sum(update.seconds.values()))
    return update


class LocalEngine(Engine):
    """Trains the clients of a round on this machine.

    Two processes of one thread train two clients faster than one process of two threads, and a
    fixed number of threads per client keeps the results the same on every machine.

    Args:
        workers: 1 trains in this process; n in a pool of n processes, at most one per client of
            a cohort; ``auto`` takes as many of these as there are cores, or GPUs (accelerators of
            any kind) if the Trainer uses them.
        threads: intra-op threads of each client's training; another number gives other rounding.
        timeout: seconds that a client may take, after which it is left out of the round.
    """

    def __init__(
        self,
        workers: int | Literal["auto"] = "auto",
        threads: int = 1,
        timeout: float | None = None,
    ) -> None:
        super().__init__(threads, timeout)
        require(workers == "auto" or int(workers) >= 1, "workers", "must be auto or ≥ 1", workers)
        self.workers = workers

    @override
    def open(self, job: Job, cohort_size: int) -> Session:
        keep_memory()  # for evaluation, too
        on_cpu = job.device.type == "cpu"
        slots = cores() // self.threads if on_cpu else devices_like(job.device)
        workers = min(slots if self.workers == "auto" else self.workers, cohort_size)
        if workers > max(1, slots):
            log.warning("workers: %d share %d slots (cores / threads, or GPUs)", workers, slots)
        workers = max(1, workers)
        if workers == 1 and self.timeout is None:  # only another process can be stopped
            return InProcessSession(job, self.threads)
        from fedgkd_pl.engines.pool import PoolSession

        return PoolSession(job, workers, self.threads, self.timeout)


class InProcessSession(Session):
    """One client after the other in this process, with ``threads`` intra-op threads."""

    def __init__(self, job: Job, threads: int) -> None:
        self.job = job
        self.threads = threads
        self.trainer = ClientTrainer(job)

    @override
    def run(self, message: Message, cohort: Sequence[int]) -> Iterator[Answer]:
        for client in schedule(self.job, cohort):
            with threads(self.threads), quiet():  # not while the answer is used
                answer = self._train(message, client, self.job.states.get(client, {}))
            yield answer

    @override
    def close(self) -> None:
        self.trainer.close()

    def _train(self, message: Message, client: int, state: State) -> Answer:
        try:
            return self.trainer.update(message, client, state)
        except Exception as error:  # a user's net or loss may fail in any way
            self.trainer.close()
            self.trainer = ClientTrainer(self.job)  # nothing of the failed fit stays
            return failure(client, error)
