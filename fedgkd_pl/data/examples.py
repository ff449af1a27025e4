"""Data that stays in memory as tensors, or in a mapped file, and the batches cut from it.

Clients may learn tasks: one group of classes after the other, each in an order of its own. A task
is known by its number, in training and in evaluation: outputs of classes that are not in it are set
far below all others. With one row of the last layer per class, that is a head per task.
"""

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from fedgkd_pl.data.partition import ClientIndex, Labels
from fedgkd_pl.errors import SettingError, at_least, require
from fedgkd_pl.seeds import derive
from fedgkd_pl.storage.recorded import Recorded
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


class MappedTensor(Tensor):
    """A tensor over a file. Read-only: take rows of it by :class:`Examples`, which copies them.

    It is pickled as the file's name, so worker processes map the same file.
    """

    source: tuple[str, str, tuple[int, ...], int]
    # what is taken out of it is a plain Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return open_map, self.source


def open_map(file: str, dtype: str, shape: tuple[int, ...], offset: int) -> MappedTensor:
    """Maps an array that lies in a file in C order, ``offset`` bytes from its start."""
    array = np.memmap(file, np.dtype(dtype), "r", offset, shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor: MappedTensor = Tensor._make_subclass(MappedTensor, torch.from_numpy(array))
    tensor.source = (file, dtype, shape, offset)
    return tensor


def as_tensor(array: Any, key: str) -> Tensor:
    """A tensor of the same numbers; a memory map stays one.

    Args:
        array: a tensor, an array, or a list of numbers.
        key: the setting that named it, for errors.
    """
    if isinstance(array, Tensor):
        return array.detach().cpu()
    try:
        array = np.asanyarray(array)
    except ValueError as error:
        raise SettingError(key, "rows must be alike, of numbers") from error
    reason = f"must be numbers, of {', '.join(DTYPES)}"
    require(array.dtype.name in DTYPES and array.dtype.isnative, key, reason, array.dtype)
    require(array.ndim > 0, key, "must have a row per sample")
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.memmap):
        usable = array.flags.writeable and array.flags.c_contiguous
        return torch.from_numpy(array if usable else np.array(array, order="C"))
    reason = "a memory map must be of a file, in C order, with its rows in order"
    require(bool(root.filename) and array.flags.c_contiguous, key, reason)
    if array.flags.writeable:
        root.flush()  # what was written must be in the file before others map it
    offset = root.offset + array.ctypes.data - root.ctypes.data
    return open_map(str(Path(str(root.filename)).absolute()), array.dtype.str, array.shape, offset)


# What a hidden class has for a logit: its probability is 0 in every precision, and unlike with
# minus infinity the divergence of two such outputs is a number.
FAR = -1e4


@dataclass(frozen=True)
class Task:
    """The task of a client in a round.

    Attributes:
        place: its place in the client's sequence, from 0.
        number: which of all tasks it is, from 0.
        classes: whose samples it is made of.
        ends: whether the round is its last one.
    """

    place: int
    number: int
    classes: tuple[int, ...]
    ends: bool


class ClassTasks(Recorded):
    """Every client goes through all tasks, which are groups of classes, for some rounds each.

    The classes are cut into groups of equal size in the order of their numbers: with five tasks of
    ten classes 0, 1 | 2, 3 | …. In a round all clients are at the same place of their sequences.

    Args:
        tasks: into how many groups the classes are cut.
        rounds_per_task: after how many rounds the next task begins.
        order: ``own``: every client has an order of its own, by the partition's seed; ``same``: all
            begin with the first group and end with the last.
    """

    def __init__(
        self, tasks: int = 5, rounds_per_task: int = 10, order: Literal["own", "same"] = "own"
    ) -> None:
        at_least(1, tasks=tasks, rounds_per_task=rounds_per_task)
        require(order in ("own", "same"), "order", "must be own or same", order)
        self.tasks = tasks
        self.rounds_per_task = rounds_per_task
        self.order = order

    @property
    def rounds(self) -> int:
        """The rounds of all tasks together."""
        return self.tasks * self.rounds_per_task

    def sequences(self, num_classes: int, seed: int) -> "TaskSequences":
        """The tasks of some classes; ``seed`` is that of the clients' orders."""
        text = f"must divide the {num_classes} classes into groups of equal size"
        require(num_classes > 0 and num_classes % self.tasks == 0, "tasks", text, self.tasks)
        groups = np.arange(num_classes).reshape(self.tasks, -1).tolist()
        own = seed if self.order == "own" else None
        return TaskSequences(tuple(map(tuple, groups)), self.rounds_per_task, own)


@dataclass(frozen=True)
class TaskSequences:
    """The task of every client in every round.

    Attributes:
        groups: the classes of every task.
        seed: of the clients' orders; None if all have the same.
    """

    groups: tuple[tuple[int, ...], ...]
    rounds_per_task: int
    seed: int | None = None

    def order(self, client: int) -> list[int]:
        """A client's tasks by their numbers, the first one first."""
        if self.seed is None:
            return list(range(len(self.groups)))
        rng = np.random.default_rng(derive(self.seed, "tasks", client=client))
        return rng.permutation(len(self.groups)).tolist()  # type: ignore[no-any-return]

    def place(self, round: int) -> int:
        """At which place of their sequences all clients are in a round."""
        return (round - 1) // self.rounds_per_task

    def ends(self, round: int) -> bool:
        """Whether a round is the last one of a task."""
        return round % self.rounds_per_task == 0

    def at(self, client: int, round: int) -> Task:
        """The task of a client in a round."""
        place = self.place(round)
        number = self.order(client)[place]
        return Task(place, number, self.groups[number], self.ends(round))

    def known(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Outputs for samples whose task is known: that which their label belongs to."""
        per_class = [number for number, classes in enumerate(self.groups) for _ in classes]
        task_of = torch.tensor(per_class, device=outputs.device)
        return outputs.masked_fill(task_of[y][:, None] != task_of[None, :], FAR)

    def check_clients(self, index: ClientIndex, labels: Labels, clients: list[int]) -> None:
        """Raises a clear error if a client has no sample of a task."""
        counts = np.array(index.label_counts(labels, sum(map(len, self.groups))))
        for number, classes in enumerate(self.groups):
            none = [client for client in clients if not counts[client, list(classes)].any()]
            text = (
                f"every client goes through all tasks, and client {none[:1]} has no sample of "
                f"classes {list(classes)}: take fewer clients, or a partition such as IID"
            )
            require(not none, "tasks", text, number)


Batch = tuple[Tensor, ...]  # inputs, labels and, where computed already, the teachers' outputs
# x and the generator of the batch's randomness (None: no augmentation) → the net's input
Transform = Callable[[Tensor, torch.Generator | None], Tensor]
PIECE = 4096  # rows that are looked at at once, where all would be too many


@dataclass(frozen=True)
class Examples:
    """Inputs and labels of one split; ``inputs`` may be raw bytes, which ``transform`` reads.

    Attributes:
        inputs: one row per sample.
        targets: one label per sample; or a number, several of them, or a class for every pixel.
        transform: makes the net's input from a batch of rows.
        rows: which rows of ``inputs`` these are, where they stay in their file; by default all.
    """

    inputs: Tensor
    targets: Tensor
    transform: Transform
    rows: Tensor | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, rows: Tensor | slice) -> "Examples":
        """Some of the examples, in memory."""
        return Examples(self.read(rows), self.targets[rows], self.transform)

    def view(self, rows: Tensor | slice) -> "Examples":
        """Some of the examples; inputs that are not in memory stay where they are."""
        if self._in_memory:
            return self[rows]
        return replace(self, targets=self.targets[rows], rows=self._known()[rows])

    def read(self, rows: Tensor | slice) -> Tensor:
        """The inputs of some of the examples."""
        if self._in_memory:
            return self.inputs[rows]
        return self.inputs[self._known()[rows].cpu()].to(self.targets.device)

    @property
    def labels(self) -> Tensor:
        """One class number per sample, by which it can be dealt out; zeros where it has none."""
        if self.targets.ndim == 1 and self.targets.dtype == torch.int64:
            return self.targets
        return torch.zeros(len(self), dtype=torch.int64)

    def pieces(self) -> Iterator[Tensor]:
        """All inputs, 4096 at a time."""
        for first in range(0, len(self), PIECE):
            yield self.read(slice(first, first + PIECE))

    def held(self) -> Iterator[Tensor]:
        """The inputs that checks and checksums look at: none of those that are read lazily."""
        return iter(()) if self.inputs.is_meta else self.pieces()

    def batches(
        self, parts: Iterable[Tensor], generator: torch.Generator | None
    ) -> Iterator[Tensor]:
        """The net's inputs for one group of rows after the other."""
        for rows in parts:
            yield self.transform(self.read(rows), generator)

    def portable(self, rows: Tensor | slice) -> "Examples":
        """Some of the examples, as they can be sent to another machine: in memory, or lazily."""
        return self.view(rows) if self.inputs.is_meta else self[rows]

    def content(self) -> dict[str, Tensor]:
        """The tensors sent to a worker: fields of the examples that it fills in."""
        return {"inputs": self.inputs, "targets": self.targets}

    def close(self) -> None:
        """Ends what reads them."""

    @property
    def _in_memory(self) -> bool:
        return not (isinstance(self.inputs, MappedTensor) or self.inputs.is_meta)

    def _known(self) -> Tensor:
        if self.rows is not None:
            return self.rows
        return torch.arange(len(self.inputs), device=self.targets.device)

    @property
    def repeat(self) -> bool:
        """Whether every pass sees the same inputs.

        A transform's class says so by ``random = False``; a subclass, which may draw what its base
        does not, must say so again.
        """
        declared = "random" in vars(type(self.transform))
        return declared and self.transform.random is False  # type: ignore[attr-defined]

    def to(self, device: torch.device) -> "Examples":
        """The same examples on ``device``."""
        targets = self.targets.to(device)
        if self._in_memory:
            return replace(self, inputs=self.inputs.to(device), targets=targets)
        rows = None if self.rows is None else self.rows.to(device)
        return replace(self, targets=targets, rows=rows)


@dataclass(frozen=True)
class Splits:
    """The splits of a dataset.

    Attributes:
        train: what the clients share.
        test: the official test set.
        val: the official validation set; without one the server keeps a part of ``train``.
        keys: the natural owner of every training sample, where the data knows it.
        test_keys: likewise of every test sample; an owner without training samples has any other
            number than these.
    """

    train: Examples
    test: Examples
    val: Examples | None = None
    keys: NDArray[np.int64] | None = None
    test_keys: NDArray[np.int64] | None = None


def digest(*parts: Tensor | Examples) -> str:
    """The SHA-256 of tensors, and of examples' inputs and labels: their bytes, shapes and types."""
    checksum = hashlib.sha256()
    for part in parts:
        if isinstance(part, Examples):
            _add(checksum, part.inputs, len(part), part.held())
            part = part.targets
        _add(checksum, part, len(part), part.detach().split(PIECE))
    return checksum.hexdigest()


def _add(checksum: Any, tensor: Tensor, length: int, pieces: Iterable[Tensor]) -> None:
    checksum.update(f"{tensor.dtype} {(length, *tensor.shape[1:])};".encode())
    for rows in pieces:
        checksum.update(rows.cpu().contiguous().flatten().view(torch.uint8).numpy())


class Batches:
    """One pass over examples per iteration, in batches.

    Args:
        batch_size: rows per batch; the last one may be smaller.
        generator: shuffles and augments every pass; None keeps the order and augments nothing.
    """

    def __init__(
        self, examples: Examples, batch_size: int, generator: torch.Generator | None = None
    ) -> None:
        self.examples = examples
        self.batch_size = batch_size
        self.generator = generator
        self.teacher_output: Tensor | None = None  # one row per sample, added to the batches

    def __len__(self) -> int:
        return math.ceil(len(self.examples) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        examples, generator = self.examples, self.generator
        order = torch.arange(len(examples))
        if generator is not None:
            order = torch.randperm(len(examples), generator=generator)
        parts = order.to(examples.targets.device).split(self.batch_size)
        for rows, inputs in zip(parts, examples.batches(parts, generator), strict=True):
            known = () if self.teacher_output is None else (self.teacher_output[rows],)
            yield inputs, examples.targets[rows], *known


@dataclass
class ClientData:
    """All that clients train on: the examples in memory and who owns which.

    Where there are ``tasks``, a client has in a round its samples of one of them.
    """

    examples: Examples
    index: ClientIndex
    batch_size: int
    seed: int
    tasks: TaskSequences | None = None

    def batches(self, client: int, round: int) -> Batches:
        """The batches of one client in one round (from 1): a function of (seed, round, client)."""
        generator = torch.Generator().manual_seed(derive(self.seed, "batches", round, client))
        return Batches(self.owned(client, round), self.batch_size, generator)

    def owned(self, client: int, round: int | None = None) -> Examples:
        """The examples of one client: all, or those that it learns from in a round."""
        return self.examples.view(self._rows(client, round))

    def size(self, client: int, round: int) -> int:
        """n_k: the number of samples that a client learns from in a round."""
        return self.index.size(client) if self.tasks is None else len(self._rows(client, round))

    def task(self, client: int, round: int) -> Task | None:
        """The task of a client in a round; None without tasks."""
        return None if self.tasks is None else self.tasks.at(client, round)

    def _rows(self, client: int, round: int | None) -> Tensor:
        rows = torch.from_numpy(self.index[client]).to(self.examples.targets.device)
        task = None if round is None else self.task(client, round)
        if task is None:
            return rows
        classes = torch.tensor(task.classes, device=rows.device)
        rows = rows[torch.isin(self.examples.targets[rows], classes)]
        text = f"client {client} has no sample of classes {list(task.classes)}"
        require(len(rows) > 0, "tasks", text, task.number)
        return rows

    def only(self, client: int, examples: Examples) -> "ClientData":
        """The data of one client with these examples, where nobody else's data is."""
        return replace(
            self, examples=examples, index=ClientIndex([np.arange(len(examples))], client)
        )


class ImageTransform:
    """Bytes to normalised images; in training each is cropped and flipped on its own.

    Args:
        mean: mean of each channel, in [0, 1].
        std: standard deviation of each channel.
        padding: zero padding of the random crop; 0 for none.
        flip: whether to flip half of the images left to right.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], padding: int = 4, flip: bool = True
    ) -> None:
        self.mean = tuple(mean)
        self.std = tuple(std)
        self.padding = padding
        self.flip = flip

    @property
    def random(self) -> bool:
        """Whether two passes over the same images differ."""
        return self.padding > 0 or self.flip

    def __call__(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """Float images of bytes (batch × channels × height × width).

        ``generator`` draws crops and flips, on the CPU so that they are the same on every device;
        None for evaluation.
        """
        if generator is not None:
            images = self._augment(images, generator)
        mean, std = (by_channel(values, images.device) for values in (self.mean, self.std))
        return images.float().div_(255).sub_(mean).div_(std)

    def _augment(self, images: Tensor, generator: torch.Generator) -> Tensor:
        batch, channels, height, width = images.shape
        device, shifts = images.device, 2 * self.padding + 1
        corner = torch.randint(shifts, (2, batch, 1), generator=generator)
        flip = torch.rand(batch, 1, generator=generator, dtype=torch.float32) < 0.5
        corner, flip = (drawn.to(device, non_blocking=True) for drawn in (corner, flip))
        rows = corner[0] + torch.arange(height, device=device)
        columns = torch.arange(width, device=device).expand(batch, width)
        if self.flip:
            columns = torch.where(flip, columns.flip(1), columns)
        padded = pad(images, [self.padding] * 4)
        pixels = rows[:, :, None] * padded.shape[3] + (corner[1] + columns)[:, None, :]
        pixels = pixels.view(batch, 1, -1).expand(batch, channels, -1)
        return padded.flatten(2).gather(2, pixels).view(images.shape)


@lru_cache
def by_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """A number for every channel of images, moved to a device once."""
    return torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1)


class Scale:
    """Numbers to floats in [0, 1].

    Args:
        maximum: the value that becomes 1.
        shape: of a sample, where it is stored in another one.
    """

    random = False

    def __init__(self, maximum: float, shape: Sequence[int] | None = None) -> None:
        self.maximum = maximum
        self.shape = shape

    def __call__(self, values: Tensor, generator: torch.Generator | None) -> Tensor:
        """The scaled values; nothing is random."""
        values = values if self.shape is None else values.reshape(len(values), *self.shape)
        return values.float() / self.maximum


class Ids:
    """Whole numbers, unchanged, as a net's embedding takes them."""

    random = False

    def __call__(self, ids: Tensor, generator: torch.Generator | None) -> Tensor:
        """The ids as int64; nothing is random."""
        return ids.long()


class TrimPadding:
    """Cuts a batch to its longest text.

    Args:
        pad_id: the token that fills rows up.
    """

    random = False

    def __init__(self, pad_id: int) -> None:
        self.pad_id = pad_id

    def __call__(self, ids: Tensor, generator: torch.Generator | None) -> Tensor:
        """The ids, padded on the right, as batch × longest; nothing is random."""
        longest = int((ids != self.pad_id).sum(dim=1).max())
        return ids[:, : max(1, longest)].long()
