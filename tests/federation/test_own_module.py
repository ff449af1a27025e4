"""LightningModules of the user's, as the net of a method."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fedgkd_pl import (
    SCAFFOLD,
    Digits,
    FedAvg,
    FedGen,
    FedGKD,
    FedGKDVote,
    FedGMT,
    FedLSD,
    FedNTD,
    FedProx,
    Forgetting,
    LocalEngine,
    LocalModels,
    read_run,
)
from fedgkd_pl.errors import SettingError
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from tests.conftest import Table, fit, linear, quiet_trainer, same
from tests.support.lit import LitAutoEncoder, LitClassifier
from tests.support.runs import Run as Call

LIT = ("--import", "tests.support.lit", "--config", "lit.yaml")
HERE: dict[str, Any] = {"engine": LocalEngine(1)}


def digits(**kwargs: Any) -> Digits:
    return Digits(**{"num_clients": 4, "participation": 0.5, "batch_size": 100, "seed": 0} | kwargs)


def classifier() -> LitClassifier:
    seed_everything(0, verbose=False)
    return LitClassifier()


class Lit(LightningModule):
    """A module around a linear net, with what a test adds."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = linear() if net is None else net

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])


class Shown(Lit):
    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        FedAvg,
        partial(FedProx, mu=0.5),
        partial(FedGKD, gamma=2.0),
        partial(FedGKDVote, lam=1.0),
        FedLSD,
        FedNTD,
        FedGMT,
        SCAFFOLD,
    ],
)
def test_a_tutorials_module_trains_as_its_net_does(method: Callable[..., FedAvg]) -> None:
    """As the plain net, to the bit, with the same optimizer, scheduler and loss."""
    ours = method(module=classifier(), local_epochs=2, **HERE)
    fit(ours, digits(), 3)
    plain = method(
        classifier().model,
        local_epochs=2,
        optimizer=partial(SGD, lr=0.1, momentum=0.9, fused=False),
        scheduler=partial(StepLR, step_size=1, gamma=0.5),
        **HERE,
    )
    fit(plain, digits(), 3)
    trained, expected = ours.net.model.state_dict(), plain.net.state_dict()  # type: ignore[union-attr]
    if isinstance(ours, FedGKDVote):  # whose weights are the module's own validation losses
        for name, tensor in expected.items():
            torch.testing.assert_close(trained[name], tensor)
    else:
        assert same(trained, expected)
    for name in ("val/acc", "val/f1", "test/acc", "client/acc_mean"):
        assert ours.report[name] == pytest.approx(plain.report[name], abs=1e-6), name
    assert ours.report["client/task_mean"] == pytest.approx(plain.report["client/ce_mean"])


def test_an_autoencoder_trains_in_ten_lines() -> None:
    seed_everything(0, verbose=False)
    encoder = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))
    decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 64))
    for method in (FedAvg, FedProx):
        model = method(module=LitAutoEncoder(encoder, decoder), local_epochs=2, **HERE)
        fit(model, digits(), 2)
        x = model.datamodule.test.inputs.float() / 16
        error = F.mse_loss(decoder(encoder(x.flatten(1))), x.flatten(1))
        assert model.report["test/loss"] == pytest.approx(error.item(), rel=1e-4)
        assert "test/acc" not in model.report
    with pytest.raises(
        SettingError, match=r"FedGKD distils logits, .*LitAutoEncoder.*forward\(x\)"
    ):
        fit(FedGKD(module=LitAutoEncoder(encoder, decoder), **HERE), digits(), 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_and_a_resume_change_nothing(workers: int, tmp_path: Path) -> None:
    whole = FedGKD(module=classifier(), engine=LocalEngine(1))
    fit(whole, digits(), 3)
    first = FedGKD(module=classifier(), engine=LocalEngine(workers))
    fit(first, digits(), 2).save_checkpoint(tmp_path / "two.ckpt")
    second = FedGKD(module=classifier(), engine=LocalEngine(workers))
    trainer = quiet_trainer(max_epochs=3)
    trainer.fit(second, digits(), ckpt_path=str(tmp_path / "two.ckpt"))
    assert same(second.global_state(), whole.global_state())


def test_hooks_and_steps_are_called_and_may_ask_for_their_trainer() -> None:
    calls: list[str] = []

    class Hooked(Shown):
        def on_train_epoch_start(self) -> None:
            calls.append("start")
            self.rates: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.rates.append(self.optimizers().param_groups[0]["lr"])
            self.log("train_rate/x", self.rates[-1] + self.trainer.max_epochs)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            calls.append(f"batch{batch_idx}")

        def on_train_epoch_end(self) -> None:
            calls.append(f"end{self.current_epoch}")

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val/round", float(self.trainer.current_epoch + self.trainer.max_epochs))

    model = FedAvg(module=Hooked(), local_epochs=2, optimizer=partial(SGD, lr=0.5), **HERE)
    fit(model, Table((150,), val_fraction=0.1), 1)
    assert calls[:3] == ["start", "batch0", "end0"]  # the trial on two samples, before the run
    assert calls[3:] == ["start", "batch0", "batch1", "end0", "start", "batch0", "batch1", "end1"]
    assert model.report["client/rate_x_mean"] == 2.5 and model.report["val/round"] == 1


def test_a_method_that_ignores_the_modules_loss_fails() -> None:
    class Deaf(FedAvg):
        def client(self, number: int = 0) -> Any:
            client = super().client(number)
            client.objective = lambda x, y, _: (client.net(x).mean(), {})  # type: ignore[assignment]
            return client

    model = Deaf(module=Shown(), max_failed_rounds=1, **HERE)
    with pytest.raises(Exception, match="objective does not use task_loss"):
        fit(model, Table(), 1)


# -- evaluation ------------------------------------------------------------------------------------


def test_its_own_metrics_are_measured_by_split() -> None:
    """Validation and test are measured one after the other by one metric of the module."""
    model = FedAvg(module=classifier(), **HERE)
    fit(model, digits(eval_batch_size=50), 1)
    data, net = model.datamodule, model.net.eval()
    for split in ("val", "test"):
        examples = getattr(data, split)
        with torch.no_grad():
            logits = net(examples.transform(examples.inputs, None))
        right = (logits.argmax(1) == examples.targets).float().mean()
        top = logits.topk(2).values
        assert model.report[f"{split}/acc"] == pytest.approx(right.item())
        loss = F.cross_entropy(logits, examples.targets)
        assert model.report[f"{split}/loss"] == pytest.approx(loss.item(), rel=1e-5)
        margin = (top[:, 0] - top[:, 1]).mean()
        assert model.report[f"{split}/margin"] == pytest.approx(margin.item(), rel=1e-5)
    assert data.val.targets.shape != data.test.targets.shape


def test_the_command_line_trains_reads_and_exports_a_module(run: Call, tmp_path: Path) -> None:
    config = """
rounds: 2
model:
  class_path: FedGKD
  init_args:
    module: {class_path: tests.support.lit.LitClassifier, init_args: {hidden_size: 8}}
    engine: {class_path: LocalEngine, init_args: {workers: 1}}
data: {class_path: Digits, init_args: {num_clients: 4}}
trainer:
  callbacks:
    - {class_path: ModelExport, init_args: {formats: [torch_export, torchscript]}}
"""
    (tmp_path / "lit.yaml").write_text(config)
    code, out, err = run("fit", *LIT)
    assert code == 0, err
    folder = tmp_path / "runs/fedgkd/version_0"
    module = read_run(folder).net(imports=["tests.support.lit"])
    data = digits()
    data.setup()
    test = data.test
    x = test.transform(test.inputs, None)
    assert isinstance(module, LitClassifier)
    right = (module(x).argmax(1) == test.targets).float().mean().item()
    assert f"final {right:.4f}" in out
    exported = torch.export.load(folder / "model.pt2").module()
    traced = torch.jit.load(folder / "model.torchscript.pt")
    assert torch.equal(exported(x), module(x)) and torch.equal(traced(x), module(x))
    code, _, err = run("test", *LIT, "--ckpt_path", str(folder))
    assert code == 0, err


# -- what is refused -------------------------------------------------------------------------------


def probabilities(self: Any, batch: Any, batch_idx: int) -> Any:
    return F.nll_loss(self(batch[0]).log(), batch[1])


def two_optimizers(self: Any) -> Any:
    return [SGD(self.parameters(), 0.1), SGD(self.parameters(), 0.1)]


def plateau(self: Any) -> Any:
    optimizer = SGD(self.parameters(), 0.1)
    return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer), "monitor": "x"}


def fails(self: Any, batch: Any, batch_idx: int) -> Any:
    raise IndexError("no such column")


def logs_max(self: Any, batch: Any, batch_idx: int) -> Any:
    self.log("train_max", 1.0, reduce_fx="max")
    return Lit.training_step(self, batch, batch_idx)


def nothing(self: Any, *args: Any) -> None: ...


PROBABILITIES = {"forward": lambda self, x: self.net(x).softmax(1), "training_step": probabilities}
NO_LOGITS = {"forward": lambda self, x: self.net(x)[:, :2], "training_step": Lit.training_step}
REFUSED: dict[str, tuple[Any, ...]] = {  # by what the error says
    "module: A optimizes by hand": (FedAvg, Lit, {"automatic_optimization": False}),
    "module: A.optimizer_step has no place": (FedAvg, Lit, {"optimizer_step": nothing}),
    "module: a step of A fails .*multiple optimizers": (
        *(FedAvg, Lit),
        {"configure_optimizers": two_optimizers},
    ),
    "module: a step of A fails": (FedAvg, Lit, {"configure_optimizers": plateau}),
    "module: A.setup is not called": (FedAvg, Lit, {"setup": nothing}),
    "A.on_after_batch_transfer has no": (FedAvg, Lit, {"on_after_batch_transfer": nothing}),
    r"module: FedGKD distils logits, .* give it forward\(x\)": (FedGKD, Lit, {}),
    "probabilities already": (FedGKD, Shown, PROBABILITIES),
    r"are \(2, 2\), not logits of 3 classes": (FedGKD, Shown, NO_LOGITS),
    "a step of A fails on table.*no such column": (FedAvg, Lit, {"training_step": fails}),
    "training_step must return a loss": (FedAvg, Lit, {"training_step": nothing}),
    "validation_step of A fails on table": (FedAvg, Lit, {"validation_step": fails}),
    r"log\('train_max'\) by max: only means": (FedAvg, Lit, {"training_step": logs_max}),
    "compile: is for nets": (partial(FedAvg, compile=True), Lit, {}),
    "module: takes the place of net": (lambda module: FedAvg(linear(), module=module), Lit, {}),
    "net: missing": (lambda module: FedAvg(), Lit, {}),
    "module: must have a training_step": (FedAvg, LightningModule, {}),
    "FedGen": (lambda module: FedGen(Shown(nn.Sequential())), Lit, {}),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_federated_is_refused(text: str) -> None:
    method, base, members = REFUSED[text]
    with pytest.raises(SettingError, match=text):
        fit(method(module=type("A", (base,), members)()), Table(), 1)


@pytest.mark.parametrize("callback", [LocalModels(), Forgetting()])
def test_callbacks_that_compare_classes_are_refused(callback: Any) -> None:
    with pytest.raises(SettingError, match=r"callbacks: .* needs the logits of classes"):
        fit(FedAvg(module=Lit(), **HERE), Table(), 1, callbacks=[callback])
