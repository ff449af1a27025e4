"""Stock Lightning: the Trainer, its callbacks, its counters, its checkpoints."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fedgkd_pl import Digits, FedAvg, FedGKD, LocalEngine
from fedgkd_pl.errors import SettingError
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch.amp import GradScaler
from torch.optim import SGD

from tests.conftest import Table, fit, linear, quiet_trainer, same

LOCAL: dict[str, Any] = {
    "optimizer": partial(SGD, lr=0.1, momentum=0.9),
    "engine": LocalEngine(workers=1),
}


def table(**kwargs: Any) -> Table:
    return Table(**({"sizes": (8, 5, 7, 6), "val_fraction": 0.1, "participation": 0.5} | kwargs))


def test_model_checkpoint_keeps_the_best_round(tmp_path: Path) -> None:
    seen: list[float] = []

    class Watch(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(float(trainer.callback_metrics["val/loss"]))

    best = ModelCheckpoint(tmp_path, monitor="val/loss", mode="min", filename="{epoch}")
    callbacks = [Watch(), best]
    fit(FedAvg(linear(), **LOCAL), table(), 5, callbacks=callbacks, enable_checkpointing=True)
    assert len(seen) == 5
    assert best.best_model_score == pytest.approx(min(seen))
    assert Path(best.best_model_path).name == f"epoch={seen.index(min(seen))}.ckpt"


@pytest.mark.parametrize("when", ["validation end", "epoch end"])
@pytest.mark.parametrize("method", [FedAvg, partial(FedGKD, gamma=1.0, buffer_size=3)])
def test_resume_is_exact(when: str, method: Any, tmp_path: Path) -> None:
    """Six rounds, or three and then three more from either of Lightning's two saving points."""

    def model() -> FedAvg:
        server = partial(SGD, lr=1.0, momentum=0.5)
        built: FedAvg = method(linear(), server_optimizer=server, **LOCAL)
        return built

    whole, first, second = model(), model(), model()
    fit(whole, table(), 6)
    save = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=when == "epoch end")
    fit(first, table(), 3, callbacks=[save], enable_checkpointing=True)
    trainer = quiet_trainer(max_epochs=6)
    trainer.fit(second, table(), ckpt_path=tmp_path / "last.ckpt")
    assert trainer.global_step == trainer.current_epoch == 6
    assert same(whole.net.state_dict(), second.net.state_dict())
    assert not same(whole.net.state_dict(), first.net.state_dict())
    assert (whole.bytes_down, whole.bytes_up) == (second.bytes_down, second.bytes_up)


def test_validate_test_predict() -> None:
    data, model = table(), FedAvg(linear(), **LOCAL)
    trainer = fit(model, data, 1)
    validated = trainer.validate(model, data, verbose=False)[0]
    tested = trainer.test(model, data, verbose=False)[0]
    assert all(name.startswith("val/") for name in validated)
    assert all(name.startswith("test/") for name in tested)
    probabilities = torch.cat(trainer.predict(model, data))  # type: ignore[arg-type]
    x, y = torch.from_numpy(data.x[:6]), torch.from_numpy(data.y[:6])
    expected = model.net(x).softmax(1)
    torch.testing.assert_close(probabilities, expected.detach())
    assert tested["test/acc"] == pytest.approx((expected.argmax(1) == y).float().mean().item())
    loss = torch.nn.functional.cross_entropy(model.net(x), y).item()
    assert tested["test/loss"] == pytest.approx(loss, abs=1e-6)
    guess, f1s = expected.argmax(1), []  # per-class accuracy and macro F1 by counting
    for label in range(3):
        hit = int(((guess == label) & (y == label)).sum())
        truth, guessed = int((y == label).sum()), int((guess == label).sum())
        assert tested[f"test/class_acc/{label}"] == pytest.approx(hit / truth if truth else 0.0)
        if truth + guessed:
            f1s.append(2 * hit / (truth + guessed))
    assert tested["test/f1"] == pytest.approx(sum(f1s) / len(f1s))


def test_clients_of_every_fit_inherit_precision_loss_scale_and_clipping() -> None:
    settings: list[Any] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            session = pl_module._session
            client, scaler = session.trainer.trainer, session.job.precision.scaler
            settings.append((client.precision, client.gradient_clip_val, scaler.get_scale()))

    plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=8.0))
    flags: dict[str, Any] = {"plugins": [plugin], "callbacks": [Look()], "gradient_clip_val": 0.3}
    trainer = quiet_trainer(max_epochs=1, **flags)
    for rounds in (1, 2):
        trainer.fit_loop.max_epochs = rounds
        trainer.fit(FedAvg(linear(), **LOCAL), datamodule=table())
    assert trainer.gradient_clip_val == 0.3  # it is still the Trainer's
    assert settings == [("16-mixed", 0.3, 8.0)] * 2


def test_half_precision_leaves_the_servers_step_alone() -> None:
    """The loss scale belongs to a backward pass, and the server has none."""
    half, single = FedAvg(linear(), **LOCAL), FedAvg(linear(), **LOCAL)
    fit(half, table(), 2, plugins=[MixedPrecision("16-mixed", "cpu")])
    fit(single, table(), 2)
    for name, value in single.net.state_dict().items():
        torch.testing.assert_close(half.net.state_dict()[name], value, atol=0.05, rtol=0)


class Twice(Precision):
    """An own plugin: gradients are those of twice the loss."""

    precision: Any = "32-true"

    def pre_backward(self, tensor: Any, module: Any) -> Any:
        return super().pre_backward(2 * tensor, module)


class OwnCPU(CPUAccelerator):
    """An own accelerator that no registry of Lightning's knows."""


@pytest.mark.parametrize("workers", [1, 2])
def test_own_plugins_and_accelerators_reach_the_clients(workers: int) -> None:
    """Twice the loss is twice the rate."""
    own = FedAvg(linear(), engine=LocalEngine(workers), optimizer=partial(SGD, lr=0.05))
    fit(own, table(), 2, plugins=[Twice()])
    plain = FedAvg(linear(), optimizer=partial(SGD, lr=0.1))
    fit(plain, table(), 2)
    assert same(own.net.state_dict(), plain.net.state_dict())


def test_a_second_fit_is_a_new_run() -> None:
    model = FedGKD(linear(), **LOCAL)
    start = {name: t.clone() for name, t in model.net.state_dict().items()}
    fit(model, table(), 2)
    first = {name: t.clone() for name, t in model.net.state_dict().items()}
    sent = model.bytes_down
    model.net.load_state_dict(start)
    fit(model, table(), 2)
    assert same(first, model.net.state_dict()) and model.bytes_down == sent


def test_other_data_is_refused() -> None:
    with pytest.raises(SettingError, match="FederatedDataModule"):
        quiet_trainer(max_epochs=1).fit(FedAvg(linear(), **LOCAL), [[0]])


def test_checkpoint_of_another_method_is_refused(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, save_last=True)
    fit(FedAvg(linear(), **LOCAL), table(), 1, callbacks=[save], enable_checkpointing=True)
    with pytest.raises(SettingError, match="written by FedAvg, this run is FedGKD"):
        quiet_trainer(max_epochs=2).fit(
            FedGKD(linear(), **LOCAL), table(), ckpt_path=tmp_path / "last.ckpt"
        )


def test_seed_of_seed_everything_is_taken() -> None:
    seed_everything(11, verbose=False)
    assert Digits().seed == 11
    assert Digits(seed=4).seed == 4
