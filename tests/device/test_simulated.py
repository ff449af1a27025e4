"""The simulated device itself: equal to the CPU, and it refuses what a GPU refuses."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.conftest import script
from tests.device.pieces import sim

pytestmark = pytest.mark.device
Op = Callable[[Tensor, Tensor], Tensor]
OPS: dict[str, Op] = {
    "index": lambda t, i: t[i],
    "index by a mask": lambda t, i: t[t > 0],
    "gather": lambda t, i: t.gather(1, i[None].expand(5, 3)),
    "index_add": lambda t, i: t.clone().index_add_(0, i, t[:3]),
    "index_put": lambda t, i: t.clone().index_put_((i,), t[:3]),
    "cat": lambda t, i: torch.cat([t, t], 1),
    "where": lambda t, i: torch.where(t > 0, t, 0.0),
    "one_hot": lambda t, i: F.one_hot(i, 4),
    "view of another type": lambda t, i: t.view(3, 10).view(torch.int32),
    "transpose": lambda t, i: t.t().contiguous(),
    "sort": lambda t, i: t.sort(1)[1],
    "matmul": lambda t, i: t @ t.T,
    "list": lambda t, i: torch._foreach_mul([t, t], 2.0)[1],
    "resize": lambda t, i: torch.empty(0, device=t.device).resize_(3).fill_(2.0),
    "out": lambda t, i: torch.add(t, t, out=torch.empty(0, device=t.device)),
    "norm": lambda t, i: nn.utils.get_total_norm([t, t]),
}


@pytest.mark.parametrize("name", OPS)
def test_operators_give_the_cpus_bits(name: str) -> None:
    x, i = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, 3])
    host, there = OPS[name](x, i), OPS[name](x.to("sim:1"), i.to("sim:1"))
    assert there.device == torch.device("sim:1") and there.dtype == host.dtype
    assert torch.equal(there.cpu(), host)


def conv(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: conv(nn.GroupNorm(2, 4)),
        lambda: conv(nn.BatchNorm2d(4)),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.LayerNorm(6), nn.Dropout(0.5)),
    ],
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_training_gives_the_cpus_bits(make: Callable[[], nn.Module], kind: Any) -> None:
    torch.manual_seed(0)
    host = make()
    x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 3, (4,))
    there = copy.deepcopy(host).to("sim:1")
    for net, inputs, labels in ((host, x, y), (there, x.to("sim:1"), y.to("sim:1"))):
        optimizer = kind(net.parameters(), lr=0.1, foreach=False)
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), labels).backward()
            optimizer.step()
    for ours, theirs in zip(host.state_dict().values(), there.state_dict().values(), strict=True):
        assert theirs.device == torch.device("sim:1") and torch.equal(ours, theirs.cpu())


MIXED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda a, b: a + b,
    "add in place": lambda a, b: b.clone().add_(a),
    "cat": lambda a, b: torch.cat([a, b]),
    "matmul": lambda a, b: a @ b.T,
    "linear": lambda a, b: F.linear(a, b),
    "conv": lambda a, b: F.conv2d(a[None, None], b[None, None, :2, :2]),
    "loss": lambda a, b: F.mse_loss(a, b),
    "labels": lambda a, b: F.cross_entropy(a, b[:, 0].long().clamp(0, 2)),
    "gather": lambda a, b: a.gather(0, b.long()),
    "list": lambda a, b: torch._foreach_add([a], [b]),
    "out": lambda a, b: torch.add(a, a, out=b),
    "index of the other": lambda a, b: b[a[:, 0].long()],
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("other", ["cpu", "sim:1"])
def test_two_devices_in_one_operator_are_refused(name: str, other: str) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        MIXED[name](torch.ones(4, 4, device="sim:0"), torch.ones(4, 4, device=other))


def test_numbers_of_the_host_are_welcome() -> None:
    there = torch.ones(3, device="sim")
    assert (there + torch.tensor(1.0)).device.type == "sim"
    with pytest.raises(RuntimeError, match="same device"):
        torch.tensor(1.0).add_(there.sum())


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


def test_autocast() -> None:
    net, x = nn.Linear(4, 3).to("sim"), torch.ones(2, 4, device="sim")
    with torch.autocast("sim", torch.bfloat16):
        logits = net(x)
        loss = F.cross_entropy(logits, torch.tensor([0, 1], device="sim"))
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    loss.backward()
    assert net.weight.grad is not None and net.weight.grad.dtype == torch.float32


def test_saving_and_memory() -> None:
    module: Any = torch.get_device_module("sim")
    before = module.memory_allocated(1)
    there = torch.ones(1000, device="sim:1")
    assert module.memory_allocated(1) == before + 4000
    file = io.BytesIO()
    torch.save(there, file)
    file.seek(0)
    assert torch.equal(torch.load(file, map_location="cpu"), torch.ones(1000))
    del there
    assert module.memory_allocated(1) == before


FORKED = """
import os
import torch

torch.ones(1, device="sim")
child = os.fork()
if child == 0:
    try:
        torch.ones(1, device="sim")
    except RuntimeError as error:
        os._exit(7 if "forked subprocess" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_a_fork_of_a_process_that_uses_it_is_refused(tmp_path: Path) -> None:
    done = script(FORKED, tmp_path)
    assert done.returncode == 0, done.stderr
