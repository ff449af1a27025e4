"""All randomness as a function of (seed, purpose, round, client): there is no state to save."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

Purpose = Literal[
    "partition",
    "cohort",
    "batches",
    "model",
    "generator",
    "validation",
    "public",
    "server",
    "client test",
    "client val",
    "personalize",
    "tasks",
]
_STREAMS: dict[str, int] = {name: index for index, name in enumerate(get_args(Purpose))}


def derive(seed: int, purpose: Purpose, round: int = 0, client: int = 0) -> int:
    """A 63-bit seed that belongs to one purpose, round and client alone.

    Rounds count from 1; 0 is for what belongs to no round. Two purposes never share a stream.
    """
    words = np.random.SeedSequence([seed, _STREAMS[purpose], round, client]).generate_state(2)
    return (int(words[0]) << 31) ^ int(words[1])


def default_seed() -> int:
    """The seed of Lightning's ``seed_everything``, or 0 where it was never called."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the generators of torch (dropout), NumPy and Python inside, restores them outside.

    Those of an accelerator, too, if this process uses one.
    """
    accelerator = _accelerator()
    devices = range(accelerator.device_count() if accelerator is not None else 0)
    states = [accelerator.get_rng_state(device) for device in devices]
    with kept_generators():
        if accelerator is not None:  # else it would look for devices that are not there: 0.4 ms
            torch.manual_seed(seed)
        seed_host(seed)
        try:
            yield
        finally:
            for device, state in zip(devices, states, strict=True):
                accelerator.set_rng_state(state, device)


def _accelerator() -> Any:
    """The module of the accelerator that this process uses, such as ``torch.cuda``, or None.

    Asking initialises nothing: a worker that trains on the CPU must not take a GPU's memory, and
    processes that are forked from it must be able to use one.
    """
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    module: Any = torch.get_device_module(device)
    in_use = getattr(module, "is_initialized", module.is_available)  # MPS has only the second
    return module if in_use() else None


@contextmanager
def kept_generators() -> Iterator[None]:
    """Leaves the host's generators of torch, NumPy and Python as they were before the block."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def seed_host(seed: int) -> None:
    """Seeds the host's generators of torch, NumPy and Python; an accelerator's stay."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def next_seed(generator: torch.Generator) -> int:
    """A 63-bit seed by what the generator would draw next; it goes on as if nobody had asked."""
    copy = torch.Generator().set_state(generator.get_state())
    return int(torch.randint(2**63 - 1, (), generator=copy))


def sample_seeds(seed: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A 64-bit seed for every number, by SplitMix64: a thousand of them take microseconds."""
    state = np.uint64(seed) + (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(
        0x9E3779B97F4A7C15
    )
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(state ^ (state >> np.uint64(31)))
