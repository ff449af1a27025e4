"""The DataLoader that reads a lazy dataset: its workers stay for all epochs and clients."""

import signal
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from fedgkd_pl.data.reading import Batch, SampleError, SampleReader, Task
from fedgkd_pl.errors import RunFailed
from fedgkd_pl.processes.output import keep_output
from fedgkd_pl.processes.start import context_of_helpers, end_with_parent, without_main
from torch.utils.data import DataLoader, Sampler

PRELOAD = "fedgkd_pl.data.datamodule"  # torch and Lightning, which a pool's workers need as well


class _Plan(Sampler[Task]):
    """The tasks of the next pass."""

    def __init__(self) -> None:
        self.tasks: Sequence[Task] = ()

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)


class SampleLoader:
    """Reads passes over a dataset, with processes that stay until it is closed.

    It may be sent to another process, where it starts processes of that one's.

    Args:
        reader: reads and checks samples.
        workers: processes that read ahead; 0 reads in this process.
    """

    def __init__(self, reader: SampleReader, workers: int) -> None:
        self.reader = reader
        self.workers = workers
        self._plan = _Plan()
        self._loader: DataLoader[Any] | None = None
        self._pins = False
        self._batches: Iterator[Any] | None = None
        self._reading: object | None = None  # the pass that is being read

    def __reduce__(self) -> Any:
        return SampleLoader, (self.reader, self.workers)

    def read(self, tasks: Sequence[Task], pin: bool = False) -> Iterator[Batch]:
        """One batch for each task, in their order.

        Args:
            tasks: of the pass.
            pin: whether batches go to a GPU, which copies faster from pinned memory.
        """
        if self._reading is not None:  # two passes at a time, of which the DataLoader can do one
            yield from (_good(self.reader[task]) for task in tasks)
            return
        me = self._reading = object()
        try:
            self._start(tasks, pin)
            for _ in tasks:
                if self._reading is not me:
                    raise RunFailed("what reads samples was closed")
                yield _good(_next(self._batches))
        except Exception:
            if self._reading is me:
                self.close()  # nothing of a failed pass stays
            raise
        finally:
            if self._reading is me:
                self._reading = None

    def close(self) -> None:
        """Ends the processes, also in the middle of a pass; the next one starts others."""
        self._loader = self._batches = self._reading = None  # with its last reference

    def _start(self, tasks: Sequence[Task], pin: bool) -> None:
        self._plan.tasks = tasks
        if self._loader is None or self._pins != pin:
            self._loader, self._pins = self._make(pin), pin
        with without_main():
            self._batches = iter(self._loader)

    def _make(self, pin: bool) -> "DataLoader[Any]":
        many: dict[str, Any] = {}
        if self.workers:
            many = {
                "num_workers": self.workers,
                "persistent_workers": True,
                "worker_init_fn": _begin,
                "multiprocessing_context": context_of_helpers(PRELOAD),
            }
        return DataLoader(
            self.reader,
            batch_size=None,  # an item of the reader is a batch
            sampler=self._plan,
            collate_fn=_as_it_is,
            pin_memory=pin,
            generator=torch.Generator(),  # it would draw a seed from the process's own
            **many,
        )


def _as_it_is(batch: Any) -> Any:
    return batch


def _next(batches: Iterator[Any] | None) -> Any:
    assert batches is not None
    try:
        return next(batches)
    except RuntimeError as error:  # the DataLoader's, of a worker that died or does not start
        line = (str(error).splitlines() or ["it ended"])[0]
        text = f"a process that reads samples failed ({line:.200}): mostly a lack of memory"
        raise RunFailed(f"{text}; take fewer loader_workers") from error


def _good(given: Any) -> Batch:
    if isinstance(given, str):
        raise SampleError(given)
    batch: Batch = given.unpack()
    return batch


def _begin(worker: int) -> None:
    """What a process that reads samples does first: it ends with the one it reads for."""
    end_with_parent()
    keep_output()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the DataLoader's, if it hangs at the end
    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)  # handled by its parent
