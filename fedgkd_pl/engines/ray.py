"""The engine of a cluster: Ray actors, each with a resident net and Trainer.

A round's message lies once on every node, in Ray's object store, and so does the data of a client
once it was trained there. Training is a function of message, state, data and seed, so a client
whose worker or node was lost is trained again somewhere else and answers the same.
"""

import logging
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import cloudpickle
import numpy as np
import torch
from fedgkd_pl.engines.base import Engine, Session, cores, needs, schedule
from fedgkd_pl.engines.worker import Worker, read
from fedgkd_pl.errors import RunFailed, SettingError, require
from fedgkd_pl.federation.client_trainer import Job, quiet
from fedgkd_pl.federation.message import Answer, ClientFailure, Message, encode_state
from fedgkd_pl.federation.performance import keep_memory, numerics, set_numerics
from fedgkd_pl.processes.signals import stop_behind
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fedgkd_pl.federation.server import FederatedServer

Blob = NDArray[np.uint8]  # bytes that Ray's workers read where they lie
log = logging.getLogger("fedgkd_pl")
PATIENCE = 60.0  # seconds without a worker, after which a line says what is waited for
STARTING = 30.0  # seconds for all workers to start, after which a line counts those that have
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": for no other machine, on Linux too
TOKEN = (
    "the cluster wants its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
    "RAY_AUTH_TOKEN_PATH, without which it is read from ~/.ray/auth_token"
)
UNKNOWN = "uthentication"  # in what Ray says where a token is missing or another one
KNOCK_SECONDS = 30.0
KNOCK = """
import sys
import ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False)
except Exception as error:
    print(error, error.__cause__)
"""


class RayEngine(Engine):
    """Trains the clients of a round on a Ray cluster.

    Workers, and nodes, that are lost in the middle of a round cost time and nothing else: their
    clients are trained again by others, with the same result.

    Args:
        ray_address: of a cluster: ``auto`` for the one of this machine, ``host:6379`` or
            ``ray://host:10001``; by default ``RAY_ADDRESS`` (which ``ray job submit`` sets) and,
            without it, a Ray of its own on this machine, for as long as the run lasts.
        workers: how many; ``auto`` takes one per client of a cohort as far as the cluster has
            cores, or GPUs if a worker needs one.
        threads: intra-op threads of each client's training, and the cores that Ray keeps for it;
            another number gives other rounding.
        gpus: of each worker; 0.25 lets four share one. By default 1 where the Trainer has a GPU.
        timeout: seconds that a client may take, after which it is left out of the round.
        retries: how often a client is trained again because its worker was lost.
    """

    def __init__(
        self,
        ray_address: str | None = None,
        workers: int | Literal["auto"] = "auto",
        threads: int = 1,
        gpus: float | None = None,
        timeout: float | None = None,
        retries: int = 3,
    ) -> None:
        needs("ray", "ray")
        require(workers == "auto" or int(workers) >= 1, "workers", "must be auto or ≥ 1", workers)
        require(threads >= 1, "threads", "must be at least 1", threads)
        require(gpus is None or gpus >= 0, "gpus", "must not be negative", gpus)
        require(timeout is None or timeout > 0, "timeout", "must be positive", timeout)
        require(retries >= 0, "retries", "must not be negative", retries)
        self.ray_address = ray_address
        self.workers = workers
        self.threads = threads
        self.gpus = gpus
        self.timeout = timeout
        self.retries = retries
        self.joined = False  # whether the connection is ours to end
        self.surroundings = ExitStack()  # of a Ray of our own

    def check(self, server: "FederatedServer") -> None:
        """Joins the cluster, or starts one; see :meth:`Engine.check`.

        Args:
            server: the method.
        """
        import ray

        if ray.is_initialized():  # it is the user's, who will also end it
            return
        self.joined = True
        with _stopped():
            try:
                self._join()
            except BaseException:
                self.leave()
                raise

    def _join(self) -> None:
        address = self.ray_address or os.environ.get("RAY_ADDRESS", "local")
        if address != "local":
            _connect(address)
            return
        self.surroundings.enter_context(_own())
        with _or_none():
            _init({"address": "local", "num_cpus": cores(), "include_dashboard": False})

    def leave(self) -> None:
        """Leaves the cluster that :meth:`check` has joined."""
        import ray

        if self.joined:  # or has begun to
            with _signals_kept():
                ray.shutdown()
        self.surroundings.close()
        self.joined = False

    def open(self, job: Job, cohort_size: int) -> Session:
        """See :meth:`Engine.open`; :meth:`check` has joined the cluster.

        Args:
            job: what the workers will train.
            cohort_size: clients per round.
        """
        keep_memory()  # for evaluation
        gpus = self.gpus
        if gpus is None:
            gpus = 1.0 if job.device.type == "cuda" else 0.0
        return RaySession(self, job, cohort_size, gpus)


@dataclass(eq=False)
class Actor:
    """A worker, and what it is at.

    Attributes:
        handle: Ray's.
        pending: what it will answer to; None if it waits.
        client: whom it trains; None while it starts.
        since: when it was asked.
        place: its machine and process, once it has started.
        node: the cluster's name of the machine.
    """

    handle: Any
    pending: Any
    client: int | None = None
    since: float = 0.0
    place: str = ""
    node: str = ""


class RaySession(Session):
    """Actors on a cluster that train clients side by side.

    Args:
        engine: the settings.
        job: what they train.
        cohort_size: clients per round.
        gpus: of each actor.
    """

    def __init__(self, engine: RayEngine, job: Job, cohort_size: int, gpus: float) -> None:
        import ray

        self.ray = ray
        self.engine = engine
        self.job = job
        self.actors: list[Actor] = []
        self.never_started = 0
        self.opened = time.monotonic()
        self.told = 0  # workers, of whom a line has told
        try:
            with _stopped():
                self._open(job, cohort_size, gpus)
        except BaseException:
            self.close()
            raise

    def _open(self, job: Job, cohort_size: int, gpus: float) -> None:
        ray, engine = self.ray, self.engine
        fit = sum(
            _fit(node["Resources"], engine.threads, gpus) for node in ray.nodes() if node["Alive"]
        )
        what = f"{engine.threads} cores" + (f" and {gpus:g} GPUs" if gpus else "")
        require(fit >= 1, "engine", f"no node of the Ray cluster has the {what} of a worker")
        self.room = fit
        number = min(fit, cohort_size) if engine.workers == "auto" else engine.workers
        device = torch.device("cuda", 0) if gpus else torch.device("cpu")  # Ray shows no other
        nobody = job.data.only(-1, job.data.examples[torch.empty(0, dtype=torch.int64)])
        packed = cloudpickle.dumps(replace(job, data=nobody, device=device, states={}))
        self.packed = ray.put(_blob(packed))
        self.parts: dict[int, Any] = {}  # each client's data, from its first round on
        self.kind = ray.remote(_Worker).options(
            num_cpus=engine.threads, num_gpus=gpus, max_restarts=0, max_concurrency=1
        )
        self.actors = [self._start() for _ in range(number)]

    def run(self, message: Message, cohort: Sequence[int]) -> Iterator[Answer]:
        """See :meth:`Session.run`.

        Args:
            message: what every client gets.
            cohort: the clients' ids.
        """
        try:
            with _stopped():
                yield from self._run(message, schedule(self.job, cohort))
        except BaseException:  # a stopped round leaves workers in the middle of something
            self.close()
            raise

    def _run(self, message: Message, order: list[int]) -> Iterator[Answer]:
        broadcast = self.ray.put(_blob(message.encode()))
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
                self._tell_workers()
            yield done.pop(client)

    def _tell_workers(self) -> None:
        """Says once who trains: when all have started, or some and the others take their time."""
        started = [actor for actor in self.actors if actor.place]
        late = time.monotonic() - self.opened >= STARTING
        complete = len(started) == len(self.actors)
        if len(started) <= self.told or not (complete or (late and not self.told)):
            return
        nodes, threads = len({actor.node for actor in started}), self.engine.threads
        log.warning(
            "Ray: %d of %d workers train on %d node%s, with %d thread%s each; there is room for %d",
            *(len(started), len(self.actors), nodes, "s" * (nodes > 1)),
            *(threads, "s" * (threads > 1), self.room),
        )
        self.told = len(started)

    def close(self) -> None:
        """See :meth:`Session.close`."""
        with _stopped():
            for actor in self.actors:
                self._kill(actor)
            self.actors = []
            self.engine.leave()

    def _start(self) -> Actor:
        handle = self.kind.remote([self.packed], self.engine.threads, numerics())
        return Actor(handle, handle.started.remote(), since=time.monotonic())

    def _ask(self, actor: Actor, client: int, broadcast: Any) -> None:
        if client not in self.parts:
            owned = self.job.data.owned(client)
            content = encode_state({"inputs": owned.inputs, "targets": owned.targets})
            self.parts[client] = self.ray.put(_blob(content))
        state = encode_state(self.job.states.get(client, {}))
        actor.client, actor.since = client, time.monotonic()
        part = self.parts[client]
        actor.pending = actor.handle.train.remote([broadcast], client, state, part)

    def _answers(self, round: int, waiting: deque[int], lost: Counter[int]) -> Iterator[Answer]:
        """What has come within a second; the clients of lost workers wait again."""
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
                text = "round %d: client %d is trained again: its worker (%s) was lost: %s"
                log.warning(text, round, client, actor.place, reason)
                waiting.appendleft(client)
                continue
            actor.pending = actor.client = None
            if client is None:
                self.never_started = 0
                actor.place, actor.node = answer
            else:
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
        if actor.client is None:  # it did not even start
            if any(other.place for other in self.actors if other is not actor):
                log.warning(
                    "a worker of the Ray cluster does not start, the others go on: %s", reason
                )
                self.actors.remove(actor)
                return
            self.never_started += 1
            if self.never_started > self.engine.retries + len(self.actors):
                raise RunFailed(f"engine: no worker of the Ray cluster starts: {reason}")
        self.actors[self.actors.index(actor)] = self._start()

    def _kill(self, actor: Actor) -> None:
        with suppress(self.ray.exceptions.RayError, ValueError):  # it may be gone, or the cluster
            self.ray.kill(actor.handle)


class _Worker:
    """The actor: what Ray keeps in a process of its own.

    Args:
        job: where the job lies; in a list, so that Ray does not fetch it before it is wanted.
        threads: intra-op threads.
        settings: the server's :func:`numerics`.
    """

    def __init__(self, job: list[Any], threads: int, settings: dict[str, Any]) -> None:
        set_numerics(settings, threads)
        self.worker = Worker(lambda: cloudpickle.loads(_get(job)))
        self.name = ""
        self.message: Message | None = None

    def started(self) -> tuple[str, str]:
        """Where it is, for people and for the cluster, once it is ready to train."""
        import ray

        with quiet(), suppress(Exception):  # the first client will tell
            self.worker.prepare()
        place = f"{platform.node()}, process {os.getpid()}"
        return place, ray.get_runtime_context().get_node_id()

    def train(self, message: list[Any], client: int, state: bytes, part: Blob) -> bytes:
        """The answer of a client, for :func:`read`."""
        name = message[0].hex()
        if self.message is None or name != self.name:  # once a round
            self.name, self.message = name, Message.decode(_get(message))
        with quiet():
            return self.worker.train(self.message, client, state, part.tobytes())


def _fit(has: dict[str, float], threads: int, gpus: float) -> int:
    """How many workers a node has room for."""
    cores = int(has.get("CPU", 0) // threads)
    return min(cores, int(has.get("GPU", 0) / gpus + 1e-9)) if gpus else cores


def _get(reference: list[Any]) -> bytes:
    import ray

    blob: Blob = ray.get(reference[0])
    return blob.tobytes()


def _blob(content: bytes) -> Blob:
    return np.frombuffer(content, dtype=np.uint8)


def _reason(error: Exception) -> str:
    """The first line of what Ray says, which goes on for many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _connect(address: str) -> None:
    """Joins a cluster."""
    _knock(address)
    _init({"address": address})


def _init(settings: dict[str, Any]) -> None:
    import ray

    where = settings["address"]

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    settings |= {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        with _signals_kept(), warnings.catch_warnings(action="ignore"):
            ray.init(**settings)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.AuthenticationError) as error:
        reason = " ".join(str(error).split())
        if UNKNOWN in f"{reason} {error.__cause__}":
            reason = TOKEN
        elif where.startswith("ray://"):  # whose client says nothing of tokens
            reason = f"{reason[:200]}; perhaps {TOKEN}"
        raise SettingError("ray_address", reason[:400], where) from error


@contextmanager
def _own() -> Iterator[None]:
    """The environment of a Ray of our own, which listens on loopback and leaves nothing behind.

    Ray keeps a token in the home folder, by which the user's next cluster would want tokens, too.
    """
    from ray._private import ray_constants

    names = "RAY_AUTH_TOKEN", "RAY_AUTH_MODE", LOOPBACK
    before = {name: os.environ.get(name) for name in names}
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ[LOOPBACK] = "0"
    cluster, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = cluster
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _forget_token()


def _forget_token() -> None:
    """Lets Ray read the environment again, for the next cluster of this process."""
    from ray._raylet import AuthenticationTokenLoader, Config

    Config.initialize("")  # first: else a thread that still ends would look for a token
    AuthenticationTokenLoader.instance().reset_cache()


def _knock(address: str) -> None:
    """Refuses an address where nobody is, at which Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise SettingError("ray_address", f"no Ray there: {error}", address) from error
    if address.startswith("ray://"):
        return
    words = [sys.executable, "-c", KNOCK, address]  # a process, for all that Ray prints meanwhile
    around = os.environ | {"RAY_NUM_REDIS_GET_RETRIES": "1"}
    around.pop("RAY_JOB_CONFIG_JSON_ENV_VAR", None)  # it is not the job
    try:
        told = subprocess.run(
            words, env=around, capture_output=True, text=True, timeout=KNOCK_SECONDS
        ).stdout
    except subprocess.TimeoutExpired as error:
        text = f"no Ray there: no answer within {KNOCK_SECONDS:g} s"
        raise SettingError("ray_address", text, address) from error
    require(UNKNOWN not in told, "ray_address", TOKEN, address)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself; how a run ends is ours to say."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    taken = False
    try:
        yield
    except SystemExit as error:
        taken = error.code == signal.SIGTERM  # Ray's handler
        if not taken:
            raise
    finally:
        if main and before is not None:
            signal.signal(signal.SIGTERM, before)
    if taken:
        signal.raise_signal(signal.SIGTERM)


@contextmanager
def _or_none() -> Iterator[None]:
    """Ends what a start leaves that is interrupted: Ray itself does not know of it yet.

    Some of its processes would outlive the run by a minute.
    """
    before = _descendants()
    try:
        yield
    except BaseException:
        halted: set[int] = set()
        while new := _descendants() - before - halted:  # none starts another meanwhile
            _send(signal.SIGSTOP, new)
            halted |= new
        _send(signal.SIGKILL, halted)
        raise


def _send(number: int, processes: set[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(process, number)


def _descendants() -> set[int]:
    """The processes below this one; none where the system does not show them."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            after_name = file.read_text(errors="replace").rpartition(")")[2].split()
            children.setdefault(int(after_name[1]), []).append(int(file.parent.name))
    found, waiting = set(), [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting += below
    return found


@contextmanager
def _stopped() -> Iterator[None]:
    """Ray wraps what a signal's handler raises inside of it."""
    try:
        yield
    except Exception as error:
        if stop := stop_behind(error):
            raise stop from error
        raise
