"""Models on the clients' own samples: every number against NumPy, and the file of a resumed run."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import (
    MLP,
    ClientEvaluation,
    Digits,
    FedAvg,
    FedDistill,
    FederatedCallback,
    FederatedData,
    LocalEngine,
    RunFiles,
    SquaredError,
    read_checkpoint,
)
from fedgkd_pl.callbacks.client_evaluation import Score, spread
from fedgkd_pl.errors import SettingError
from torch import nn

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
    scores = [Score(acc / 100, acc) for acc in range(25, 0, -1)]  # 1 % to 25 %
    assert spread(scores) == pytest.approx(
        {
            "acc_mean": 0.13,
            "acc_std": np.sqrt((25**2 - 1) / 12) / 100,
            "acc_worst10": 0.015,  # of 25 clients two: 1 % and 2 %
            "acc_min": 0.01,
            "loss_mean": 13,
        }
    )
    assert spread(scores[:9])["acc_worst10"] == 0.17, "one at least"
    assert spread(scores[:10])["acc_worst10"] == 0.16
    assert spread(scores[:20])["acc_worst10"] == pytest.approx(0.065)


@pytest.mark.parametrize("split", ["test", "val"])
def test_every_client_on_its_own_samples(split: Any, tmp_path: Path) -> None:
    fractions = {"client_test_fraction": 0.2, "client_val_fraction": 0.3}
    data = Table(sizes=SIZES, participation=0.6, eval_batch_size=7, **fractions)
    keep, files = Keep(), RunFiles(str(tmp_path))
    model = FedAvg(linear(), engine=LocalEngine(1), local_epochs=3)
    fit(model, data, 3, callbacks=[ClientEvaluation(split=split), files, keep])
    own = data.client_splits[split]
    rows = rows_of(tmp_path / "clients.csv")
    counted = [0, 1, 3, 4] if split == "test" else own.clients
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


def test_without_local_models_and_every_second_round(tmp_path: Path) -> None:
    keep, files = Keep(), RunFiles(str(tmp_path))
    callbacks = [ClientEvaluation(every_n_rounds=2, local=False), files, keep]
    data = Table(sizes=SIZES, client_test_fraction=0.2)
    fit(FedAvg(linear(), engine=LocalEngine(1)), data, 4, callbacks=callbacks)
    assert [bool(each) for each in keep.logged] == [False, True, False, True]
    assert not any("local" in name for each in keep.logged for name in each)
    rows = rows_of(tmp_path / "clients.csv")
    assert [row["round"] for row in rows] == ["2"] * 4 + ["4"] * 4
    assert all(row["global_acc"] and not row["local_acc"] for row in rows)


def test_clients_that_keep_their_models_have_them_evaluated() -> None:
    keep = Keep()
    model = FedDistill(linear(), engine=LocalEngine(1))
    data = Table(sizes=(20, 20), client_test_fraction=0.5)
    fit(model, data, 2, callbacks=[ClientEvaluation(), keep])
    own = data.client_splits["test"]
    parts = [own.examples[own.rows(client)] for client in (0, 1)]
    hands = [
        score(keep.models[1][client], part.inputs.numpy(), part.targets.numpy())[1]
        for client, part in enumerate(parts)
    ]
    assert keep.logged[1]["clients/local_loss_mean"] == pytest.approx(np.mean(hands), rel=1e-5)


def test_it_changes_nothing_that_is_trained() -> None:
    def weights(*callbacks: Any) -> torch.Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        data = Table(sizes=SIZES, client_test_fraction=0.2, batch_size=8)
        fit(FedAvg(net, engine=LocalEngine(1)), data, 2, callbacks=list(callbacks))
        return torch.cat([tensor.flatten().float() for tensor in net.state_dict().values()])

    assert torch.equal(weights(), weights(ClientEvaluation()))


def test_a_run_of_the_command_line_with_two_workers_and_resumed(run: Run, tmp_path: Path) -> None:
    """The same bytes; and the last rows again, from the checkpoint, in plain torch."""
    names = ("whole", "two", "parts")
    words = {name: ("fit", *QUICK, *OWN, "--name", name) for name in names}
    assert run(*words["whole"], "--rounds", "3")[0] == 0
    assert run(*words["two"], "--rounds", "3", "--model.engine.workers", "2")[0] == 0
    assert run(*words["parts"], "--rounds", "1")[0] == 0
    folder = version(tmp_path, "parts")
    file = folder / "clients.csv"
    file.write_text(file.read_text() + "2,0,5,0.5,0.5,,\n")  # of a round that was not committed
    assert run("fit", "--resume", folder, "--rounds", "3")[0] == 0
    texts = {(version(tmp_path, name) / "clients.csv").read_text() for name in names}
    metrics = {(version(tmp_path, name) / "metrics.csv").read_text() for name in names}
    assert len(texts) == 1 and len(metrics) == 1

    state = read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]
    net = MLP(hidden=[32])
    net.load_state_dict({name.removeprefix("net."): tensor for name, tensor in state.items()})
    data = Digits(num_clients=4, seed=0, client_test_fraction=0.2)
    data.setup()
    own = data.client_splits["test"]
    last = [row for row in rows_of(file) if row["round"] == "3"]
    assert [int(row["samples"]) for row in last] == own.index.sizes.tolist()
    for row in last:
        part = own.examples[own.rows(int(row["client"]))]
        with torch.no_grad():
            logits = net.eval()(part.inputs.float() / 16)
        right = (logits.argmax(1) == part.targets).double().mean()
        assert float(row["global_acc"]) == pytest.approx(float(right))
        loss = nn.functional.cross_entropy(logits, part.targets)
        assert float(row["global_loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert sum(bool(row["local_acc"]) for row in last) == 2, "half of four clients train"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--trainer.callbacks+", "ClientEvaluation"), "data.client_test_fraction: ClientEval"),
        (
            (*OWN, "--trainer.callbacks.split", "val"),
            "data.client_val_fraction: ClientEvaluation needs samples that a client has not",
        ),
        ((*OWN, "--trainer.callbacks.every_n_rounds", "0"), "every_n_rounds: must be at least 1"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    flags: Any, text: str, run: Run, tmp_path: Path
) -> None:
    code, _, err = run("fit", *QUICK, *flags)
    assert code == 2 and text in err and len(err.splitlines()) == 1, err
    assert not list(tmp_path.iterdir())


def test_data_elsewhere_is_refused() -> None:
    model, data = FedAvg(linear(), engine=LocalEngine(1)), Table(client_test_fraction=0.4)
    data.setup()
    model.engine.max_samples = 9
    with pytest.raises(SettingError, match=r"callbacks: .*, and theirs is not here"):
        ClientEvaluation().check(model, data)


def test_targets_without_classes_are_split_and_refused(tmp_path: Path) -> None:
    x = np.arange(40, dtype=np.float32)[:, None]
    fractions = {"client_test_fraction": 0.25, "test_fraction": 0.5, "val_fraction": 0}
    data = FederatedData.from_arrays(x, x / 7, num_clients=2, **fractions)
    model = FedAvg(linear(1, 1), loss=SquaredError(), engine=LocalEngine(1))
    with pytest.raises(SettingError, match="callbacks: ClientEvaluation needs the logits of cl"):
        fit(model, data, 1, callbacks=[ClientEvaluation()])
    assert data.client_splits["test"].index.sizes.tolist() == [2, 2]
    assert data.client_data.index.sizes.tolist() == [8, 8]
