"""Memory that a process shares with those it starts, without ``/dev/shm`` (64 MB in a container).

It is a file without a name: in memory (memfd) where the system has that, a removed file in the
temporary folder elsewhere. The system frees it when the last process that has it ends; only
Windows, where descriptors cannot be shared, needs a name and a :meth:`Memory.close`.
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
        """Replaces the content, which nobody may be reading; returns the number of bytes.

        Writing to the file, unlike to a mapping of it, raises an error where there is no room.
        """
        self.file.seek(0)
        for chunk in chunks:
            self.file.write(chunk)
        self.file.flush()
        self.size = self.file.tell()
        return self.size

    def map(self, size: int | None = None) -> mmap.mmap:
        """The bytes, not copied, by default as many as when this was pickled; writes stay here."""
        return mmap.mmap(self.file.fileno(), size or self.size, access=mmap.ACCESS_COPY)

    def close(self) -> None:
        """Frees it, except what is mapped; may be called twice."""
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
    """Strided CPU tensors in one shared memory, each in the order in which its elements lay."""

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
