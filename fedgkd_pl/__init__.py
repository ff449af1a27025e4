"""FedGKD and its baselines on PyTorch Lightning.

A communication round is one training step of the server's Trainer; a client's local update is
one ``fit`` of a second Trainer that all clients reuse.

Names are imported on first use, so that ``import fedgkd_pl`` and ``fedgkd-pl --help`` stay fast:
those of ``__init__.pyi``, and every method that has a file in ``fedgkd_pl/methods``, with
its client half (``FedProxClient``).
"""

from importlib import import_module
from typing import Any

import lazy_loader
from fedgkd_pl import _torchvision
from fedgkd_pl.methods import discover

__version__ = "0.1.0"

_torchvision.install()
_import_listed, _, _listed = lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted({"__version__", *_listed, *discover()})


def __getattr__(name: str) -> Any:
    method = discover().get(name) or discover().get(name.removesuffix("Client"))
    return getattr(import_module(method.module), name) if method else _import_listed(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
