"""The settings of a run that was put together in Python, as ``config.yaml`` has them.

Runs with the same settings are averaged over their seeds. So objects of this package, optimizers in
a ``partial`` and arrays are described by what they were made with, and anything else gets a mark
that nothing else has: such runs are never taken for alike.
"""

import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import yaml
from fedgkd_pl.data.examples import digest
from fedgkd_pl.runs.folder import OF_PYTHON
from fedgkd_pl.storage.recorded import Recorded, given
from jsonargparse import ArgumentParser
from jsonargparse._util import get_import_path
from lightning.pytorch import Trainer
from torch import Tensor

Settings = dict[str, Any]


def settings_of(trainer: Trainer, server: Any) -> Settings:
    """The settings that decide the result of a ``fit``, nested as ``config.yaml`` has them."""
    data = server.datamodule
    algorithm = trainer.gradient_clip_algorithm
    precision = str(trainer.precision)
    seed = os.environ.get("PL_GLOBAL_SEED")  # Lightning's, of seed_everything
    of_data = describe(data)
    of_data["init_args"]["seed"] = None if str(data.seed) == seed else data.seed
    if data.partition_seed == data.seed:
        of_data["init_args"]["partition_seed"] = None  # as where none is given
    return {
        "seed_everything": False if seed is None else int(seed),
        "trainer": {
            "precision": None if precision == "32-true" else precision,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": None if algorithm is None else str(algorithm.value),
        },
        "model": describe(server),
        "data": of_data,
        "rounds": trainer.max_epochs,
    }


def as_yaml(settings: Settings) -> str:
    """The text of ``config.yaml``."""
    return OF_PYTHON + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def describe(value: Any) -> Any:
    """A value as plain data: the same for values that mean the same, another for others."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return describe(value.value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [describe(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): describe(each) for key, each in value.items()}
    if isinstance(value, Recorded):
        return _call(type(value), given(value))
    if isinstance(value, partial) and not value.args and inspect.isclass(value.func):
        return _call(value.func, value.keywords, "params", "optimizer")
    if isinstance(value, Tensor | np.ndarray):
        with suppress(TypeError):  # torch has no strings
            tensor = torch.as_tensor(value)
            return f"{tensor.dtype} {tuple(tensor.shape)} {digest(tensor.reshape(-1))}"
    return {"class_path": get_import_path(type(value)), "not_known": uuid4().hex[:12]}


def _call(made: Callable[..., Any], known: Settings, *skip: str) -> Settings:
    """A class with the arguments that it was given, and its defaults but those to ``skip``."""
    arguments = _defaults_of(made, {*skip}) | {key: describe(each) for key, each in known.items()}
    return {"class_path": get_import_path(made)} | ({"init_args": arguments} if arguments else {})


def _defaults_of(made: Callable[..., Any], skip: set[str | int]) -> Settings:
    """The arguments that a config may give to a class, with their defaults."""
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_class_arguments(made, None, fail_untyped=False, sub_configs=True, skip=skip)
        text = parser.dump(parser.get_defaults(), skip_unset=False, skip_validation=True)
        return yaml.safe_load(text) or {}
    except Exception:  # of a user's class, which may be written in any way
        return {}
