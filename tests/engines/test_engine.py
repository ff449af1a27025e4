"""Engines on one machine: a pool gives the bits of this process, and survives its workers."""

import pickle
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import FedAvg, LocalEngine
from fedgkd_pl.engines.base import schedule
from fedgkd_pl.engines.pool import MappedFiles, PoolSession
from fedgkd_pl.errors import SettingError, StorageError
from fedgkd_pl.federation.client_trainer import Job
from fedgkd_pl.runs.folder import fixed_settings
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch.optim import SGD

from tests.conftest import Table, fit, linear, same
from tests.support.everything import PRECISIONS, assert_same, examples, train
from tests.support.faults import warm_script
from tests.support.trouble import Trouble, Watch

LOCAL: dict[str, Any] = {"optimizer": partial(SGD, lr=0.1, momentum=0.9)}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_pool_gives_the_bits_of_this_process(precision: str) -> None:
    """Every field of messages, updates and states; public data, two nets, tasks."""
    here = train(LocalEngine(1), precision)
    assert_same(train(LocalEngine(2), precision), here)
    if precision == "32-true":
        assert_same(train(LocalEngine(3, timeout=600), precision), here)
        times = {client: int(state["times"]) for client, state in here.client_states.items()}
        assert sum(times.values()) == 3 * 4 and len(set(times.values())) > 1


def test_client_order_does_not_matter() -> None:
    class Shuffled(FedAvg):
        def training_step(self, cohort: list[int], batch_idx: int) -> None:
            super().training_step(cohort[::-1], batch_idx)

    models = [kind(linear(), engine=LocalEngine(1), **LOCAL) for kind in (FedAvg, Shuffled)]
    for model in models:
        fit(model, Table(sizes=(8, 5, 9, 5), batch_size=4), 2)
    assert same(models[0].net.state_dict(), models[1].net.state_dict())


def test_largest_client_first() -> None:
    data = Table(sizes=(3, 9, 5, 9)).client_data
    job: Any = type("Job", (), {"data": data})
    assert schedule(job, [0, 1, 2, 3]) == schedule(job, [3, 2, 0, 1]) == [1, 3, 2, 0]


class Careless(torch.nn.Module):
    """Leaves something behind, rolls every kind of dice, and has one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = torch.nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            x = x * (1 + 0.1 * self.calls) + random.random() + np.random.rand() + torch.rand(1)
        logits: torch.Tensor = self.head(self.second(self.first(x).relu()))
        return logits


def test_nothing_passes_from_client_to_client() -> None:
    models = [FedAvg(Careless(), engine=LocalEngine(n), **LOCAL) for n in (1, 2)]
    for model in models:
        fit(model, Table(sizes=(8, 5, 6, 7), batch_size=4), 2)
    assert same(models[0].net.state_dict(), models[1].net.state_dict())
    assert models[1].net.first.weight is models[1].net.second.weight


def test_clients_that_raise_hang_or_die_are_left_out() -> None:
    """The others train as if these were not there, under the parent's settings."""
    before, watch = torch.get_float32_matmul_precision(), Watch()
    try:
        torch.set_float32_matmul_precision("high")
        model = Trouble(linear(), engine=LocalEngine(2, timeout=5), **LOCAL)
        data = Table(sizes=(8, 5, 6, 7, 9), batch_size=10)
        fit(model, data, 2, callbacks=[watch], deterministic=True)
    finally:
        torch.set_float32_matmul_precision(before)
        torch.use_deterministic_algorithms(False)
    assert watch.reasons.keys() == {1, 2, 3} and model.failed_rounds == []
    assert watch.reasons[1] == "ValueError: this client cannot"
    assert "Traceback" in watch.traceback and "training_step" in watch.traceback
    assert watch.reasons[2] == "timed out after 5 s"
    assert "died (exit code -9" in watch.reasons[3]
    assert model.report["client/high_mean"] == model.report["client/strict_mean"] == 1
    assert len(watch.processes) == 4 and not any(p.is_alive() for p in watch.processes)
    here = Watch()
    fit(Trouble(linear(), engine=LocalEngine(1)), Table(sizes=(8, 5)), 1, callbacks=[here])
    assert here.reasons == {1: "ValueError: this client cannot"}


def test_a_failure_elsewhere_ends_the_workers() -> None:
    class Breaks(Watch):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_epoch_end(trainer, pl_module)
            raise KeyError("a callback of the user's")

    watch = Breaks()
    with pytest.raises(KeyError):
        fit(FedAvg(linear(), engine=LocalEngine(2)), Table(), 1, callbacks=[watch])
    assert len(watch.processes) == 2 and not any(p.is_alive() for p in watch.processes)


def test_auto_takes_what_cohort_and_cores_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    local = "fedgkd_pl.engines.base."
    monkeypatch.setattr(local + "InProcessSession", lambda job, threads: opened.append(1))
    monkeypatch.setattr(PoolSession, "__init__", lambda self, job, n, *_: opened.append(n))
    monkeypatch.setattr(local + "cores", lambda: 4)
    monkeypatch.setattr(local + "devices_like", lambda device: 2)
    for device, threads, cohort in (
        ("cpu", 1, 10),  # four cores
        ("cpu", 1, 3),  # three clients
        ("cpu", 2, 10),  # two threads each
        ("cpu", 1, 1),
        ("cuda", 1, 10),  # two GPUs
    ):
        job: Any = type("Job", (), {"device": torch.device(device)})
        LocalEngine(threads=threads).open(job, cohort)
    assert opened == [4, 3, 2, 1, 2]


def test_a_job_for_another_kind_of_device_leaves_lightnings_plugins_behind() -> None:
    """Autocast for cuda would do nothing at all on a CPU."""

    class Own(Precision):
        pass

    half, accelerator = MixedPrecision("bf16-mixed", "cuda"), CUDAAccelerator()
    gpu: Any = (None, None, torch.device("cuda", 0), {}, {})
    job = Job(*gpu, accelerator=accelerator, precision=half)
    near, far = job.on(torch.device("cuda", 1)), job.on(torch.device("cpu"))
    assert (near.precision, near.accelerator) == (half, accelerator)
    assert (far.precision, far.accelerator) == (None, None)
    own = Job(*gpu, precision=Own())
    assert own.on(torch.device("cpu")).precision is own.precision


@pytest.mark.parametrize("bad", [{"workers": 0}, {"threads": 0}, {"timeout": 0.0}])
def test_bad_settings(bad: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(bad))):
        LocalEngine(**bad)


SCRIPT = """
from fedgkd_pl import Digits, FedAvg, LocalEngine
from fedgkd_pl.methods.fedavg import FedAvgClient
from lightning.pytorch import Trainer
from torch import nn
from torch.optim import SGD

print("the script runs", flush=True)

class MyNet(nn.Linear):
    pass

class MyClient(FedAvgClient):
    def training_step(self, batch, batch_idx):
        return 2 * super().training_step(batch, batch_idx)

class MyMethod(FedAvg):
    client_class = MyClient

model = MyMethod(MyNet(64, 10), optimizer=lambda p: SGD(p, lr=0.1), engine=LocalEngine(workers=2))
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
    "ray": ["fit", "--config", "smoke.yaml", "--model.engine", "RayEngine"],
    "flwr": ["flower", "app", "--config", "smoke.yaml"],
}


@pytest.mark.parametrize("package", MISSING)
def test_an_engine_whose_extra_is_missing(
    package: str, run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fedgkd_pl.engines.base.find_spec", lambda name: None)
    code, _, err = run(*MISSING[package])
    extra = {"ray": "ray", "flwr": "flower"}[package]
    assert code == 2 and err.count("\n") == 1 and list(tmp_path.iterdir()) == []
    assert f": pip install '.[{extra}]' in a clone" in err  # we are on no index


def test_of_an_engine_only_its_threads_decide_the_result() -> None:
    def settings(name: str, **init: Any) -> dict[str, Any]:
        engine = {"class_path": name, "init_args": init}
        return fixed_settings({"model": {"init_args": {"engine": engine, "gamma": 1}}})

    local = settings("LocalEngine", workers=2, threads=1)
    assert local == settings("RayEngine", ray_address="auto", threads=1, retries=3)
    assert local != settings("LocalEngine", workers=2, threads=2)
    assert local["model.init_args.gamma"] == 1


# -- what workers map ----------------------------------------------------------------------------


def test_mapped_tensors_are_the_same_in_every_order_and_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    torch.manual_seed(0)
    images = torch.randn(5, 3, 4, 4)
    for inputs in (
        images,
        images.to(memory_format=torch.channels_last),
        images.byte(),
        images.bfloat16(),
        images[2:, :1].expand(3, 3, 4, 4),
        images.transpose(0, 3)[:, ::2],
    ):
        files = MappedFiles()
        job: Any = examples(inputs)
        files.write(job)
        if sys.platform == "linux":
            assert list(tmp_path.iterdir()) == [], "they would stay after a kill"
        there = pickle.loads(files.pickle(job))
        assert there.inputs.dtype == inputs.dtype and torch.equal(there.inputs, inputs)
        assert there.inputs.stride() == inputs.stride()
        assert torch.equal(there.targets, job.targets)
        there.inputs[:, :1] = 0  # of this reader alone
        assert torch.equal(pickle.loads(files.pickle(job)).inputs, inputs)
        files.close()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    with pytest.raises(StorageError, match="full: No such file"):
        MappedFiles().write(examples(images))


def test_workers_read_data_from_files_and_not_from_their_own_memory() -> None:
    """A gigabyte of data costs no process a gigabyte of its own, nor the pipe one."""
    data = Table(sizes=(64, 64), features=20_000)
    sizes: list[int] = []

    class Look(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            files = pl_module._session.files
            sizes.extend([len(files.pickle(pl_module._session.job)), len(files.known)])

    fit(FedAvg(torch.nn.Linear(20_000, 3), engine=LocalEngine(2)), data, 1, callbacks=[Look()])
    assert sizes[0] < 2_000_000 < data.x.nbytes and sizes[1] == 2  # inputs and targets
