"""A map-style dataset of torch's: read sample by sample, never as a whole."""

import logging
import pickle
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.examples import Examples, Splits, Transform
from fedgkd_pl.data.lazy import READ_AT_ONCE, LazyExamples, lazy_inputs, task_of
from fedgkd_pl.data.loading import SampleLoader
from fedgkd_pl.data.reading import Form, Label, SampleError, SampleReader
from fedgkd_pl.data.sources.arrays import as_labels, count_classes, read_array, transform_for
from fedgkd_pl.data.sources.base import OwnData
from fedgkd_pl.errors import SettingError, require
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

log = logging.getLogger("fedgkd_pl")
PATIENCE = 10.0  # seconds between two lines about a long pass


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
            per sample and round, and ``__getitems__`` of a dataset is used if it has one.
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
        require(num_classes is None or num_classes >= 1, "num_classes", "must be at least 1")
        self.datasets = {"train": train, "test": test, "val": val}
        self.targets = {"train": targets, "test": test_targets, "val": val_targets}
        self.owners = owners
        if num_classes is not None:
            self.num_classes = num_classes
        self.class_names = class_names or ()
        self.random = random
        self.loader_workers = loader_workers
        self.transform = transform

    def load(self) -> Splits:
        """See :meth:`FederatedDataModule.load`."""
        settings = self.random, self.loader_workers, self.transform
        found: dict[str, Examples | None] = {
            split: None
            if dataset is None
            else lazy_examples(dataset, split, self.targets[split], *settings)
            for split, dataset in self.datasets.items()
        }
        train = found["train"]
        require(train is not None, "train", "must be a dataset")
        assert train is not None
        names = getattr(self.datasets["train"], "classes", ())
        if not self.class_names and all(isinstance(name, str) for name in names):
            known = getattr(self, "num_classes", len(names))
            self.class_names = list(names) if len(names) == known else ()
        if not hasattr(self, "num_classes"):
            self.num_classes = len(self.class_names) or count_classes(train.targets)
        keys = None
        if self.owners is not None:
            owners = np.asarray(read_array(self.owners, "owners"))
            reason = f"must be one number or name for each of {len(train)} samples"
            require(owners.shape == (len(train),), "owners", reason, owners.shape)
            keys = self.take_owners(owners)
        return self.split(train, found["test"], found["val"], keys)


def check_workers(number: int, lazy: bool = True) -> None:
    """Refuses what is no number of processes, and processes that would have nothing to read."""
    require(number >= 0, "loader_workers", "must not be negative", number)
    reason = "all samples are in memory, for which nobody reads: give lazy: true, too"
    require(lazy or number == 0, "loader_workers", reason, number)


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
    plain = all(hasattr(dataset, name) for name in ("__len__", "__getitem__"))
    reason = "must be a map-style dataset, with len() and samples by number"
    require(plain, split, reason, type(dataset).__name__)
    length = len(dataset)
    require(length > 0, split, "has no samples")
    key = "targets" if split == "train" else f"{split}_targets"
    reader = SampleReader(dataset, split, random)
    if workers:
        pickle.dumps(reader)  # or say now that it cannot be sent to them
    labels = known_labels(dataset) if targets is None else as_labels(targets, key)
    if labels is not None:
        reason = f"there are {length} samples of {split}: give a label for each"
        require(len(labels) == length, key, reason, len(labels))
    try:
        (first,) = SampleLoader(reader, 0).read([task_of(np.array([0]))])
        reader.form = Form(tuple(first.inputs.shape[1:]), first.inputs.dtype)
        if labels is None:
            labels = read_labels(SampleLoader(reader, workers), length, key)
        reader.targets = labels.numpy()
        some = task_of(np.unique([0, length // 2, length - 1]))
        list(SampleLoader(reader, 0).read([some]))
    except SampleError as error:
        raise SettingError("data", str(error)) from error
    inputs = lazy_inputs(SampleLoader(reader, workers), length)
    return LazyExamples(inputs, labels, transform or transform_for(first.inputs, None, None))


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
        if isinstance(found, Tensor | np.ndarray | Sequence) and len(found) == len(dataset):
            try:
                return as_labels(found, "targets")
            except SettingError:  # it is something else that has this name
                continue
    return None


def read_labels(loader: SampleLoader, length: int, key: str) -> Tensor:
    """The labels of all samples, each of which is read for it."""
    name = loader.reader.name
    text = "%s does not tell its labels: reading all %d samples once for them; give %s to avoid it"
    log.warning(text, name, length, key)
    starts = range(0, length, READ_AT_ONCE)
    tasks = [task_of(np.arange(n, min(n + READ_AT_ONCE, length))) for n in starts]
    labels: list[Label] = []
    told = time.monotonic()
    try:
        for batch in loader.read(tasks):
            labels += batch.labels
            if time.monotonic() - told >= PATIENCE:
                told = time.monotonic()
                log.warning("%s: %d of %d labels are read", name, len(labels), length)
    finally:
        loader.close()
    try:
        return as_labels(np.stack([np.asarray(label) for label in labels]), key)
    except ValueError as error:
        reason = f"{name} has class numbers and rows of numbers: all must be alike"
        raise SettingError(key, reason) from error
