"""A table of six classes, which are three tasks of two rounds."""

from typing import Any

import numpy as np
import torch
from fedgkd_pl import MLP, ClassTasks
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.transforms import Scale

from tests.support.pieces import Table

ROUNDS = 6


class Six(Table):
    """Labels 0, 1, …, 5, 0, 1, …: every client has all classes."""

    name = "six"
    num_classes = 6

    def __init__(self, sizes: Any = (14, 18, 13), **kwargs: Any) -> None:
        settings = {"batch_size": 3, "tasks": ClassTasks(tasks=3, rounds_per_task=2), "seed": 4}
        super().__init__(sizes=sizes, **(settings | kwargs))
        self.y = np.arange(len(self.y)) % 6

    def load(self) -> Splits:
        rows = Examples(torch.from_numpy(self.x), torch.from_numpy(self.y), Scale(1))
        return Splits(rows, rows[:25])


def six_net() -> MLP:
    torch.manual_seed(0)
    return MLP(in_features=4, hidden=[7, 5], num_classes=6)
