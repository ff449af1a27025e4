"""What goes wrong on an ordinary day, without an enemy."""

import json
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fedgkd_pl import Digits, FedAvg, FedGKD, FedGMT, LocalEngine, RunFiles
from fedgkd_pl.errors import RunFailed
from fedgkd_pl.federation.message import decode_state, encode_state
from fedgkd_pl.storage.checkpoint import StateStore
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn, optim
from torch.optim import SGD

from tests.conftest import Table, fit, linear, quiet_trainer, same, script
from tests.support.lit import LitClassifier
from tests.support.runs import QUICK, Run, version

HERE: dict[str, Any] = {"engine": LocalEngine(1)}


class AdamClassifier(LitClassifier):
    def configure_optimizers(self) -> Any:
        return optim.Adam(self.parameters(), lr=0.001)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (None, "Adam(lr=0.001)"),
        (partial(SGD, lr=0.05), "SGD(lr=0.05)"),
        (partial(SGD, lr=0.01, momentum=0.9), "SGD(lr=0.01, momentum=0.9)"),
    ],
)
def test_a_modules_optimizer_gives_way_to_one_that_is_given(given: Any, used: str) -> None:
    model = FedAvg(module=AdamClassifier(), optimizer=given, **HERE)
    fit(model, Digits(num_clients=4, participation=0.5, batch_size=100, seed=0), 1)
    assert model.client_optimizer == used
    made = model.client().configure_optimizers()
    assert type(made).__name__ == used.partition("(")[0]


def test_a_net_without_an_optimizer_has_sgd_and_the_run_says_so(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("fit", *QUICK, "--rounds", "1", "--model.optimizer", "null")
    assert code == 0 and out.splitlines()[0].endswith(", clients' SGD(lr=0.05)")
    summary = json.loads((version(tmp_path) / "summary.json").read_text())
    assert summary["client_optimizer"] == "SGD(lr=0.05)"


def test_names_keep_their_order_in_a_blob() -> None:
    """Sums over a state depend on it: safetensors gives names in the order of a hash map."""
    names = [f"{n * 7919 % 101}.weight" for n in range(100)]
    state = {name: torch.zeros(1) for name in names}
    assert list(decode_state(encode_state(state))) == names
    store = StateStore()
    store[0] = state
    assert list(store[0]) == sorted(names)


class Leaving(nn.Linear):
    """Calls ``sys.exit`` where it is trained."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            sys.exit(0)
        return super().forward(x)


def test_a_client_that_calls_exit_is_left_out() -> None:
    model = FedAvg(Leaving(4, 3), **HERE)
    with pytest.raises(RunFailed, match=r"rounds in a row failed.* called sys.exit\(0\)"):
        fit(model, Table(sizes=(4, 4), batch_size=4), 5)


def test_an_exit_on_the_server_is_a_failed_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    text = "import sys\nfrom fedgkd_pl import MLP\n\nclass Gone(MLP):\n"
    text += "    def forward(self, x):\n        sys.exit(0)\n"
    (tmp_path / "gone.py").write_text(text)
    code, _, err = run("fit", "--import", "gone", *QUICK, "--model.net", "gone.Gone")
    assert code == 3 and "called sys.exit(0)" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("method", [partial(FedGKD, ema=0.9), partial(FedGMT, alpha=0.9)])
def test_an_average_that_starts_at_w0_counts_it_for_all_rounds_before(method: Any) -> None:
    """e_1 = 0.9 w_0 + 0.1 w_1, in both methods."""
    model = method(linear(), teach_from_start=True, **HERE)
    start = {name: tensor.clone() for name, tensor in model.global_state().items()}
    fit(model, Table(sizes=(4, 4), batch_size=4), 1)
    average = model.buffer if isinstance(model, FedGKD) else model.average
    for name, tensor in average.mean().items():
        expected = 0.9 * start[name].double() + 0.1 * model.global_state()[name].double()
        torch.testing.assert_close(tensor.double(), expected, atol=1e-7, rtol=0)


def test_a_fused_optimizer_may_be_clipped_in_half_precision() -> None:
    """Lightning refuses it by a mark that torch leaves on fused optimizers."""
    results = []
    for fused in (True, None):
        torch.manual_seed(0)
        model = FedAvg(linear(), optimizer=partial(SGD, lr=0.1, fused=fused), **HERE)
        trainer = quiet_trainer(max_epochs=2, precision="bf16-mixed", gradient_clip_val=0.01)
        trainer.fit(model, Table(sizes=(4, 4), batch_size=4))
        assert not model.failed_rounds and model.report["client/failed"] == 0
        results.append(model.global_state())
    assert same(*results)


def test_a_pool_has_no_more_workers_than_clients(caplog: pytest.LogCaptureFixture) -> None:
    model = FedAvg(linear(), engine=LocalEngine(workers=64))
    data = Table(sizes=(4, 4, 4), batch_size=4)
    found: list[int] = []

    class Count(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            found.append(len(pl_module._session.workers))

    quiet_trainer(max_epochs=1, callbacks=[Count()]).fit(model, data)
    assert found == [3]


@pytest.mark.parametrize("monitor", ["val/ac", "val_acc", "test_loss"])
def test_a_wrong_monitor_names_its_callback(run: Run, monitor: str) -> None:
    words = ("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor", monitor)
    code, _, err = run("fit", *QUICK, *words)
    assert code == 2
    assert err.startswith("error: trainer.callbacks.EarlyStopping.monitor: no such score: val/acc")


def test_checkpoints_lie_in_the_folder_of_their_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        trainer = Trainer(
            max_epochs=1,
            logger=False,
            default_root_dir=tmp_path,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[RunFiles(str(tmp_path / name)), ModelCheckpoint()],
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            trainer.fit(FedAvg(linear(), **HERE), Table(sizes=(4, 4), batch_size=4))
        assert len(list((tmp_path / name / "checkpoints").glob("*.ckpt"))) == 1
    assert not (tmp_path / "checkpoints").exists()


def test_checkpoints_may_be_a_link_to_another_disk(run: Run, tmp_path: Path) -> None:
    assert run("fit", *QUICK, "--rounds", "1")[0] == 0
    folder = version(tmp_path)
    (tmp_path / "scratch").mkdir()
    (folder / "checkpoints").rename(tmp_path / "scratch" / "kept")
    (folder / "checkpoints").symlink_to(tmp_path / "scratch" / "kept")
    assert run("fit", "--resume", str(folder), "--rounds", "2")[0] == 0
    assert (folder / "checkpoints").is_symlink()
    assert (tmp_path / "scratch" / "kept" / "last.ckpt").exists()


HEARD = """
import sys
from fedgkd_pl.processes.command import run_command

heard, write = [], sys.stdout.write
sys.stdout.write = lambda text: heard.append(text) or write(text)  # as flwr's ServerApp has it
run_command(lambda: print("round 1") or 0)
assert "round 1" in heard, heard
"""


def test_who_listens_to_a_command_hears_it(tmp_path: Path) -> None:
    done = script(HEARD, tmp_path)
    assert done.returncode == 0, done.stderr
