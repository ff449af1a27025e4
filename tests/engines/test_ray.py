"""The Ray engine: the bits of the local one, on one machine and on a cluster that loses parts."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fedgkd_pl import FedAvg, FederatedData, LocalEngine, RayEngine
from fedgkd_pl.engines.ray import _fit
from fedgkd_pl.errors import SettingError
from fedgkd_pl.methods.fedavg import FedAvgClient
from lightning.pytorch import Callback

from tests.conftest import Table, fit, linear, same
from tests.support.everything import PRECISIONS, Everything, EverythingClient, assert_same, train
from tests.support.lazy import Points
from tests.support.trouble import Trouble, Watch

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
from ray.cluster_utils import Cluster  # noqa: E402

NIGHTLY = pytest.mark.nightly


@pytest.fixture(scope="module")
def started() -> Iterator[None]:
    """One Ray for the tests that do not look at how it starts."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True, scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home folder of their own, where the tests' own Ray leaves its token."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
        patch.setenv("HOME", str(folder))
        yield folder


def test_an_address_where_nobody_is(run: Any, tmp_path: Path) -> None:
    assert not ray.is_initialized()  # this test is the first
    words = ["fit", "--config", "smoke.yaml", "--model.engine", "RayEngine"]
    code, _, err = run(*words, "--model.engine.ray_address", "127.0.0.1:1")
    assert code == 2 and err.startswith("error: model.engine.ray_address: no Ray: ")
    assert err.count("\n") == 1 and list(tmp_path.iterdir()) == []


MARKS = [pytest.mark.engines, NIGHTLY, NIGHTLY]


@pytest.mark.parametrize(
    "precision", [pytest.param(p, marks=m) for p, m in zip(PRECISIONS, MARKS, strict=True)]
)
def test_the_same_bits_as_in_this_process(precision: str, started: None) -> None:
    """Every field of messages, updates and states; public data, two nets, tasks."""
    assert_same(train(RayEngine(actors=2), precision), train(LocalEngine(1), precision))


@NIGHTLY
def test_a_lazy_dataset_is_read_by_the_workers(started: None) -> None:
    def trained(engine: Any) -> Any:
        settings: dict[str, Any] = {"num_clients": 4, "batch_size": 16, "loader_workers": 1}
        data = FederatedData.from_dataset(Points(noise=0.3), **settings)
        model = FedAvg(linear(4, 2), engine=engine)
        fit(model, data, 2)
        assert model.report["client/failed"] == 0
        return model.net.state_dict()

    assert same(trained(LocalEngine(1)), trained(RayEngine(actors=2)))


@NIGHTLY
def test_clients_that_raise_hang_or_die_are_left_out(started: None) -> None:
    watch = Watch()
    model = Trouble(linear(), engine=RayEngine(actors=2, timeout=5, retries=1))
    fit(model, Table(sizes=(8, 5, 6, 7, 9), batch_size=10), 1, callbacks=[watch])
    assert watch.reasons.keys() == {1, 2, 3} and len(model.results.reports) == 2
    assert watch.reasons[1] == "ValueError: this client cannot"
    assert "training_step" in watch.traceback
    assert watch.reasons[2] == "timed out after 5 s"
    assert watch.reasons[3] == "its worker was lost 2 times"


class Unloadable(FedAvgClient):
    """Ends the process in which it is unpickled."""

    def __setstate__(self, state: Any) -> None:
        os._exit(3)


class NeverStarts(FedAvg):
    client_class = Unloadable


@NIGHTLY
def test_workers_that_do_not_start_end_the_run(started: None) -> None:
    with pytest.raises(Exception, match="no worker of the Ray cluster starts"):
        fit(NeverStarts(linear(), engine=RayEngine(actors=1, retries=1)), Table(), 1)


def test_more_than_the_cluster_has(started: None) -> None:
    with pytest.raises(SettingError, match="1000 cores"):
        fit(FedAvg(linear(), engine=RayEngine(threads=1000)), Table(), 1)


def test_room_on_a_node() -> None:
    assert _fit({"CPU": 4.0}, 1, 0) == 4 and _fit({"CPU": 3.0}, 2, 0) == 1
    assert _fit({"CPU": 4.0}, 8, 0) == 0  # though four such nodes have 16
    assert [_fit({"CPU": 16.0, "GPU": 1.0}, 1, gpus) for gpus in (0.1, 0.2, 1.0)] == [10, 5, 1]
    assert _fit({"CPU": 2.0, "GPU": 1.0}, 1, 0.1) == 2 and _fit({"CPU": 8.0}, 1, 0.5) == 0


def test_the_gpus_of_a_worker() -> None:
    import torch

    def gpus(device: str, **settings: Any) -> float:
        return RayEngine(**settings).gpus_of_worker(torch.device(device))

    assert [gpus("cpu"), gpus("cuda:0"), gpus("xpu:0"), gpus("mps", gpus=0.0)] == [0, 1, 1, 0]
    assert gpus("cuda:0", gpus=0.25) == gpus("cpu", gpus=0.25) == 0.25
    with pytest.raises(SettingError, match="gpus"):
        gpus("mps:0")


BAD = {"actors": 0, "threads": 0, "gpus": -1.0, "timeout": 0.0, "retries": -1}


@pytest.mark.parametrize("key", BAD)
def test_bad_settings(key: str) -> None:
    with pytest.raises(SettingError, match=key):
        RayEngine(**{key: BAD[key]})  # type: ignore[arg-type]


# -- a cluster of two nodes --------------------------------------------------------------------


class During(Callback):
    """Does something while clients of a round are being trained."""

    def __init__(self, round: int, act: Callable[[], None]) -> None:
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
            self.act()
        except Exception as error:
            self.error = error


class Slow(EverythingClient):
    """Takes two seconds for a round."""

    def on_train_start(self) -> None:
        super().on_train_start()
        time.sleep(2)


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


def kill_one() -> None:
    workers = psutil.process_iter(["cmdline"])
    next(p for p in workers if "RayWorker.train" in " ".join(p.info["cmdline"] or [])).kill()


@NIGHTLY
def test_a_worker_killed_and_a_node_removed(
    cluster: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = train(LocalEngine(1))
    monkeypatch.setattr(Everything, "client_class", Slow)
    kill = During(2, kill_one)
    remove = During(3, lambda: cluster.remove_node(cluster.second, allow_graceful=False))
    with caplog.at_level(logging.WARNING, "fedgkd_pl"):
        engine = RayEngine(ray_address=cluster.address, actors=2)
        there = train(engine, callbacks=[kill, remove])
    assert kill.error is None and remove.error is None
    told = [text for text in caplog.messages if "was lost" in text]
    assert any(text.startswith("round 2:") for text in told)
    assert any(text.startswith("round 3:") for text in told)
    assert_same(there, here)


# -- how it ends -------------------------------------------------------------------------------


def command(*words: str, **settings: Any) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-m", "fedgkd_pl", *words], **pipes, **settings)


@NIGHTLY
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_a_run_and_its_ray_in_order(number: signal.Signals, tmp_path: Path) -> None:
    words = ["fit", "--config", "smoke.yaml", "--output_dir", str(tmp_path), "--rounds", "8"]
    whole = command(*words, "--name", "whole")
    assert whole.wait(200) == 0
    run = command(*words, "--name", "ray", "--model.engine", "RayEngine")
    rows, end = tmp_path / "ray/version_0/metrics.csv", time.monotonic() + 400
    while not rows.is_file() or rows.read_text().count("\n") < 3:
        assert run.poll() is None and time.monotonic() < end, run.communicate()[0]
        time.sleep(0.02)
    family = psutil.Process(run.pid).children(recursive=True)
    assert any("raylet" in process.name() for process in family)
    run.send_signal(number)
    told = run.communicate(timeout=60)[0]
    assert run.returncode == 128 + number and "--resume" in told, told
    left = psutil.wait_procs(family, timeout=5)[1]
    assert [process.name() for process in left] == []
    # another engine goes on where it stopped
    rest = command("fit", "--resume", str(rows.parent), "--model.engine", "LocalEngine")
    assert rest.wait(200) == 0, rest.communicate()[0]
    assert rows.read_text() == (tmp_path / "whole/version_0/metrics.csv").read_text()


OWN = """
import json, os
import psutil, ray, torch
from fedgkd_pl import FedAvg, RayEngine

@ray.remote
def token():
    return os.environ.get("RAY_AUTH_TOKEN", "")

before = dict(os.environ)
heard, tokens = set(), set()
for _ in range(2):  # a program may train twice
    model = FedAvg(torch.nn.Linear(2, 2), engine=RayEngine())
    model.engine.check(model)
    tokens.add(ray.get(token.remote()))
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            opened = process.net_connections("inet")
        except psutil.Error:
            continue
        heard |= {one.laddr.ip for one in opened if one.status == psutil.CONN_LISTEN}
    model.engine.leave()
changed = [key for key, value in os.environ.items() if before.get(key) != value]
print(json.dumps([sorted(heard), [len(one) for one in tokens], changed]))
"""


@pytest.mark.engines
def test_a_ray_of_its_own_leaves_nothing_and_listens_on_loopback(tmp_path: Path) -> None:
    environment = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", OWN], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    heard, tokens, changed = json.loads(done.stdout.splitlines()[-1])
    assert heard and set(heard) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert tokens == [64]
    assert not [name for name in changed if name.startswith(("RAY_AUTH_TOKEN", "RAY_ENABLE"))]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
