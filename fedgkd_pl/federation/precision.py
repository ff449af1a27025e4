"""Half precision: where it is fast, where it is refused, and what is computed in more."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from fedgkd_pl.errors import require
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn

# what oneDNN takes in bfloat16, as a process of its own that an illegal instruction may end
PROBE = """
import torch
x = torch.ones(64, 64, 8, 8, dtype=torch.bfloat16)
torch.nn.functional.conv2d(x, torch.ones(64, 64, 3, 3, dtype=torch.bfloat16))
torch.nn.functional.linear(x.flatten(1), torch.ones(64, 4096, dtype=torch.bfloat16))
"""
LARGE = 1_000_000  # parameters of a net whose matrices are worth half precision


def wide(values: Tensor) -> Tensor:
    """Numbers in at least float32: what a loss is computed in, whatever autocast gives a net."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


@contextmanager
def plain_precision(device: torch.device) -> Iterator[None]:
    """As a new process would be: no autocast, float32 by default.

    A round runs within the precision of the server's Trainer. A client in the same process must
    not: its own Trainer opens what its forward pass needs, and no more than that.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.autocast(device.type, enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def evaluating(precision: Precision, device: torch.device) -> Iterator[None]:
    """As models are evaluated: in the type of their weights, whatever autocast trains them in."""
    with precision.val_step_context(), torch.autocast(device.type, enabled=False):
        yield


def slow_precision(precision: str, device: torch.device) -> bool:
    """Whether this hardware only emulates a precision, which makes it slower."""
    if device.type == "cpu":
        if not torch.backends.mkldnn.is_available():
            return "16" in precision
        if "bf16" in precision:
            return not has_bf16()
        return precision.startswith("16") and not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    if device.type == "cuda" and "bf16" in precision:
        return not torch.cuda.is_bf16_supported(including_emulation=False)
    return False


def has_bf16() -> bool:
    """Whether this CPU has instructions for bfloat16; oneDNN takes AVX-512 alone for enough."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    known = _capabilities()
    if known.get("architecture") != "x86_64":
        return True
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def _capabilities() -> dict[str, object]:
    """What torch knows of this CPU."""
    return dict(torch.cpu.get_capabilities())


def check_instructions(precision: str, device: torch.device) -> None:
    """Refuses bfloat16 where the CPU announces AMX and the system does not permit it.

    The first convolution would end the process without a word (SIGILL): so a child tries it.
    """
    announced = _capabilities().get("amx_tile") or _capabilities().get("amx_bf16")
    if "bf16" not in precision or device.type != "cpu" or not announced:
        return
    if "ONEDNN_MAX_CPU_ISA" in os.environ:
        return
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=False)
    text = (
        "this machine announces AMX instructions and does not permit them: set "
        "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment, or take 32-true"
    )
    require(done.returncode != -signal.SIGILL, "precision", text, precision)


def faster_precision(net: nn.Module, device: torch.device) -> str:
    """The precision that would take less time here than 32 bits; empty if none is known to."""
    layers = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    heavy = any(isinstance(module, layers) for module in net.modules())
    heavy = heavy or sum(parameter.numel() for parameter in net.parameters()) > LARGE
    return "bf16-mixed" if heavy and device.type == "cpu" and has_bf16() else ""
