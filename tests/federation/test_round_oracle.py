"""Whole rounds against the NumPy oracle, which knows nothing of the package."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from fedgkd_pl import FedAvg, FedGKD, LocalEngine
from torch.optim import SGD

from tests.conftest import Table, fit, linear
from tests.oracles import oracle
from tests.support.methods import batches_of, double, watched

SGD_BY_HAND: dict[str, Any] = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.01}
LOCAL: dict[str, Any] = {"local_epochs": 2, "optimizer": partial(SGD, **SGD_BY_HAND)}
LOCAL |= {"engine": LocalEngine(workers=1)}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float | None]] = {  # of the table, of FedGKD
    "FedAvg": ({}, {}, None),
    "FedAvg, clipped": ({"batch_size": 3}, {}, 0.5),
    "kl of the last": ({"batch_size": 4}, {"gamma": 0.8, "buffer_size": 1}, None),
    "kl of two": ({}, {"gamma": 0.8, "buffer_size": 2}, None),
    "kl at a temperature": ({}, {"gamma": 0.8, "buffer_size": 2, "temperature": 2.0}, None),
    "mse of two": ({}, {"gamma": 0.8, "buffer_size": 2, "distance": "mse"}, None),
}


@pytest.mark.parametrize(("precision", "atol"), [("64-true", 1e-10), ("32-true", 1e-6)])
@pytest.mark.parametrize("case", CASES)
def test_four_rounds(case: str, precision: str, atol: float) -> None:
    of_table, of_gkd, clip = CASES[case]
    data = Table(sizes=(8, 5), **of_table)
    model = FedGKD(linear(), **of_gkd, **LOCAL) if of_gkd else FedAvg(linear(), **LOCAL)
    start = {name: tensor.numpy() for name, tensor in double(model.net.state_dict()).items()}
    rows = batches_of(data, 2)
    run = partial(
        *(oracle.run, start, data.arrays(), [[0, 1]] * 4),
        batches=lambda round, client: [batch.numpy() for batch in rows(round, client)],
        **SGD_BY_HAND,
    )
    expected, seen = run(clip=clip, **of_gkd), watched(model)
    fit(model, data, 4, precision=precision, gradient_clip_val=clip)
    for ours, theirs in zip(seen, expected, strict=True):
        for name, value in ours.items():
            np.testing.assert_allclose(value.numpy(), theirs[name], atol=atol, rtol=0)
    # The comparison could not tell FedGKD from FedAvg if distillation changed nothing.
    without = run(clip=clip)[-1]["weight"]
    assert bool(np.abs(expected[-1]["weight"] - without).max() > 1e-3) is bool(of_gkd)
