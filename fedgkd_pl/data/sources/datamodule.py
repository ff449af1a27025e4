"""Any LightningDataModule: its training set is cut into clients."""

from typing import Any

import torch
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.sources.arrays import transform_for
from fedgkd_pl.data.sources.base import OwnData, reading
from fedgkd_pl.data.sources.dataset import check_workers, lazy_examples
from fedgkd_pl.errors import require
from fedgkd_pl.seeds import seeded
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, default_collate
from typing_extensions import override


class LightningData(OwnData):
    """The data of a ``LightningDataModule``, read into memory once unless it is ``lazy``.

    Its training set is cut into clients; its validation and test sets are kept, and are cut from
    the training set where it has none. Batches must be pairs of inputs and class numbers. Random
    transforms of the training set are drawn once, for all rounds.

    Args:
        datamodule: the data module.
        num_classes: by default the largest class number and one.
        class_names: in the order of their numbers.
        lazy: reads the datasets of its DataLoaders sample by sample when a batch needs them, as
            :class:`TorchDataset` does; random transforms are then drawn anew every time.
        loader_workers: where ``lazy``: processes that read ahead, for each that trains.
        kwargs: those of :class:`OwnData`.
    """

    name = "lightning"

    def __init__(
        self,
        datamodule: LightningDataModule,
        num_classes: int | None = None,
        class_names: list[str] | None = None,
        lazy: bool = False,
        loader_workers: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_workers(loader_workers, lazy)
        self.datamodule = datamodule
        self.lazy = lazy
        self.loader_workers = loader_workers
        self.set_classes(num_classes, class_names)

    @override
    def prepare_data(self) -> None:
        self.datamodule.prepare_data()

    @override
    def load(self) -> Splits:
        self.prepare_data()
        for stage in ("fit", "test"):
            self.datamodule.setup(stage)
        examples: dict[str, Any] = {}
        for split in ("train", "test", "val"):
            hook = f"{split}_dataloader"
            if getattr(type(self.datamodule), hook) is not getattr(LightningDataModule, hook):
                examples[split] = self._examples(split, hook)
        require("train" in examples, "datamodule", "must have a train_dataloader()")
        return self.split(**examples)

    def _examples(self, split: str, hook: str) -> Examples:
        """All samples of a split, in their order."""
        loader = getattr(self.datamodule, hook)()
        loader = loader[0] if isinstance(loader, list | tuple) and len(loader) == 1 else loader
        reason = f"its {hook}() must be one DataLoader, of a map-style dataset"
        plain = isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__")
        require(plain, "datamodule", reason, type(loader).__name__)
        if self.lazy:
            reason = f"its {hook}() has a collate_fn: let its dataset give (x, y) instead"
            require(loader.collate_fn is default_collate, "lazy", reason)
            return lazy_examples(loader.dataset, split, workers=self.loader_workers)
        ordered: Any = DataLoader(loader.dataset, 256, collate_fn=loader.collate_fn)
        with reading(f"its {hook}() of (inputs, labels)", "datamodule"):
            with seeded(self.partition_seed):
                batches = list(ordered)
            inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return Examples(inputs, targets, transform_for(inputs, None, None))
