"""Tasks as data: who learns what in which round, what is hidden, and what is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import (
    MLP,
    ClassTasks,
    Digits,
    FedAvg,
    FedGKD,
    HeldOut,
    LocalEngine,
    Pathological,
    TaskAccuracy,
)
from fedgkd_pl.data.examples import FAR
from fedgkd_pl.errors import SettingError
from fedgkd_pl.federation.message import Message
from fedgkd_pl.federation.round import job_of
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import log_softmax
from torch.optim import SGD

from tests.conftest import fit, quiet_trainer, same
from tests.support.methods import CLASSES
from tests.support.pieces import ROUNDS, Six, six_net


def test_groups_are_cut_in_order_and_clients_go_through_all_of_them() -> None:
    tasks = ClassTasks(tasks=5, rounds_per_task=3).sequences(10, seed=7)
    assert tasks.groups == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
    orders = [tasks.order(client) for client in range(20)]
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in orders)
    assert len(set(map(tuple, orders))) > 5
    again = ClassTasks(tasks=5, rounds_per_task=3).sequences(10, seed=7)
    assert orders == [again.order(client) for client in range(20)]
    places = [tasks.place(number) for number in range(1, 16)]
    assert places == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    task = tasks.at(3, 6)
    assert (task.place, task.number, task.ends) == (1, orders[3][1], True)
    assert task.classes == tasks.groups[orders[3][1]] and not tasks.at(3, 5).ends
    same_order = ClassTasks(tasks=2, order="same").sequences(4, seed=7)
    assert [same_order.order(client) for client in (0, 9)] == [[0, 1], [0, 1]]


def test_a_round_has_the_samples_of_its_task_and_n_k_follows() -> None:
    data = Six()
    data.setup()
    tasks, clients = data.client_data.tasks, data.client_data
    assert tasks is not None
    for client in range(3):
        labels = data.arrays()[client][1]
        seen = []
        for number in range(1, ROUNDS + 1):
            classes = tasks.groups[tasks.order(client)[(number - 1) // 2]]
            batches = clients.batches(client, number)
            found = torch.cat([y for _, y in batches]).tolist()
            assert sorted(found) == sorted(y for y in labels.tolist() if y in classes)
            assert clients.size(client, number) == len(found) == len(batches.examples)
            seen += found if number % 2 else []
        assert sorted(seen) == sorted(labels.tolist())
        assert len(clients.owned(client)) == len(labels)


@pytest.mark.parametrize("method", [FedAvg, FedGKD])
def test_losses_and_teachers_see_the_classes_of_the_task_alone(method: Any) -> None:
    """By hand, with the columns of other classes cut out; their rows of the head stay."""
    torch.manual_seed(0)
    net = MLP(4, [5], 6, projection=3)
    model = method(net, optimizer=partial(SGD, lr=0.1), engine=LocalEngine(1))
    data = Six()
    trainer = quiet_trainer(max_epochs=1)
    model._trainer = trainer  # as in a run
    trainer.datamodule = data
    data.setup()
    tasks = data.client_data.tasks
    assert tasks is not None
    client = job_of(model, trainer, data).client
    assert not net._forward_hooks, "the server's own net hides nothing"
    torch.manual_seed(1)
    start = {n: torch.randn_like(t) for n, t in net.state_dict().items()}
    teacher = {n: torch.randn_like(t) for n, t in net.state_dict().items()}
    message = Message(3, {"global": start, "teacher": teacher}, {"distil": 1})
    task = tasks.at(1, 3)
    client.begin(1, 6, task)
    client.receive(message, {})
    x, y = torch.randn(6, 4), torch.tensor(list(task.classes) * 3)
    loss, parts = client.objective(x, y, client.teach(x))
    columns = list(task.classes)

    def cut(state: dict[str, torch.Tensor]) -> torch.Tensor:
        net.load_state_dict(state)
        return log_softmax(net(x)[:, columns], dim=1)

    ours = cut(start)
    ce = -ours[range(6), [columns.index(int(label)) for label in y]].mean()
    assert parts["ce"].item() == pytest.approx(ce.item(), rel=1e-5)
    if method is FedGKD:
        theirs = cut(teacher)
        kd = (theirs.exp() * (theirs - ours)).sum(1).mean()
        assert parts["kd"].item() == pytest.approx(kd.item(), rel=1e-5)
        assert loss.item() == pytest.approx((ce + 0.1 * kd).item(), rel=1e-5)
    loss.backward()
    gradient = client.net.classifier.weight.grad  # type: ignore[union-attr, operator]
    moved = gradient.any(1).nonzero()[:, 0].tolist()  # type: ignore[union-attr]
    assert moved == columns


def test_hidden_outputs_are_far_below_and_finite() -> None:
    tasks = ClassTasks(tasks=2).sequences(4, seed=0)
    outputs, y = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]]), torch.tensor([1, 2])
    assert tasks.known(outputs, y).tolist() == [[1, 2, FAR, FAR], [FAR, FAR, 7, 8]]
    assert torch.tensor(FAR, dtype=torch.float16).isfinite()
    assert torch.tensor(FAR, dtype=torch.bfloat16).exp() == 0


def test_the_global_model_is_tested_with_the_task_of_each_sample_known() -> None:
    model = FedAvg(six_net(), optimizer=partial(SGD, lr=0.1), engine=LocalEngine(1))
    data = Six()
    fit(model, data, 2)
    with torch.no_grad():
        logits = model.net(torch.from_numpy(data.x[:25])).numpy()
    pairs = [(0, 1), (2, 3), (4, 5)]
    right = []
    for row, label in zip(logits, data.y[:25].tolist(), strict=True):
        pair = pairs[label // 2]
        right.append(pair[int(np.argmax(row[list(pair)]))] == label)
    assert model.report["test/acc"] == pytest.approx(np.mean(right))


def test_a_resume_at_any_round_of_any_task_gives_the_same_bits(tmp_path: Path) -> None:
    """Three tasks of two rounds: within a task, at its end, at the beginning of the next."""
    made = partial(FedGKD, six_net(), optimizer=partial(SGD, lr=0.1), engine=LocalEngine(1))
    every = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole, scores = made(), TaskAccuracy()
    data = {"participation": 0.67}
    fit(whole, Six(**data), ROUNDS, callbacks=[scores, every], enable_checkpointing=True)
    for done in range(1, ROUNDS):
        model, again = made(), TaskAccuracy()
        file = tmp_path / f"epoch={done - 1}.ckpt"
        quiet_trainer(max_epochs=ROUNDS, callbacks=[again]).fit(model, Six(**data), ckpt_path=file)
        assert same(whole.state_dict(), model.state_dict()) and again.rows == scores.rows


def test_tasks_that_cannot_be() -> None:
    few = {"num_clients": 5, "partition": Pathological(2)}
    public = {"num_clients": 2, "public": HeldOut(0.2)}
    of_all = {name for name, method in CLASSES.items() if not method.takes_sequences}
    assert of_all == {"FedMD", "CFD", "FedGen", "FedDF", "FedAUX", "Ditto"}
    engine = LocalEngine(1)
    for make, data, text in (
        (FedAvg, lambda: Six(tasks=ClassTasks(tasks=4)), "tasks: must divide the 6 classes"),
        (FedAvg, lambda: Digits(**few, tasks=ClassTasks()), "tasks: every client goes through all"),
        (FedAvg, lambda: Six(tasks=ClassTasks(3, rounds_per_task=1)), "rounds: must be at most 3"),
        (FedAvg, lambda: Six(tasks=ClassTasks(tasks=0)), "tasks: must be at least 1"),
        (CLASSES["FedDF"], lambda: Digits(**public, tasks=ClassTasks()), "tasks: FedDF"),
    ):
        net = six_net() if make is FedAvg else MLP()
        with pytest.raises(SettingError, match=text):
            fit(make(net, engine=engine), data(), 4)
