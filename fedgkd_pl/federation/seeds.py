"""All randomness as a function of (seed, purpose, round, client): there is no state to save."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch

Purpose = Literal["partition", "cohort", "batches", "model"]
_STREAMS: dict[str, int] = {"partition": 0, "cohort": 1, "batches": 2, "model": 3}


def derive(seed: int, purpose: Purpose, round: int = 0, client: int = 0) -> int:
    """A 63-bit seed that belongs to one purpose, round and client alone.

    Args:
        seed: the seed of the run.
        purpose: what it is for; two purposes never share a stream.
        round: the round, from 1; 0 for what belongs to no round.
        client: the client's id.
    """
    words = np.random.SeedSequence([seed, _STREAMS[purpose], round, client]).generate_state(2)
    return (int(words[0]) << 31) ^ int(words[1])


def default_seed() -> int:
    """The seed of Lightning's ``seed_everything``, or 0 where it was never called."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's global generators (dropout) seeded inside, and as they were outside.

    Args:
        seed: the seed inside.
        device: an accelerator whose generator takes part, or the CPU.
    """
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
