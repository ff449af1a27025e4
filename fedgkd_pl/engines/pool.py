"""A pool of worker processes, each with a resident net, Trainer and view of the data.

The training data and every round's message lie in shared memory. Workers are forked from a server
process that has torch and Lightning imported, so a pool costs that import once, and nothing of
the parent's threads or accelerators comes along.
"""

import io
import multiprocessing
import pickle
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, cast

import cloudpickle
import torch
import torch.multiprocessing
from fedgkd_pl.engines.base import ClientFailed, Session, schedule
from fedgkd_pl.federation.client_trainer import ClientTrainer, Job
from fedgkd_pl.federation.message import (
    ClientUpdate,
    Message,
    decode_state,
    encode_state,
)
from torch import Tensor


class Pool(Session):
    """Processes that train clients side by side.

    Args:
        job: what they train.
        workers: how many processes.
        threads: intra-op threads of each.
    """

    def __init__(self, job: Job, workers: int, threads: int) -> None:
        self.job = job
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        fork = "forkserver" in multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if fork else "spawn")
        if fork:
            context.set_forkserver_preload([__name__])
        for number in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(  # type: ignore[attr-defined]
                target=_work,
                args=(theirs, threads, _numerics()),
                name=f"fedgkd-worker-{number}",
                daemon=True,
            )
            with _without_main():
                process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        tensors = [job.data.examples.inputs, job.data.examples.targets]
        for number, connection in enumerate(self.connections):
            connection.send((_dumps(_for_worker(job, number), tensors), tensors))

    def run(self, message: Message, cohort: Sequence[int]) -> Iterator[ClientUpdate]:
        """See :meth:`Session.run`.

        Args:
            message: what every client gets.
            cohort: the clients' ids.
        """
        blob = torch.frombuffer(bytearray(message.encode()), dtype=torch.uint8).share_memory_()
        order = schedule(self.job, cohort)
        waiting = iter(order)
        busy: dict[Connection, int] = {}
        done: dict[int, ClientUpdate] = {}
        try:
            for connection in self.connections:
                connection.send(blob)
                self._assign(connection, waiting, busy)
            for client in order:
                while client not in done:
                    for connection in cast(list[Connection], wait(list(busy))):
                        update = self._receive(connection, busy.pop(connection))
                        done[update.client] = update
                        self._assign(connection, waiting, busy)
                update = done.pop(client)
                if update.state:
                    self.job.states[client] = update.state
                yield update
        except BaseException:  # a stopped round leaves workers in the middle of something
            self.close()
            raise

    def close(self) -> None:
        """See :meth:`Session.close`."""
        for connection in self.connections:
            connection.close()  # a worker that reads the end of its connection ends
        for process in self.processes:
            process.join(timeout=1)
            if process.is_alive():
                process.kill()
                process.join()
        self.connections, self.processes = [], []

    def _assign(
        self, connection: Connection, waiting: Iterator[int], busy: dict[Connection, int]
    ) -> None:
        client = next(waiting, None)
        if client is not None:
            connection.send((client, encode_state(self.job.states.get(client, {}))))
            busy[connection] = client

    def _receive(self, connection: Connection, client: int) -> ClientUpdate:
        try:
            answer = connection.recv_bytes()
        except (EOFError, OSError) as error:
            process = self.processes[self.connections.index(connection)]
            process.join(timeout=5)
            raise ClientFailed(
                f"the worker that trained client {client} died (exit code {process.exitcode}; "
                "-9 is mostly a lack of memory: take fewer workers)"
            ) from error
        if answer[:1] == b"!":
            details = answer[1:].decode()
            reason = details.strip().splitlines()[-1]
            raise ClientFailed(f"client {client} failed: {reason}", details)
        return ClientUpdate.decode(answer[1:])


def _for_worker(job: Job, number: int) -> Job:
    """The job on the worker's own GPU, without the states, which travel with the tasks."""
    device = job.device
    if device.type == "cuda":
        first = device.index or 0  # the server's own, then the others
        device = torch.device("cuda", (first + number) % torch.cuda.device_count())
    return replace(job, device=device, states={})


def _numerics() -> dict[str, Any]:
    """The process-wide settings that change numbers."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "matmul": torch.get_float32_matmul_precision(),
    }


def _work(connection: Connection, threads: int, numerics: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(numerics["deterministic"], warn_only=numerics["warn_only"])
    torch.backends.cudnn.benchmark = numerics["benchmark"]
    torch.set_float32_matmul_precision(numerics["matmul"])
    try:
        job = connection.recv()
        trainer = message = None
        while True:
            task = connection.recv()
            if isinstance(task, Tensor):
                message = Message.decode(task.numpy().tobytes())
                continue
            client, state = task
            assert message is not None
            try:
                trainer = trainer or ClientTrainer(_loads(*job))
                update = trainer.update(message, client, decode_state(state))
                connection.send_bytes(b"=" + update.encode())
            except Exception:
                connection.send_bytes(b"!" + traceback.format_exc().encode())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the pool was closed, or its process is gone


@contextmanager
def _without_main() -> Iterator[None]:
    """Starts a process that does not import the user's script again.

    multiprocessing would, and a script without an ``if __name__ == "__main__"`` would then start
    another pool. What the worker needs of ``__main__`` travels by value (cloudpickle).
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _dumps(job: Job, shared: list[Tensor]) -> bytes:
    """Pickles a job by value, but for the tensors that are sent through shared memory."""
    places = {id(tensor): place for place, tensor in enumerate(shared)}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, value: object) -> int | None:
            return places.get(id(value))

    buffer = io.BytesIO()
    Pickler(buffer).dump(job)
    return buffer.getvalue()


def _loads(blob: bytes, shared: list[Tensor]) -> Job:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, place: int) -> Tensor:
            return shared[place]

    job: Job = Unpickler(io.BytesIO(blob)).load()
    return job
