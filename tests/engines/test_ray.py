"""The Ray engine: the bits of the local one, on one machine and on a cluster that loses parts."""

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from fedgkd_pl import (
    IID,
    MLP,
    MOON,
    AveragedModel,
    ClassTasks,
    Digits,
    Dirichlet,
    FedAvg,
    FedDistill,
    FedDistillPlus,
    FederatedData,
    FedGen,
    FedGKD,
    FedGKDPlus,
    FedGKDVote,
    FedProx,
    HeldOut,
    LocalEngine,
    RayEngine,
)
from fedgkd_pl.engines.ray import Actor, RaySession, _fit
from fedgkd_pl.engines.ray_worker import RayWorker
from fedgkd_pl.errors import SettingError
from fedgkd_pl.federation.message import ClientFailure
from fedgkd_pl.federation.performance import numerics
from fedgkd_pl.methods.fedavg import FedAvgClient
from lightning.pytorch import Callback
from torch.optim import SGD

from tests.conftest import Table, fit, linear, same, seed_everything
from tests.support.lazy import Points
from tests.support.methods import CLASSES, SETTINGS

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
from ray.cluster_utils import Cluster  # noqa: E402

LOCAL: dict[str, Any] = {"optimizer": partial(SGD, lr=0.1, momentum=0.9)}
METHODS: dict[str, Any] = {
    "fedgkd": partial(FedGKD, buffer_size=2),
    "moon": partial(MOON, mu=1.0),
    "fedavg": FedAvg,
    "fedprox": partial(FedProx, mu=0.1),
    "feddistill": FedDistill,
    "feddistill+": FedDistillPlus,
    "fedgen": partial(FedGen, hidden=8, generator_steps=2),
    "fedgkd-vote": partial(FedGKDVote, lam=0.5, buffer_size=2),
    "fedgkd+": FedGKDPlus,
}
PRECISIONS = ["32-true", "64-true", "bf16-mixed", "bf16-true"]
PAIRS = [(method, precision) for method in METHODS for precision in PRECISIONS]
for _title, _class in CLASSES.items():  # what is not above, by itself
    if _title.lower() not in METHODS:
        METHODS[_title.lower()] = partial(_class, **SETTINGS.get(_title, {}))
        PAIRS.append((_title.lower(), "32-true"))
LONG = [  # in CI two methods at all precisions, the others at one; with make test-ray at all
    pytest.param(
        *pair,
        marks=getattr(pytest.mark, "engines" if n < 8 or pair[1] == "32-true" else "ray"),
    )
    for n, pair in enumerate(PAIRS)
]


class ReusedWorker(RayWorker):
    """Begins again for another run, in a process that has imported everything."""

    def renew(self, *arguments: Any) -> None:
        RayWorker.__init__(self, *arguments)


@pytest.fixture(scope="module")
def idle() -> Iterator[list[Any]]:
    """One Ray for the tests that do not look at how it starts; its idle :class:`ReusedWorker`."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield []
    ray.shutdown()


@pytest.fixture
def started(idle: list[Any]) -> None:
    """A Ray whose cores are all free."""
    while idle:
        ray.kill(idle.pop())


@pytest.fixture
def warm(idle: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers' processes outlive their sessions: importing everything takes longer than a run."""

    def start(session: RaySession) -> Actor:
        arguments = [session.packed], session.engine.threads, numerics()
        if idle:
            handle = idle.pop()
            handle.renew.remote(*arguments)
        else:
            handle = session.actor_class.remote(*arguments)
        return Actor(handle, handle.started.remote(), since=time.monotonic())

    monkeypatch.setattr("fedgkd_pl.engines.ray.RayWorker", ReusedWorker)
    monkeypatch.setattr(RaySession, "_start", start)
    monkeypatch.setattr(RaySession, "_kill", lambda _, actor: idle.append(actor.handle))


@pytest.fixture(autouse=True, scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home folder of their own, where the tests' own Ray leaves its token."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
        patch.setenv("HOME", str(folder))
        yield folder


def train(
    method: str, engine: Any, *callbacks: Callback, data: dict[str, Any] | None = None, **flags: Any
) -> Any:
    seed_everything(3, verbose=False)
    settings: dict[str, Any] = {"participation": 0.6, "batch_size": 20, "public": HeldOut(0.1)}
    settings |= {"partition": Dirichlet(alpha=0.5)} | (data or {})
    digits = Digits(num_clients=7, **settings)
    model = METHODS[method](MLP(hidden=[16], projection=8), engine=engine, **LOCAL)
    fit(model, digits, 3, callbacks=list(callbacks), **flags)
    return model


def test_an_address_where_nobody_is(run: Any, tmp_path: Path) -> None:
    assert not ray.is_initialized()  # this test is the first
    words = ["fit", "--config", "smoke.yaml", "--model.engine", "ray", "--model.engine.ray_address"]
    code, _, err = run(*words, "127.0.0.1:1")
    assert code == 2 and err.startswith("error: model.engine.ray_address: no Ray there")
    assert err.count("\n") == 1 and list(tmp_path.iterdir()) == []


def bits_are_those_of_the_local_engine(method: str, precision: str) -> None:
    engines, means = (LocalEngine(1), RayEngine(workers=2)), (AveragedModel(), AveragedModel())
    here, there = (
        train(method, engine, mean, precision=precision)
        for engine, mean in zip(engines, means, strict=True)
    )
    assert same(here.net.state_dict(), there.net.state_dict())
    assert same(means[0].average(here), means[1].average(there))
    assert (here.bytes_down, here.bytes_up) == (there.bytes_down, there.bytes_up)
    assert here._client_states.keys() == there._client_states.keys()
    for client, state in here._client_states.items():
        assert same(state, there._client_states[client])


@pytest.mark.parametrize("method", ["fedgkd", "moon"])
def test_the_same_bits_as_the_local_engine(method: str, started: None) -> None:
    bits_are_those_of_the_local_engine(method, "32-true")


@pytest.mark.parametrize("method, precision", LONG)
def test_every_method_has_the_same_bits(method: str, precision: str, warm: None) -> None:
    bits_are_those_of_the_local_engine(method, precision)


@pytest.mark.engines
@pytest.mark.parametrize("method", ["fedgkd", "fedweit"])
def test_one_task_after_the_other(method: str, warm: None) -> None:
    tasks = {"tasks": ClassTasks(tasks=2, rounds_per_task=2), "partition": IID()}
    engines = (LocalEngine(1), RayEngine(workers=2))
    here, there = (train(method, engine, data=tasks) for engine in engines)
    assert same(here.net.state_dict(), there.net.state_dict())
    assert here._client_states.keys() == there._client_states.keys()
    for client, state in here._client_states.items():
        assert same(state, there._client_states[client])


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_a_lazy_dataset_is_read_by_the_workers(loader_workers: int, started: None) -> None:
    def trained(engine: Any, loader_workers: int) -> Any:
        settings: dict[str, Any] = {"num_clients": 4, "batch_size": 16}
        data = FederatedData.from_dataset(
            Points(noise=0.3), loader_workers=loader_workers, **settings
        )
        model = FedAvg(linear(4, 2), engine=engine)
        fit(model, data, 2)
        assert model.report["client/failed"] == 0
        return model.net.state_dict()

    here, there = trained(LocalEngine(1), 0), trained(RayEngine(workers=2), loader_workers)
    assert same(here, there)


class Stubborn(FedAvgClient):
    """Raises with five samples, never ends with six."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[1]) == 5:
            raise ValueError("this client cannot")
        if len(batch[1]) == 6:
            time.sleep(600)
        return super().training_step(batch, batch_idx)


class Troubled(FedAvg):
    def client(self) -> FedAvgClient:
        return Stubborn(self.net, self.optimizer, self.scheduler)


@pytest.mark.ray
def test_clients_that_raise_or_hang_are_left_out(started: None) -> None:
    sizes = (8, 5, 6, 9)
    model = Troubled(linear(), engine=RayEngine(workers=2, timeout=5), **LOCAL)
    seen: list[ClientFailure] = []
    model._leave_out = lambda failure, _: seen.append(failure)  # type: ignore[method-assign]
    fit(model, Table(sizes=sizes, batch_size=10), 1)
    told = {failure.client: failure for failure in seen}
    assert told[1].reason == "ValueError: this client cannot"
    assert "training_step" in told[1].traceback
    assert told[2].reason == "timed out after 5 s"
    assert len(told) == 2 and len(model.results.reports) == 2


def test_more_than_the_cluster_has(started: None) -> None:
    model = FedAvg(linear(), engine=RayEngine(threads=1000), **LOCAL)
    with pytest.raises(SettingError, match="1000 cores"):
        fit(model, Table(), 1)


def test_room_on_a_node() -> None:
    assert _fit({"CPU": 4.0}, 1, 0) == 4 and _fit({"CPU": 3.0}, 2, 0) == 1
    assert _fit({"CPU": 4.0}, 8, 0) == 0  # though four such nodes have 16
    assert [_fit({"CPU": 16.0, "GPU": 1.0}, 1, gpus) for gpus in (0.1, 0.2, 1.0)] == [10, 5, 1]
    assert _fit({"CPU": 2.0, "GPU": 1.0}, 1, 0.1) == 2 and _fit({"CPU": 8.0}, 1, 0.5) == 0


def test_bad_settings() -> None:
    bad = {"workers": 0, "threads": 0, "gpus": -1.0, "timeout": 0.0, "retries": -1}
    for key, value in bad.items():
        with pytest.raises(SettingError, match=key):
            RayEngine(**{key: value})  # type: ignore[arg-type]


# -- a cluster of two nodes --------------------------------------------------------------------


class During(Callback):
    """Does something while clients of a round are being trained."""

    def __init__(self, round: int, act: Callable[[Any], None]) -> None:
        self.round = round
        self.act = act
        self.error: Exception | None = None

    def on_broadcast(self, trainer: Any, module: Any, message: Any, cohort: Any) -> None:
        if message.round == self.round:
            threading.Thread(target=self._later, args=(module,)).start()

    def _later(self, module: Any) -> None:
        try:
            end = time.monotonic() + 60
            while not any(actor.client is not None for actor in module._session.actors):
                assert time.monotonic() < end, "no client was being trained"
                time.sleep(0.05)
            time.sleep(0.7)  # in the middle of its training
            self.act(module._session)
        except Exception as error:
            self.error = error


def slow(client: Any) -> Any:
    """Takes two seconds for a round."""
    client.on_train_start = lambda: time.sleep(2)
    return client


class SlowGKD(FedGKD):
    def client(self) -> Any:
        return slow(super().client())


class SlowMOON(MOON):
    def client(self) -> Any:
        return slow(super().client())


@pytest.fixture
def cluster() -> Iterator[Any]:
    if ray.is_initialized():
        ray.shutdown()
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.second = made.add_node(num_cpus=1)
    made.wait_for_nodes()
    yield made
    ray.shutdown()
    made.shutdown()


def kill_one(session: Any) -> None:
    busy = next(actor for actor in session.actors if actor.client is not None)
    os.kill(int(busy.place.split()[-1]), signal.SIGKILL)


@pytest.mark.ray
@pytest.mark.parametrize("kind", [pytest.param(SlowGKD, marks=pytest.mark.engines), SlowMOON])
def test_a_worker_killed_and_a_node_removed(
    kind: Any, cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def run(engine: Any, *callbacks: Callback) -> Any:
        seed_everything(3, verbose=False)
        data = Digits(num_clients=4, partition=Dirichlet(alpha=0.5), batch_size=20)
        model = kind(MLP(hidden=[16], projection=8), engine=engine, **LOCAL)
        fit(model, data, 3, callbacks=list(callbacks))
        return model

    here = run(LocalEngine(1))
    kill = During(2, kill_one)
    remove = During(3, lambda _: cluster.remove_node(cluster.second, allow_graceful=False))
    with caplog.at_level(logging.WARNING, "fedgkd_pl"):
        there = run(RayEngine(ray_address=cluster.address, workers=2), kill, remove)
    assert kill.error is None and remove.error is None
    line = "Ray: 2 of 2 workers train on 2 nodes, with 1 thread each; there is room for 2"
    assert caplog.messages.count(line) == 1
    told = [text for text in caplog.messages if "trained again" in text]
    assert any(text.startswith("round 2:") for text in told)
    assert any(text.startswith("round 3:") for text in told)
    assert there.failed_rounds == [] and len(there.results.reports) == 4
    assert same(here.net.state_dict(), there.net.state_dict())
    for client, state in here._client_states.items():
        assert same(state, there._client_states[client])


def command(*words: str, **settings: Any) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-m", "fedgkd_pl", *words], **pipes, **settings)


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def rays(parent: int) -> list[str]:
    """The processes that a run's own Ray left behind."""
    found = subprocess.run(["pgrep", "-af", "raylet|gcs_server"], capture_output=True, text=True)
    return [line for line in found.stdout.splitlines() if f"_{parent}" in line]


@pytest.mark.ray
def test_a_ray_of_its_own_ends_with_the_run(tmp_path: Path) -> None:
    words = ["fit", "--config", "smoke.yaml", "--output_dir", str(tmp_path), "--rounds", "8"]
    whole = command(*words, "--name", "whole")
    assert whole.wait(200) == 0
    run = command(*words, "--name", "ray", "--model.engine", "RayEngine")
    rows, end = tmp_path / "ray/version_0/metrics.csv", time.monotonic() + 120
    while not rows.is_file() or rows.read_text().count("\n") < 3:
        assert run.poll() is None and time.monotonic() < end, run.communicate()[0]
        time.sleep(0.02)
    assert rays(run.pid)
    run.send_signal(signal.SIGTERM)
    told = run.communicate(timeout=60)[0]
    assert run.returncode == 143 and "--resume" in told, told
    assert rays(run.pid) == []
    # another engine goes on where it stopped
    folder = str(rows.parent)
    rest = command("fit", "--resume", folder, "--model.engine", "LocalEngine")
    assert rest.wait(200) == 0, rest.communicate()[0]
    assert rows.read_text() == (tmp_path / "whole/version_0/metrics.csv").read_text()


# -- how it ends -------------------------------------------------------------------------------

KICK = """
import os, threading, time
import psutil
from lightning.pytorch import Callback


class Kick(Callback):
    def __init__(self, moment: str, number: int) -> None:
        self.moment, self.number = moment, number
        if moment == "start":
            threading.Thread(target=self.when_ray_starts, daemon=True).start()

    def kick(self) -> None:
        print("kick", flush=True)
        os.kill(os.getpid(), self.number)

    def when_ray_starts(self) -> None:
        while not any("raylet" in c.name() for c in psutil.Process().children(recursive=True)):
            time.sleep(0.02)
        self.kick()

    def on_broadcast(self, trainer, module, message, cohort):
        if message.round == 3 and self.moment == "broadcast":
            self.kick()
        if message.round == 3 and self.moment == "wait":
            threading.Timer(0.05, self.kick).start()

    def on_train_epoch_end(self, trainer, module):
        if module.round == 3 and self.moment == "between":
            self.kick()
"""
MOMENTS = [
    ("start", signal.SIGTERM),
    ("start", signal.SIGINT),
    ("broadcast", signal.SIGTERM),
    ("wait", signal.SIGTERM),
    ("wait", signal.SIGINT),
    ("between", signal.SIGTERM),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The metrics of a run that nobody stops."""
    folder = tmp_path_factory.mktemp("whole")
    words = ["fit", "--config", "smoke.yaml", "--output_dir", str(folder), "--rounds", "5"]
    made = command(*words, "--model.engine.workers", "1")
    assert made.wait(200) == 0, made.communicate()[0]
    return (folder / "smoke/version_0/metrics.csv").read_text()


@pytest.mark.ray
@pytest.mark.parametrize("moment, number", MOMENTS, ids=lambda value: str(value))
def test_a_signal_ends_it_in_order(
    moment: str, number: signal.Signals, whole: str, tmp_path: Path
) -> None:
    (tmp_path / "kick.py").write_text(KICK)
    words = ["fit", "--import", "kick", "--config", "smoke.yaml", "--output_dir", str(tmp_path)]
    words += ["--rounds", "5", "--trainer.callbacks+", "kick.Kick"]
    words += ["--trainer.callbacks.moment", moment, "--trainer.callbacks.number", str(int(number))]
    run = command(*words, "--model.engine", "ray", cwd=tmp_path)
    assert run.stdout is not None
    lines, since = [], 0.0
    family: dict[int, psutil.Process] = {}
    for line in run.stdout:
        lines.append(line)
        if line == "kick\n":
            since = time.monotonic()
            family = {p.pid: p for p in psutil.Process(run.pid).children(recursive=True)}
    assert run.wait(60) == 128 + number, "".join(lines)
    assert since and time.monotonic() - since < 10
    left = psutil.wait_procs(family.values(), timeout=5)[1]
    assert family and [process.name() for process in left] == []  # nor does it leave any behind
    folder = tmp_path / "smoke/version_0"
    if moment == "start":  # before anything was written
        assert lines[-1] == f"stopped by {number.name}\n" and not folder.exists()
        return
    assert lines[-1].startswith(f"stopped by {number.name}; go on with: fedgkd-pl fit --resume")
    assert not (folder / "error.txt").exists()
    rest = ["--resume", str(folder), "--model.engine", "local", "--model.engine.workers", "1"]
    again = command("fit", "--import", "kick", *rest, "--trainer.callbacks", "null", cwd=tmp_path)
    assert again.wait(200) == 0, again.communicate()[0]
    assert (folder / "metrics.csv").read_text() == whole


# -- what it leaves, and who can reach it ------------------------------------------------------

OWN = """
import json, os, sys
from pathlib import Path
import psutil, ray, torch
from fedgkd_pl import FedAvg, RayEngine

def listening():
    me = psutil.Process()
    found = set()
    for process in [me, *me.children(recursive=True)]:
        try:
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN:
                    found.add(one.laddr.ip)
        except psutil.Error:
            pass
    return sorted(found)

@ray.remote
def nothing():
    return 1

before = dict(os.environ)
model = FedAvg(torch.nn.Linear(2, 2), engine=RayEngine())
model.engine.check(model)
assert ray.get(nothing.remote()) == 1
token = os.environ.get("RAY_AUTH_TOKEN", "")
heard = listening()
model.engine.leave()
changed = {k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)}
ray.init(address=sys.argv[1], log_to_driver=False)  # of a cluster without tokens, afterwards
print(json.dumps({
    "heard": heard,
    "token": len(token),
    "changed": [name for name in changed if name.startswith(("RAY_AUTH", "RAY_ENABLE"))],
    "home": sorted(str(path) for path in Path.home().rglob("*") if path.is_file()),
    "nodes": len(ray.nodes()),
}))
"""


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Starts a cluster of one node, as its operator would; its address."""
    found: list[psutil.Process] = []
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)  # which Ray sets where it starts one

    def start(**variables: str) -> str:
        port, client = free_port(), free_port()
        words = ["start", "--head", "--port", port, "--ray-client-server-port", client]
        words += ["--num-cpus", "1", "--include-dashboard", "false", "--disable-usage-stats"]
        place = Path("/tmp") / f"ray-{os.getpid()}"  # Ray's sockets need short names
        made = subprocess.run(
            [str(Path(sys.executable).parent / "ray"), *words, "--temp-dir", str(place)],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert made.returncode == 0, made.stdout + made.stderr
        for process in psutil.process_iter(["cmdline"]):
            if str(place) in " ".join(process.info["cmdline"] or []):
                found.append(process)
        assert found
        return f"127.0.0.1:{port}"

    yield start
    for process in found:
        if process.is_running():
            process.kill()
    psutil.wait_procs(found, timeout=10)
    shutil.rmtree(Path("/tmp") / f"ray-{os.getpid()}", ignore_errors=True)


@pytest.mark.ray
def test_a_ray_of_its_own_leaves_nothing_and_listens_on_loopback(head: Any, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        (tmp_path / "home").mkdir()
        patch.setenv("HOME", str(tmp_path / "home"))
        address = head(RAY_AUTH_MODE="disabled")
        (tmp_path / "own.py").write_text(OWN)
        words = [sys.executable, str(tmp_path / "own.py"), address]
        done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["heard"] and set(told["heard"]) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert told["token"] == 64 and told["changed"] == [] and told["nodes"] == 1
    assert told["home"] == []


@pytest.mark.ray
def test_a_cluster_that_wants_a_token(head: Any, tmp_path: Path) -> None:
    token = "0123456789abcdef" * 4
    address = head(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    words = ["fit", "--config", "smoke.yaml", "--output_dir", str(tmp_path / "runs")]
    words += ["--rounds", "1", "--model.engine", "ray", "--model.engine.ray_address", address]
    wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64}
    nowhere = {"RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}
    for variables in {}, wrong, nowhere:
        start = time.monotonic()
        run = command(*words, env=os.environ | variables)
        told = run.communicate(timeout=120)[0]
        assert run.returncode == 2 and told.count("\n") == 1, told
        assert told.startswith("error: model.engine.ray_address: the cluster wants its token")
        assert "RAY_AUTH_TOKEN" in told and time.monotonic() - start < 42
    assert not (tmp_path / "runs").exists()
    right = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    run = command(*words, env=os.environ | right)
    told = run.communicate(timeout=200)[0]
    assert run.returncode == 0, told
    assert "Ray: 1 of 1 workers train on 1 node, with 1 thread each; there is room for 1" in told
