"""The engine of a cluster: Ray actors, each with a net and a Trainer.

A round's message lies once on every node, in Ray's object store, and so does the data of a client
once it was trained there. Training is a function of message, state, data and seed, so a client
whose worker or node was lost is trained again somewhere else and answers the same.
"""

import logging
import os
import secrets
import signal
import socket
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

import cloudpickle
import torch
from fedgkd_pl.engines.base import Engine, Session, Worker, cores, needs, read, schedule
from fedgkd_pl.errors import RunFailed, SettingError, not_negative, require
from fedgkd_pl.federation.client_trainer import Job, quiet
from fedgkd_pl.federation.hardware import keep_memory, numerics, set_numerics
from fedgkd_pl.federation.message import Answer, ClientFailure, Message, encode_state, failure
from typing_extensions import override

if TYPE_CHECKING:
    from fedgkd_pl.federation.server import FederatedServer

log = logging.getLogger("fedgkd_pl")
GPUS = ("cuda", "xpu")  # what Ray shares out as GPUs, by torch's names
# Of the clusters of this process, which Ray reads once. It would keep one in the home folder, and
# the user's next cluster would ask for it.
TOKEN = secrets.token_hex(32)


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
        super().__init__(threads, timeout)
        require(actors == "auto" or int(actors) >= 1, "actors", "must be auto or ≥ 1", actors)
        require(gpus is None or gpus >= 0, "gpus", "must not be negative", gpus)
        not_negative(retries=retries)
        self.ray_address = ray_address
        self.actors = actors
        self.gpus = gpus
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
            _connect(self.ray_address or os.environ.get("RAY_ADDRESS", "local"))
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Leaves the cluster that :meth:`check` has joined."""
        import ray

        if self.joined:  # perhaps not completely
            with _keep_signals():
                ray.shutdown()
        self.joined = False

    @override
    def open(self, job: Job, cohort_size: int) -> Session:
        """Starts actors on the cluster that :meth:`check` has joined."""
        keep_memory()  # for evaluation
        return RaySession(self, job, cohort_size, self.gpus_of_worker(job.device))

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
        self.packed = ray.put(cloudpickle.dumps(replace(job.on(device), data=nobody, states={})))
        self.actor_class = ray.remote(num_cpus=engine.threads, num_gpus=gpus)(RayWorker)
        self.actors = [self._start() for _ in range(number)]
        log.warning("Ray: %d workers, %d nodes with room for %d", number, len(nodes), room)

    @override
    def run(self, message: Message, cohort: Sequence[int]) -> Iterator[Answer]:
        order = schedule(self.job, cohort)
        return self.in_order(order, self._answers(message, deque(order)))

    @override
    def close(self) -> None:
        for actor in self.actors:
            self._kill(actor)
        self.actors = []
        self.engine.leave()

    def _answers(self, message: Message, waiting: deque[int]) -> Iterator[Answer]:
        """The answers as they come; the clients of lost workers wait again."""
        broadcast = self.ray.put(message.encode())
        lost: Counter[int] = Counter()
        while True:
            for actor in self.actors:
                if actor.pending is None and waiting:
                    self._ask(actor, waiting.popleft(), broadcast)
            for actor in self._ready():
                client = actor.client
                try:
                    answer = self.ray.get(actor.pending)
                except self.ray.exceptions.RayError as error:
                    reason = failure(-1, error).reason
                    self._replace(actor, reason)
                    if client is not None:
                        lost[client] += 1
                        waiting.appendleft(client)
                        text = "round %d: the worker of client %d was lost: %s"
                        log.warning(text, message.round, client, reason)
                else:
                    actor.pending = actor.client = None
                    if client is not None:
                        yield read(answer, client, time.monotonic() - actor.since)
            for client in [c for c in waiting if lost[c] > self.engine.retries]:
                waiting.remove(client)
                yield ClientFailure(client, f"its worker was lost {lost[client]} times")
            now, limit = time.monotonic(), self.engine.timeout
            for actor in list(self.actors):
                late = limit is not None and now - actor.since >= limit
                if actor.client is not None and late:
                    yield ClientFailure(actor.client, f"timed out after {limit:g} s")
                    self._replace(actor, "timed out")

    def _start(self) -> Actor:
        handle = self.actor_class.remote([self.packed], self.engine.threads, numerics())
        return Actor(handle, handle.prepare.remote(), time.monotonic())

    def _ask(self, actor: Actor, client: int, broadcast: Any) -> None:
        if client not in self.parts:
            content = self.job.data.owned(client).portable(slice(None)).content()
            self.parts[client] = self.ray.put(encode_state(content))
        state = encode_state(self.job.states.get(client, {}))
        actor.client, actor.since = client, time.monotonic()
        part = self.parts[client]
        actor.pending = actor.handle.train.remote([broadcast], client, state, part)

    def _ready(self) -> list[Actor]:
        """Waits up to a second for workers that have answered, or were lost."""
        pending = {actor.pending: actor for actor in self.actors if actor.pending is not None}
        self.ray.wait(list(pending), timeout=1.0)
        ready, _ = self.ray.wait(list(pending), num_returns=len(pending), timeout=0)
        return [pending[reference] for reference in ready]

    def _replace(self, actor: Actor, reason: str) -> None:
        self._kill(actor)
        self.failed_starts += actor.client is None
        if actor.client is not None or self.failed_starts <= self.engine.retries:
            self.actors[self.actors.index(actor)] = self._start()
            return
        log.warning("a worker of the Ray cluster does not start: %s", reason)
        self.actors.remove(actor)
        if not self.actors:
            raise RunFailed(f"engine: no worker of the Ray cluster starts: {reason}")

    def _kill(self, actor: Actor) -> None:
        with suppress(self.ray.exceptions.RayError, ValueError):  # it may be gone, or the cluster
            self.ray.kill(actor.handle)


class RayWorker:
    """Trains clients in a process that Ray starts.

    ``job`` and messages are references, in lists so that Ray does not fetch them before use.
    """

    def __init__(self, job: list[Any], threads: int, settings: dict[str, Any]) -> None:
        set_numerics(settings, threads)
        self.worker = Worker(lambda: cloudpickle.loads(_get(job)))
        self.name = ""
        self.message: Message | None = None

    def prepare(self) -> None:
        """Makes it ready to train."""
        with quiet():
            self.worker.prepare()

    def train(self, message: list[Any], client: int, state: bytes, part: bytes) -> bytes:
        """The answer of a client, for :func:`read`."""
        name = message[0].hex()
        if self.message is None or name != self.name:  # once a round
            self.name, self.message = name, Message.decode(_get(message))
        with quiet():
            return self.worker.train(self.message, client, state, part)


def _get(reference: list[Any]) -> bytes:
    import ray

    content: bytes = ray.get(reference[0])
    return content


def _fit(has: dict[str, float], threads: int, gpus: float) -> int:
    """How many workers a node has room for."""
    number = int(has.get("CPU", 0) // threads)
    return min(number, int(has.get("GPU", 0) / gpus + 1e-9)) if gpus else number


# -- the cluster ---------------------------------------------------------------------------------


def _connect(address: str) -> None:
    """Joins a cluster; for ``local``, starts one that listens on loopback and leaves no file."""
    import ray
    from ray._private import ray_constants

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quietly: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    own = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # "0": loopback, on Linux too
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        own["RAY_AUTH_TOKEN"] = TOKEN
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():  # Ray itself would wait for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        with _keep_signals(), warnings.catch_warnings(action="ignore"):
            if address != "local":
                ray.init(address, **quietly)
                return
            plain = patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False)
            with patch.dict(os.environ, own), plain:
                ray.init(address, num_cpus=cores(), include_dashboard=False, **quietly)
    except (OSError, OverflowError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        reason = f"no Ray: {' '.join(str(error).split())[:400]}"
        raise SettingError("ray_address", reason, address) from error


@contextmanager
def _keep_signals() -> Iterator[None]:
    """Restores the handler of SIGTERM, which Ray replaces."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
