"""Small real pieces that tests put together: a table of numbers, a short fit."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from fedgkd_pl import MLP, ClassTasks
from fedgkd_pl.data.datamodule import FederatedDataModule, OwnSplit
from fedgkd_pl.data.examples import Examples, Scale, Splits
from fedgkd_pl.data.partition import Indices, Labels, Partition
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn


class Given(Partition):
    """Clients with exactly these samples."""

    def __init__(self, parts: Sequence[Sequence[int]]) -> None:
        self.parts = [np.array(part) for part in parts]

    def split(self, labels: Labels, num_clients: int, generator: Any) -> Iterator[Indices]:
        yield from self.parts


class Table(FederatedDataModule):
    """Numbers made here: what a test can compute by hand."""

    name = "table"
    num_classes = 3
    val_split = "last"

    def __init__(
        self,
        sizes: Sequence[int] = (8, 5),
        features: int = 4,
        scored: bool = False,  # whether clients have test samples in turn as their own
        **kwargs: Any,
    ) -> None:
        self.scored = scored
        ends = np.cumsum(sizes).tolist()
        parts = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        defaults: dict[str, Any] = {
            "num_clients": len(sizes),
            "partition": Given(parts),  # type: ignore[arg-type]
            "batch_size": 100,
            "val_fraction": 0.0,
            "seed": 0,
        }
        super().__init__(**(defaults | kwargs))
        rng = np.random.default_rng(7)
        rows = ends[-1] + (6 if self.val_fraction else 0)
        self.val_fraction = 6 / rows if self.val_fraction else 0.0
        self.x = rng.normal(size=(rows, features)).astype(np.float32)
        self.y = rng.integers(0, 3, rows)

    def load(self) -> Splits:
        all_ = Examples(torch.from_numpy(self.x), torch.from_numpy(self.y), Scale(1))
        return Splits(all_, all_[:6])

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        if self.scored:
            parts = np.array_split(np.arange(len(self.test)), self.num_clients)
            own = OwnSplit.of(self.test, parts)
            self.client_splits = {"test": own, "val": own} | self.client_splits

    def arrays(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Each client's (x, y)."""
        self.setup()
        data = self.client_data
        parts = [data.examples[torch.from_numpy(np.asarray(part))] for part in data.index]
        return [(part.inputs.numpy(), part.targets.numpy()) for part in parts]


def quiet_trainer(**kwargs: Any) -> Trainer:
    silent: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "devices": 1,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**(silent | kwargs))


def linear(features: int = 4, classes: int = 3, seed: int = 0) -> nn.Linear:
    seed_everything(seed, verbose=False)
    return nn.Linear(features, classes)


def fit(model: LightningModule, data: FederatedDataModule, rounds: int, **kwargs: Any) -> Trainer:
    trainer = quiet_trainer(max_epochs=rounds, **kwargs)
    trainer.fit(model, data)
    return trainer


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# A table of six classes, which are three tasks of two rounds.
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
