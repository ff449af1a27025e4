"""Speed and precision: layouts, memory, threads, what the hardware has, what is computed wider."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn

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


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Computes on so many threads; results should not depend on how many the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
