"""The simulated device itself: equal to the CPU, and it refuses what a GPU refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.device.pieces import sim

pytestmark = [pytest.mark.device, pytest.mark.nightly]
Op = Callable[[Tensor, Tensor], Tensor]
OPS: dict[str, Op] = {
    "index": lambda t, i: t[i],
    "index by a mask": lambda t, i: t[t > 0],
    "index_add": lambda t, i: t.clone().index_add_(0, i, t[:3]),
    "index_put": lambda t, i: t.clone().index_put_((i,), t[:3]),
    "view of another type": lambda t, i: t.view(3, 10).view(torch.int32),
    "matmul": lambda t, i: t @ t.T,
    "out": lambda t, i: torch.add(t, t, out=torch.empty(0, device=t.device)),
}


@pytest.mark.parametrize("name", OPS)
def test_operators_give_the_cpus_bits(name: str) -> None:
    x, i = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, 3])
    host, there = OPS[name](x, i), OPS[name](x.to("sim:1"), i.to("sim:1"))
    assert there.device == torch.device("sim:1") and there.dtype == host.dtype
    assert torch.equal(there.cpu(), host)


MIXED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda a, b: a + b,
    "matmul": lambda a, b: a @ b.T,
    "conv": lambda a, b: F.conv2d(a[None, None], b[None, None, :2, :2]),
    "labels": lambda a, b: F.cross_entropy(a, b[:, 0].long().clamp(0, 2)),
    "out": lambda a, b: torch.add(a, a, out=b),
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("other", ["cpu", "sim:1"])
def test_two_devices_in_one_operator_are_refused(name: str, other: str) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        MIXED[name](torch.ones(4, 4, device="sim:0"), torch.ones(4, 4, device=other))


def test_what_needs_the_host_is_refused() -> None:
    there = torch.ones(3, device="sim")
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, generator=torch.Generator(), device="sim")
    with pytest.raises(RuntimeError, match="no such device"):
        torch.ones(3, device="sim:2")


def test_float64_is_refused_on_request() -> None:
    there = torch.ones(3, device="sim")
    with sim.without_double():
        for make in (there.double, lambda: torch.ones(3, dtype=torch.float64).to("sim")):
            with pytest.raises(TypeError, match="float64"):
                make()
        assert (there * 2.0).dtype == torch.float32
    assert there.double().dtype == torch.float64


def test_a_generator_of_its_own() -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(1)
    torch.rand(7)  # the host's
    assert torch.equal(torch.rand(3, device="sim:1").cpu(), expected)
    made = torch.Generator("sim").manual_seed(1)
    assert torch.equal(torch.rand(3, generator=made, device="sim").cpu(), expected)
