"""A run in which clients failed says so at its end and in its summary, with every engine."""

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fedgkd_pl import FedAvg, LocalEngine
from fedgkd_pl.cli.main import main
from fedgkd_pl.methods.fedavg import FedAvgClient
from fedgkd_pl.processes.signals import Stopped, stop_behind
from fedgkd_pl.runs.files import RunFiles
from torch.optim import SGD

from tests.conftest import Table, fit, linear


class Unwilling(FedAvgClient):
    """Raises with five samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[1]) == 5:
            raise ValueError("not with five")
        return super().training_step(batch, batch_idx)


class Troubled(FedAvg):
    def client(self) -> FedAvgClient:
        return Unwilling(self.net, self.optimizer, self.scheduler)


@pytest.mark.parametrize("sizes, failed", [((8, 5, 6, 5), 6), ((8, 7), 0)])
def test_failed_trainings_are_counted_and_told(
    sizes: Any, failed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Troubled(linear(), optimizer=partial(SGD, lr=0.1), engine=LocalEngine(1))
    with caplog.at_level(logging.WARNING, "fedgkd_pl"):
        fit(model, Table(sizes=sizes), 3, callbacks=[RunFiles(str(tmp_path))])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["client_trainings"] == 3 * len(sizes) and summary["failed_clients"] == failed
    told = [text for text in caplog.messages if "client trainings failed" in text]
    line = "6 of 12 client trainings failed, most often: ValueError: not with five"
    assert told == ([f"{line} (failures.csv has them all)"] if failed else [])


def test_the_stop_behind_an_error() -> None:
    """As an extension module wraps what a signal's handler raised in it."""
    stop = Stopped(15)
    wrapped = SystemError("returned a result with an exception set")
    wrapped.__cause__ = stop
    outer = RuntimeError("while waiting")
    outer.__context__ = wrapped
    assert stop_behind(outer) is stop_behind(wrapped) is stop_behind(stop) is stop
    assert stop_behind(SystemError("of its own")) is None and stop_behind(None) is None
    one, other = ValueError(), ValueError()
    one.__cause__, other.__cause__ = other, one
    assert stop_behind(one) is None


def test_a_run_says_where_its_charts_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard opens on another plugin, unless the address names this one."""
    from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin

    monkeypatch.chdir(tmp_path)
    config = ("--config", "quickstart.yaml", "--output_dir", "my runs")
    assert main(["fit", *config, "--rounds", "1", "--model.local_steps", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-3:-1] == [
        "look:  tensorboard --logdir 'my runs/quickstart'",
        f"       http://localhost:6006/#{CustomScalarsPlugin.plugin_name}",
    ]
