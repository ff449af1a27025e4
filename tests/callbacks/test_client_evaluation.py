"""Models on the clients' own samples: every number against NumPy, and the file of a resumed run."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import (
    ClientEvaluation,
    FedAvg,
    FederatedCallback,
    LocalEngine,
    RunFiles,
)
from fedgkd_pl.callbacks.evaluate import spread
from fedgkd_pl.errors import SettingError

from tests.conftest import Table, fit, linear
from tests.support.runs import QUICK, Run, version

OWN = ("--data.client_test_fraction", "0.2", "--trainer.callbacks+", "ClientEvaluation")
SIZES = (30, 20, 2, 40, 25)  # the third is too small: rounded, a fifth of it is nothing


class Keep(FederatedCallback):
    """The models of every round, and what was logged."""

    def __init__(self) -> None:
        self.models: list[dict[Any, dict[str, torch.Tensor]]] = []
        self.logged: list[dict[str, float]] = []

    def on_broadcast(self, *_: Any) -> None:
        self.models.append({})

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any, _: int) -> None:
        self.models[-1][update.client] = {n: t.clone() for n, t in update.weights.items()}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.models[-1]["global"] = {n: t.clone() for n, t in pl_module.global_state().items()}
        self.logged.append({k: v for k, v in pl_module.report.items() if k.startswith("clients/")})


def score(model: dict[str, torch.Tensor], x: Any, y: Any) -> tuple[float, float]:
    """Accuracy and cross-entropy of a Linear, in NumPy."""
    weight, bias = (model[name].double().numpy() for name in ("weight", "bias"))
    logits = x.astype(float) @ weight.T + bias
    raised = np.exp(logits - logits.max(1, keepdims=True))
    right = (raised / raised.sum(1, keepdims=True))[np.arange(len(y)), y]
    return float((logits.argmax(1) == y).mean()), float(-np.log(right).mean())


def rows_of(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text().splitlines()))


def test_the_worst_tenth_by_hand() -> None:
    scores = [(acc / 100, acc) for acc in range(25, 0, -1)]  # 1 % to 25 %
    found = spread(scores)
    assert found["acc_worst10"] == pytest.approx(0.015), "of 25 clients two: 1 % and 2 %"
    assert found["acc_std"] == pytest.approx(np.sqrt((25**2 - 1) / 12) / 100)
    assert spread(scores[:9])["acc_worst10"] == 0.17, "one at least"


def test_every_client_on_its_own_samples(tmp_path: Path) -> None:
    fractions = {"client_test_fraction": 0.2, "client_val_fraction": 0.3}
    data = Table(sizes=SIZES, participation=0.6, eval_batch_size=7, **fractions)
    keep, files = Keep(), RunFiles(str(tmp_path))
    model = FedAvg(linear(), engine=LocalEngine(1), local_epochs=3)
    fit(model, data, 3, callbacks=[ClientEvaluation(), files, keep])
    own = data.client_splits["test"]
    rows = rows_of(tmp_path / "clients.csv")
    counted = [0, 1, 3, 4]
    assert [(row["round"], int(row["client"])) for row in rows] == [
        (str(number), client) for number in (1, 2, 3) for client in counted
    ]
    for number, models in enumerate(keep.models, 1):
        of_round = [row for row in rows if row["round"] == str(number)]
        found: dict[str, list[tuple[float, float]]] = {"global": [], "local": []}
        assert len(models) == 1 + 3, "three of five clients train in a round"
        for row in of_round:
            client = int(row["client"])
            part = own.examples[own.rows(client)]
            x, y = part.inputs.numpy(), part.targets.numpy()
            assert int(row["samples"]) == len(y)
            for kind, name in (("global", "global"), ("local", client)):
                values = (row[f"{kind}_acc"], row[f"{kind}_loss"])
                if name not in models:
                    assert values == ("", "")
                    continue
                hand = score(models[name], x, y)
                assert tuple(map(float, values)) == pytest.approx(hand, rel=1e-5)
                found[kind].append(hand)
        expected = {}
        for kind, hands in found.items():
            accs = np.sort([acc for acc, _ in hands])
            expected |= {
                f"clients/{kind}_acc_mean": accs.mean(),
                f"clients/{kind}_acc_std": np.sqrt(((accs - accs.mean()) ** 2).mean()),
                f"clients/{kind}_acc_worst10": accs[0],  # of fewer than twenty, one
                f"clients/{kind}_acc_min": accs[0],
                f"clients/{kind}_loss_mean": np.mean([loss for _, loss in hands]),
            }
        assert keep.logged[number - 1] == pytest.approx(expected, rel=1e-5)


def test_a_run_of_the_command_line_with_two_workers_and_resumed(run: Run, tmp_path: Path) -> None:
    words = {name: ("fit", *QUICK, *OWN, "--name", name) for name in ("whole", "parts")}
    assert run(*words["whole"], "--rounds", "3", "--model.engine.workers", "2")[0] == 0
    assert run(*words["parts"], "--rounds", "1")[0] == 0
    file = version(tmp_path, "parts") / "clients.csv"
    file.write_text(file.read_text() + "2,0,5,0.5,0.5,,\n")  # of a round that was not committed
    assert run("fit", "--resume", file.parent, "--rounds", "3")[0] == 0
    for name in ("clients.csv", "metrics.csv"):
        whole = version(tmp_path, "whole") / name
        assert whole.read_bytes() == (file.parent / name).read_bytes()
    last = [row for row in rows_of(file) if row["round"] == "3"]
    assert sum(bool(row["local_acc"]) for row in last) == 2, "half of four clients train"
    code, _, err = run("fit", *QUICK, "--trainer.callbacks+", "ClientEvaluation")
    assert code == 2 and "data.client_test_fraction: " in err


def test_data_elsewhere_is_refused() -> None:
    model, data = FedAvg(linear(), engine=LocalEngine(1)), Table(client_test_fraction=0.4)
    data.setup()
    model.engine.max_samples = 9
    with pytest.raises(SettingError, match=r"callbacks: .*, and theirs is not here"):
        ClientEvaluation().check(model, data)
