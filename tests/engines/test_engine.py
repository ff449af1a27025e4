"""The same bits from one process or several, in any order."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import MLP, Digits, Dirichlet, FedAvg, FedDistill, FedGKD, FedWeIT, LocalEngine
from fedgkd_pl.engines.base import schedule
from fedgkd_pl.engines.flower.engine import FlowerEngine
from fedgkd_pl.engines.pool import PoolSession
from fedgkd_pl.errors import RunFailed, SettingError
from fedgkd_pl.federation.answers import Spec, Specs
from fedgkd_pl.federation.client_trainer import Job
from fedgkd_pl.federation.message import ClientFailure, ClientUpdate, Message
from fedgkd_pl.methods.fedavg import FedAvgClient
from fedgkd_pl.runs.settings import fixed_settings
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch.optim import SGD

from tests.conftest import Table, fit, linear, same, seed_everything
from tests.support.faults import warm_script

LOCAL: dict[str, Any] = {"optimizer": partial(SGD, lr=0.1, momentum=0.9)}


def train(workers: int) -> FedGKD:
    seed_everything(3, verbose=False)
    data = Digits(num_clients=7, partition=Dirichlet(alpha=0.5), participation=0.6, batch_size=20)
    model = FedGKD(MLP(hidden=[16]), buffer_size=2, engine=LocalEngine(workers), **LOCAL)
    fit(model, data, 3)
    return model


def test_workers_give_identical_models() -> None:
    one, two, three = train(1), train(2), train(3)
    assert same(one.net.state_dict(), two.net.state_dict())
    assert same(one.net.state_dict(), three.net.state_dict())
    assert (one.bytes_down, one.bytes_up) == (two.bytes_down, two.bytes_up)


@pytest.mark.parametrize("workers", [1, 2])
def test_client_order_does_not_matter(workers: int) -> None:
    class Shuffled(FedAvg):
        def training_step(self, cohort: list[int], batch_idx: int) -> None:
            super().training_step(cohort[::-1], batch_idx)

    data = {"sizes": (8, 5, 9, 5), "batch_size": 4}
    forward = FedAvg(linear(), engine=LocalEngine(workers), **LOCAL)
    backward = Shuffled(linear(), engine=LocalEngine(workers), **LOCAL)
    fit(forward, Table(**data), 2)  # type: ignore[arg-type]
    fit(backward, Table(**data), 2)  # type: ignore[arg-type]
    assert same(forward.net.state_dict(), backward.net.state_dict())


@pytest.mark.parametrize(
    ("server", "apart"),
    [
        (FedWeIT, True),
        (partial(FedWeIT, local=False), False),
        (partial(FedWeIT, adaptive=False), False),
        (FedDistill, True),
        (FedAvg, False),
    ],
)
def test_flower_says_which_models_stay_with_clients(
    server: Any, apart: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Models that the server averages are what val/ and test/ are of."""
    engine = object.__new__(FlowerEngine)  # its constructor asks for Flower
    with pytest.raises(SettingError, match="runs in a Flower app"):
        engine.check(server(MLP(hidden=[4])))
    assert ("clients keep their models" in caplog.text) is apart


def test_largest_client_first() -> None:
    data = Table(sizes=(3, 9, 5, 9)).client_data
    job: Any = type("Job", (), {"data": data})
    assert schedule(job, [0, 1, 2, 3]) == schedule(job, [3, 2, 0, 1]) == [1, 3, 2, 0]


class Remembering(FedAvgClient):
    """Keeps how often it has trained, with the client."""

    def receive(self, message: Message, state: dict[str, torch.Tensor]) -> None:
        super().receive(message, state)
        self.times = state.get("times", torch.zeros(1, dtype=torch.int64)) + 1

    def reply(self) -> ClientUpdate:
        update = super().reply()
        update.state = {"times": self.times}
        update.extra = {"times": self.times.float()}
        return update


class Counting(FedAvg):
    """A method whose clients keep state."""

    def client_extra(self) -> Specs:
        return {"times": Spec((1,), torch.float32)}

    def client_state(self) -> Specs:
        return {"times": Spec((1,), torch.int64)}

    def client(self) -> FedAvgClient:
        return Remembering(self.net, self.optimizer, self.scheduler)


@pytest.mark.parametrize("workers", [1, 2])
def test_client_state_is_kept_per_client_and_created_lazily(workers: int) -> None:
    model = Counting(linear(), engine=LocalEngine(workers), **LOCAL)
    data = Table(sizes=(5, 6, 7, 8, 9), participation=0.4)
    trained: list[int] = []
    data.setup()
    sampler = data.train_dataloader().sampler
    for epoch in range(4):
        sampler.set_epoch(epoch)
        trained += sampler.cohort()
    fit(model, data, 4)
    times = {client: int(state["times"]) for client, state in model._client_states.items()}
    assert times == {client: trained.count(client) for client in sorted(set(trained))}
    assert len(times) < 5  # some client was never drawn and costs nothing


class Tied(torch.nn.Module):
    """Two names for one weight, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.second(self.first(x).relu()))
        return logits


def test_tied_weights_stay_tied_in_a_pool() -> None:
    models = [FedGKD(Tied(), buffer_size=2, engine=LocalEngine(n), **LOCAL) for n in (1, 2)]
    for model in models:
        fit(model, Table(sizes=(8, 5, 6), batch_size=4), 3)
    assert same(models[0].net.state_dict(), models[1].net.state_dict())
    assert models[1].net.first.weight is models[1].net.second.weight


class Fails(FedAvgClient):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[1]) == 5:
            raise ValueError("this client cannot")
        return super().training_step(batch, batch_idx)


class Failing(FedAvg):
    def client(self) -> FedAvgClient:
        return Fails(self.net, self.optimizer, self.scheduler)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failing_client_is_left_out(workers: int) -> None:
    model = Failing(linear(), engine=LocalEngine(workers), **LOCAL)
    seen: list[ClientFailure] = []
    model._leave_out = lambda failure, _: seen.append(failure)  # type: ignore[method-assign]
    fit(model, Table(sizes=(8, 5)), 1)
    assert [(f.client, f.reason) for f in seen] == [(1, "ValueError: this client cannot")]
    assert "Traceback" in seen[0].traceback and "training_step" in seen[0].traceback


def test_a_failure_elsewhere_ends_the_workers() -> None:
    class Breaks(Callback):
        def on_validation_end(self, *_: Any) -> None:
            processes.extend(w.process for w in model._session.workers)  # type: ignore[union-attr]
            raise KeyError("a callback of the user's")

    processes: list[Any] = []
    model = FedAvg(linear(), engine=LocalEngine(2), **LOCAL)
    with pytest.raises(KeyError):
        fit(model, Table(), 1, callbacks=[Breaks()])
    assert len(processes) == 2 and not any(process.is_alive() for process in processes)


class Careless(torch.nn.Module):
    """Leaves something behind, and rolls every kind of dice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            x = x * (1 + 0.1 * self.calls) + random.random() + np.random.rand() + torch.rand(1)
        logits: torch.Tensor = self.layer(x)
        return logits


def test_nothing_passes_from_client_to_client() -> None:
    models = [FedAvg(Careless(), engine=LocalEngine(n), **LOCAL) for n in (1, 2, 3)]
    for model in models:
        fit(model, Table(sizes=(8, 5, 6, 7), batch_size=4), 2)
    assert same(models[0].net.state_dict(), models[1].net.state_dict())
    assert same(models[0].net.state_dict(), models[2].net.state_dict())


class Asks(FedAvgClient):
    """Reports the settings it trains under."""

    def reply(self) -> ClientUpdate:
        update = super().reply()
        precise = torch.get_float32_matmul_precision() == "high"
        update.metrics = {
            "deterministic": float(torch.are_deterministic_algorithms_enabled()),
            "high": float(precise),
        }
        return update


class Asking(FedAvg):
    def client(self) -> FedAvgClient:
        return Asks(self.net, self.optimizer, self.scheduler)


def test_workers_train_under_the_parents_settings() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        model = Asking(linear(), engine=LocalEngine(2), **LOCAL)
        fit(model, Table(), 1, deterministic=True)
        assert model.report["client/deterministic_mean"] == model.report["client/high_mean"] == 1
    finally:
        torch.set_float32_matmul_precision(before)
        torch.use_deterministic_algorithms(False)


class Dies(FedAvgClient):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        import os

        os._exit(7)


class Dying(FedAvg):
    def client(self) -> FedAvgClient:
        return Dies(self.net, self.optimizer, self.scheduler)


def test_a_dead_worker_is_reported() -> None:
    with pytest.raises(RunFailed, match=r"client 0: its process died \(exit code 7"):
        fit(Dying(linear(), engine=LocalEngine(2), **LOCAL), Table(), 4)


def test_pool_closes_its_processes() -> None:
    model = FedAvg(linear(), engine=LocalEngine(2), **LOCAL)
    pools: list[Any] = []
    model.on_train_epoch_end = lambda: pools.append([w.process for w in model._session.workers])  # type: ignore
    fit(model, Table(), 1)
    assert len(pools[0]) == 2
    assert not any(process.is_alive() for process in pools[0])


def test_auto_takes_what_cohort_andcores_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(
        "fedgkd_pl.engines.local.InProcessSession", lambda job, threads: opened.append(1)
    )
    monkeypatch.setattr(
        PoolSession, "__init__", lambda self, job, workers, *_: opened.append(workers)
    )
    monkeypatch.setattr("fedgkd_pl.engines.local.cores", lambda: 4)
    job: Any = type("Job", (), {"device": torch.device("cpu")})
    for engine, cohort in [
        (LocalEngine(), 10),  # four cores
        (LocalEngine(), 3),  # three clients
        (LocalEngine(threads=2), 10),  # two threads each
        (LocalEngine(), 1),
    ]:
        engine.open(job, cohort)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cuda", "mps"):
        job.device = torch.device(device, 0)
        LocalEngine().open(job, 10)
    assert opened == [4, 3, 2, 1, 2, 1]


def test_ray_trains_on_cpus_only_if_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from fedgkd_pl.engines import ray

    opened: list[float] = []
    monkeypatch.setattr(ray, "needs", lambda *_: None)
    monkeypatch.setattr(ray, "RaySession", lambda engine, job, cohort, gpus: opened.append(gpus))

    def gpus(device: str, **settings: Any) -> float:
        job: Any = type("Job", (), {"device": torch.device(device)})
        ray.RayEngine(**settings).open(job, 4)
        return opened[-1]

    assert [gpus("cpu"), gpus("cuda:0"), gpus("xpu:0")] == [0, 1, 1]
    assert gpus("cuda:0", gpus=0.25) == gpus("cpu", gpus=0.25) == 0.25
    assert not caplog.records
    assert gpus("mps:0", gpus=0.0) == 0 and "clients train on CPUs, not on mps" in caplog.text
    with pytest.raises(SettingError, match="gpus: Ray shares out no mps devices"):
        gpus("mps:0")


def test_a_job_for_another_kind_of_device_leaves_lightnings_plugins_behind() -> None:
    """Autocast for cuda would do nothing at all on a CPU."""

    class Own(Precision):
        pass

    host, gpu = torch.device("cpu"), torch.device("cuda", 0)
    half = MixedPrecision("bf16-mixed", "cuda")
    job = Job(None, None, gpu, {"precision": "bf16-mixed"}, {}, precision=half)  # type: ignore[arg-type]
    job.accelerator = CUDAAccelerator()
    near, far = job.on(torch.device("cuda", 1)), job.on(host)
    assert near.precision is half and near.accelerator is job.accelerator
    assert far.precision is None and far.accelerator is None
    assert far.trainer == {"precision": "bf16-mixed"} and far.device == host
    job.precision = Own()
    assert job.on(host).precision is job.precision


@pytest.mark.parametrize("workers", [0, -1])
def test_bad_workers(workers: int) -> None:
    with pytest.raises(SettingError, match="workers"):
        LocalEngine(workers)


SCRIPT = """
from fedgkd_pl import Digits, FedAvg, LocalEngine
from fedgkd_pl.methods.fedavg import FedAvgClient
from fedgkd_pl.runs.settings import fixed_settings
from lightning.pytorch import Trainer
from torch import nn
from torch.optim import SGD

print("the script runs", flush=True)

class MyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
    def forward(self, x):
        return self.layer(x)

class MyClient(FedAvgClient):
    def training_step(self, batch, batch_idx):
        return 2 * super().training_step(batch, batch_idx)

class MyMethod(FedAvg):
    def client(self):
        return MyClient(self.net, self.optimizer, self.scheduler)

model = MyMethod(MyNet(), optimizer=lambda p: SGD(p, lr=0.1), engine=LocalEngine(workers=2))
trainer = Trainer(max_epochs=2, logger=False, enable_checkpointing=False)
trainer.fit(model, Digits(num_clients=3))
print("rounds", trainer.global_step)
"""


def test_a_plain_script_with_its_own_classes_uses_the_pool(tmp_path: Path) -> None:
    """No ``if __name__ == "__main__"``, a net, a method and a lambda of the script's own."""
    done = warm_script(SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the script runs") == 1
    assert "rounds 2" in done.stdout


MISSING = {
    "ray": ["fit", "--config", "smoke.yaml", "--model.engine", "ray"],
    "flwr": ["fit", "--config", "smoke.yaml", "--model.engine", "flower"],
    "flwr ": ["flower", "app", "--config", "smoke.yaml"],
}


@pytest.mark.parametrize("package", MISSING)
def test_an_engine_whose_extra_is_missing(
    package: str, run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fedgkd_pl.engines.base.find_spec", lambda name: None)
    code, _, err = run(*MISSING[package])
    install = {"ray": "'ray>=2.60'", "flwr": "'flwr>=1.41' 'httpx>=0.27'"}[package.strip()]
    assert code == 2 and err.count("\n") == 1 and list(tmp_path.iterdir()) == []
    assert f"needs {package.strip()}, which is not installed" in err
    assert f": pip install {install}\n" in err  # which works without an index that has us


def test_engines_have_short_names(run: Any) -> None:
    code, out, _ = run("fit", "--config", "smoke.yaml", "--model.engine", "local", "--print_config")
    assert code == 0 and "class_path: fedgkd_pl.LocalEngine" in out


def test_of_an_engine_only_its_threads_decide_the_result() -> None:
    def settings(name: str, **init: Any) -> dict[str, Any]:
        engine = {"class_path": name, "init_args": init}
        return fixed_settings({"model": {"init_args": {"engine": engine, "gamma": 1}}})

    local = settings("LocalEngine", workers=2, threads=1)
    assert local == settings("RayEngine", ray_address="auto", threads=1, retries=3)
    assert local != settings("LocalEngine", workers=2, threads=2)
    assert local["model.init_args.gamma"] == 1
