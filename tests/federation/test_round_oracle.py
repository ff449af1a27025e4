"""Whole rounds against the NumPy oracle, which knows nothing of the package."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import FedAvg, FedGKD, LocalEngine
from torch.optim import SGD

from tests.conftest import Table, fit, linear
from tests.oracles import oracle
from tests.support.methods import batches_of

ENGINE = LocalEngine(workers=1)
LOCAL = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.01}


def compare(model: FedAvg, data: Table, rounds: int, epochs: int, **trainer: Any) -> list[Any]:
    """Runs both; asserts that every round's global model is the same."""
    w0 = {name: t.double().numpy().copy() for name, t in model.net.state_dict().items()}
    gkd = (
        {
            "gamma": model.gamma,
            "distance": model.distance,
            "temperature": model.temperature,
            "buffer_size": model.buffer.maxlen,
        }
        if isinstance(model, FedGKD)
        else {}
    )
    expected = oracle.run(
        w0,
        data.arrays(),
        [[0, 1]] * rounds,
        batches=batches_of(data, epochs),
        clip=trainer.get("gradient_clip_val"),
        **LOCAL,
        **gkd,
    )
    for done in range(1, rounds + 1):
        model.net.load_state_dict({name: torch.from_numpy(value) for name, value in w0.items()})
        fit(model, data, done, precision="64-true", **trainer)
        for name, value in model.net.state_dict().items():
            np.testing.assert_allclose(value.numpy(), expected[done - 1][name], atol=1e-10, rtol=0)
    return expected


def local(epochs: int) -> dict[str, Any]:
    return {"local_epochs": epochs, "optimizer": partial(SGD, **LOCAL), "engine": ENGINE}


def test_fedavg_two_local_steps() -> None:
    compare(FedAvg(linear(), **local(2)), Table(), rounds=3, epochs=2)


def test_fedavg_minibatches_and_clipping() -> None:
    data = Table(sizes=(8, 5), batch_size=3)
    compare(FedAvg(linear(), **local(2)), data, rounds=2, epochs=2, gradient_clip_val=0.5)


@pytest.mark.parametrize("distance", ["kl", "mse"])
@pytest.mark.parametrize("buffer_size", [1, 2])
def test_fedgkd(distance: str, buffer_size: int) -> None:
    model = FedGKD(
        linear(),
        gamma=0.8,
        buffer_size=buffer_size,
        distance=distance,  # type: ignore[arg-type]
        **local(2),
    )
    data = Table(sizes=(8, 5), batch_size=4)
    rounds = compare(model, data, rounds=4, epochs=2)
    other = oracle.run(
        {name: t.double().numpy() for name, t in linear().state_dict().items()},
        data.arrays(),
        [[0, 1]] * 4,
        batches=batches_of(data, 2),
        **LOCAL,
    )
    # The comparison could not tell FedGKD from FedAvg if distillation changed nothing.
    assert np.abs(rounds[-1]["weight"] - other[-1]["weight"]).max() > 1e-3


def test_single_precision_is_within_the_stated_tolerance() -> None:
    data = Table()
    model = FedGKD(linear(), gamma=0.8, buffer_size=2, **local(2))
    w0 = {name: t.double().numpy().copy() for name, t in model.net.state_dict().items()}
    expected = oracle.run(
        w0,
        data.arrays(),
        [[0, 1]] * 3,
        batches=batches_of(data, 2),
        gamma=0.8,
        buffer_size=2,
        **LOCAL,
    )
    fit(model, data, 3)
    for name, value in model.net.state_dict().items():
        np.testing.assert_allclose(value.numpy(), expected[-1][name], atol=1e-6, rtol=0)
