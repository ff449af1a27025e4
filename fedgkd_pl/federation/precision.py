"""Half precision: where it is fast, and what is computed in more."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn


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


@contextmanager
def in_eval_mode(net: nn.Module) -> Iterator[None]:
    """Evaluates a net in place; its layers get their modes back."""
    modes = {module: module.training for module in net.modules()}
    net.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


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
    known = torch.cpu.get_capabilities()
    other = known.get("architecture") != "x86_64"
    return other or bool(known.get("avx512_bf16") or known.get("amx_bf16"))
