"""Clients as odd as real ones: one sample, one class, nothing at all."""

from functools import partial
from typing import Any

import pytest
import torch
from fedgkd_pl import FedAvg, FedGKD, LocalEngine
from torch import nn
from torch.optim import SGD

from tests.conftest import Table, fit, linear

LOCAL: dict[str, Any] = {"optimizer": partial(SGD, lr=0.1), "engine": LocalEngine(1)}


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("net", [linear, normed], ids=["plain", "BatchNorm"])
@pytest.mark.parametrize("method", [FedAvg, partial(FedGKD, buffer_size=2)])
def test_one_sample_one_class_and_an_empty_client(net: Any, method: Any) -> None:
    data = Table(sizes=(1, 9, 0, 6, 5), participation=0.8, batch_size=4)
    data.y[1:10] = 2  # the second client holds one class; 9 = 4 + 4 + 1: a last batch of one
    model = method(net(), local_epochs=2, **LOCAL)
    trainer = fit(model, data, 3)
    assert trainer.global_step == 3
    assert all(torch.isfinite(t).all() for t in model.net.state_dict().values())


def test_batchnorm_uses_its_statistics_for_a_batch_of_one_and_learns_again() -> None:
    model = FedAvg(normed(), **LOCAL)
    seen: list[tuple[int, bool]] = []

    class Spy(type(model.client())):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append((len(batch[1]), self.net[1].training))
            return super().training_step(batch, batch_idx)

    model.client = lambda number=0: Spy(model.net, model.optimizer)  # type: ignore[method-assign]
    fit(model, Table(sizes=(9,), batch_size=4), 2)
    assert seen == [(4, True), (4, True), (1, False)] * 2
