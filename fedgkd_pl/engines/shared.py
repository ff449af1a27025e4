"""Memory that a process shares with those it starts, whatever ``/dev/shm`` is like.

It is a file without a name: in memory (memfd) where the system has that, a removed file in the
temporary folder elsewhere. ``/dev/shm``, of which a container has 64 MB, is not touched. Nothing
is left of it when the last process that has it is gone, however that ended; only Windows, which
gives no descriptors away, needs a name and a :meth:`Memory.close`.
"""

import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

ALIGNED = 64  # bytes
ROWS = 4096  # copied at once
NAMED = os.name == "nt"


class Memory:
    """Bytes that can be given to a process as it is started (pickled with its arguments)."""

    def __init__(self) -> None:
        self.name, descriptor = _named() if NAMED else ("", _nameless())
        self.file = open(descriptor, "r+b")  # closed by close
        self.size = 0

    def __getstate__(self) -> dict[str, Any]:
        file = self.name or reduction.DupFd(self.file.fileno())
        return {"file": file, "size": self.size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        file, self.size, self.name = state["file"], state["size"], ""
        self.file = open(file if isinstance(file, str) else file.detach(), "r+b")

    def write(self, chunks: Iterable[Any]) -> int:
        """Replaces what is there, which nobody may be reading; returns the number of bytes.

        Writing a file, unlike a mapping of it, tells in time that there is no room.

        Args:
            chunks: what is there from now on.
        """
        self.file.seek(0)
        for chunk in chunks:
            self.file.write(chunk)
        self.file.flush()
        self.size = self.file.tell()
        return self.size

    def map(self, size: int | None = None) -> mmap.mmap:
        """The bytes, not copied; what is written to them stays in this process.

        Args:
            size: how many; by default those that were there when this was pickled.
        """
        return mmap.mmap(self.file.fileno(), size or self.size, access=mmap.ACCESS_COPY)

    def close(self) -> None:
        """Lets go of it; what is mapped stays. May be called twice."""
        self.file.close()
        if self.name:
            with suppress(OSError):
                os.unlink(self.name)


def _named() -> tuple[str, int]:
    descriptor, name = tempfile.mkstemp(prefix="fedgkd_pl-")
    return name, descriptor


def _nameless() -> int:
    """The descriptor of a new file that has no name."""
    if hasattr(os, "memfd_create"):
        try:
            return os.memfd_create("fedgkd_pl")
        except OSError:  # a sandbox without it
            pass
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedTensors:
    """Tensors in one shared memory, each in the order in which its elements lay.

    Args:
        tensors: strided, on the CPU.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.memory = Memory()
        self.layouts = [_Layout(tensor) for tensor in tensors]
        try:
            self.memory.write(
                chunk
                for tensor, layout in zip(tensors, self.layouts, strict=True)
                for chunk in layout.chunks(tensor)
            )
        except BaseException:
            self.memory.close()
            raise

    def tensors(self) -> list[Tensor]:
        """The tensors, not copied."""
        if not self.memory.size:
            return [layout.read(torch.empty(0, dtype=torch.uint8)) for layout in self.layouts]
        rest = torch.frombuffer(self.memory.map(), dtype=torch.uint8)
        tensors = []
        for layout in self.layouts:
            tensors.append(layout.read(rest))
            rest = rest[layout.padded :]
        return tensors


class _Layout:
    """How a tensor lies in memory: its dimensions with the widest step first."""

    def __init__(self, tensor: Tensor) -> None:
        steps = tensor.stride()
        self.order = sorted(range(tensor.dim()), key=lambda dim: -steps[dim])
        self.shape = [tensor.shape[dim] for dim in self.order]
        self.dtype = tensor.dtype
        self.nbytes = tensor.numel() * tensor.element_size()

    @property
    def padded(self) -> int:
        return -(-self.nbytes // ALIGNED) * ALIGNED

    def chunks(self, tensor: Tensor) -> Iterable[Any]:
        ordered = tensor.detach().permute(self.order)
        for rows in ordered.split(ROWS) if tensor.dim() else [ordered]:
            plain = rows.resolve_conj().resolve_neg().contiguous()
            yield plain.flatten().view(torch.uint8).numpy()
        yield bytes(self.padded - self.nbytes)

    def read(self, memory: Tensor) -> Tensor:
        stored = memory[: self.nbytes].view(self.dtype).view(self.shape)
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return stored.permute(back)
