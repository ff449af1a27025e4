"""Any LightningDataModule: its training set is cut into clients."""

from typing import Any

import torch
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.sources.arrays import transform_for
from fedgkd_pl.data.sources.base import OwnData
from fedgkd_pl.data.sources.dataset import check_workers, lazy_examples
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.seeds import seeded
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, default_collate


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
        federated = isinstance(datamodule, OwnData)
        require(not federated, "datamodule", "is cut into clients already: use it as it is")
        self.datamodule = datamodule
        self.lazy = lazy
        self.loader_workers = loader_workers
        if num_classes is not None:
            self.num_classes = num_classes
        self.class_names = class_names or ()

    def prepare_data(self) -> None:
        """See Lightning's."""
        self.datamodule.prepare_data()

    def load(self) -> Splits:
        """See :meth:`FederatedDataModule.load`."""
        module = self.datamodule
        self.prepare_data()
        for stage in ("fit", "test"):
            module.setup(stage)
        train = self._examples("train")
        require(train is not None, "datamodule", "has no train_dataloader()")
        assert train is not None
        if not hasattr(self, "num_classes"):
            self.num_classes = len(self.class_names) or int(train.targets.max()) + 1
        return self.split(train, self._examples("test"), self._examples("val"))

    def _examples(self, split: str) -> Examples | None:
        """All samples of a split, in their order; None where there is no such split."""
        if getattr(type(self.datamodule), f"{split}_dataloader") is getattr(
            LightningDataModule, f"{split}_dataloader"
        ):
            return None
        loader = getattr(self.datamodule, f"{split}_dataloader")()
        if isinstance(loader, list | tuple) and len(loader) == 1:
            (loader,) = loader
        reason = f"its {split}_dataloader() must be one DataLoader, of a map-style dataset"
        plain = isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__")
        require(plain, "datamodule", reason, type(loader).__name__)
        if self.lazy:
            own = loader.collate_fn is not default_collate
            reason = f"its {split}_dataloader() has a collate_fn, which needs whole batches"
            require(not own, "lazy", f"{reason}: let its dataset give (x, y)")
            return lazy_examples(loader.dataset, split, workers=self.loader_workers)
        batches = []
        ordered: Any = DataLoader(loader.dataset, 256, collate_fn=loader.collate_fn)
        with seeded(self.partition_seed):
            for batch in ordered:
                pair = isinstance(batch, list | tuple) and len(batch) == 2
                fits = pair and all(isinstance(part, torch.Tensor) for part in batch)
                reason = f"its {split} batches must be (inputs, labels), both tensors"
                require(fits, "datamodule", reason, type(batch).__name__)
                batches.append(batch)
        if not batches:
            return None
        try:
            inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        except RuntimeError as error:
            reason = f"its {split} inputs are not alike: give all samples one shape"
            raise SettingError("datamodule", reason) from error
        return Examples(inputs, targets, transform_for(inputs, None, None))
