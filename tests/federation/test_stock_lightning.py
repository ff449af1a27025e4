"""Every stock callback and Trainer flag: it works per round, or is refused in one line."""

import inspect
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fedgkd_pl import (
    IID,
    MLP,
    FedAUX,
    FedAvg,
    FedDF,
    FederatedCallback,
    HeldOut,
    LocalEngine,
    SimCLR,
    read_checkpoint,
    read_run,
)
from fedgkd_pl.errors import SettingError
from fedgkd_pl.federation.checks import FLAGS
from lightning.pytorch import Callback, Trainer, callbacks
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from tests.conftest import Table, fit, linear, quiet_trainer, same

LOCAL: dict[str, Any] = {"optimizer": partial(SGD, lr=0.1), "engine": LocalEngine(workers=1)}
BASES = {"BasePredictionWriter", "ProgressBar", "WeightAveraging"}  # of others
# name → its arguments
WORKS: dict[str, dict[str, Any]] = {name: {} for name in ("Callback", "Checkpoint")}
WORKS |= {name: {} for name in ("LambdaCallback", "LearningRateMonitor", "ModelSummary")}
WORKS |= {name: {} for name in ("RichModelSummary", "RichProgressBar", "TQDMProgressBar")}
WORKS |= {"DeviceStatsMonitor": {"cpu_stats": False}, "EMAWeightAveraging": {"decay": 0.0}}
WORKS |= {"EarlyStopping": {"monitor": "val/loss"}, "ModelCheckpoint": {"monitor": "val/loss"}}
WORKS |= {"OnExceptionCheckpoint": {"dirpath": "."}, "ThroughputMonitor": {"batch_size_fn": len}}
WORKS |= {"Timer": {"duration": timedelta(hours=1)}}
REFUSED: dict[str, dict[str, Any]] = {
    "BackboneFinetuning": {},
    "BaseFinetuning": {},
    "BatchSizeFinder": {},
    "GradientAccumulationScheduler": {"scheduling": {0: 2}},
    "LearningRateFinder": {},
    "ModelPruning": {"pruning_fn": "l1_unstructured", "amount": 0.5},
    "StochasticWeightAveraging": {"swa_lrs": 1e-2},
    "SpikeDetection": {},
}


def table(**kwargs: Any) -> Table:
    return Table(**({"sizes": (8, 5, 7), "val_fraction": 0.1} | kwargs))


def weights(**flags: Any) -> dict[str, torch.Tensor]:
    model = FedAvg(linear(), **LOCAL)
    fit(model, table(), flags.pop("rounds", 3), **flags)
    return model.global_state()


@pytest.fixture(scope="module")
def plain() -> dict[str, torch.Tensor]:
    return weights()


@pytest.mark.parametrize("name", WORKS)
def test_a_callback_that_works_changes_no_weight(
    name: str, plain: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    writes = "Checkpoint" in name
    bar = name.endswith("ProgressBar")
    flags = {"enable_checkpointing": writes, "enable_progress_bar": bar}
    logger = CSVLogger(tmp_path) if "Monitor" in name else False
    callback = getattr(callbacks, name)(**WORKS[name])
    assert same(weights(callbacks=[callback], logger=logger, **flags), plain)


@pytest.mark.parametrize("name", REFUSED)
def test_a_callback_that_cannot_work_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match=f"callbacks: {name}") as refused:
        weights(callbacks=[getattr(callbacks, name)(**REFUSED[name])])
    assert "\n" not in str(refused.value)
    if name == "StochasticWeightAveraging":
        assert "EMAWeightAveraging" in str(refused.value)


class MeanOfRounds(WeightAveraging):
    """The plain mean of the models after every round."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None


def test_weight_averaging_ends_with_the_mean_of_the_rounds() -> None:
    """Rounds 1 to 3 by hand: WeightAveraging's own first entry is the first update's model."""
    seen: list[dict[str, torch.Tensor]] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append({n: t.clone() for n, t in pl_module.global_state().items()})

    found = weights(callbacks=[Watch(), MeanOfRounds()])
    for name, value in found.items():
        mean = torch.stack([state[name] for state in seen]).mean(0)
        torch.testing.assert_close(value, mean, atol=1e-6, rtol=0)


# flag → a value that changes nothing
HARMLESS: dict[str, Any] = {"accumulate_grad_batches": 1, "barebones": False, "benchmark": True}
HARMLESS |= {"check_val_every_n_epoch": 2, "detect_anomaly": True, "deterministic": True}
HARMLESS |= {"gradient_clip_algorithm": "norm", "gradient_clip_val": 1e6, "inference_mode": False}
HARMLESS |= {"limit_predict_batches": 1, "limit_test_batches": 1, "limit_train_batches": 7}
HARMLESS |= {"limit_val_batches": 0, "log_every_n_steps": 7, "max_steps": 3, "min_steps": 1}
HARMLESS |= {"max_time": "00:01:00:00", "min_epochs": 1, "num_sanity_val_steps": 1}
HARMLESS |= {"overfit_batches": 0.0, "profiler": "simple", "sync_batchnorm": True}
HARMLESS |= {"reload_dataloaders_every_n_epochs": 1, "use_distributed_sampler": True}
HARMLESS |= {"val_check_interval": 1.0}
BAD = [("accumulate_grad_batches", 2), ("limit_train_batches", 0), ("limit_train_batches", 0.1)]
BAD += [("max_steps", 0), ("overfit_batches", 1), ("overfit_batches", 0.5)]
ELSEWHERE = {  # where it runs and what is written: tests of the command line, devices, resumes
    *("accelerator", "strategy", "devices", "num_nodes", "precision", "logger", "callbacks"),
    *("fast_dev_run", "max_epochs", "enable_checkpointing", "enable_progress_bar", "plugins"),
    *("enable_model_summary", "default_root_dir", "enable_autolog_hparams", "model_registry"),
}


def test_no_flag_and_no_stock_callback_is_forgotten() -> None:
    flags = {*inspect.signature(Trainer.__init__).parameters} - {"self"}
    assert flags == {*HARMLESS} | ELSEWHERE
    assert {*FLAGS} <= {*HARMLESS}
    assert {*WORKS, *REFUSED, *BASES} == set(callbacks.__all__)


@pytest.mark.parametrize("flag", HARMLESS)
def test_a_flag_that_works_changes_no_weight(
    flag: str, plain: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    try:
        assert same(weights(**{flag: HARMLESS[flag]}), plain)
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


@pytest.mark.parametrize(("flag", "value"), BAD)
def test_a_flag_that_cannot_work_is_refused(
    flag: str, value: Any, run: Any, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=flag):
        weights(**{flag: value})
    words = ("fit", "--config", "smoke.yaml", f"--trainer.{flag}", str(value))
    code, _, errors = run(*words)
    assert code == 2 and errors.startswith(f"error: trainer.{flag}: "), errors
    assert len(errors.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_the_last_round_is_always_tested(run: Any, tmp_path: Path) -> None:
    """Every second round of three: the first number is none, the last the last model's."""
    short = ("--config", "smoke.yaml", "--rounds", "3", "--model.engine.workers", "1")
    assert run("fit", *short, "--name", "a", "--trainer.check_val_every_n_epoch", "2")[0] == 0
    assert run("fit", *short, "--name", "b")[0] == 0
    a, b = (read_run(tmp_path / f"runs/{name}/version_0") for name in "ab")
    some, every = (each.by_round("test/acc").to_dict() for each in (a, b))
    assert some == {2: every[2], 3: every[3]} and len(every) == 3
    assert a.summary["final_test_acc"] == every[3]


@pytest.mark.parametrize("every", [1, 2])
def test_checkpoints_by_steps_are_named_by_their_round(tmp_path: Path, every: int) -> None:
    saver = ModelCheckpoint(tmp_path, "round{step}", save_top_k=-1, every_n_train_steps=every)
    saver.auto_insert_metric_name = False
    model = FedAvg(linear(), **LOCAL)
    fit(model, table(), 4, callbacks=[saver], enable_checkpointing=True)
    names = sorted(file.name for file in tmp_path.glob("*.ckpt"))
    assert names == [f"round{n}.ckpt" for n in range(every, 5, every)]
    for name in names:
        assert read_checkpoint(tmp_path / name)["global_step"] == int(name[5])


class Fails(FederatedCallback):
    """An error in a round: in the server's own training, of a client's answer, or at its end."""

    def __init__(self, where: str, number: int = 2) -> None:
        self.where, self.number = where, number

    def at(self, where: str, server: Any) -> None:
        if (self.where, self.number) == (where, server.round):
            raise ArithmeticError("a user's fault")

    def on_server_step(self, trainer: Any, pl_module: Any, step: int, total: int) -> None:
        if step == 2:
            self.at("server", pl_module)

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any, cohort_size: int) -> None:
        self.at("client", pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.at("end", pl_module)


def distilled(rounds: int = 3, **flags: Any) -> FedDF:
    data = Table(sizes=(20, 20), public=HeldOut(0.25), partition=IID())
    model, start = FedDF(linear(), distil_steps=4, **LOCAL), flags.pop("ckpt_path", None)
    quiet_trainer(max_epochs=rounds, **flags).fit(model, data, ckpt_path=start)
    return model


@pytest.mark.parametrize("where", ["client", "server", "end"])
def test_what_an_exception_saves_is_never_half_a_round(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever there is afterwards goes on to the same bits."""
    keep = ModelCheckpoint(tmp_path, "{step}", save_last=True, save_on_exception=True)
    keep.CHECKPOINT_NAME_LAST = "last-{step}"
    saved = [keep, callbacks.OnExceptionCheckpoint(tmp_path, "e")]
    with pytest.raises(ArithmeticError):
        distilled(callbacks=[Fails(where), *saved], enable_checkpointing=True)
    files = {file.name for file in tmp_path.glob("*.ckpt")}
    half = where == "server"
    if half:
        assert files == {"step=1.ckpt", "last-step=1.ckpt"}
        told = [line for line in caplog.messages if "is not written" in line]
        assert len(told) == 1 and told[0].startswith("round 2 is half done: ")
        assert told[0].endswith(f"the last commit is {tmp_path / 'last-step=1.ckpt'}")
    else:
        assert "e.ckpt" in files and "is not written" not in caplog.text
    whole = distilled().global_state()
    for name in files:
        assert same(whole, distilled(ckpt_path=tmp_path / name).global_state()), name


@pytest.mark.parametrize("where", ["server", "client"])
def test_pretraining_is_not_saved_before_the_first_round(where: str, tmp_path: Path) -> None:
    """Which pre-trains again when it goes on."""
    data = Table(sizes=(20, 20), public=HeldOut(0.25), partition=IID())
    model = FedAUX(MLP(4, [5], 3), pretraining=SimCLR(epochs=2, batch_size=4), **LOCAL)
    saved = [Fails(where, 1), callbacks.OnExceptionCheckpoint(tmp_path, "e")]
    with pytest.raises(ArithmeticError):
        fit(model, data, 2, callbacks=saved, enable_checkpointing=True)
    assert not list(tmp_path.iterdir())


def test_a_score_of_the_round_before_names_no_checkpoint(tmp_path: Path) -> None:
    for late in ({"every_n_train_steps": 1}, {"train_time_interval": timedelta(seconds=1)}):
        saver = ModelCheckpoint(tmp_path, monitor="val/acc", **late)
        with pytest.raises(SettingError, match="every_n_epochs"):
            weights(callbacks=[saver], enable_checkpointing=True)


def test_a_scheduler_that_clients_cannot_step_is_refused() -> None:
    plateau = FedAvg(linear(), scheduler=ReduceLROnPlateau, **LOCAL)
    with pytest.raises(SettingError, match="scheduler: needs a score"):
        fit(plateau, table(), 1)
    fit(FedAvg(linear(), scheduler=partial(StepLR, step_size=1), **LOCAL), table(), 1)


def test_a_broken_server_step_ends_the_run(run: Any, tmp_path: Path) -> None:
    words = ("fit", "--config", "smoke.yaml", "--model.engine.workers", "1", "--rounds", "2")
    server = ("--model.server_optimizer", "torch.optim.SGD", "--model.server_optimizer.lr")
    code, _, errors = run(*words, *server, "1e38")
    assert code == 3 and ("loss is" in errors or "NaN or Inf" in errors), errors
    assert len([line for line in errors.splitlines() if line.startswith("error:")]) == 1
