"""Data that torch reads: a map-style dataset, sample by sample, or a LightningDataModule."""

import logging
import pickle
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import util
from typing import Any

import cloudpickle
import numpy as np
import torch
from fedgkd_pl.data.examples import Examples, Splits, Transform
from fedgkd_pl.data.sources.base import (
    OwnData,
    as_labels,
    examples_of,
    read_array,
    reading,
    transform_for,
)
from fedgkd_pl.errors import RunFailed, SettingError, at_least, require
from fedgkd_pl.processes.start import context_of_helpers, end_with_parent, without_main
from fedgkd_pl.seeds import kept_generators, next_seed, sample_seeds, seed_host, seeded
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from typing_extensions import override

PRELOAD = "fedgkd_pl.data.datamodule"  # torch and Lightning, which a pool's workers need as well
READ_AT_ONCE = 64  # samples, where nobody asks for batches
Label = int | NDArray[np.float32]
Task = tuple[NDArray[np.int64], NDArray[np.uint64]]  # rows to read, and a seed for each
Samples = tuple[Tensor, list[Label]]  # inputs and labels


class SampleError(RunFailed):
    """A sample that cannot be used; of a client, it fails that client."""


@dataclass
class SampleReader:
    """Reads and checks batches of a dataset; each sample's randomness comes from a seed of its own.

    Attributes:
        dataset: anything with ``len()`` whose items are ``(x, y)``.
        name: of the split, for errors.
        random: whether two readings of a sample may differ.
        workers: processes that read ahead until :meth:`close`; 0 reads in this process.
        first: of the shape and type of every sample; None while these are not known.
        targets: the label of every sample; None while they are not known.
    """

    dataset: Any
    name: str
    random: bool
    workers: int = 0
    first: Tensor | None = None
    targets: NDArray[Any] | None = None
    pool: ProcessPoolExecutor | None = field(default=None, init=False)

    def __reduce__(self) -> Any:
        """Pickles the dataset by value, also one whose class is the user's script's."""
        try:
            dataset = cloudpickle.dumps(self.dataset)
        except Exception as error:  # it may hold anything
            name = type(self.dataset).__name__
            reason = f"{name} cannot be sent to another process ({error!s:.100})"
            hint = "open files where they are read, or set loader_workers 0 and engine.workers 1"
            raise SettingError(self.name, f"{reason}: {hint}") from error
        return _unpickle, (dataset, self.name, self.random, self.workers, self.first, self.targets)

    def read(self, tasks: Sequence[Task]) -> Iterator[Samples]:
        """The inputs and labels of one task after the other."""
        if not self.workers or len(tasks) == 1:
            yield from (self.take(*task) for task in tasks)
            return
        first, waiting = self.first, iter(tasks)
        assert first is not None
        try:
            ahead = deque(map(self._submit, islice(waiting, 2 * self.workers)))
            while ahead:
                flat, labels = ahead.popleft().result()
                ahead.extend(map(self._submit, islice(waiting, 1)))
                yield torch.from_numpy(flat).view(first.dtype).view(-1, *first.shape), labels
        except BrokenProcessPool as error:  # mostly for lack of memory
            self.close()
            raise RunFailed(f"{error!s:.200}; take fewer loader_workers") from error

    def close(self) -> None:
        """Ends the processes; the next pass starts others."""
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
        self.pool = None

    def take(self, rows: NDArray[np.int64], seeds: NDArray[np.uint64]) -> Samples:
        """The inputs and labels of some samples; nobody else's generators are touched."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in a worker
        try:
            with kept_generators():
                samples = list(map(self._sample, rows.tolist(), seeds.tolist()))
        finally:
            torch.set_num_threads(threads)
        return torch.stack([x for x, _ in samples]), [label for _, label in samples]

    def _submit(self, task: Task) -> Future[tuple[NDArray[np.uint8], list[Label]]]:
        with without_main():
            if self.pool is None:
                how = context_of_helpers(PRELOAD)
                self.pool = ProcessPoolExecutor(self.workers, how, _begin, (pickle.dumps(self),))
                # before multiprocessing waits for its processes
                util.Finalize(self, self.pool.shutdown, (False,), exitpriority=10)
            return self.pool.submit(_answer, task)

    def _sample(self, row: int, seed: int) -> tuple[Tensor, Label]:
        seed_host(seed)
        try:
            given = self.dataset[row]
        except Exception as error:  # the user's dataset may fail in any way
            raise self._error(row, f"cannot be read: {type(error).__name__}: {error}") from error
        pair = given if isinstance(given, tuple | list) and len(given) == 2 else (None, None)
        x, label = as_input(pair[0]), as_label(pair[1])
        if x is None or label is None:
            text = "must be (x, y): a tensor or an array, and a class number or numbers"
            raise self._error(row, f"{text} (got {given})")
        if self.first is None:
            self.first = torch.empty_like(x, device="meta")
        forms = [f"{each.dtype} of shape {tuple(each.shape)}" for each in (x, self.first)]
        if forms[0] != forms[1]:
            raise self._error(row, f"is {forms[0]}, the first is {forms[1]}; make them alike")
        if x.is_floating_point() and not x.isfinite().all():
            raise self._error(row, "has NaN or Inf; drop or fix it")
        if self.targets is not None and np.any(label != self.targets[row]):
            text = f"has the label {label}, but its target is {self.targets[row]}"
            raise self._error(row, f"{text}; give targets as the samples have them")
        return x, label

    def _error(self, row: int, text: str) -> SampleError:
        return SampleError(f"{self.name}: sample {row} {' '.join(text.split()):.300}")


def _unpickle(dataset: bytes, *args: Any) -> SampleReader:
    return SampleReader(cloudpickle.loads(dataset), *args)


_readers: list[SampleReader] = []  # the one that a process works for


def _begin(reader: bytes) -> None:
    """Has a process end with the one that it reads for, which handles the signals."""
    end_with_parent()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _readers.append(pickle.loads(reader))


def _answer(task: Task) -> tuple[NDArray[np.uint8], list[Label]]:
    """Bytes and labels: tensors would travel in ``/dev/shm``, which may be 64 MB."""
    inputs, labels = _readers[0].take(*task)
    return inputs.flatten().view(torch.uint8).numpy(), labels


@dataclass(frozen=True)
class LazyExamples(Examples):
    """Examples that stay in their dataset until a batch needs them.

    ``inputs`` has a shape and a type, but no numbers (device ``meta``).
    """

    reader: SampleReader = field(kw_only=True)

    @override
    def read(self, rows: Tensor | slice) -> Tensor:
        none = torch.empty_like(self.inputs[:0], device="cpu")
        return torch.cat([none, *self.view(rows).pieces()]).to(self.targets.device)

    @override
    def pieces(self) -> Iterator[Tensor]:
        return (inputs for inputs, _ in self.reader.read(tasks_of(self._known().cpu().numpy())))

    @override
    def batches(
        self, parts: Iterable[Tensor], generator: torch.Generator | None
    ) -> Iterator[Tensor]:
        """A sample's seed is that of the pass and its place in it; in evaluation, its row's."""
        known, tasks, place = self._known(), list[Task](), 0
        seed = 0 if generator is None else next_seed(generator)
        for part in parts:
            rows = known[part].cpu().numpy()
            places = np.arange(place, place + len(rows))
            tasks.append((rows, sample_seeds(seed, rows if generator is None else places)))
            place += len(rows)
        for inputs, _ in self.reader.read(tasks):
            yield self.transform(inputs.to(self.targets.device, non_blocking=True), generator)

    @override
    def content(self) -> dict[str, Tensor]:
        return {"rows": self._known(), "targets": self.targets}

    @property
    @override
    def repeat(self) -> bool:
        return not self.reader.random and super().repeat

    @override
    def close(self) -> None:
        self.reader.close()


def tasks_of(rows: NDArray[np.int64]) -> list[Task]:
    """The reading of rows as evaluation sees them, a few at a time."""
    parts = [rows[n : n + READ_AT_ONCE] for n in range(0, len(rows), READ_AT_ONCE)]
    return [(part, sample_seeds(0, part)) for part in parts]


def as_input(x: Any) -> Tensor | None:
    """A sample's input as a plain tensor on the host; None where it is none."""
    if isinstance(x, Tensor):
        return x.detach().as_subclass(Tensor).cpu()
    if isinstance(x, np.ndarray | np.generic | int | float):
        with suppress(TypeError):  # of text, or of objects
            dtype = np.float32 if isinstance(x, float) else None
            return torch.from_numpy(np.array(x, dtype, order="C"))
    return None


def as_label(y: Any) -> Label | None:
    """A class number, or a row of numbers to learn as float32; None where it is none of these."""
    try:
        values = np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y)
    except (TypeError, ValueError):  # rows that are not alike
        return None
    if values.dtype.kind in "iub" and values.size == 1:
        return int(values.item())
    return values.astype(np.float32) if values.dtype.kind == "f" and values.ndim < 2 else None


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
            with seeded(self.partition_seed):
                batches = list(DataLoader(loader.dataset, 256, collate_fn=loader.collate_fn))
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
    return LazyExamples(inputs, labels, transform or transform_for(inputs), reader=reader)


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
