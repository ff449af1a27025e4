"""A simulated accelerator: ``torch.device("sim", 0)`` and ``sim:1`` on a machine without a GPU.

With this folder on ``PYTHONPATH``, every process that imports torch has the device, also the
workers of a pool: torch finds it as it finds a vendor's backend, by the entry point
``torch.backends`` of the ``dist-info`` folder. ``python simdevice.py`` compiles it, once for each
torch. ``make test-device`` does both.
"""

import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor

NAME = "sim"
SOURCE = Path(__file__).with_name("sim.cpp")
_sim: Any = None  # the extension, once it is loaded


def missing() -> str:
    """What the device lacks on this machine; empty if it is there or can be compiled."""
    if library().exists():
        return ""
    compiler = os.environ.get("CXX", "g++")
    return "" if shutil.which(compiler) else f"a C++ compiler ({compiler})"


def library() -> Path:
    """Where the compiled device is, in torch's cache: another one for another source or torch."""
    parts = SOURCE.read_bytes(), torch.__version__.encode(), sys.version.encode()
    name = hashlib.sha256(b"|".join(parts)).hexdigest()[:16]
    cache = os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return Path(cache).expanduser() / f"simdevice-{name}" / f"simdevice_ext{suffix}"


def build() -> Path:
    """Compiles the device, where that was not done before (a minute)."""
    built = library()
    if built.exists():
        return built
    from torch.utils.cpp_extension import load

    # ninja of a virtual environment that is not activated
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        flags = ["-O1", "-w"]
        load("simdevice_ext", [str(SOURCE)], flags, build_directory=folder, is_python_module=False)
        # complete or absent, whoever else compiles it at this moment
        os.replace(Path(folder) / "simdevice_ext.so", built)
    return built


def autoload() -> None:
    """Registers the device, once; torch calls it at the end of its import."""
    global _sim
    if _sim is not None or __name__ == "__main__" or not library().exists():
        return
    spec = importlib.util.spec_from_file_location("simdevice_ext", library())
    assert spec is not None and spec.loader is not None
    _sim = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_sim)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module("torch.sim"))
    torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=[torch.quint8])


def loaded() -> bool:
    """Whether this process has the device."""
    return _sim is not None


def _index(device: Any) -> int:
    """The number of a device, given in any form that torch takes; by default the current one."""
    index = device if isinstance(device, int | None) else torch.device(device).index
    return _sim.current() if index is None else index


class _On:
    """A current device, for a while: ``with torch.sim.device(1)``."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = _sim.current()
        if self.index >= 0:
            _sim.set_current(self.index)

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _sim.set_current(self.before)


class _Module(ModuleType):
    """``torch.sim``: what torch and Lightning ask of an accelerator's module."""

    device = _On

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return bool(_sim.in_use()) and not _sim.bad_fork()

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return int(_sim.current())

    def set_device(self, device: Any) -> None:
        _sim.set_current(_index(device))

    def synchronize(self, device: Any = None) -> None:
        """Nothing is asynchronous."""

    def _is_in_bad_fork(self) -> bool:
        return bool(_sim.bad_fork())

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self.device_count()):
            _sim.default_generator(index).manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> Tensor:
        state: Tensor = _sim.default_generator(_index(device)).get_state()
        return state

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        _sim.default_generator(_index(device)).set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def memory_allocated(self, device: Any = None) -> int:
        return int(_sim.allocated(_index(device)))

    def empty_cache(self) -> None:
        _tell("empty_cache", 0)  # on CUDA, a cudaFree now and a cudaMalloc later for every block


@dataclass
class Transfers:
    """What the host and the device had to do with each other, with its bytes."""

    seen: list[tuple[str, int]] = field(default_factory=list)

    def count(self, kind: str) -> int:
        """How many there were of a kind."""
        return [seen for seen, _ in self.seen].count(kind)

    @property
    def blocking(self) -> list[str]:
        """Those that the host waits for on a GPU: all but copies that are ``non_blocking``."""
        kinds = [kind for kind, _ in self.seen]
        waits = ("h2d", "d2h", "peer", "item")
        return [kind for kind in kinds if kind in waits or kind.startswith("wait ")]


_listeners: list[Transfers] = []


def _tell(kind: str, nbytes: int) -> None:
    for transfers in _listeners:
        transfers.seen.append((kind, nbytes))


@contextmanager
def transfers() -> Iterator[Transfers]:
    """Notes copies between host and device, ``.item()`` and what else the host waits for."""
    made = Transfers()
    _listeners.append(made)
    _sim.set_hook(_tell)
    try:
        yield made
    finally:
        _listeners.remove(made)
        _sim.set_hook(_tell if _listeners else None)


@contextmanager
def without_double() -> Iterator[None]:
    """The device has no float64, as Apple's."""
    _sim.refuse_double(True)
    try:
        yield
    finally:
        _sim.refuse_double(False)


if __name__ == "__main__":
    print(f"the simulated device needs {missing()}" if missing() else build())
