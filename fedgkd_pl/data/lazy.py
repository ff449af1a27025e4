"""Examples whose inputs are read sample by sample from a map-style dataset."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.examples import Examples
from fedgkd_pl.data.loading import SampleLoader
from fedgkd_pl.data.reading import Task
from fedgkd_pl.errors import require
from fedgkd_pl.seeds import next_seed, sample_seeds
from numpy.typing import NDArray
from torch import Tensor

READ_AT_ONCE = 64  # samples of a task where nobody asks for batches
SHAPES = ("__get__", "__len__", "dim", "size", "numel", "element_size", "is_floating_point")


class LazyInputs(Tensor):
    """Stands for inputs that nobody has read: their shape and type, and what reads them.

    Rows of it are read as in evaluation. Anything else that needs numbers is refused.
    """

    loader: SampleLoader

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        reason = "inputs that are read sample by sample are no tensor: take some, as examples[:8]"
        require(name in SHAPES, "data", reason, name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __getitem__(self, rows: Any) -> Tensor:
        numbers = np.atleast_1d(np.arange(len(self))[rows])
        return torch.cat([*read_rows(self.loader, numbers)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return lazy_inputs, (self.loader, len(self))


def lazy_inputs(loader: SampleLoader, length: int) -> LazyInputs:
    """The inputs of a dataset whose samples' form is known."""
    form = loader.reader.form
    assert form is not None
    plain = torch.empty((length, *form.shape), dtype=form.dtype, device="meta")
    inputs: LazyInputs = Tensor._make_subclass(LazyInputs, plain)
    inputs.loader = loader
    return inputs


@dataclass(frozen=True)
class LazyExamples(Examples):
    """Examples that stay in their dataset until a batch needs them.

    ``transform`` gets what the dataset gave, a batch at a time.
    """

    inputs: LazyInputs

    def __getitem__(self, rows: Tensor | slice) -> Examples:
        """Some of the examples, in memory: only few should be."""
        return Examples(self.read(rows), self.targets[rows], self.transform)

    def view(self, rows: Tensor | slice) -> Examples:
        """Some of the examples, not read."""
        return replace(self, targets=self.targets[rows], rows=self._known()[rows])

    def read(self, rows: Tensor | slice) -> Tensor:
        """The inputs of some of the examples, as evaluation sees them."""
        numbers = self._known()[rows].cpu().numpy()
        if not len(numbers):
            return torch.empty((0, *self.inputs.shape[1:]), dtype=self.inputs.dtype)
        read = torch.cat([*read_rows(self.inputs.loader, numbers)])
        return read.to(self.targets.device)

    def pieces(self) -> Iterator[Tensor]:
        """All inputs, a few at a time."""
        return read_rows(self.inputs.loader, self._known().cpu().numpy())

    def held(self) -> Iterator[Tensor]:
        """Nothing: every sample is checked when it is read."""
        return iter(())

    def batches(
        self, parts: Iterable[Tensor], generator: torch.Generator | None
    ) -> Iterator[Tensor]:
        """The net's inputs for one group of rows after the other, read ahead by the workers.

        A sample's seed is that of the pass and its place in it; in evaluation, its row's alone.
        """
        device, tasks, place = self.targets.device, [], 0
        known = self._known()
        seed = None if generator is None else next_seed(generator)
        for rows in parts:
            numbers = known[rows].cpu().numpy()
            places = np.arange(place, place + len(numbers))
            tasks.append(task_of(numbers) if seed is None else task_of(numbers, seed, places))
            place += len(numbers)
        for batch in self.inputs.loader.read(tasks, pin=device.type == "cuda"):
            yield self.transform(batch.inputs.to(device, non_blocking=True), generator)

    def portable(self, rows: Tensor | slice) -> Examples:
        """Some of the examples: the dataset itself is sent, and read where it arrives."""
        return self.view(rows)

    def content(self) -> dict[str, Tensor]:
        """The numbers of the samples, and their labels."""
        return {"rows": self._known(), "targets": self.targets}

    def filled(self, content: dict[str, Tensor]) -> Examples:
        """The samples of these numbers."""
        return replace(self, rows=content["rows"], targets=content["targets"])

    @property
    def repeat(self) -> bool:
        """Whether every pass sees the same inputs: only where the user says so."""
        return not self.inputs.loader.reader.random and super().repeat

    def to(self, device: torch.device) -> Examples:
        """The same examples, whose batches come to ``device``."""
        rows = None if self.rows is None else self.rows.to(device)
        return replace(self, targets=self.targets.to(device), rows=rows)

    def close(self) -> None:
        """Ends the processes that read them."""
        self.inputs.loader.close()


def task_of(
    rows: NDArray[np.int64], seed: int = 0, numbers: NDArray[np.int64] | None = None
) -> Task:
    """The reading of some rows, each with a seed by its number, by default that of the row."""
    return Task(rows, sample_seeds(seed, rows if numbers is None else numbers))


def read_rows(loader: SampleLoader, rows: NDArray[np.int64]) -> Iterator[Tensor]:
    """The inputs of some rows, as evaluation sees them, a few at a time."""
    tasks = [task_of(rows[n : n + READ_AT_ONCE]) for n in range(0, len(rows), READ_AT_ONCE)]
    if len(tasks) == 1:  # not worth the start of a process
        loader = SampleLoader(loader.reader, 0)
    yield from (batch.inputs for batch in loader.read(tasks))
