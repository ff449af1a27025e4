"""The engine of one machine: in this process, or a pool of processes."""

from collections.abc import Iterator, Sequence
from typing import Literal

from fedgkd_pl.engines.base import Engine, Session, cores, devices_like, schedule
from fedgkd_pl.errors import require
from fedgkd_pl.federation.client_trainer import ClientTrainer, Job, quiet
from fedgkd_pl.federation.hardware import keep_memory, threads
from fedgkd_pl.federation.message import Answer, Message, State, failure
from typing_extensions import override


class LocalEngine(Engine):
    """Trains the clients of a round on this machine.

    Two processes of one thread train two clients faster than one process of two threads, and a
    fixed number of threads per client keeps the results the same on every machine.

    Args:
        workers: 1 trains in this process; n in a pool of n processes; ``auto`` takes one per
            client of a cohort as far as there are cores, or GPUs (accelerators of any kind) if
            the Trainer uses them.
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
        if self.workers != "auto":
            workers = self.workers
        else:
            on_cpu = job.device.type == "cpu"
            slots = cores() // self.threads if on_cpu else devices_like(job.device)
            workers = max(1, min(slots, cohort_size))
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
