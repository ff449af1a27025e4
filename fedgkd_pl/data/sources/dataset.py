"""Data that torch reads: a map-style dataset, sample by sample, or a LightningDataModule."""

import logging
import pickle
from collections.abc import Sized
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.examples import Examples, Splits, Transform
from fedgkd_pl.data.lazy import LazyExamples, SampleError, SampleReader, tasks_of
from fedgkd_pl.data.sources.arrays import as_labels, examples_of, read_array, transform_for
from fedgkd_pl.data.sources.base import OwnData, reading
from fedgkd_pl.errors import SettingError, at_least, require
from fedgkd_pl.seeds import seeded
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from typing_extensions import override

log = logging.getLogger("fedgkd_pl")


class TorchDataset(OwnData):
    """Map-style datasets of torch's, whose samples are read when a batch needs them.

    ``train[i]`` is ``(x, y)``: a tensor or an array, always of one shape and type, and a class
    number, or a row of floats to learn. Bytes (uint8) become floats in [0, 1], other whole numbers
    stay token ids. The datasets' own transforms run for every sample anew. What they draw from the
    generators of torch, NumPy and Python is a function of seed, round, client, epoch and place in
    it, so it depends neither on ``loader_workers`` nor on the engine; in evaluation it is one of
    the sample alone.

    Args:
        train: the dataset that is cut into clients.
        test: the test set; by default ``test_fraction`` of ``train`` is it.
        val: the validation set; by default ``val_fraction`` of ``train`` is it, and gets the
            transforms of ``train``.
        targets: the labels of ``train``, as an array or the path of an ``.npy``. By default those
            of its attribute ``targets`` or ``labels``, or of ``TensorDataset``, also within
            ``Subset``; without one, all samples are read once.
        owners: a number or name per sample of ``train``, for ``ByKey``.
        num_classes: by default the number of names, or the largest class number and one.
        class_names: in the order of their numbers; by default those of ``train.classes``.
        random: whether two readings of a sample may differ. If not, say so: teachers then run once
            per sample and round.
        loader_workers: processes that read ahead, for each process that trains or evaluates; 0
            reads where it trains.
        transform: of a batch, on the device, after the dataset's own; see docs/data.md.
        kwargs: those of :class:`OwnData`.
    """

    name = "dataset"

    def __init__(
        self,
        train: Dataset,  # type: ignore[type-arg]
        test: Dataset | None = None,  # type: ignore[type-arg]
        val: Dataset | None = None,  # type: ignore[type-arg]
        targets: Any = None,
        owners: Any = None,
        num_classes: int | None = None,
        class_names: list[str] | None = None,
        random: bool = True,
        loader_workers: int = 0,
        transform: Transform | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        at_least(0, loader_workers=loader_workers)
        self.set_classes(num_classes, class_names)
        self.datasets = {"train": train, "test": test, "val": val}
        self.targets = {"train": targets}
        self.owners = owners
        self.settings = random, loader_workers, transform

    @override
    def load(self) -> Splits:
        examples: dict[str, Any] = {
            split: lazy_examples(dataset, split, self.targets.get(split), *self.settings)
            for split, dataset in self.datasets.items()
            if dataset is not None
        }
        names = getattr(self.datasets["train"], "classes", ())
        known = getattr(self, "num_classes", len(names)) == len(names)
        if known and not self.class_names and all(isinstance(name, str) for name in names):
            self.class_names = list(names)
        owners = read_array(self.owners, "owners")
        return self.split(**examples, keys=self.take_owners(owners, len(examples["train"])))


class LightningData(OwnData):
    """The data of a ``LightningDataModule``, read into memory once.

    Its training set is cut into clients; its validation and test sets are kept, and are cut from
    the training set where it has none. Batches must be pairs of inputs and class numbers. Random
    transforms of the training set are drawn once, for all rounds.

    Args:
        datamodule: the data module.
        num_classes: by default the largest class number and one.
        class_names: in the order of their numbers.
        kwargs: those of :class:`OwnData`.
    """

    name = "lightning"

    def __init__(
        self,
        datamodule: LightningDataModule,
        num_classes: int | None = None,
        class_names: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.datamodule = datamodule
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
                examples[split] = self._examples(hook)
        require("train" in examples, "datamodule", "must have a train_dataloader()")
        return self.split(**examples)

    def _examples(self, hook: str) -> Examples:
        """All samples of a split, in their order."""
        with reading(f"its {hook}() of (inputs, labels)", "datamodule"):
            loader = getattr(self.datamodule, hook)()
            ordered: Any = DataLoader(loader.dataset, 256, collate_fn=loader.collate_fn)
            with seeded(self.partition_seed):
                batches = list(ordered)
            inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return examples_of(inputs, targets, "datamodule")


def lazy_examples(
    dataset: Any,
    split: str,
    targets: Any = None,
    random: bool = True,
    workers: int = 0,
    transform: Transform | None = None,
) -> LazyExamples:
    """The examples of a dataset, of which the first, the middle and the last one are read.

    Args:
        split: its name, which is also that of the setting.
        targets: the labels, where they are given.
        transform: of a batch; by default as for arrays.
    """
    length = len(dataset) if isinstance(dataset, Sized) else 0
    require(length > 0, split, "must be a map-style dataset, with samples by number, and len()")
    reader = SampleReader(dataset, split, random, workers)
    if workers:
        pickle.dumps(reader)  # or say now that it cannot be sent to them
    labels = known_labels(dataset) if targets is None else as_labels(targets, "targets", length)
    try:
        reader.targets = None if labels is None else labels.numpy()
        reader.take(*tasks_of(np.unique([0, length // 2, length - 1]))[0])
        if labels is None:
            labels = read_labels(reader, length)
            reader.targets = labels.numpy()
    except SampleError as error:
        raise SettingError("data", str(error)) from error
    assert reader.first is not None
    inputs = reader.first.expand(length, *reader.first.shape)
    transform = transform or transform_for(inputs)
    return LazyExamples(inputs, labels, transform, reader=reader)


def known_labels(dataset: Any) -> Tensor | None:
    """The labels that a dataset tells without reading a sample; None if it does not."""
    if isinstance(dataset, Subset):
        labels = known_labels(dataset.dataset)
        return None if labels is None else labels[torch.as_tensor(dataset.indices)]
    tensors = dataset.tensors[1:] if isinstance(dataset, TensorDataset) else ()
    for found in (getattr(dataset, "targets", None), getattr(dataset, "labels", None), *tensors):
        if found is not None:
            with suppress(SettingError):  # it is something else that has this name
                return as_labels(found, "targets", len(dataset))
    return None


def read_labels(reader: SampleReader, length: int) -> Tensor:
    """The labels of all samples, each of which is read for it."""
    text = "%s has no attribute targets: reading all %d samples once for their labels"
    log.warning(text, reader.name, length)
    read = [label for _, labels in reader.read(tasks_of(np.arange(length))) for label in labels]
    with reading(f"what {reader.name} gives as labels", "targets"):
        return as_labels(np.stack(read), "targets")
