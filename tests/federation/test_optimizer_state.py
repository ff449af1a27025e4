"""An optimizer whose state was kept goes on as if it had never stopped."""

from functools import partial
from typing import Any

import pytest
import torch
from fedgkd_pl import FedWeIT
from fedgkd_pl.errors import SettingError
from fedgkd_pl.federation.optimizer import empty_state, load_state, state_of
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, Adam, NAdam

from tests.conftest import fit, same
from tests.support.pieces import Six, six_net

OPTIMIZERS = {
    "SGD": (partial(SGD, lr=0.1, momentum=0.9), {"momentum_buffer"}),
    "plain SGD": (partial(SGD, lr=0.1), set()),
    "Adam": (partial(Adam, lr=0.1), {"step", "exp_avg", "exp_avg_sq"}),
    "NAdam": (partial(NAdam, lr=0.1), {"step", "exp_avg", "exp_avg_sq", "mu_product"}),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2), nn.Linear(2, 2))
    made[2].requires_grad_(False)
    return made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def train(model: nn.Sequential, optimizer: Any, steps: range) -> None:
    """The last layer has no gradient before the third step."""
    for step in steps:
        x = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        out: Tensor = model[:3](x)
        (model(x) if step > 2 else out).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_it_goes_on_to_the_bit(case: str) -> None:
    build, parts = OPTIMIZERS[case]
    whole, first = net(), net()
    train(whole, build(whole.parameters()), range(6))
    optimizer = build(first.parameters())
    train(first, optimizer, range(3))
    named = {f"net: {n}": w for n, w in first.named_parameters()}
    empty = empty_state(build, named)
    kept = state_of(optimizer, empty, named)
    # weights 2 and 3 are frozen, 4 and 5 have not moved yet
    names = [f"net: {n}/" for n in ("0.weight", "0.bias", "3.weight", "3.bias")]
    assert kept.keys() == empty.keys() == {name + part for name in names for part in parts}
    assert not any(tensor.any() for name, tensor in kept.items() if name.startswith(names[2]))
    counts = {tensor.dtype for tensor in kept.values() if not tensor.dim()}
    assert counts <= {torch.float32}
    kept = {name: tensor.contiguous() for name, tensor in kept.items()}  # as from a file
    optimizer = build(first.parameters())
    load_state(optimizer, kept, named)
    for tensor in optimizer.state[first[0].weight].values():
        assert tensor.dim() == 0 or tensor.stride() == first[0].weight.stride()
    train(first, optimizer, range(3, 6))
    assert same(whole.state_dict(), first.state_dict())


def test_tensors_of_other_shapes_than_the_weights() -> None:
    """Adafactor has a row and a column for a matrix."""
    whole, first = nn.Linear(3, 4), nn.Linear(3, 4)
    first.load_state_dict(whole.state_dict())
    optimizers = [Adafactor(each.parameters(), lr=0.1) for each in (whole, first)]
    for step in range(4):
        for each, optimizer in zip((whole, first), optimizers, strict=True):
            optimizer.zero_grad()
            each(torch.full((2, 3), step + 1.0)).square().sum().backward()
            optimizer.step()
        named = dict(first.named_parameters())
        kept = state_of(optimizers[1], empty_state(Adafactor, named), named)
        optimizers[1] = Adafactor(first.parameters(), lr=0.1)
        load_state(optimizers[1], kept, named)
    assert {"weight/row_var", "weight/col_var", "bias/variance"} <= kept.keys()
    assert same(whole.state_dict(), first.state_dict())


def test_an_optimizer_without_plain_steps_is_refused() -> None:
    with pytest.raises(SettingError, match=r"must take plain steps.*LBFGS"):
        fit(FedWeIT(six_net(), optimizer=LBFGS), Six(), 1)
