"""Accuracy, forgetting and transfer by task, against numbers worked out by hand."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from fedgkd_pl import FedAvg, LocalEngine, RunFiles, TaskAccuracy
from fedgkd_pl.callbacks.task_accuracy import scores
from fedgkd_pl.data.examples import Splits
from fedgkd_pl.errors import SettingError
from torch.optim import SGD

from tests.callbacks.by_hand import rows_of, watched
from tests.conftest import fit
from tests.support.pieces import ROUNDS, Six, six_net


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
    rows = [
        {"learned": learned, "place": place, "acc": acc}
        for (learned, place), accs in table.items()
        for acc in accs
    ]
    found = scores(rows, 3)
    assert found["task/forgetting/1"] == pytest.approx(0.1)
    assert found["task/forgetting/2"] == pytest.approx(0.15)
    assert found["task/forgetting"] == pytest.approx(0.125)
    assert "task/forgetting/3" not in found
    assert found["task/acc/1"] == pytest.approx(0.75) and found["task/acc/3"] == pytest.approx(0.95)
    assert found["task/acc"] == pytest.approx((0.75 + 0.7 + 0.95) / 3)
    gains = [(0.4 + 0.2) / 2, (0.3 + 0.3) / 2, (0.5 + 0.4) / 2]
    assert [found[f"task/transfer/{i}"] for i in (1, 2, 3)] == pytest.approx(gains)
    assert found["task/transfer"] == pytest.approx(np.mean(gains))
    first = scores(rows, 1)
    assert set(first) == {f"task/{kind}{end}" for kind in ("acc", "transfer") for end in ("", "/1")}


def test_every_accuracy_is_that_of_the_global_model_on_the_task(tmp_path: Path) -> None:
    data, callback, net = Six(), TaskAccuracy(), six_net()
    model = FedAvg(net, optimizer=partial(SGD, lr=0.3), engine=LocalEngine(1))
    watch = watched(model, data, ROUNDS, callback, RunFiles(str(tmp_path)))
    logits = []
    for state in watch.before[0], *watch.after[1::2]:  # at the end of every task
        net.load_state_dict(state)
        logits.append(net(torch.from_numpy(data.x[:25])).detach().numpy())
    y = data.y[:25]
    tasks = data.client_data.tasks
    assert tasks is not None

    def acc(learned: int, task: int) -> float:
        rows = np.isin(y, [2 * task, 2 * task + 1])
        picked = logits[learned][rows][:, [2 * task, 2 * task + 1]].argmax(1)
        return float((picked + 2 * task == y[rows]).mean())

    rows = rows_of(tmp_path / "tasks.csv")
    assert rows == callback.rows and len(rows) == 3 * (1 + 2 + 3 + 3)
    for row in rows:
        task = tasks.order(int(row["client"]))[int(row["place"]) - 1]
        assert row["task"] == task and row["round"] == 2 * row["learned"]
        assert row["acc"] == pytest.approx(acc(int(row["learned"]), task))
    logged = [row.get("task/acc") for row in rows_of(tmp_path / "metrics.csv")]
    assert [value is not None for value in logged] == [False, True] * 3
    everything = np.mean([acc(3, task) for task in range(3)])  # all clients have learned all
    assert scores(rows, 3)["task/acc"] == pytest.approx(everything)
    assert logged[-1] == pytest.approx(everything)


class Few(Six):
    """Two test samples, of one task."""

    def load(self) -> Splits:
        train = super().load().train
        return Splits(train, train[2:4])


def test_what_it_cannot_measure() -> None:
    model = FedAvg(six_net(), engine=LocalEngine(1))
    with pytest.raises(SettingError, match="tasks: TaskAccuracy needs data with tasks"):
        fit(model, Six(tasks=None), 1, callbacks=[TaskAccuracy()])
    with pytest.raises(SettingError, match=r"split: has no sample of classes \[0, 1\]"):
        fit(model, Few(), 1, callbacks=[TaskAccuracy()])
