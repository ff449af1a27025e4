"""Accuracy, forgetting and transfer by task, against numbers worked out by hand."""

import csv
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import ClassTasks, FedAvg, LocalEngine, RunFiles, TaskAccuracy
from fedgkd_pl.callbacks.task_accuracy import scores
from fedgkd_pl.errors import SettingError
from lightning.pytorch import Callback
from torch.optim import SGD

from tests.conftest import fit
from tests.support.tasks import ROUNDS, Six, six_net


def test_scores_by_hand() -> None:
    """Two clients, three tasks.

    Client 0 falls on its first task from .9 to .5 to .7, on its second from .8 to .6: it has
    forgotten .9 − .7 and .8 − .6. Client 1 has its best on the first task at the end, and loses .1
    of the second: 0 and .1. So .1 of the first, .15 of the second, .125 in all.
    """
    table = {
        (0, 1): [0.5, 0.4],
        (1, 1): [0.9, 0.6],
        (1, 2): [0.5, 0.6],
        (2, 1): [0.5, 0.7],
        (2, 2): [0.8, 0.9],
        (2, 3): [0.5, 0.5],
        (3, 1): [0.7, 0.8],
        (3, 2): [0.6, 0.8],
        (3, 3): [1.0, 0.9],
    }
    found = scores(table, 3)
    assert found["task/forgetting/1"] == pytest.approx(0.1)
    assert found["task/forgetting/2"] == pytest.approx(0.15)
    assert found["task/forgetting"] == pytest.approx(0.125)
    assert "task/forgetting/3" not in found
    assert found["task/acc/1"] == pytest.approx(0.75) and found["task/acc/3"] == pytest.approx(0.95)
    assert found["task/acc"] == pytest.approx((0.75 + 0.7 + 0.95) / 3)
    gains = [(0.4 + 0.2) / 2, (0.3 + 0.3) / 2, (0.5 + 0.4) / 2]
    assert [found[f"task/transfer/{i}"] for i in (1, 2, 3)] == pytest.approx(gains)
    assert found["task/transfer"] == pytest.approx(np.mean(gains))
    first = scores(table, 1)
    assert set(first) == {f"task/{kind}{end}" for kind in ("acc", "transfer") for end in ("", "/1")}


class Models(Callback):
    """The global model before the run and at the end of every task."""

    def __init__(self) -> None:
        self.logits: list[np.ndarray] = []

    def _add(self, pl_module: Any) -> None:
        data = pl_module.datamodule
        with torch.no_grad():
            self.logits.append(pl_module.net(torch.from_numpy(data.x[:25])).numpy())

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._add(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if pl_module.round % 2 == 0:
            self._add(pl_module)


def test_every_accuracy_is_that_of_the_global_model_on_the_task(tmp_path: Path) -> None:
    data, models, callback = Six(), Models(), TaskAccuracy()
    model = FedAvg(six_net(), optimizer=partial(SGD, lr=0.3), engine=LocalEngine(1))
    fit(model, data, ROUNDS, callbacks=[models, callback, RunFiles(str(tmp_path))])
    y = data.y[:25]
    tasks = data.client_data.tasks
    assert tasks is not None

    def acc(learned: int, task: int) -> float:
        rows = np.isin(y, [2 * task, 2 * task + 1])
        picked = models.logits[learned][rows][:, [2 * task, 2 * task + 1]].argmax(1)
        return float((picked + 2 * task == y[rows]).mean())

    with (tmp_path / "tasks.csv").open() as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    assert rows == callback.rows and len(rows) == 3 * (1 + 2 + 3 + 3)
    for row in rows:
        task = tasks.order(int(row["client"]))[int(row["place"]) - 1]
        assert row["task"] == task and row["round"] == 2 * row["learned"]
        assert row["acc"] == pytest.approx(acc(int(row["learned"]), task))
    with (tmp_path / "metrics.csv").open() as file:
        logged = [row["task/acc"] for row in csv.DictReader(file)]
    assert [bool(value) for value in logged] == [False, True] * 3
    assert scores(rows, 3)["task/acc"] == pytest.approx(float(logged[-1]))
    everything = np.mean([acc(3, task) for task in range(3)])  # all clients have learned all
    assert float(logged[-1]) == pytest.approx(everything)


def test_what_it_cannot_measure() -> None:
    model = FedAvg(six_net(), engine=LocalEngine(1))
    with pytest.raises(SettingError, match="tasks: TaskAccuracy needs data with tasks"):
        fit(model, Six(tasks=None), 1, callbacks=[TaskAccuracy()])
    tasks = ClassTasks(tasks=3, rounds_per_task=2)
    with pytest.raises(SettingError, match=r"split: has no sample of classes \[0, 1\]"):
        fit(model, Six(tasks=tasks), 1, callbacks=[TaskAccuracy("val")])
    with pytest.raises(SettingError, match="split: must be val or test"):
        TaskAccuracy("train")  # type: ignore[arg-type]
