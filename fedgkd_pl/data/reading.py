"""Samples of a map-style dataset, read one by one where a batch needs them, and checked."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch
from fedgkd_pl.errors import RunFailed, SettingError
from fedgkd_pl.seeds import kept_generators, seed_host
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

Label = int | NDArray[np.float32]


class SampleError(RunFailed):
    """A sample that cannot be used; of a client, it fails that client."""


@dataclass(frozen=True)
class Task:
    """What to read for a batch: rows of the dataset, and the seed of each one's randomness."""

    rows: NDArray[np.int64]
    seeds: NDArray[np.uint64]


@dataclass(frozen=True)
class Form:
    """What all samples of a dataset have in common."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


@dataclass(frozen=True)
class Packed:
    """A batch on its way from a worker: bytes through a pipe.

    torch would put a tensor into ``/dev/shm``, which in a container is 64 MB, and a worker that
    finds it full is killed without a word.
    """

    form: Form
    inputs: NDArray[np.uint8]
    labels: list[Label]

    def pin_memory(self) -> "Batch":
        """What the DataLoader calls where batches go to a GPU."""
        return Batch(self.unpack().inputs.pin_memory(), self.labels)

    def unpack(self) -> "Batch":
        """The tensor of these bytes."""
        flat = torch.from_numpy(self.inputs).view(self.form.dtype)
        return Batch(flat.view(self.form.shape), self.labels)


@dataclass(frozen=True)
class Batch:
    """Samples as they were read."""

    inputs: Tensor
    labels: list[Label]

    def pin_memory(self) -> "Batch":
        """What the DataLoader calls where batches go to a GPU."""
        return Batch(self.inputs.pin_memory(), self.labels)

    def unpack(self) -> "Batch":
        """Itself: it was read in this process."""
        return self

    def pack(self) -> Packed:
        """Its bytes."""
        flat = self.inputs.contiguous().view(-1)
        form = Form(tuple(self.inputs.shape), self.inputs.dtype)
        return Packed(form, flat.view(torch.uint8).numpy(), self.labels)


class SampleReader(Dataset[Any]):
    """Reads batches of a dataset, as a dataset whose items are batches.

    All randomness of a sample comes from a seed of its own, so that it does not matter which
    process reads it, nor what was read before.

    Args:
        dataset: anything with ``len()`` whose items are ``(x, y)``.
        name: of the split, for errors.
        random: whether two readings of a sample may differ.
        form: that of every sample; None while it is not known.
        targets: the label of every sample; None while they are not known.
    """

    def __init__(
        self,
        dataset: Any,
        name: str,
        random: bool,
        form: Form | None = None,
        targets: NDArray[Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self.name = name
        self.random = random
        self.form = form
        self.targets = targets

    def __reduce__(self) -> Any:
        """Pickles the dataset by value, also one whose class is the user's script's."""
        try:
            packed = cloudpickle.dumps(self.dataset)
        except Exception as error:  # it may hold anything
            text = (
                f"{type(self.dataset).__name__} cannot be sent to another process ({error!s:.100})"
            )
            reason = f"{text}: open files where they are read, or take no other process"
            raise SettingError(
                self.name, f"{reason} (loader_workers 0, engine.workers 1)"
            ) from error
        return _unpickle, (packed, self.name, self.random, self.form, self.targets)

    def __getitem__(self, task: Task) -> Batch | Packed | str:
        """The samples of a task, or in one line why they cannot be used."""
        here = get_worker_info() is None
        try:
            with _undisturbed() if here else nullcontext():
                samples = self._samples(task)
            batch = self._joined(task, samples)
        except SampleError as error:
            return str(error)
        return batch if here else batch.pack()

    def _samples(self, task: Task) -> list[tuple[Tensor, Label]]:
        rows: list[int] = task.rows.tolist()
        whole = None if self.random else getattr(self.dataset, "__getitems__", None)
        if callable(whole):
            try:
                given = list(whole(rows))
            except Exception:  # reading one by one will find which sample it was
                given = []
            if len(given) == len(rows):
                return [self._checked(*pair) for pair in zip(rows, given, strict=True)]
        return [self._sample(*pair) for pair in zip(rows, task.seeds.tolist(), strict=True)]

    def _sample(self, row: int, seed: int) -> tuple[Tensor, Label]:
        seed_host(seed)
        try:
            given = self.dataset[row]
        except Exception as error:  # the user's dataset may fail in any way
            line = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            line = error.reason if isinstance(error, SettingError) else line
            raise self._error(row, f"cannot be read: {line:.200}") from error
        return self._checked(row, given)

    def _checked(self, row: int, given: Any) -> tuple[Tensor, Label]:
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise self._error(row, f"must be (x, y), and is a {type(given).__name__}")
        x, label = as_input(given[0]), as_label(given[1])
        if x is None:
            text = f"has a {type(given[0]).__name__} as its input: let a transform make it a tensor"
            raise self._error(row, text)
        first = self.form
        if first is not None and (x.shape != first.shape or x.dtype != first.dtype):
            form = Form(tuple(x.shape), x.dtype)
            raise self._error(row, f"is {form}, the first is {first}: make them alike")
        if label is None:
            text = f"has {given[1]!r:.40} as its label, not a class number or a row of numbers"
            raise self._error(row, text)
        if self.targets is not None and np.any(label != self.targets[row]):
            text = f"has the label {label}, but its target is {self.targets[row]}"
            raise self._error(row, f"{text}: give targets as the samples have them")
        return x, label

    def _joined(self, task: Task, samples: list[tuple[Tensor, Label]]) -> Batch:
        inputs = torch.stack([x for x, _ in samples])
        if inputs.is_floating_point() and not inputs.sum().isfinite():
            for bad in torch.nonzero(~inputs.isfinite())[:1]:  # none if only the sum was too large
                raise self._error(int(task.rows[int(bad[0])]), "has NaN or Inf: drop or fix it")
        return Batch(inputs, [label for _, label in samples])

    def _error(self, row: int, text: str) -> SampleError:
        return SampleError(f"{self.name}: sample {row} {text}")


def _unpickle(dataset: bytes, *args: Any) -> SampleReader:
    return SampleReader(cloudpickle.loads(dataset), *args)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """As in a worker, which has one thread, and without a trace in this process's generators."""
    threads = torch.get_num_threads()
    if threads != 1:
        torch.set_num_threads(1)
    try:
        with kept_generators():
            yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)


def as_input(x: Any) -> Tensor | None:
    """A sample's input as a plain tensor on the host; None where it is none."""
    if type(x) is Tensor and x.is_cpu and not x.requires_grad:  # as nearly all are
        return x
    if isinstance(x, Tensor):
        return x.detach().as_subclass(Tensor).cpu()
    if isinstance(x, float):
        return torch.tensor(x, dtype=torch.float32)
    if isinstance(x, np.ndarray | np.generic | int):
        try:
            return torch.from_numpy(np.array(x, order="C"))
        except TypeError:  # of text, or of objects
            return None
    return None


def as_label(y: Any) -> Label | None:
    """A class number, or a row of numbers to learn as float32; None where it is none of these."""
    if isinstance(y, int):
        return int(y)
    try:
        values = np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y)
    except (TypeError, ValueError):  # rows that are not alike
        return None
    if values.dtype.kind in "iub" and values.size == 1:
        return int(values.item())
    return values.astype(np.float32) if values.dtype.kind == "f" and values.ndim < 2 else None
