"""A map-style dataset of torch's: read sample by sample, never as a whole."""

import logging
import pickle
from collections.abc import Sequence, Sized
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.examples import Splits, Transform
from fedgkd_pl.data.lazy import LazyExamples, SampleError, SampleReader, tasks_of
from fedgkd_pl.data.sources.arrays import as_labels, read_array, transform_for
from fedgkd_pl.data.sources.base import OwnData, reading
from fedgkd_pl.errors import SettingError, require
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset
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
            ``Subset`` and ``ConcatDataset``; without one, all samples are read once.
        test_targets: those of ``test``.
        val_targets: those of ``val``.
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
        test_targets: Any = None,
        val_targets: Any = None,
        owners: Any = None,
        num_classes: int | None = None,
        class_names: list[str] | None = None,
        random: bool = True,
        loader_workers: int = 0,
        transform: Transform | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_workers(loader_workers)
        self.set_classes(num_classes, class_names)
        self.datasets = {"train": train, "test": test, "val": val}
        self.targets = {"train": targets, "test": test_targets, "val": val_targets}
        self.owners = owners
        self.settings = random, loader_workers, transform

    @override
    def load(self) -> Splits:
        examples: dict[str, Any] = {
            split: lazy_examples(dataset, split, self.targets[split], *self.settings)
            for split, dataset in self.datasets.items()
            if dataset is not None
        }
        names = getattr(self.datasets["train"], "classes", ())
        known = getattr(self, "num_classes", len(names)) == len(names)
        if known and not self.class_names and all(isinstance(name, str) for name in names):
            self.class_names = list(names)
        owners = None if self.owners is None else read_array(self.owners, "owners")
        return self.split(**examples, keys=self.take_owners(owners, len(examples["train"])))


def check_workers(number: int, lazy: bool = True) -> None:
    """Checks ``loader_workers``."""
    require(number >= 0, "loader_workers", "must not be negative", number)
    require(lazy or number == 0, "loader_workers", "must be 0, or lazy true", number)


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
    key = "targets" if split == "train" else f"{split}_targets"
    reader = SampleReader(dataset, split, random, workers)
    if workers:
        pickle.dumps(reader)  # or say now that it cannot be sent to them
    labels = known_labels(dataset) if targets is None else as_labels(targets, key, length)
    try:
        reader.targets = None if labels is None else labels.numpy()
        reader.take(*tasks_of(np.unique([0, length // 2, length - 1]))[0])
        if labels is None:
            labels = read_labels(reader, length, key)
            reader.targets = labels.numpy()
    except SampleError as error:
        raise SettingError("data", str(error)) from error
    assert reader.first is not None
    inputs = reader.first.expand(length, *reader.first.shape)
    transform = transform or transform_for(inputs, None, None)
    return LazyExamples(inputs, labels, transform, reader=reader)


def known_labels(dataset: Any) -> Tensor | None:
    """The labels that a dataset tells without reading a sample; None if it does not."""
    if isinstance(dataset, Subset):
        labels = known_labels(dataset.dataset)
        return None if labels is None else labels[torch.as_tensor(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        parts = [known_labels(part) for part in dataset.datasets]
        plain = [part for part in parts if part is not None]
        return torch.cat(plain) if len(plain) == len(parts) else None
    tensors = getattr(dataset, "tensors", ())
    for found in (*(getattr(dataset, name, None) for name in ("targets", "labels")), *tensors[1:2]):
        if isinstance(found, Tensor | np.ndarray | Sequence):
            with suppress(SettingError):  # it is something else that has this name
                return as_labels(found, "targets", len(dataset))
    return None


def read_labels(reader: SampleReader, length: int, key: str) -> Tensor:
    """The labels of all samples, each of which is read for it."""
    text = "%s does not tell its labels: reading all %d samples once for them; give %s to avoid it"
    log.warning(text, reader.name, length, key)
    read = [label for _, labels in reader.read(tasks_of(np.arange(length))) for label in labels]
    with reading(f"what {reader.name} gives as labels", key):
        return as_labels(np.stack(read), key)
