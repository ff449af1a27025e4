"""A pool of worker processes, each with a net, a Trainer and a view of the data.

The training data and every round's message lie in shared memory. Workers are forked from a server
process that has torch and Lightning imported, so a pool costs that import once.
"""

import io
import pickle
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import cloudpickle
import torch
from fedgkd_pl.engines.base import Session, devices_like, schedule
from fedgkd_pl.engines.shared import Memory, SharedTensors
from fedgkd_pl.engines.worker import Worker, read
from fedgkd_pl.errors import RunFailed, SettingError
from fedgkd_pl.federation.client_trainer import Job, quiet
from fedgkd_pl.federation.message import Answer, ClientFailure, Message, encode_state
from fedgkd_pl.federation.performance import numerics, set_numerics
from fedgkd_pl.processes.start import (
    context,
    ending_with_parent,
    may_be_forked,
    without_main,
)
from torch import Tensor

BEGUN = b">"


@dataclass
class WorkerHandle:
    """A process of the pool, and what it is doing."""

    process: Any
    connection: Connection
    client: int | None = None  # None while it waits for one
    given: float | None = None  # when it got that client
    started: float | None = None  # when it began with that client; None until it says so


class PoolSession(Session):
    """Processes that train clients side by side; ``timeout``: seconds that a client may take."""

    def __init__(self, job: Job, workers: int, threads: int, timeout: float | None = None) -> None:
        self.job = job
        self.threads = threads
        self.timeout = timeout
        self.context = context(__name__)
        parts = [vars(part) for part in (job.data.examples, job.client.public) if part is not None]
        self.data = [t for part in parts for t in part.values() if _can_be_shared(t)]
        self.shared = SharedTensors(self.data)
        self.message = Memory()
        self.workers: list[WorkerHandle] = []
        # before multiprocessing waits for workers, which ignore its SIGTERM
        self._end = util.Finalize(
            self, _end, (self.workers, self.shared.memory, self.message), exitpriority=10
        )
        try:
            for slot in range(workers):
                self.workers.append(self._start(slot))
        except BaseException:
            self.close()
            raise

    def run(self, message: Message, cohort: Sequence[int]) -> Iterator[Answer]:
        """See :meth:`Session.run`."""
        self.message.write([message.encode()])  # nobody reads: all clients before have answered
        order = schedule(self.job, cohort)
        waiting = iter(order)
        done: dict[int, Answer] = {}
        try:
            for slot in range(len(self.workers)):
                self._tell(slot, self.message.size)
                self._assign(slot, waiting)
            for client in order:
                while client not in done:
                    for slot in self._ready():
                        answer = self._receive(slot)
                        if answer is not None:
                            done[answer.client] = answer
                            self._assign(slot, waiting)
                yield done.pop(client)
        except BaseException:  # a stopped round leaves workers in the middle of something
            self.close()
            raise

    def close(self) -> None:
        """See :meth:`Session.close`."""
        self._end()

    def _start(self, slot: int) -> WorkerHandle:
        job = _dumps(_for_worker(self.job, slot), self.data)
        ours, theirs = self.context.Pipe()
        args = (theirs, self.threads, numerics(), self.shared, self.message)
        process = self.context.Process(
            **ending_with_parent(_work, *args),
            name=f"fedgkd-worker-{slot}",
            daemon=False,  # it may start processes that read samples; _end ends it
        )
        try:
            with without_main():
                process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        worker = WorkerHandle(process, ours)
        try:
            ours.send_bytes(job)
        except BaseException as error:
            ours.close()
            _kill(worker)
            if isinstance(error, OSError):
                reason = f"ended as it started (exit code {process.exitcode})"
                raise RunFailed(f"a worker process {reason}") from error
            raise
        return worker

    def _tell(self, slot: int, task: Any) -> None:
        """Sends a task; a worker that has died since its last one is replaced."""
        if not self.workers[slot].process.is_alive():
            self._replace(slot)
        try:
            self.workers[slot].connection.send(task)
        except OSError:
            self._replace(slot)
            self.workers[slot].connection.send(task)

    def _replace(self, slot: int) -> None:
        _kill(self.workers[slot])
        self.workers[slot].connection.close()
        self.workers[slot] = self._start(slot)
        self.workers[slot].connection.send(self.message.size)

    def _assign(self, slot: int, waiting: Iterator[int]) -> None:
        client = next(waiting, None)
        given = time.monotonic()
        if client is not None:
            self._tell(slot, (client, encode_state(self.job.states.get(client, {}))))
        worker = self.workers[slot]
        worker.client, worker.given, worker.started = client, given, None

    def _ready(self) -> list[int]:
        """Waits until a worker has answered, died or run out of time."""
        busy = {w.connection: n for n, w in enumerate(self.workers) if w.client is not None}
        left = None
        started = [w.started for w in self.workers if w.client is not None and w.started]
        if self.timeout is not None and started:
            left = max(0.0, min(started) + self.timeout - time.monotonic())
        answered = cast(list[Connection], wait(list(busy), left))
        return [busy[connection] for connection in answered] or [
            slot for slot in busy.values() if self._late(slot)
        ]

    def _late(self, slot: int) -> bool:
        started = self.workers[slot].started
        if started is None or self.timeout is None:
            return False
        return time.monotonic() - started >= self.timeout

    def _receive(self, slot: int) -> Answer | None:
        """A worker's answer; None if it only says that it has begun."""
        worker = self.workers[slot]
        assert worker.client is not None
        if not worker.connection.poll():
            self._replace(slot)
            return ClientFailure(worker.client, f"timed out after {self.timeout:g} s")
        try:
            answer = worker.connection.recv_bytes()
        except (EOFError, OSError):
            worker.process.join(timeout=5)
            code = worker.process.exitcode
            self._replace(slot)
            killed = code == -signal.SIGKILL
            hint = "; mostly a lack of memory: take fewer workers" if killed else ""
            return ClientFailure(worker.client, f"its process died (exit code {code}{hint})")
        if answer == BEGUN:
            worker.started = time.monotonic()
            return None
        assert worker.given is not None
        return read(answer, worker.client, time.monotonic() - worker.given)


def _end(workers: list[WorkerHandle], *memories: Memory) -> None:
    for worker in workers:
        worker.connection.close()  # a worker that reads the end of its connection ends
    for worker in workers:
        if worker.client is None:
            worker.process.join(timeout=1)
        _kill(worker)
    workers.clear()
    for memory in memories:
        memory.close()


def _kill(worker: WorkerHandle) -> None:
    if worker.process.is_alive():
        worker.process.kill()
    worker.process.join()


def _can_be_shared(value: object) -> bool:
    """Whether a value is a plain tensor in the host's memory; others travel by value."""
    if type(value) is not Tensor or value.layout is not torch.strided:
        return False
    return value.device.type == "cpu" and not value.is_quantized


def _for_worker(job: Job, number: int) -> Job:
    """The job on the worker's own GPU, without the states, which travel with the tasks."""
    device = job.device
    if device.type != "cpu":
        first = device.index or 0  # the server's own, then the others
        device = torch.device(device.type, (first + number) % devices_like(device))
    return replace(job.on(device), states={})


def _work(
    connection: Connection,
    threads: int,
    settings: dict[str, Any],
    shared: SharedTensors,
    message: Memory,
) -> None:
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)  # handled by the parent
    may_be_forked()
    set_numerics(settings, threads)
    with quiet():
        _serve(connection, shared, message)


def _serve(connection: Connection, shared: SharedTensors, memory: Memory) -> None:
    worker: Worker | None = None
    try:
        job = connection.recv_bytes()
        data = shared.tensors()
        shared.memory.close()
        worker = Worker(lambda: _loads(job, data))
        size, message = 0, None
        while True:
            task = connection.recv()
            if isinstance(task, int):  # the size of a new message
                size, message = task, None
                continue
            client, state = task
            if message is None:
                message = Message.decode(memory.map(size)[:])
            begun = partial(connection.send_bytes, BEGUN)
            connection.send_bytes(worker.train(message, client, state, begun=begun))
    except (EOFError, OSError):
        if worker is not None:  # the pool was closed, or its process is gone
            worker.close()


def _dumps(job: Job, shared: list[Tensor]) -> bytes:
    """Pickles a job by value, but for the tensors that are sent through shared memory."""
    slots = {id(tensor): slot for slot, tensor in enumerate(shared)}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, value: object) -> int | None:
            return slots.get(id(value))

    buffer = io.BytesIO()
    try:
        Pickler(buffer).dump(job)
    except SettingError:  # of a dataset, which it names
        raise
    except Exception as error:  # a user's net or loss may hold anything
        text = f"the net, loss or data cannot be sent to another process ({error})"
        raise pickle.PicklingError(f"{text}; engine.workers 1 needs none") from error
    return buffer.getvalue()


def _loads(blob: bytes, shared: list[Tensor]) -> Job:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, slot: int) -> Tensor:
            return shared[slot]

    job: Job = Unpickler(io.BytesIO(blob)).load()
    return job
