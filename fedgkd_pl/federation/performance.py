"""How a net runs fastest: layouts, fused optimizers, memory, and what the hardware has."""

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from fedgkd_pl.errors import require
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # which decides whether its sums are reproducible


def channels_last(net: nn.Module, inputs: Tensor, device: torch.device | None = None) -> None:
    """Lays out the weights of convolutions for channels-last images, if the net can take them so.

    A net that flattens by ``view`` cannot, nor one with convolutions of other dimensions: they stay
    as they are. So do nets with GroupNorm where its kernels would copy every image to the other
    layout and back, and on CPUs nets with a convolution whose kernel is wrong (:func:`_overruns`).
    Copies of a net have its layout. ``device``: where it will train, if not where the inputs are.
    """
    convolutions = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
    if inputs.dim() != 4 or not convolutions:
        return
    kind = (device or inputs.device).type
    grouped = any(isinstance(module, nn.GroupNorm) for module in net.modules())
    if grouped and kind not in ("cpu", "xpu"):
        return
    if kind == "cpu" and any(map(_overruns, convolutions)):
        return
    layout = {"memory_format": torch.channels_last}
    try:
        with torch.no_grad():
            deepcopy(net).eval().to(**layout)(inputs.contiguous(**layout))  # type: ignore[call-overload]
    except RuntimeError:
        return
    net.to(**layout)  # type: ignore[call-overload]


def _overruns(layer: nn.Conv2d) -> bool:
    """Whether its gradient, with channels last, may be written beyond its memory.

    That of a 1 x 1 convolution with a stride and fewer channels than a vector register holds is
    (github.com/uxlfoundation/oneDNN/issues/6035): wrong weights, or a crash.
    """
    strided = layer.kernel_size == (1, 1) and layer.stride != (1, 1)
    return strided and layer.in_channels // layer.groups < 16


def is_channels_last(net: nn.Module) -> bool:
    """Whether :func:`channels_last` changed a net."""
    return any(
        module.weight.is_contiguous(memory_format=torch.channels_last)
        and not module.weight.is_contiguous()
        for module in net.modules()
        if isinstance(module, nn.Conv2d)
    )


def fused(optimizer: Optimizer) -> Optimizer:
    """Lets a new optimizer of torch take its step in one kernel, unless the user chose how.

    Only where that kernel was seen to be right here: torch 2.13's for half-precision weights on
    CPUs leaves most of them as they were.
    """
    if type(optimizer) not in (SGD, Adam, AdamW):
        return optimizer
    for group in optimizer.param_groups:
        chosen = any(group.get(way) for way in ("foreach", "differentiable", "capturable"))
        plain = all(
            p.is_floating_point() and not p.is_sparse and p.device.type in ("cpu", "cuda", "mps")
            for p in group["params"]
        )
        unset = group["fused"] is None and group["foreach"] is None and not chosen and plain
        if not unset and not group["fused"]:
            continue
        types = {(p.dtype, p.device) for p in group["params"]}
        right = all(
            _fused_is_right(type(optimizer), dtype, device, _features(group))  # type: ignore[arg-type]
            for dtype, device in types
        )
        require(
            right or not group["fused"],
            "fused",
            "torch's fused step is wrong here for weights of this precision: leave it out",
            group["fused"],
        )
        group["fused"] = right or None
    return optimizer


def _features(group: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The settings that choose what a kernel computes: on or off, not how much."""
    sizes = {"momentum": 0.5, "weight_decay": 0.1, "dampening": 0.1}
    switches = ("nesterov", "amsgrad", "maximize", "decoupled_weight_decay")
    return (
        *((name, size if group.get(name) else 0) for name, size in sizes.items() if name in group),
        *((name, group[name]) for name in switches if group.get(name) is not None),
    )


@lru_cache
def _fused_is_right(
    cls: type[Optimizer],
    dtype: torch.dtype,
    device: torch.device,
    features: tuple[tuple[str, Any], ...],
) -> bool:
    """Whether three fused steps give what three plain ones do, up to rounding."""
    known = signature(cls).parameters
    settings = {name: value for name, value in features if name in known}
    results = []
    for way in (True, False):
        weights = [
            torch.linspace(-1, 1, size, dtype=torch.float32, device=device).to(dtype)
            for size in (1, 7, 64, 1000)  # scalars, tails and blocks of vector instructions
        ]
        weights = [nn.Parameter(weight) for weight in weights]
        try:
            optimizer = cls(weights, lr=0.5, fused=way, foreach=False, **settings)  # type: ignore[call-arg]
            for step in range(3):
                for weight in weights:
                    flipped = torch.linspace(1, -1, len(weight), dtype=torch.float32, device=device)
                    weight.grad = (flipped * (0.5 + step)).to(dtype)
                optimizer.step()
        except RuntimeError:  # this torch has no such kernel
            return False
        results.append(torch.cat([weight.detach() for weight in weights]).double().cpu())
    tolerance = 32 * torch.finfo(dtype).eps
    return torch.allclose(results[0], results[1], rtol=tolerance, atol=tolerance)


def keep_memory() -> None:
    """Lets this process keep the memory that a step frees, for the next step.

    glibc gives blocks of megabytes back to the system at once and gets them as new pages: ten
    thousand page faults, a quarter of the time, in every step of a ResNet-8. Other allocators, and
    settings in the environment, stay as they are.
    """
    chosen = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if sys.platform != "linux" or any(name in os.environ for name in chosen):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30) or mallopt(mmap_threshold, 2**25)  # an old one's largest


def numerics() -> dict[str, Any]:
    """The process-wide settings that change numbers."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "cudnn": [torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32],
        "cublas": os.environ.get(CUBLAS),
        "matmul": torch.get_float32_matmul_precision(),
    }


def set_numerics(settings: dict[str, Any], threads: int) -> None:
    """Lets a worker's process compute as the server's does, whose :func:`numerics` these are."""
    keep_memory()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["warn_only"])
    torch.backends.cudnn.benchmark = settings["benchmark"]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = settings["cudnn"]
    if settings["cublas"] is not None:
        os.environ[CUBLAS] = settings["cublas"]
    torch.set_float32_matmul_precision(settings["matmul"])


def missing_compiler(device: torch.device) -> str:
    """What ``compile: true`` lacks on this machine; empty if nothing."""
    if device.type == "cuda":
        return "" if find_spec("triton") else "the package triton"
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    name = os.environ.get("CXX", usual)  # as torch looks for it
    return "" if shutil.which(name) else f"a C++ compiler ({name})"


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Computes on so many threads; results should not depend on how many the machine has."""
    before = torch.get_num_threads()
    if number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
