"""No table misleads: significance, protocol, what is not shown, clients that diverge."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fedgkd_pl import FedAvg, LocalEngine, RunFiles
from fedgkd_pl.callbacks.divergence import Divergence
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import SGD

from tests.conftest import REPO, Table, fit, linear, quiet_trainer
from tests.faults import Fault, inject

Command = Callable[..., tuple[int, str, str]]

# -- clients that diverge ------------------------------------------------------------------------


def huge(lr: float = 1e12, engine: LocalEngine | None = None) -> FedAvg:
    """A linear model whose loss is ln 3 or so in round 1 and about the rate in round 2."""
    return FedAvg(
        linear(), local_steps=1, optimizer=partial(SGD, lr=lr), engine=engine or LocalEngine(1)
    )


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [r.getMessage() for r in caplog.records if r.name == "fedgkd_pl"]
    return [line for line in lines if "clients diverge" in line]


def summary_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loss_that_explodes_is_told_once(
    workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = huge(engine=LocalEngine(workers))
    files = RunFiles(str(tmp_path))
    fit(model, Table(), 4, callbacks=[files])
    assert files.rows[1]["client/loss_mean"] < 3 < 1e10 < files.rows[2]["client/loss_mean"]
    (line,) = told(caplog)
    assert line.startswith("round 2: clients diverge: the clients' mean loss is ")
    assert line.endswith("; try --trainer.gradient_clip_val 10 or a smaller learning rate")
    assert summary_of(tmp_path)["diverged_round"] == 2


def test_a_plain_trainer_tells_it_too_and_a_sound_run_says_nothing(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    fit(huge(), Table(), 2)  # no RunFiles
    assert len(told(caplog)) == 1
    caplog.clear()
    fit(huge(lr=1e8), Table(), 3, callbacks=[RunFiles(str(tmp_path))])  # grows by 1e8 only
    assert told(caplog) == [] and summary_of(tmp_path)["diverged_round"] is None


def test_a_first_round_that_explodes_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = FedAvg(linear(), local_steps=3, optimizer=partial(SGD, lr=1e12), engine=LocalEngine(1))
    fit(model, Table(), 1)
    assert told(caplog)[0].startswith("round 1: ")


@pytest.mark.parametrize("kind", ["nan", "inf", "loss"])
def test_a_client_left_out_as_not_finite_is_told(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = inject(huge(lr=0.1), [Fault(2, 1, kind), Fault(3, 0, kind)])
    fit(model, Table(), 3, callbacks=[RunFiles(str(tmp_path))])
    (line,) = told(caplog)
    assert line.startswith("round 2: clients diverge: of client 1, its "), line
    assert summary_of(tmp_path)["diverged_round"] == 2
    caplog.clear()
    other = inject(huge(lr=0.1), [Fault(2, 1, "raise"), Fault(3, 0, "shape")])
    fit(other, Table(), 3, callbacks=[RunFiles(str(tmp_path / "other"))])
    assert told(caplog) == [] and summary_of(tmp_path / "other")["diverged_round"] is None


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_resume_neither_repeats_nor_forgets_it(
    stop: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first loss and the round told travel in the checkpoint."""
    save = ModelCheckpoint(str(tmp_path), "{step}", save_top_k=-1)
    fit(huge(), Table(), stop, callbacks=[save, RunFiles(str(tmp_path))], enable_checkpointing=True)
    before = len(told(caplog))
    assert before == (stop >= 2)
    caplog.clear()
    model = huge()
    trainer = quiet_trainer(max_epochs=4, callbacks=[RunFiles(str(tmp_path / "on"))])
    trainer.fit(model, Table(), ckpt_path=str(tmp_path / f"step={stop}.ckpt"))
    assert len(told(caplog)) == 1 - before
    assert summary_of(tmp_path / "on")["diverged_round"] == 2


def test_the_first_loss_is_that_of_a_round_that_counted() -> None:
    """A round that changed nothing is no measure; losses below 1e-10 count as 1e-10."""

    class Server:
        def __init__(self, round: int, loss: float | None, failed: list[int]) -> None:
            self.round, self.failed_rounds = round, failed
            self.report = {} if loss is None else {"client/loss_mean": loss}

    def rounds(*losses: float | None, failed: tuple[int, ...] = ()) -> int | None:
        watch = Divergence()
        for number, loss in enumerate(losses, 1):
            watch.on_train_batch_end(None, Server(number, loss, list(failed)))  # type: ignore[arg-type]
        return watch.round

    assert rounds(1e-9, 2.0, 2e10, failed=(1,)) == 3
    assert rounds(None, 2.0, 1.9e10, 2e10) == 4
    assert rounds(0.0, 0.5, 0.99) is None and rounds(0.0, 0.5, 1.0) == 3
    assert rounds(-3.0, -3e10) == 2 and rounds(2.0, float("inf")) == 2


def test_the_digits_are_clipped_as_the_protocol_says() -> None:
    import yaml

    files = [*(REPO / "configs" / "digits").glob("*.yaml"), REPO / "configs" / "quickstart.yaml"]
    files += [REPO / "configs" / "smoke.yaml"]
    assert len(files) == 11
    for file in files:
        assert yaml.safe_load(file.read_text())["trainer"] == {"gradient_clip_val": 10}, file.name
