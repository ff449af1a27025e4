"""NetAccuracy, and what else a run of several nets leaves."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fedgkd_pl import (
    IID,
    MLP,
    AveragedModel,
    ClassTasks,
    ClientEvaluation,
    Digits,
    FedAvg,
    FedDistill,
    FedMD,
    HeldOut,
    LocalEngine,
    LocalModels,
    NetAccuracy,
    RunFiles,
)
from fedgkd_pl.callbacks.drift import ClientDrift, TeacherAgreement
from fedgkd_pl.errors import SettingError
from fedgkd_pl.models.heads import Ensemble
from torch import nn
from torch.optim import SGD

from tests.callbacks.by_hand import rows_of, watched
from tests.conftest import Table, fit, linear, same


def test_a_run_of_several_nets(tmp_path: Path) -> None:
    torch.manual_seed(0)
    nets = [MLP(4, [6], 3), MLP(4, [5, 7], 3), nn.Linear(4, 3)]
    model = FedMD(nets=nets, public_epochs=0, start_epochs=2, engine=LocalEngine(1))
    fractions = {"participation": 0.5, "val_fraction": 0.1, "client_test_fraction": 0.2}
    data = Table(sizes=[20] * 4, partition=IID(), public=HeldOut(0.25), **fractions)
    others = [LocalModels(), AveragedModel(), ClientDrift(), TeacherAgreement(), ClientEvaluation()]
    callbacks = [NetAccuracy(), *others, RunFiles(str(tmp_path))]
    fit(model, data, 3, callbacks=callbacks)
    rows, local = rows_of(tmp_path / "metrics.csv"), rows_of(tmp_path / "local_models.csv")
    names = ["MLP0", "MLP1", "Linear"]  # of clients 0 and 3, 1, 2
    newest: dict[int, float] = {}
    for row in rows:
        now = [each for each in local if each["round"] == row["round"]]
        newest |= {int(each["client"]): each["acc"] for each in now}
        for kind, name in enumerate(names):
            accs = [acc for client, acc in newest.items() if client % 3 == kind]
            expected = sum(accs) / len(accs) if accs else None
            assert row.get(f"nets/{name}_test_acc") == pytest.approx(expected, abs=1e-6)
    assert len(local) == 6 and 2 < len(newest) <= 4
    assert not any(name.startswith(("drift/", "teacher/")) for name in rows[0])


def test_accuracies_are_of_the_classes_of_a_samples_task() -> None:
    tasks = ClassTasks(tasks=5, rounds_per_task=2)
    data = Digits(num_clients=2, partition=IID(), tasks=tasks, val_fraction=0.2, eval_batch_size=50)
    local: dict[str, Any] = {"local_epochs": 5, "optimizer": partial(SGD, lr=0.3)}
    model = FedDistill(nets=[MLP()], engine=LocalEngine(1), **local)
    fit(model, data, 2, callbacks=[NetAccuracy()])
    part, known = data.val, data.client_data.tasks
    assert known is not None
    right = []
    for member in model.net.members:
        logits = known.known(member(part.transform(part.inputs, None)), part.targets)
        right.append((logits.argmax(1) == part.targets).float().mean().item())
    assert len(right) == 2 and min(right) > 0.4 > 2 * 50 / len(data.val)
    assert model.report["nets/MLP_val_acc"] == pytest.approx(sum(right) / 2, abs=1e-6)


@pytest.mark.parametrize("form", [{"size": 2}, {"decay": 0.5}])
def test_the_average_of_a_client_s_net_is_of_what_it_has_learned(form: Any) -> None:
    """By hand over all rounds, of those in which a net had been trained."""
    averaged, model = AveragedModel(**form), FedDistill(nets=[linear()], engine=LocalEngine(1))
    seen = watched(model, Table(sizes=(8, 5, 6), participation=0.34), 4, averaged).after
    average = averaged.average(model)
    first = []
    for number in range(3):
        name, mark = f"{Ensemble.prefix(number)}weight", Ensemble.mark(number)
        trained = [state[name].double() for state in seen if state[mark]]
        first.append(4 - len(trained))
        trained = trained[-form.get("size", 4) :]
        shares = [form.get("decay", 1.0) ** n for n in range(len(trained))][::-1]
        if trained:
            mean = sum(s * t for s, t in zip(shares, trained, strict=True)) / sum(shares)
            assert torch.allclose(average[name].double(), mean, atol=1e-7)
        else:
            assert torch.equal(average[name], seen[-1][name])
    assert len(set(first)) > 1, "some net was trained later than another"
    again = AveragedModel(**form)
    again.load_state_dict(averaged.state_dict())
    assert same(again.average(model), average)


def test_it_needs_an_ensemble() -> None:
    with pytest.raises(SettingError, match="NetAccuracy needs an ensemble"):
        fit(FedAvg(linear()), Table(), 1, callbacks=[NetAccuracy()])
