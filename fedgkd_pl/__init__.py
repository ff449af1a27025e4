"""FedGKD and its baselines on PyTorch Lightning.

A communication round is one training step of the server's Trainer; a client's local update is
one ``fit`` of a second Trainer that all clients reuse.

Names are imported on first use, so that ``import fedgkd_pl`` and ``fedgkd-pl --help`` stay fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedgkd_pl import _torchvision

if TYPE_CHECKING:
    from fedgkd_pl.callbacks.progress import RoundProgress as RoundProgress
    from fedgkd_pl.callbacks.run_files import RunFiles as RunFiles
    from fedgkd_pl.data.cifar import CIFAR10 as CIFAR10
    from fedgkd_pl.data.datamodule import FederatedDataModule as FederatedDataModule
    from fedgkd_pl.data.digits import Digits as Digits
    from fedgkd_pl.data.partition import IID as IID
    from fedgkd_pl.data.partition import Dirichlet as Dirichlet
    from fedgkd_pl.engines.local import LocalEngine as LocalEngine
    from fedgkd_pl.methods.fedavg import FedAvg as FedAvg
    from fedgkd_pl.methods.fedgkd import FedGKD as FedGKD
    from fedgkd_pl.models.mlp import MLP as MLP
    from fedgkd_pl.models.resnet import ResNet8 as ResNet8

__version__ = "0.1.0"

_HOME = {
    "CIFAR10": "data.cifar",
    "Digits": "data.digits",
    "Dirichlet": "data.partition",
    "FedAvg": "methods.fedavg",
    "FedGKD": "methods.fedgkd",
    "FederatedDataModule": "data.datamodule",
    "IID": "data.partition",
    "LocalEngine": "engines.local",
    "MLP": "models.mlp",
    "ResNet8": "models.resnet",
    "RoundProgress": "callbacks.progress",
    "RunFiles": "callbacks.run_files",
}
__all__ = ["__version__", *sorted(_HOME)]

_torchvision.install()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedgkd_pl' has no attribute {name!r}")
    return getattr(import_module(f"fedgkd_pl.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
