"""FedGKD and its baselines on PyTorch Lightning.

A communication round is one training step of the server's Trainer; a client's local update is
one ``fit`` of a second Trainer that all clients reuse.

Names are imported on first use, so that ``import fedgkd_pl`` and ``fedgkd-pl --help`` stay fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedgkd_pl import _torchvision

if TYPE_CHECKING:
    from fedgkd_pl.callbacks.agreement import TeacherAgreement as TeacherAgreement
    from fedgkd_pl.callbacks.communication import Communication as Communication
    from fedgkd_pl.callbacks.dashboard import Dashboard as Dashboard
    from fedgkd_pl.callbacks.drift import ClientDrift as ClientDrift
    from fedgkd_pl.callbacks.export import ModelExport as ModelExport
    from fedgkd_pl.callbacks.feature_map import FeatureMap as FeatureMap
    from fedgkd_pl.callbacks.forgetting import Forgetting as Forgetting
    from fedgkd_pl.callbacks.local_models import LocalModels as LocalModels
    from fedgkd_pl.callbacks.profile import RoundProfile as RoundProfile
    from fedgkd_pl.callbacks.progress import RoundProgress as RoundProgress
    from fedgkd_pl.data.cohorts import AuthorsCohorts as AuthorsCohorts
    from fedgkd_pl.data.cohorts import BernoulliCohorts as BernoulliCohorts
    from fedgkd_pl.data.cohorts import Cohorts as Cohorts
    from fedgkd_pl.data.cohorts import CohortsFromFile as CohortsFromFile
    from fedgkd_pl.data.cohorts import CyclicCohorts as CyclicCohorts
    from fedgkd_pl.data.cohorts import UniformCohorts as UniformCohorts
    from fedgkd_pl.data.cohorts import WeightedCohorts as WeightedCohorts
    from fedgkd_pl.data.datamodule import FederatedDataModule as FederatedDataModule
    from fedgkd_pl.data.datasets.ag_news import AGNews as AGNews
    from fedgkd_pl.data.datasets.cifar import CIFAR10 as CIFAR10
    from fedgkd_pl.data.datasets.cifar import CIFAR100 as CIFAR100
    from fedgkd_pl.data.datasets.digits import Digits as Digits
    from fedgkd_pl.data.datasets.sst5 import SST5 as SST5
    from fedgkd_pl.data.datasets.text import TextDataModule as TextDataModule
    from fedgkd_pl.data.datasets.tiny_imagenet import TinyImageNet as TinyImageNet
    from fedgkd_pl.data.datasets.toy import Toy2D as Toy2D
    from fedgkd_pl.data.partition import IID as IID
    from fedgkd_pl.data.partition import ByKey as ByKey
    from fedgkd_pl.data.partition import Dirichlet as Dirichlet
    from fedgkd_pl.data.partition import Partition as Partition
    from fedgkd_pl.data.partition import Pathological as Pathological
    from fedgkd_pl.data.partition import QuantitySkew as QuantitySkew
    from fedgkd_pl.data.partition import Shards as Shards
    from fedgkd_pl.data.published import AuthorsDirichlet as AuthorsDirichlet
    from fedgkd_pl.data.published import FromFile as FromFile
    from fedgkd_pl.engines.base import Engine as Engine
    from fedgkd_pl.engines.base import Session as Session
    from fedgkd_pl.engines.flower.engine import FlowerEngine as FlowerEngine
    from fedgkd_pl.engines.local import LocalEngine as LocalEngine
    from fedgkd_pl.engines.ray import RayEngine as RayEngine
    from fedgkd_pl.federation.answers import Spec as Spec
    from fedgkd_pl.federation.callback import FederatedCallback as FederatedCallback
    from fedgkd_pl.federation.client import FederatedClient as FederatedClient
    from fedgkd_pl.federation.message import ClientUpdate as ClientUpdate
    from fedgkd_pl.federation.message import Message as Message
    from fedgkd_pl.federation.server import FederatedServer as FederatedServer
    from fedgkd_pl.methods.fedavg import FedAvg as FedAvg
    from fedgkd_pl.methods.fedavg import FedAvgClient as FedAvgClient
    from fedgkd_pl.methods.feddistill import FedDistill as FedDistill
    from fedgkd_pl.methods.feddistill import FedDistillPlus as FedDistillPlus
    from fedgkd_pl.methods.fedgen import FedGen as FedGen
    from fedgkd_pl.methods.fedgkd import FedGKD as FedGKD
    from fedgkd_pl.methods.fedgkd_plus import FedGKDPlus as FedGKDPlus
    from fedgkd_pl.methods.fedgkd_vote import FedGKDVote as FedGKDVote
    from fedgkd_pl.methods.fedprox import FedProx as FedProx
    from fedgkd_pl.methods.moon import MOON as MOON
    from fedgkd_pl.models.heads import SplitNet as SplitNet
    from fedgkd_pl.models.mlp import MLP as MLP
    from fedgkd_pl.models.resnet import ResNet as ResNet
    from fedgkd_pl.models.resnet import ResNet8 as ResNet8
    from fedgkd_pl.models.resnet import ResNet18 as ResNet18
    from fedgkd_pl.models.resnet import ResNet20 as ResNet20
    from fedgkd_pl.models.resnet import ResNet32 as ResNet32
    from fedgkd_pl.models.resnet import ResNet50 as ResNet50
    from fedgkd_pl.models.resnet import ResNet56 as ResNet56
    from fedgkd_pl.models.text import TextClassifier as TextClassifier
    from fedgkd_pl.runs.files import RunFiles as RunFiles
    from fedgkd_pl.storage.checkpoint import read_checkpoint as read_checkpoint

__version__ = "0.1.0"

_HOME = {
    "AGNews": "data.datasets.ag_news",
    "AuthorsCohorts": "data.cohorts",
    "AuthorsDirichlet": "data.published",
    "BernoulliCohorts": "data.cohorts",
    "ByKey": "data.partition",
    "CIFAR10": "data.datasets.cifar",
    "CIFAR100": "data.datasets.cifar",
    "Cohorts": "data.cohorts",
    "CohortsFromFile": "data.cohorts",
    "CyclicCohorts": "data.cohorts",
    "ClientDrift": "callbacks.drift",
    "ClientUpdate": "federation.message",
    "Communication": "callbacks.communication",
    "Dashboard": "callbacks.dashboard",
    "Digits": "data.datasets.digits",
    "Dirichlet": "data.partition",
    "Engine": "engines.base",
    "FeatureMap": "callbacks.feature_map",
    "FedAvg": "methods.fedavg",
    "FedAvgClient": "methods.fedavg",
    "FedDistill": "methods.feddistill",
    "FedDistillPlus": "methods.feddistill",
    "FedGKD": "methods.fedgkd",
    "FedGKDPlus": "methods.fedgkd_plus",
    "FedGKDVote": "methods.fedgkd_vote",
    "FedGen": "methods.fedgen",
    "FedProx": "methods.fedprox",
    "FederatedCallback": "federation.callback",
    "FederatedClient": "federation.client",
    "FederatedDataModule": "data.datamodule",
    "FederatedServer": "federation.server",
    "FlowerEngine": "engines.flower.engine",
    "Forgetting": "callbacks.forgetting",
    "FromFile": "data.published",
    "IID": "data.partition",
    "LocalEngine": "engines.local",
    "LocalModels": "callbacks.local_models",
    "MLP": "models.mlp",
    "MOON": "methods.moon",
    "Message": "federation.message",
    "ModelExport": "callbacks.export",
    "Partition": "data.partition",
    "Pathological": "data.partition",
    "QuantitySkew": "data.partition",
    "ResNet": "models.resnet",
    "ResNet18": "models.resnet",
    "ResNet20": "models.resnet",
    "ResNet32": "models.resnet",
    "ResNet50": "models.resnet",
    "ResNet56": "models.resnet",
    "ResNet8": "models.resnet",
    "RayEngine": "engines.ray",
    "RoundProfile": "callbacks.profile",
    "RoundProgress": "callbacks.progress",
    "RunFiles": "runs.files",
    "SST5": "data.datasets.sst5",
    "Session": "engines.base",
    "Shards": "data.partition",
    "Spec": "federation.answers",
    "SplitNet": "models.heads",
    "TeacherAgreement": "callbacks.agreement",
    "TextClassifier": "models.text",
    "TextDataModule": "data.datasets.text",
    "TinyImageNet": "data.datasets.tiny_imagenet",
    "Toy2D": "data.datasets.toy",
    "UniformCohorts": "data.cohorts",
    "WeightedCohorts": "data.cohorts",
    "read_checkpoint": "storage.checkpoint",
}
__all__ = ["__version__", *sorted(_HOME)]

_torchvision.install()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedgkd_pl' has no attribute {name!r}")
    return getattr(import_module(f"fedgkd_pl.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
