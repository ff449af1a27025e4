"""A pool of worker processes, each with a net, a Trainer and a view of the data.

The training data lies in temporary files, which all workers map. Workers are forked from a server
process that has torch and Lightning imported, so a pool costs that import once.
"""

import io
import math
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from typing import IO, Any, cast

import cloudpickle
import torch
from fedgkd_pl.data.examples import Examples
from fedgkd_pl.engines.base import Session, Worker, devices_like, read, schedule
from fedgkd_pl.errors import SettingError, StorageError
from fedgkd_pl.federation.client_trainer import Job, quiet
from fedgkd_pl.federation.hardware import numerics, set_numerics
from fedgkd_pl.federation.message import Answer, ClientFailure, Message, encode_state
from fedgkd_pl.processes.command import STOPS
from fedgkd_pl.processes.start import context, end_with_parent, may_be_forked, without_main
from torch import Tensor
from typing_extensions import override

BEGUN = b">"


@dataclass
class WorkerHandle:
    """A process of the pool, and what it is doing."""

    process: Any
    connection: Connection
    client: int | None = None  # None while it waits for one
    given: float = 0.0  # when it got that client
    limit: float = math.inf  # when it must have answered; known once it says that it has begun

    def end(self) -> None:
        """Ends it, at once if it is training."""
        self.connection.close()  # a worker that reads the end of its connection ends
        self.process.join(timeout=1 if self.client is None else 0)
        self.process.kill()
        self.process.join()


class PoolSession(Session):
    """Processes that train clients side by side; ``timeout``: seconds that a client may take."""

    def __init__(self, job: Job, workers: int, threads: int, timeout: float | None) -> None:
        self.job = job
        self.threads = threads
        self.timeout = timeout or math.inf
        self.context = context(__name__)
        self.message = b""
        self.workers: list[WorkerHandle] = []
        self.files = MappedFiles()
        # before multiprocessing waits for workers, which ignore its SIGTERM
        self._end = util.Finalize(self, _end, (self.workers, self.files), exitpriority=10)
        try:
            self.files.write(job.data.examples)
            self.files.write(job.client.public)
            for slot in range(workers):
                self._start(slot)
        except BaseException:
            self.close()
            raise

    @override
    def run(self, message: Message, cohort: Sequence[int]) -> Iterator[Answer]:
        self.message = message.encode()
        order = schedule(self.job, cohort)
        return self.in_order(order, self._answers(iter(order)))

    def _answers(self, waiting: Iterator[int]) -> Iterator[Answer]:
        """The answers as they come."""
        for slot in range(len(self.workers)):
            self._send(slot, self.message)
            self._assign(slot, waiting)
        while any(worker.client is not None for worker in self.workers):
            answers = {slot: self._receive(slot) for slot in self._ready()}
            for slot, answer in answers.items():
                if answer is not None:
                    self._assign(slot, waiting)
            yield from filter(None, answers.values())

    @override
    def close(self) -> None:
        self._end()

    def _start(self, slot: int) -> None:
        device = self.job.device
        if device.type != "cpu":  # its own GPU
            index = ((device.index or 0) + slot) % devices_like(device)  # the server's own first
            device = torch.device(device.type, index)
        # without the states, which travel with the tasks
        job = self.files.pickle(replace(self.job.on(device), states={}))
        ours, theirs = self.context.Pipe()
        process = self.context.Process(
            target=_work,
            args=(theirs, self.threads, numerics()),
            name=f"fedgkd-worker-{slot}",
            daemon=False,  # it may start processes that read samples; _end ends it
        )
        with without_main():
            process.start()
        theirs.close()
        self.workers[slot : slot + 1] = [WorkerHandle(process, ours)]
        ours.send_bytes(job)

    def _send(self, slot: int, task: Any) -> None:
        """Sends a task; a worker that has died since its last one is replaced."""
        try:
            self.workers[slot].connection.send(task)
        except OSError:
            self._replace(slot)
            self.workers[slot].connection.send(task)

    def _replace(self, slot: int) -> None:
        self.workers[slot].end()
        self._start(slot)
        self.workers[slot].connection.send(self.message)

    def _assign(self, slot: int, waiting: Iterator[int]) -> None:
        client = next(waiting, None)
        given = time.monotonic()
        if client is not None:
            self._send(slot, (client, encode_state(self.job.states.get(client, {}))))
        worker = self.workers[slot]  # perhaps another one now
        worker.client, worker.given, worker.limit = client, given, math.inf

    def _ready(self) -> list[int]:
        """Waits until a worker has answered, died or run out of time."""
        busy = {w.connection: n for n, w in enumerate(self.workers) if w.client is not None}
        limit = min(self.workers[slot].limit for slot in busy.values())
        left = None if limit == math.inf else max(0.0, limit - time.monotonic())
        answered = cast(list[Connection], wait(list(busy), left))
        now = time.monotonic()
        late = [slot for slot in busy.values() if self.workers[slot].limit <= now]
        return [busy[connection] for connection in answered] or late

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
            code = f"exit code {worker.process.exitcode}; -9 is usually out of memory"
            self._replace(slot)
            return ClientFailure(worker.client, f"its process died ({code})")
        now = time.monotonic()
        if answer == BEGUN:
            worker.limit = now + self.timeout
            return None
        return read(answer, worker.client, now - worker.given)


class MappedFiles:
    """Tensors in temporary files, which other processes map when they unpickle what has them."""

    def __init__(self) -> None:
        self.files: list[IO[bytes]] = []
        self.known: dict[int, tuple[Any, ...]] = {}  # the arguments of _map, by the tensor's id

    def write(self, examples: Examples | None) -> None:
        """Writes the tensors of examples that lie in the host's memory; others travel by value."""
        for value in vars(examples).values() if examples is not None else ():
            plain = type(value) is Tensor and value.layout is torch.strided
            if plain and value.device.type == "cpu" and value.numel():
                self._write(value)

    def _write(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        try:
            if sys.platform == "linux":  # without a name, so that nothing stays after a kill
                self.files.append(tempfile.TemporaryFile())
                path = f"/proc/{os.getpid()}/fd/{self.files[-1].fileno()}"
            else:
                self.files.append(tempfile.NamedTemporaryFile())
                path = self.files[-1].name
            self.files[-1].write(torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data)
            self.files[-1].flush()
        except OSError as error:
            raise StorageError(tempfile.gettempdir(), error) from error
        layout = tensor.storage_offset(), tensor.size(), tensor.stride()
        self.known[id(tensor)] = path, storage.nbytes(), tensor.dtype, *layout

    def pickle(self, job: Job) -> bytes:
        """A job by value, but for the tensors in the files."""
        known = self.known

        class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
            def reducer_override(self, value: object) -> Any:
                if id(value) in known:
                    return _map, known[id(value)]
                return super().reducer_override(value)

        buffer = io.BytesIO()
        try:
            Pickler(buffer).dump(job)
        except SettingError:  # of a dataset, which it names
            raise
        except Exception as error:  # a user's net or loss may hold anything
            text = f"the net, loss or data cannot be sent to another process ({error})"
            raise pickle.PicklingError(f"{text}; engine.workers 1 needs none") from error
        return buffer.getvalue()

    def close(self) -> None:
        """Removes the files; what is mapped stays until the workers end."""
        for file in self.files:
            file.close()


def _map(path: str, nbytes: int, dtype: torch.dtype, *layout: Any) -> Tensor:
    """A tensor over a file; what is written to it stays in this process."""
    storage = torch.UntypedStorage.from_file(path, False, nbytes)
    return torch.empty(0, dtype=dtype).set_(storage, *layout)  # type: ignore[arg-type]


def _end(workers: list[WorkerHandle], files: MappedFiles) -> None:
    for worker in workers:
        worker.connection.close()  # they end side by side
    for worker in workers:
        worker.end()
    workers.clear()
    files.close()


def _work(connection: Connection, threads: int, settings: dict[str, Any]) -> None:
    end_with_parent()
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)  # handled by the parent
    may_be_forked()
    set_numerics(settings, threads)
    with quiet(), suppress(EOFError, OSError):  # the pool was closed, or its process is gone
        job = connection.recv_bytes()
        with closing(Worker(lambda: cast(Job, pickle.loads(job)))) as worker:
            while True:
                task = connection.recv()
                if isinstance(task, bytes):
                    message = Message.decode(task)
                    continue
                worker.prepare()
                connection.send_bytes(BEGUN)
                connection.send_bytes(worker.train(message, *task))
