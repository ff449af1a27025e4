"""FedGKD and its baselines on PyTorch Lightning.

A communication round is one training step of the server's Trainer; a client's local update is
one ``fit`` of a second Trainer that all clients reuse.

Names are imported on first use, so that ``import fedgkd_pl`` and ``fedgkd-pl --help`` stay fast:
those of ``__init__.pyi``, and every method that has a file in ``fedgkd_pl/methods``, with
its client half (``FedProxClient``).
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from fedgkd_pl import _torchvision
from fedgkd_pl.methods import discover

__version__ = "0.1.0"

_torchvision.install()
_stub = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_listed = re.findall(r"^from \.(\S+) import (\w+)", _stub, re.MULTILINE)
MODULES = {name: f"{__name__}.{module}" for module, name in _listed}
MODULES |= {name: method.module for name, method in discover().items()}
__all__ = sorted({"__version__", *MODULES})


def __getattr__(name: str) -> Any:
    module = MODULES.get(name) or MODULES.get(name.removesuffix("Client"))
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
