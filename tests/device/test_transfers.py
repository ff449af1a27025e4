"""How often the host waits for the device: a step of a client should not make it.

Two runs that differ in their local epochs alone are compared, so what a round costs once, such as
sending models and reading scores, is not counted.
"""

from collections import Counter
from typing import Any

import pytest
from fedgkd_pl import FedAvg, FedGen, FedGKD, LocalEngine

from tests.conftest import fit
from tests.device.pieces import OPTIMIZER, conv_net, images, sim, text_net, texts

pytestmark = [pytest.mark.device, pytest.mark.nightly]
ROUNDS, CLIENTS, EPOCHS = 2, 2, 3
STEPS = 3 + 2  # of an epoch of both clients: 12 and 8 samples in batches of 4


def run(method: Any, net: Any, data: Any, epochs: int = 1, rounds: int = ROUNDS) -> Any:
    settings: dict[str, Any] = {"optimizer": OPTIMIZER, "engine": LocalEngine(1)}
    model = method(net(), local_epochs=epochs, **settings)
    with sim.transfers() as seen:
        fit(model, data(), rounds, gradient_clip_val=10.0, limit_val_batches=0, **sim.on())
    assert not model.results.failures
    return seen


def gen(net: Any, **kwargs: Any) -> FedGen:
    return FedGen(net, hidden=4, generator_steps=2, **kwargs)


@pytest.mark.parametrize(
    ("method", "net", "data", "each"),
    [
        (FedAvg, conv_net, images, 0),
        (FedGKD, conv_net, images, 0),
        (gen, conv_net, images, 0),
        (FedAvg, text_net, texts, 2),  # the longest text, and transformers' look at the mask
    ],
)
def test_a_step_waits_at_most_so_often(method: Any, net: Any, data: Any, each: int) -> None:
    """An epoch waits once more, for its order of samples."""
    few, many = run(method, net, data, 2), run(method, net, data, 2 + EPOCHS)
    waits = Counter(many.blocking) - Counter(few.blocking)
    epochs, steps = ROUNDS * CLIENTS * EPOCHS, ROUNDS * STEPS * EPOCHS
    assert waits.total() <= epochs + each * steps, dict(waits)


def test_the_cache_is_not_emptied_for_every_client() -> None:
    two, four = (run(FedAvg, conv_net, images, rounds=rounds) for rounds in (2, 4))
    assert two.count("empty_cache") == four.count("empty_cache")


def test_copies_that_do_not_block_are_counted_apart() -> None:
    host = sim.torch.ones(3)
    with sim.transfers() as seen:
        there = host.to("sim", non_blocking=True)
        assert not seen.blocking
        (there.sum() + there.to("sim").sum()).item()
        there[sim.torch.tensor([0])] = there[there > 2].sum()
        sim.torch.bincount(there.long())
    assert seen.blocking == ["item", "wait nonzero", "h2d", "wait bincount"]
    assert seen.count("h2d non_blocking") == 1 and seen.seen[0][1] == 12
