"""A run in which clients failed says so at its end and in its summary."""

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fedgkd_pl import FedAvg, LocalEngine
from fedgkd_pl.methods.fedavg import FedAvgClient
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
    client_class = Unwilling


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
    assert len(told) == bool(failed) and all("ValueError: not with five" in t for t in told)
    rows = (tmp_path / "failures.csv").read_text().splitlines() if failed else [""]
    assert len([row for row in rows if ",ValueError: not with five," in row]) == failed
