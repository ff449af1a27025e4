"""What FedAvg and FedGKD must be, beside the numbers of the oracle."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import FedAvg, FedGKD, LocalEngine
from fedgkd_pl.federation.message import ClientUpdate, Message
from fedgkd_pl.methods.fedgkd import FedGKDClient, distillation
from torch import nn
from torch.optim import SGD

from tests.conftest import Table, fit, linear, same

ENGINE = LocalEngine(workers=1)
LOCAL: dict[str, Any] = {"optimizer": partial(SGD, lr=0.3, momentum=0.9), "engine": ENGINE}


def test_teacher_of_one_model_is_the_current_rounds_in_every_round() -> None:
    seen: list[tuple[int, bool, bool]] = []

    class Spy(FedGKDClient):
        def receive(self, message: Message, state: Any) -> None:
            super().receive(message, state)
            teacher = self.teacher.net.state_dict()
            seen.append((message.round, self.distil, same(teacher, message.models["global"])))

    class Spied(FedGKD):
        client_class = Spy

    model = Spied(linear(), buffer_size=1, **LOCAL)
    fit(model, Table(), 4)
    # Two clients a round; in round 1 nothing has been aggregated and nobody distils.
    assert [(r, d) for r, d, _ in seen] == [(r, r > 1) for r in (1, 1, 2, 2, 3, 3, 4, 4)]
    assert all(is_global for r, _, is_global in seen if r > 1)


def test_kl_is_a_batch_mean_over_classes_of_probabilities() -> None:
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(size=(2, 5, 4))
    q, p = (np.exp(z) / np.exp(z).sum(1, keepdims=True) for z in (student, teacher))
    expected = (p * np.log(p / q)).sum(1).mean()
    loss = distillation(torch.from_numpy(student), torch.from_numpy(teacher))
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert loss.item() != pytest.approx(expected / 4)  # kl_div's "mean" divides by the classes
    mse = distillation(torch.from_numpy(student), torch.from_numpy(teacher), "mse")
    assert mse.item() == pytest.approx(((student - teacher) ** 2).mean(), abs=1e-12)


def test_teacher_is_frozen_in_eval_mode_and_no_submodule() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    client: Any = FedGKD(net, gamma=0.2, optimizer=partial(SGD, lr=0.1)).client()
    client.train()
    state = {name: t.clone() for name, t in net.state_dict().items()}
    client.receive(Message(2, {"global": state}, {"distil": 1}), {})
    x = torch.randn(6, 4)
    first, second = client.teacher(x), client.teacher(x)
    assert torch.equal(first, second) and not first.requires_grad
    assert same(client.teacher.net.state_dict(), state)  # BatchNorm did not learn
    assert not any("teacher" in name for name in client.state_dict())
    loss = client.training_step((x, torch.tensor([0, 1, 2, 0, 1, 2])), 0)
    loss.backward()
    assert all(p.grad is not None for p in client.net.parameters())
    assert all(p.grad is None for p in client.teacher.net.parameters())


def test_batchnorm_statistics_are_averaged_and_counts_stay_integers() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    updates: list[ClientUpdate] = []

    class Keep(FedAvg):
        def local_updates(self, *args: Any) -> Any:
            for update in super().local_updates(*args):
                updates.append(update)
                yield update

    model = Keep(net, local_epochs=2, **LOCAL)
    fit(model, Table(sizes=(8, 6), batch_size=4), 1)
    a, b = updates
    assert (a.num_samples, b.num_samples) == (8, 6)
    mean = (8 * a.weights["1.running_mean"].double() + 6 * b.weights["1.running_mean"]) / 14
    torch.testing.assert_close(net[1].running_mean, mean.float())
    counted = net[1].num_batches_tracked
    assert counted.dtype == torch.int64 and counted == 4  # two epochs of two batches


@pytest.mark.parametrize("method", ["fedgkd_vote", "fedgen"])
def test_the_servers_cores_do_not_matter(
    method: str, run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """Vote's validation and FedGen's generator compute on the server."""
    words = ("--rounds", "3", "--model.local_steps", "2", "--output_dir", str(tmp_path))
    before = torch.get_num_threads()
    models = []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            assert run("fit", "--config", f"digits/{method}.yaml", *words)[0] == 0
            files = sorted(tmp_path.rglob("global.safetensors"))
            models.append(files[-1].read_bytes())
    finally:
        torch.set_num_threads(before)
    assert len(files) == 2 and models[0] == models[1]
