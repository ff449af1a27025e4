"""What a config may name, so that reading a stranger's config runs none of their code.

No whole packages: each has something that reads pickles, imports modules or writes anywhere, such
as Lightning's ``TorchCheckpointIO``. Only what a run is made of.
"""

import sys
from collections.abc import Collection, Iterator
from functools import cache
from inspect import isclass, isroutine
from types import ModuleType
from typing import Any

import fedgkd_pl
import torch
import torchmetrics
from fedgkd_pl.data.cohorts import Cohorts
from fedgkd_pl.data.partition import Partition
from fedgkd_pl.data.public import PublicData
from fedgkd_pl.data.tasks import ClassTasks
from fedgkd_pl.engines.base import Engine
from fedgkd_pl.errors import SettingError
from fedgkd_pl.federation.client import FederatedClient
from fedgkd_pl.federation.losses import LocalLoss
from fedgkd_pl.methods.fedaux import SimCLR
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch import Callback, LightningDataModule, callbacks, loggers, profilers
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torchvision import models, transforms
from torchvision.transforms import v2

PACKAGES = (
    "fedgkd_pl",
    "torch.nn",
    "torch.optim",
    "torchvision.models",
    "torchvision.transforms",
    "torchmetrics",
    "Lightning's callbacks, loggers and profilers",
)
ALLOWED = f"a config may name classes of {', '.join(PACKAGES)}"
ALONE = "alone, a config may name classes of fedgkd_pl, torch and Lightning (docs/config.md)"
_NOT_LIGHTNINGS = ("LitLogger",)  # sends a run to Lightning's cloud
# Metrics of these packages load pretrained nets from files or the network.
_METRICS = ("aggregation", "classification", "regression", "retrieval", "wrappers")


def only_these(modules: Collection[str]) -> None:
    """Lets jsonargparse import only what is allowed and the user's modules, and read no URL."""
    set_parsing_settings(
        import_path_denylist=["*"],
        import_path_allowlist=[*sorted(_exact()), *modules],
        instantiate_subclass_spec_in_any=False,
        config_read_mode_fsspec_enabled=False,
    )


def check_names(settings: Any, modules: Collection[str], key: str = "") -> None:
    """Refuses parts of allowed classes: jsonargparse would let a config name their methods."""
    values = vars(settings) if isinstance(settings, Namespace) else settings
    if isinstance(values, dict):
        path = values.get("class_path")
        if isinstance(path, str) and not (path in _exact() or _is_users(path, modules)):
            raise SettingError(key, why_not(path), path)
        for name, value in values.items():
            check_names(value, modules, f"{key}.{name}" if key else str(name))
    elif isinstance(values, list | tuple):
        for value in values:
            check_names(value, modules, key)
    elif isroutine(values):
        path = f"{values.__module__}.{values.__qualname__}"
        part = "." in values.__qualname__ and "<" not in values.__qualname__  # no <lambda> of ours
        if part and not _is_users(path, modules):
            raise SettingError(key, why_not(path), path)


def is_slip(path: str) -> bool:
    """Whether a dotted name is a typing error: it does not exist in a module of allowed ones."""
    module, _, name = path.rpartition(".")
    near = any(known.rpartition(".")[0] == module for known in _exact())
    return near and not hasattr(sys.modules.get(module), name)


def why_not(path: str) -> str:
    """Why a config may not name this: what to do first, where that is known."""
    top, dot, _ = path.partition(".")
    if dot and not is_known(path) and top not in sys.stdlib_module_names:
        return f"add --import {top} if it is yours; {ALONE}"
    return f"{ALLOWED}; your own come in with --import"


def is_known(path: str) -> bool:
    """Whether a dotted name begins with a package of which something is allowed."""
    return path.partition(".")[0] in _tops()


def _is_users(path: str, modules: Collection[str]) -> bool:
    return any(path.startswith(f"{module}.") for module in modules)


@cache
def _exact() -> frozenset[str]:
    return frozenset(path for thing in _things() for path in _paths(thing))


@cache
def _tops() -> frozenset[str]:
    return frozenset(path.partition(".")[0] for path in _exact())


def _things() -> Iterator[Any]:
    """Classes, and functions that make nets."""
    ours = (ClassTasks, Cohorts, Engine, LocalLoss, Partition, PublicData, SimCLR)
    parts = (Callback, LightningDataModule, nn.Module, *ours)
    for name in fedgkd_pl.__all__:
        ours = getattr(fedgkd_pl, name)
        if isclass(ours) and issubclass(ours, parts) and not issubclass(ours, FederatedClient):
            yield ours
    yield from _classes(nn, nn.Module, "torch.nn.modules.")
    yield from _classes(torch.optim, Optimizer, "torch.optim.")
    yield from _classes(lr_scheduler, lr_scheduler.LRScheduler, "torch.optim.lr_scheduler")
    yield from (models.get_model_builder(name) for name in models.list_models())
    for module in list(vars(models).values()):
        if isinstance(module, ModuleType):
            yield from _classes(module, nn.Module, "torchvision.models.")
    yield from _classes(transforms, object, "torchvision.transforms.")
    yield from _classes(v2, nn.Module, "torchvision.transforms.v2.")
    for name in _METRICS:
        module = getattr(torchmetrics, name)
        yield from _classes(module, torchmetrics.Metric, f"torchmetrics.{name}")
    for module in (callbacks, loggers, profilers):
        names = [name for name in module.__all__ if name not in _NOT_LIGHTNINGS]
        yield from (getattr(module, name) for name in names)


def _classes(module: ModuleType, base: type, home: str) -> Iterator[type]:
    """The public classes of a module that are defined where its own are."""
    for name, value in list(vars(module).items()):
        public = isclass(value) and not name.startswith("_") and issubclass(value, base)
        if public and value.__module__.startswith(home):
            yield value


def _paths(thing: Any) -> Iterator[str]:
    """Where something is defined, and the packages above from which it can be imported, too."""
    name = thing.__qualname__
    parts = thing.__module__.split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        if getattr(sys.modules.get(module), name, None) is thing:
            yield f"{module}.{name}"
