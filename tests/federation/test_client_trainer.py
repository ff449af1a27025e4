"""The reused Trainer is as clean as a new one."""

from functools import partial
from typing import Any

import pytest
import torch
from fedgkd_pl.federation.client_trainer import ClientTrainer, Job, restart
from fedgkd_pl.federation.message import ClientUpdate, Message
from fedgkd_pl.methods.fedavg import FedAvgClient
from fedgkd_pl.methods.fedgkd import FedGKD
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from tests.conftest import Table, quiet_trainer, same

SETTINGS: dict[str, dict[str, Any]] = {
    "epochs": {"max_epochs": 3, "max_steps": -1},
    "steps": {"max_epochs": -1, "max_steps": 5},
    "one step": {"max_epochs": -1, "max_steps": 1},
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def job(client: FedAvgClient, trainer: dict[str, Any], **data: Any) -> Job:
    table = Table(**({"sizes": (8, 5, 7), "batch_size": 3} | data))
    return Job(client, table.client_data, torch.device("cpu"), dict(trainer), {})


def message(round: int, distil: bool = False) -> Message:
    state = {name: t.clone() for name, t in net().state_dict().items()}
    return Message(round, {"global": state}, {"distil": 1} if distil else {})


@pytest.mark.parametrize("trainer", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("optimizer", [partial(SGD, lr=0.2, momentum=0.9), partial(Adam, lr=0.05)])
def test_reused_equals_fresh(trainer: dict[str, Any], optimizer: Any) -> None:
    def client() -> Any:
        scheduler = partial(StepLR, step_size=1, gamma=0.5)
        return FedGKD(net(), gamma=0.4, optimizer=optimizer, scheduler=scheduler).client()

    tasks = [(1, 0), (1, 2), (2, 1), (2, 0), (3, 2)]
    reused = ClientTrainer(job(client(), trainer))
    for round, number in tasks:
        sent = message(round, distil=round > 1)
        fresh = ClientTrainer(job(client(), trainer)).update(sent, number, {})
        again = reused.update(sent, number, {})
        assert same(fresh.weights, again.weights), f"client {number} in round {round}"
        assert not same(again.weights, sent.models["global"]), "nothing was trained"
        assert fresh.metrics == again.metrics


def test_a_second_fit_without_restart_trains_nothing() -> None:
    """The trap that :func:`restart` is for; if Lightning mends it, this test says so."""
    client = FedAvgClient(net(), partial(SGD, lr=0.2))
    batches = Table(batch_size=3).client_data.batches(0, 1)
    trainer = quiet_trainer(max_epochs=1, limit_val_batches=0)
    trainer.fit(client, batches)
    before = {name: t.clone() for name, t in client.net.state_dict().items()}
    trainer.fit(client, batches)
    assert same(before, client.net.state_dict())
    restart(trainer)
    trainer.fit(client, batches)
    assert not same(before, client.net.state_dict())


def count_steps(trainer: dict[str, Any]) -> int:
    class Counting(FedAvgClient):
        steps = 0

        def training_step(self, *args: Any) -> Any:
            self.steps += 1
            return super().training_step(*args)

    client = Counting(net(), partial(SGD, lr=0.1))
    ClientTrainer(job(client, trainer)).update(message(1), 0, {})
    return client.steps


def test_epochs_and_steps() -> None:
    assert count_steps(SETTINGS["epochs"]) == 9  # 8 samples in batches of 3: three an epoch
    assert count_steps(SETTINGS["steps"]) == 5


def test_scheduler_steps_once_per_local_epoch() -> None:
    """Halving the rate each epoch, as plain torch does it."""
    optimizer, data = partial(SGD, lr=0.4), {"batch_size": 100}
    linear = nn.Linear(4, 3)
    start = {name: t.clone() for name, t in linear.state_dict().items()}
    client = FedAvgClient(linear, optimizer, partial(StepLR, step_size=1, gamma=0.5))
    work = job(client, SETTINGS["epochs"], **data)
    update = ClientTrainer(work).update(Message(1, {"global": start}), 0, {})

    rows = torch.from_numpy(work.data.index[0])
    x, y = work.data.examples.inputs[rows], work.data.examples.targets[rows]
    for rate in (0.4, 0.2, 0.1):
        linear.zero_grad()
        nn.functional.cross_entropy(linear(x), y).backward()
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter -= rate * parameter.grad
    torch.testing.assert_close(update.weights["weight"], linear.weight.detach())


def test_a_client_update_does_not_touch_the_global_generator() -> None:
    trainer = ClientTrainer(job(FedAvgClient(net(), partial(SGD, lr=0.1)), SETTINGS["epochs"]))
    sent = message(1)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    update = trainer.update(sent, 0, {})
    assert torch.equal(torch.rand(3), expected)
    # ... and does not depend on it, though the net has dropout.
    torch.manual_seed(99)
    assert same(update.weights, trainer.update(sent, 0, {}).weights)


def test_report_is_the_mean_over_the_last_epoch() -> None:
    """With a rate of 0 the loss of the last epoch is that of the weights sent."""
    linear = nn.Linear(4, 3)
    state = {name: t.clone() for name, t in linear.state_dict().items()}
    work = job(FedAvgClient(linear, partial(SGD, lr=0.0)), SETTINGS["epochs"])
    update: ClientUpdate = ClientTrainer(work).update(Message(1, {"global": state}), 1, {})
    rows = torch.from_numpy(work.data.index[1])
    x, y = work.data.examples.inputs[rows], work.data.examples.targets[rows]
    logits = linear(x)
    assert update.metrics["loss"] == pytest.approx(nn.functional.cross_entropy(logits, y).item())
    assert update.metrics["acc"] == pytest.approx((logits.argmax(1) == y).float().mean().item())
    assert (update.client, update.num_samples) == (1, 5)
