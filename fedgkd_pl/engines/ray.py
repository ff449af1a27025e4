"""The engine of a cluster: Ray actors, each with a net and a Trainer.

A round's message lies once on every node, in Ray's object store, and so does the data of a client
once it was trained there. Training is a function of message, state, data and seed, so a client
whose worker or node was lost is trained again somewhere else and answers the same.
"""

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import cloudpickle
import torch
from fedgkd_pl.engines.base import Engine, Session, needs, schedule
from fedgkd_pl.engines.ray_cluster import connect, keep_signals
from fedgkd_pl.engines.ray_worker import RayWorker, blob
from fedgkd_pl.engines.worker import read
from fedgkd_pl.errors import RunFailed, require
from fedgkd_pl.federation.client_trainer import Job
from fedgkd_pl.federation.hardware import keep_memory, numerics
from fedgkd_pl.federation.message import Answer, ClientFailure, Message, encode_state
from typing_extensions import override

if TYPE_CHECKING:
    from fedgkd_pl.federation.server import FederatedServer

log = logging.getLogger("fedgkd_pl")
PATIENCE = 60.0  # seconds without a worker until a warning
GPUS = ("cuda", "xpu")  # what Ray shares out as GPUs, by torch's names


class RayEngine(Engine):
    """Trains the clients of a round on a Ray cluster.

    Workers, and nodes, that are lost in the middle of a round cost time and nothing else: their
    clients are trained again by others, with the same result.

    Args:
        ray_address: of a cluster: ``auto`` for the one of this machine, ``host:6379`` or
            ``ray://host:10001``; by default ``RAY_ADDRESS`` (which ``ray job submit`` sets) and,
            without it, a Ray of its own on this machine, for as long as the run lasts.
        actors: how many workers; ``auto`` takes one per client of a cohort as far as the cluster
            has cores, or GPUs if a worker needs one.
        threads: intra-op threads of each client's training, and the cores that Ray keeps for it;
            another number gives other rounding.
        gpus: of each worker; 0.25 lets four share one. By default 1 where the Trainer has a GPU;
            0 trains on CPUs, wherever the server is.
        timeout: seconds that a client may take, after which it is left out of the round.
        retries: how often a client is trained again because its worker was lost.
    """

    def __init__(
        self,
        ray_address: str | None = None,
        actors: int | Literal["auto"] = "auto",
        threads: int = 1,
        gpus: float | None = None,
        timeout: float | None = None,
        retries: int = 3,
    ) -> None:
        needs("ray", "ray")
        require(actors == "auto" or int(actors) >= 1, "actors", "must be auto or ≥ 1", actors)
        require(threads >= 1, "threads", "must be at least 1", threads)
        require(gpus is None or gpus >= 0, "gpus", "must not be negative", gpus)
        require(timeout is None or timeout > 0, "timeout", "must be positive", timeout)
        require(retries >= 0, "retries", "must not be negative", retries)
        self.ray_address = ray_address
        self.actors = actors
        self.threads = threads
        self.gpus = gpus
        self.timeout = timeout
        self.retries = retries
        self.joined = False  # whether the connection is ours to end

    @override
    def check(self, server: "FederatedServer") -> None:
        """Joins the cluster, or starts one."""
        import ray

        if server._trainer is not None:
            self.gpus_of_worker(server.trainer.strategy.root_device)
        if ray.is_initialized():  # it is the user's, who will also end it
            return
        self.joined = True
        try:
            connect(self.ray_address or os.environ.get("RAY_ADDRESS", "local"))
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Leaves the cluster that :meth:`check` has joined."""
        import ray

        if self.joined:  # perhaps not completely
            with keep_signals():
                ray.shutdown()
        self.joined = False

    @override
    def open(self, job: Job, cohort_size: int) -> Session:
        """Starts actors on the cluster that :meth:`check` has joined."""
        keep_memory()  # for evaluation
        gpus = self.gpus_of_worker(job.device)
        if not gpus and job.device.type != "cpu":
            log.warning("engine.gpus is 0: clients train on CPUs, not on %s", job.device.type)
        return RaySession(self, job, cohort_size, gpus)

    def gpus_of_worker(self, server: torch.device) -> float:
        """The GPUs of a worker, given where the server computes."""
        if self.gpus is not None:
            return self.gpus
        text = f"Ray has no {server.type} devices: use 0 (clients train on CPUs) or LocalEngine"
        require(server.type in ("cpu", *GPUS), "gpus", text, self.gpus)
        return 0.0 if server.type == "cpu" else 1.0


@dataclass(eq=False)
class Actor:
    """A worker, and what it is doing."""

    handle: Any
    pending: Any  # the reference of its next answer; None if it has no task
    since: float  # when it got its task
    client: int | None = None  # None while it starts


class RaySession(Session):
    """Actors on a cluster that train clients side by side."""

    def __init__(self, engine: RayEngine, job: Job, cohort_size: int, gpus: float) -> None:
        import ray

        self.ray = ray
        self.engine = engine
        self.job = job
        self.actors: list[Actor] = []
        self.parts: dict[int, Any] = {}  # each client's data, from its first round on
        self.failed_starts = 0
        try:
            self._open(cohort_size, gpus)
        except BaseException:
            self.close()
            raise

    def _open(self, cohort_size: int, gpus: float) -> None:
        ray, engine, job = self.ray, self.engine, self.job
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        room = sum(_fit(resources, engine.threads, gpus) for resources in nodes)
        what = f"{engine.threads} cores" + (f" and {gpus:g} GPUs" if gpus else "")
        require(room >= 1, "engine", f"no node of the Ray cluster has the {what} of a worker")
        number = min(room, cohort_size) if engine.actors == "auto" else int(engine.actors)
        kind = job.device.type if job.device.type in GPUS else "cuda"
        device = torch.device(kind, 0) if gpus else torch.device("cpu")  # Ray shows no other
        nobody = job.data.only(-1, job.data.examples.portable(torch.empty(0, dtype=torch.int64)))
        packed = cloudpickle.dumps(replace(job.on(device), data=nobody, states={}))
        self.packed = ray.put(blob(packed))
        self.actor_class = ray.remote(RayWorker).options(
            num_cpus=engine.threads, num_gpus=gpus, max_restarts=0, max_concurrency=1
        )
        self.actors = [self._start() for _ in range(number)]
        log.warning("Ray: %d workers, %d nodes with room for %d", number, len(nodes), room)

    @override
    def run(self, message: Message, cohort: Sequence[int]) -> Iterator[Answer]:
        try:
            yield from self._run(message, schedule(self.job, cohort))
        except BaseException:  # a stopped round leaves workers in the middle of something
            self.close()
            raise

    def _run(self, message: Message, order: list[int]) -> Iterator[Answer]:
        broadcast = self.ray.put(blob(message.encode()))
        waiting = deque(order)
        lost: Counter[int] = Counter()
        done: dict[int, Answer] = {}
        for client in order:
            while client not in done:
                for actor in self.actors:
                    if actor.pending is None and waiting:
                        self._ask(actor, waiting.popleft(), broadcast)
                for answer in self._answers(message.round, waiting, lost):
                    done[answer.client] = answer
            yield done.pop(client)

    @override
    def close(self) -> None:
        for actor in self.actors:
            self._kill(actor)
        self.actors = []
        self.engine.leave()

    def _start(self) -> Actor:
        handle = self.actor_class.remote([self.packed], self.engine.threads, numerics())
        return Actor(handle, handle.prepare.remote(), time.monotonic())

    def _ask(self, actor: Actor, client: int, broadcast: Any) -> None:
        if client not in self.parts:
            content = self.job.data.owned(client).portable(slice(None)).content()
            self.parts[client] = self.ray.put(blob(encode_state(content)))
        state = encode_state(self.job.states.get(client, {}))
        actor.client, actor.since = client, time.monotonic()
        part = self.parts[client]
        actor.pending = actor.handle.train.remote([broadcast], client, state, part)

    def _answers(self, round: int, waiting: deque[int], lost: Counter[int]) -> Iterator[Answer]:
        """Waits up to a second for answers; the clients of lost workers wait again."""
        pending = {actor.pending: actor for actor in self.actors if actor.pending is not None}
        self.ray.wait(list(pending), timeout=1.0)
        ready, _ = self.ray.wait(list(pending), num_returns=len(pending), timeout=0)
        for reference in ready:
            actor, client = pending[reference], pending[reference].client
            try:
                answer = self.ray.get(reference)
            except self.ray.exceptions.RayError as error:
                reason = _reason(error)
                self._replace(actor, reason)
                if client is None:
                    continue
                lost[client] += 1
                if lost[client] > self.engine.retries:
                    times = f"its worker was lost {lost[client]} times"
                    yield ClientFailure(client, f"{times}: {reason}")
                    continue
                text = "round %d: client %d is trained again: its worker was lost: %s"
                log.warning(text, round, client, reason)
                waiting.appendleft(client)
                continue
            actor.pending = actor.client = None
            if client is not None:
                yield read(answer, client, time.monotonic() - actor.since)
        yield from self._late()

    def _late(self) -> Iterator[Answer]:
        """The clients that have run out of time."""
        now, limit = time.monotonic(), self.engine.timeout
        for actor in list(self.actors):
            late = limit is not None and now - actor.since >= limit
            if actor.client is not None and late:
                yield ClientFailure(actor.client, f"timed out after {limit:g} s")
                self._replace(actor, "timed out")
        starting = [a for a in self.actors if a.pending is not None and a.client is None]
        if len(starting) == len(self.actors) and now - starting[0].since >= PATIENCE:
            log.warning("waiting for the Ray cluster: no worker has started for %g s", PATIENCE)
            starting[0].since = now

    def _replace(self, actor: Actor, reason: str) -> None:
        self._kill(actor)
        place = self.actors.index(actor)
        self.failed_starts += actor.client is None
        if actor.client is not None or self.failed_starts <= self.engine.retries:
            self.actors[place] = self._start()
            return
        log.warning("a worker of the Ray cluster does not start: %s", reason)
        del self.actors[place]
        if not self.actors:
            raise RunFailed(f"engine: no worker of the Ray cluster starts: {reason}")

    def _kill(self, actor: Actor) -> None:
        with suppress(self.ray.exceptions.RayError, ValueError):  # it may be gone, or the cluster
            self.ray.kill(actor.handle)


def _fit(has: dict[str, float], threads: int, gpus: float) -> int:
    """How many workers a node has room for."""
    cores = int(has.get("CPU", 0) // threads)
    return min(cores, int(has.get("GPU", 0) / gpus + 1e-9)) if gpus else cores


def _reason(error: Exception) -> str:
    """The first line of a long error of Ray's."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
