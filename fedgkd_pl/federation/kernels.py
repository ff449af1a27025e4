"""How a net runs fastest: memory layout, fused optimizers, and what the hardware has."""

import os
import shutil
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

Net = TypeVar("Net", bound=nn.Module)


def channels_last(net: Net) -> Net:
    """Lays out the weights of convolutions for channels-last images; other nets stay as they are.

    Args:
        net: changed in place; its numbers stay the same.
    """
    if any(isinstance(module, nn.Conv2d) for module in net.modules()):
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net


def fused(optimizer: Optimizer) -> Optimizer:
    """Lets an optimizer of torch take its step in one kernel, unless the user chose how.

    Args:
        optimizer: before its first step; changed in place.
    """
    if type(optimizer) not in (SGD, Adam, AdamW):
        return optimizer
    for group in optimizer.param_groups:
        chosen = any(group.get(way) for way in ("foreach", "differentiable", "capturable"))
        plain = all(
            p.is_floating_point() and not p.is_sparse and p.device.type in ("cpu", "cuda", "mps")
            for p in group["params"]
        )
        if group["fused"] is None and group["foreach"] is None and not chosen and plain:
            group["fused"] = True
    return optimizer


def missing_compiler(device: torch.device) -> str:
    """What ``compile: true`` lacks on this machine; empty if nothing.

    Args:
        device: where clients train.
    """
    if device.type == "cuda":
        return "" if find_spec("triton") else "the package triton"
    names = [os.environ.get("CXX", ""), "g++", "clang++", "cl"]
    return "" if any(shutil.which(name) for name in names if name) else "a C++ compiler (g++)"


def slow_precision(precision: str, device: torch.device) -> bool:
    """Whether a precision is only emulated by this hardware, which makes it slower.

    Args:
        precision: Lightning's name of it.
        device: where clients train.
    """
    if device.type == "cpu":
        ops = torch.ops.mkldnn
        if "bf16" in precision:
            return not ops._is_mkldnn_bf16_supported()
        return precision.startswith("16") and not ops._is_mkldnn_fp16_supported()
    if device.type == "cuda" and "bf16" in precision:
        return not torch.cuda.is_bf16_supported(including_emulation=False)
    return False
