"""Small datasets of torch's that are read sample by sample, in a module that --import can name."""

import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class Points(Dataset[Any]):
    """Points of two classes; ``noise`` is drawn from all three generators.

    Args:
        number: of the points.
        noise: its size.
        log: a file that gets a line for every sample that is read.
        told: whether the dataset has its labels as ``targets``.
    """

    def __init__(
        self, number: int = 200, noise: float = 0.0, log: str | None = None, told: bool = True
    ) -> None:
        self.x = np.random.default_rng(0).normal(size=(number, 4)).astype(np.float32)
        self.y = (self.x[:, 0] > 0).astype(np.int64)
        if told:
            self.targets = self.y
        self.noise = noise
        self.log = log

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        if self.log:
            with Path(self.log).open("a") as file:
                file.write(f"{row}\n")
        x = torch.from_numpy(self.x[row])
        if self.noise:
            drawn = torch.rand(4) + random.random() + float(np.random.rand())
            x = x + self.noise * drawn
        return x, int(self.y[row])

    def rows_read(self) -> list[int]:
        """What was read since the last call."""
        assert self.log
        lines = Path(self.log).read_text().split() if Path(self.log).exists() else []
        Path(self.log).write_text("")
        return [int(line) for line in lines]


class Bad(Points):
    """Points of which one is bad, in one of several ways."""

    def __init__(self, row: int, fault: str) -> None:
        super().__init__()
        self.row, self.fault = row, fault

    def __getitem__(self, row: int) -> Any:
        x, y = super().__getitem__(row)
        if row != self.row:
            return x, y
        if self.fault == "error":
            raise OSError(f"file {row}.png\nis gone")
        faults: dict[str, Any] = {
            "shape": (x[:3], y),
            "type": (x.double(), y),
            "nan": (x * float("nan"), y),
            "label": (x, 7),
            "no pair": x,
        }
        return faults[self.fault]


class Unsendable(Points):
    """Points with something that no other process can have."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Pid(Points):
    """Points whose input is the id of the process that reads them."""

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.tensor([os.getpid()], dtype=torch.float64), int(self.targets[row])
