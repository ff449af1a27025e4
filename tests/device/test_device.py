"""The package on an accelerator: what it trains, measures, keeps and sends is what the CPU's is.

The device runs the CPU's kernels, so results are equal bit for bit where the same kernels run, and
refuses whatever a GPU refuses (``test_simulated.py``).
"""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import (
    MLP,
    AveragedModel,
    ClientDrift,
    ClientEvaluation,
    Communication,
    Dashboard,
    FeatureMap,
    FedAvg,
    FederatedData,
    FedGKD,
    FedGKDVote,
    Forgetting,
    LocalEngine,
    LocalModels,
    ModelExport,
    RunFiles,
    TeacherAgreement,
)
from fedgkd_pl.callbacks.export import FILES
from fedgkd_pl.engines.pool import PoolSession
from fedgkd_pl.federation.message import ClientFailure
from fedgkd_pl.seeds import seeded
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from safetensors.torch import load_file
from torch import Tensor

from tests.conftest import fit, linear, quiet_trainer, same, script
from tests.device.pieces import OPTIMIZER, conv_net, far, images, sim, text_net, texts
from tests.support.everything import assert_same as assert_all_same
from tests.support.everything import train
from tests.support.lazy import Points
from tests.support.methods import CLASSES, LOCAL, build, table

pytestmark = pytest.mark.device
NIGHTLY = pytest.mark.nightly
HOST: dict[str, Any] = {}  # of a Trainer that computes on the CPU


def on(index: int = 0) -> dict[str, Any]:
    return dict(sim.on(index))


def trained(name: str, where: dict[str, Any], workers: int = 1, rounds: int = 3) -> FedAvg:
    torch.manual_seed(0)
    optimizer = type(OPTIMIZER)(OPTIMIZER.func, **LOCAL, foreach=False)
    model = build(name, workers, optimizer=optimizer)
    fit(model, table(), rounds, **where)
    assert not model.results.failures
    return model


def on_host(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in state.items()}


def assert_same(model: FedAvg, other: FedAvg) -> None:
    """The global models and what clients keep are equal, bit for bit."""
    assert same(on_host(model.global_state()), on_host(other.global_state()))
    assert model.client_states.keys() == other.client_states.keys()
    for client, state in model.client_states.items():
        assert same(on_host(state), on_host(other.client_states[client]))


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_a_device_trains_to_the_bits_of_the_cpu(precision: str) -> None:
    """Every field of messages, updates and states; public data, two nets, tasks; two devices."""
    plain = {"optimizer": OPTIMIZER}
    here = train(LocalEngine(1), precision, plain)
    assert_all_same(train(LocalEngine(1), precision, plain, **on(0)), here)
    if precision == "32-true":
        assert_all_same(train(LocalEngine(2), precision, plain, **on(1)), here)


def test_bf16_mixed_differs_by_its_rounding() -> None:
    """The clients' autocast is the device's own: the server's plugin has reached them."""
    plain = {"optimizer": OPTIMIZER}
    settings = HOST, {"precision": "bf16-mixed"}, {"precision": None} | sim.bf16()
    single, half, there = (train(LocalEngine(1), method=plain, **each) for each in settings)
    assert far(half.net.state_dict(), single.net.state_dict()) > 1e-5
    assert far(there.net.state_dict(), single.net.state_dict()) > 1e-5
    assert far(there.net.state_dict(), half.net.state_dict()) < torch.finfo(torch.bfloat16).eps


@NIGHTLY
@pytest.mark.parametrize(("net", "data"), [("batch", images), ("group", images), ("", texts)])
def test_images_and_texts(net: str, data: Any) -> None:
    """Crops, flips, dropout, and norms with and without buffers; attention."""
    models = []
    for where in (HOST, on(1)):
        made = conv_net(net) if net else text_net()
        models.append(FedGKD(made, gamma=1.0, optimizer=OPTIMIZER, engine=LocalEngine(1)))
        fit(models[-1], data(), 3, gradient_clip_val=1.0, **where)
    assert models[1].device.type == "cpu", "Lightning leaves a module on the host"
    assert far(models[0].global_state(), models[1].global_state()) < 1e-6


# -- evaluation and callbacks ----------------------------------------------------------------------


@NIGHTLY
def test_evaluation_and_prediction() -> None:
    results = []
    for where in (HOST, on()):
        trainer = quiet_trainer(**where)
        model, data = FedAvg(conv_net(), engine=LocalEngine(1)), images()
        (val,) = trainer.validate(model, data, verbose=False)
        (test,) = trainer.test(model, data, verbose=False)
        probabilities = torch.cat(trainer.predict(model, data)).cpu()  # type: ignore[arg-type]
        results.append(({**val, **test}, probabilities))
    (scores, probabilities), (their_scores, their_probabilities) = results
    assert scores and their_scores == pytest.approx(scores, abs=1e-6)
    torch.testing.assert_close(their_probabilities, probabilities, atol=1e-6, rtol=0)


def rows_of(file: Path) -> list[dict[str, float]]:
    with file.open() as lines:
        return [
            {name: float(value) for name, value in row.items() if value and "time" not in name}
            for row in csv.DictReader(lines)
        ]


@NIGHTLY
def test_every_callback_measures_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_two(features: Any, seed: int) -> Any:
        """t-SNE of a handful of points turns on their last bits."""
        return features[:, :2]

    monkeypatch.setattr("fedgkd_pl.callbacks.feature_map.embed", first_two)
    last = {}
    for name, where in (("host", HOST), ("device", on())):
        folder = tmp_path / name
        callbacks = [
            *(ClientDrift(), TeacherAgreement(split="val"), Forgetting(), LocalModels()),
            *(FeatureMap(every_n_rounds=2), AveragedModel(size=2), ClientEvaluation()),
            *(Dashboard(every_n_rounds=1), Communication()),
            *(ModelExport(formats=list(FILES)), RunFiles(str(folder))),
        ]
        model = FedGKDVote(conv_net(), buffer_size=2, optimizer=OPTIMIZER, engine=LocalEngine(1))
        data = images(sizes=(16, 12), client_test_fraction=0.25)
        logger = TensorBoardLogger(folder, "", "")
        fit(model, data, 3, callbacks=callbacks, logger=logger, **where)
        last[name] = {key: v for key, v in model.report.items() if not key.startswith("time/")}
    host, device = tmp_path / "host", tmp_path / "device"
    assert last["device"] == pytest.approx(last["host"], abs=1e-5)
    measured = " ".join(last["device"])
    for part in ("drift/", "teacher/", "forgetting/", "local/", "average", "clients/", "comm/"):
        assert part in measured
    written = {file.name for file in host.iterdir() if "tfevents" not in file.name}
    assert written == {file.name for file in device.iterdir() if "tfevents" not in file.name}
    assert {*FILES.values(), "average.safetensors"} <= written
    for name in ("metrics.csv", "clients.csv", "local_models.csv"):
        for ours, theirs in zip(rows_of(host / name), rows_of(device / name), strict=True):
            assert theirs == pytest.approx(ours, abs=1e-5), name
    for name in ("model.safetensors", "average.safetensors"):
        assert far(load_file(host / name), load_file(device / name)) < 1e-6
    maps = [np.load(folder / "features-round002.npz") for folder in (host, device)]
    np.testing.assert_allclose(maps[1]["global_points"], maps[0]["global_points"], atol=1e-5)
    x = torch.linspace(-1, 1, 2 * 48).view(2, 3, 4, 4)
    nets = [torch.jit.load(folder / FILES["torchscript"]) for folder in (host, device)]
    torch.testing.assert_close(nets[1](x), nets[0](x), atol=1e-6, rtol=0)


# -- checkpoints -----------------------------------------------------------------------------------


@NIGHTLY
@pytest.mark.parametrize("name", ["FedAdam", "MOON"])
@pytest.mark.parametrize("to_host", [True, False], ids=["to the CPU", "from the CPU"])
def test_a_run_goes_on_elsewhere_as_if_it_had_stayed(
    name: str, to_host: bool, tmp_path: Path
) -> None:
    """Teachers, client states, server optimizers and generators are in the checkpoint."""
    first, second = (on(), HOST) if to_host else (HOST, on())
    save = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)
    torch.manual_seed(0)
    optimizer = type(OPTIMIZER)(OPTIMIZER.func, **LOCAL, foreach=False)
    fit(
        build(name, optimizer=optimizer),
        *(table(), 2),
        callbacks=[save],
        enable_checkpointing=True,
        **first,
    )
    resumed = build(name, optimizer=optimizer)
    quiet_trainer(max_epochs=4, **second).fit(resumed, table(), ckpt_path=tmp_path / "last.ckpt")
    assert_same(resumed, trained(name, HOST, rounds=4))


# -- several devices -------------------------------------------------------------------------------


class OnlyOnFirst(MLP):
    """Refuses the second device."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.index == 1:
            raise RuntimeError(f"never on {x.device}")
        return super().forward(x)


@NIGHTLY
def test_each_worker_has_a_device_of_its_own() -> None:
    """As many workers as devices by default; the second trains on the second device."""
    sessions, failures = [], []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            sessions.append(pl_module._session)

        def on_client_failed(self, trainer: Any, pl_module: Any, failure: Any, _: int) -> None:
            failures.append(failure)

    model = FedAvg(OnlyOnFirst(4, [5], 3), engine=LocalEngine(), optimizer=OPTIMIZER)
    fit(model, table(), 1, callbacks=[Look()], **on(0))
    assert isinstance(sessions[0], PoolSession)
    assert 1 <= len(failures) <= 2 and len(failures) + len(model.results.reports) == 3
    assert all(isinstance(f, ClientFailure) and "never on sim:1" in f.reason for f in failures)


@NIGHTLY
def test_processes_that_read_samples_do_not_touch_the_device() -> None:
    """A fork of a process that uses a device is refused by it."""
    states = []
    for where, readers, workers in ((HOST, 0, 1), (on(), 1, 1), (on(), 1, 2)):
        settings: dict[str, Any] = {"num_clients": 4, "batch_size": 16, "loader_workers": readers}
        data = FederatedData.from_dataset(Points(), **settings)
        model = FedAvg(linear(4, 2), engine=LocalEngine(workers), optimizer=OPTIMIZER)
        fit(model, data, 2, **where)
        assert not model.results.failures
        states.append(on_host(model.global_state()))
    assert same(states[0], states[1]) and same(states[0], states[2])


# -- random numbers --------------------------------------------------------------------------------


def draws() -> list[Tensor]:
    return [torch.rand(3, device=where).cpu() for where in ("cpu", "sim:0", "sim:1")]


def test_generators_are_seeded_inside_and_restored_outside() -> None:
    torch.manual_seed(5)
    torch.rand(2, device="sim:1")  # so that the three are in three states
    module: Any = torch.get_device_module("sim")
    before = [torch.get_rng_state(), *(module.get_rng_state(index) for index in (0, 1))]
    expected = torch.rand(3, generator=torch.Generator().manual_seed(9))
    with seeded(9):
        assert all(torch.equal(drawn, expected) for drawn in draws())
    with pytest.raises(InterruptedError), seeded(9):
        draws()
        raise InterruptedError
    after = [torch.get_rng_state(), *(module.get_rng_state(index) for index in (0, 1))]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


UNUSED = """
import os
import torch
from fedgkd_pl.seeds import seeded

with seeded(3):
    torch.rand(2)
assert not torch.sim.is_initialized(), "a CPU worker would take a GPU's memory"
torch.ones(1, device="sim")
child = os.fork()
if child == 0:  # where the device cannot be used, nor seeded
    with seeded(3):
        torch.rand(2)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@NIGHTLY
def test_a_device_that_is_not_in_use_is_left_alone(tmp_path: Path) -> None:
    done = script(UNUSED, tmp_path)
    assert done.returncode == 0, done.stderr


# -- other devices' limits -------------------------------------------------------------------------


@NIGHTLY
@pytest.mark.parametrize("name", CLASSES)
def test_every_method_trains_without_float64(name: str) -> None:
    """As on Apple's devices: what is summed in double precision is summed on the host."""
    with sim.without_double():
        trained(name, on(), rounds=2)
