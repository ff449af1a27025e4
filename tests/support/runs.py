"""Short runs of the command line, and the files that they leave."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

QUICK = ("--config", "smoke.yaml", "--model.engine.workers", "1")
# Of each way to keep something between rounds one: nothing, teachers, the clients' and the server's
# variates, the server's optimizer, a generator, labels of public data.
FAMILIES = ("fedavg", "fedgkd", "scaffold", "fedadam", "fedgen", "cfd")
# What a method trains besides its clients, cut down from up to 10,000 steps a round.
FEW_STEPS = {
    "cfd": ("--model.client_steps", "10", "--model.server_steps", "10"),
    "feddf": ("--model.distil_steps", "20", "--model.validate_every", "5"),
    "fedrep": ("--model.local_steps", "null", "--model.head_epochs", "1"),
    "fedgen": ("--model.generator_steps", "5"),
}
Run = Callable[..., tuple[int, str, str]]


def of_families(names: Iterable[str], *more: str) -> list[Any]:
    """Methods as parameters of a test, of which most are for `make test-all` alone.

    Args:
        more: methods that `make test` has, too, beside those of :data:`FAMILIES`.
    """
    short = {*FAMILIES, *map(str.lower, more)}
    marks = pytest.mark.nightly
    return [pytest.param(n, marks=[] if n.lower() in short else marks) for n in names]


def no_picture(figure: Any, close: bool = True) -> Any:
    """In place of what draws TensorBoard's figures, which takes a third of a short run."""
    import numpy as np

    return np.zeros((3, 1, 1), np.uint8)


def version(folder: Path, name: str = "smoke", number: int = 0) -> Path:
    return folder / "runs" / name / f"version_{number}"
