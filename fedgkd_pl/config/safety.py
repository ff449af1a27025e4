"""What a config may name, so that reading a stranger's runs none of their code and writes nowhere.

No whole packages are allowed: each has something that reads pickles, imports modules or writes
anywhere, such as Lightning's ``TorchCheckpointIO``.
"""

import logging
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from inspect import isclass, isroutine
from os.path import isfile
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import fedgkd_pl
import torch
import torchmetrics
import yaml
from fedgkd_pl.errors import SettingError
from fedgkd_pl.storage.files import load_yaml
from jsonargparse import (
    Namespace,
    _common,
    _loaders_dumpers,
    _optionals,
    set_loader,
    set_parsing_settings,
)
from lightning.pytorch import callbacks, loggers, profilers
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torchvision import models, transforms
from torchvision.transforms import v2

log = logging.getLogger("fedgkd_pl")
NOT_ALLOWED = "a config may not name it; your own classes come in with --import MODULE"
# Where our parts of an experiment are, and what is none there.
_PARTS = (
    *("callbacks.", "data.", "engines.", "methods.", "models.", "runs.files"),
    *("federation.callback", "federation.losses", "federation.server"),
)
_NO_PARTS = (
    *("Adaptive", "Examples", "FedAvgClient", "FedGKDClient", "FederatedData", "Session"),
    *("LoRA", "Splits"),
)
# Metrics of these packages load no pretrained nets from files or the network.
_METRICS = ("aggregation", "classification", "regression", "retrieval", "wrappers")
_LOADERS = ("loaders", "loader_exceptions", "loader_json_superset", "loader_params")
# Arguments that are a place whatever they look like; any other text only if it looks like one.
PLACES = frozenset(
    "artifact_location default_root_dir dir dirpath exclude_batches_path folder log_dir root_dir "
    "save_dir tracking_uri".split()
)
SERVICES = ("CometLogger", "MLFlowLogger", "WandbLogger")


@contextmanager
def our_rules(modules: Collection[str] = ()) -> Iterator[None]:
    """Has jsonargparse read strict YAML and import only what a config may name.

    Its settings belong to the process, where a LightningCLI of the user's may need them, so they
    are put back after.
    """
    loaders = [vars(_loaders_dumpers)[name] for name in _LOADERS]
    representers = yaml.SafeDumper.yaml_multi_representers
    with ExitStack() as kept:
        for values in (_common.parsing_settings, *loaders, representers):
            kept.enter_context(patch.dict(values))
        kept.enter_context(
            patch.object(_optionals, "_config_read_mode", _optionals._config_read_mode)
        )
        # Lightning's enumerations of texts, which may be a default, are written as those texts
        representers[str] = lambda to, text: to.represent_data(str.__str__(text))
        set_parsing_settings(
            import_path_denylist=["*"],
            import_path_allowlist=[*sorted(allowed()), *modules],
            instantiate_subclass_spec_in_any=False,
            config_read_mode_fsspec_enabled=False,
        )
        set_loader("yaml", _load, (yaml.YAMLError,))
        yield


def check_names(settings: Any, modules: Collection[str], key: str = "") -> None:
    """Rejects parts of allowed classes: jsonargparse would let a config name their methods."""
    values = vars(settings) if isinstance(settings, Namespace) else settings
    path = ""
    if isinstance(values, dict):
        for name, value in values.items():
            check_names(value, modules, f"{key}.{name}" if key else str(name))
        path = str(values.get("class_path") or "")
    elif isinstance(values, list | tuple):
        for value in values:
            check_names(value, modules, key)
    elif isroutine(values) and "." in values.__qualname__ and "<" not in values.__qualname__:
        path = f"{values.__module__}.{values.__qualname__}"
    known = path in allowed() or path.startswith(tuple(f"{module}." for module in modules))
    if path and not known:
        raise SettingError(key, NOT_ALLOWED, path)


def confined(value: Any, home: Path, key: str) -> Any:
    """Settings of a run's own config without places outside of its folder, and services.

    The run may be a stranger's. Folders become the run's; what else looks like a place is left out.
    """
    name = key.rpartition(".")[2]
    if isinstance(value, Namespace | dict):
        inside = vars(value) if isinstance(value, Namespace) else value
        service = str(inside.get("class_path")).rpartition(".")[2]
        if service not in SERVICES:
            parts = {part: confined(each, home, f"{key}.{part}") for part, each in inside.items()}
            made: Any = type(value)
            return made(**parts)
        value, place = service, None
    elif isinstance(value, list | tuple):
        kept = [confined(each, home, key) for each in value]
        return [each for each in kept if each is not None]
    elif isinstance(value, str | Path) and (name in PLACES or _is_place(str(value))):
        place = str(home) if name in PLACES else None
    else:
        return value
    log.warning("%s: %s of the run's own config is not used; give it as a flag", key, value)
    return place


def _is_place(value: str) -> bool:
    is_file = isfile(value)  # which jsonargparse would read
    return is_file or re.search(r"^[/~]|^file:|\.\.|://|\0", value) is not None


@cache
def allowed() -> frozenset[str]:
    """The dotted names that a config may use, of classes and of functions that make nets."""
    ours = {f"{home}.{name}" for name, module in parts().items() for home in ("fedgkd_pl", module)}
    return frozenset(ours.union(path for thing in _theirs() for path in _paths(thing)))


def parts() -> dict[str, str]:
    """The modules of our public classes that a config may name, by the names of the classes."""
    return {
        name: module
        for name, module in fedgkd_pl.MODULES.items()
        if module.removeprefix("fedgkd_pl.").startswith(_PARTS) and name not in _NO_PARTS
    }


def import_parts(text: str) -> None:
    """Imports those of them that a text names, so that it may name them without their module."""
    for name in sorted(parts().keys() & set(re.findall(r"\w+", text))):
        getattr(fedgkd_pl, name)


def _load(text: str) -> Any:
    import_parts(text)
    return load_yaml(text)


def _theirs() -> Iterator[Any]:
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
        names = {*module.__all__} - {"LitLogger"}  # which sends a run to Lightning's cloud
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
