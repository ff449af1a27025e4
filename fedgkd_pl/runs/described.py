"""The settings of a run that was put together in Python, as ``config.yaml`` has them.

They are read off the objects, so that runs of other settings are told apart, and runs that differ
in nothing but the seed are averaged. What a config can name, too, is written as one writes it. The
rest is described: a function of a notebook by a digest of its code, a net by one of its layers, own
data by one of what it holds. What cannot be described has a mark that only the same object of
the same process shares, so that such runs are never taken for alike.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import numpy as np
import torch
import yaml
from fedgkd_pl.data.examples import digest
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.models.ensemble import Ensemble
from fedgkd_pl.models.heads import SplitNet
from fedgkd_pl.models.text import TextClassifier
from fedgkd_pl.runs.code import PLAIN, code_of, is_importable, path_of, sha
from fedgkd_pl.runs.folder import OF_PYTHON
from fedgkd_pl.storage.recorded import GIVEN, Recorded, given
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

Settings = dict[str, Any]
Outer = tuple[Any, ...]  # the objects that a value is part of
LARGEST = 1_000_000_000  # bytes of an array that is known by its content
LONGEST = 1_000  # letters or values that are written out
DEEPEST = 8  # objects within objects that are looked into
_marks: "WeakKeyDictionary[Any, str]" = WeakKeyDictionary()


def settings_of(trainer: Trainer, server: FederatedServer) -> Settings:
    """The settings that decide the result of a ``fit``, nested as ``config.yaml`` has them."""
    data = server.datamodule
    algorithm = trainer.gradient_clip_algorithm
    precision = str(trainer.precision)
    seed = os.environ.get("PL_GLOBAL_SEED")  # Lightning's, of seed_everything
    of_data = describe(data)
    arguments = of_data["init_args"]
    arguments["seed"] = None if str(data.seed) == seed else data.seed
    if data.partition_seed == data.seed:
        arguments["partition_seed"] = None  # as where none is given
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


def describe(value: Any, outer: Outer = ()) -> Any:
    """A value as plain data: the same for values that mean the same, another for others."""
    if isinstance(value, str) and len(value) > LONGEST:
        return f"{len(value)} letters {sha(value)}"
    if value is None or type(value) in PLAIN:
        return value
    if isinstance(value, Enum):
        return describe(value.value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path | bytes | complex | range | torch.dtype | torch.device):
        return str(value)
    if isinstance(value, Tensor | np.ndarray):
        return _array(value)
    if any(value is each for each in outer):
        return f"outer {len(outer)}"
    inner = (*outer, value)
    if isinstance(value, list | tuple):
        values = [describe(each, inner) for each in value]
        return values if len(values) <= LONGEST else f"{len(values)} values {sha(values)}"
    if isinstance(value, set | frozenset):
        return sorted((describe(each, inner) for each in value), key=repr)
    if isinstance(value, Mapping):
        items = {str(key): describe(each, inner) for key, each in value.items()}
        return items if len(items) <= LONGEST else f"{len(items)} values {sha(items)}"
    if isinstance(value, nn.Module) and not isinstance(value, FederatedServer):
        return _net(value, inner)
    if isinstance(value, Recorded):
        return _named(value, inner) | _init_args(_arguments(value, inner))
    if isinstance(value, partial | MethodType | FunctionType | type) or inspect.isbuiltin(value):
        return _function(value, inner)
    return _object(value, inner)


def _object(value: Any, inner: Outer) -> Settings:
    """An object of a class that we do not know, by its attributes."""
    if isinstance(mark := getattr(value, "_fingerprint", None), str):  # of Hugging Face's datasets
        return {"class_path": path_of(type(value)), "fingerprint": mark}
    hidden = any(vars(cls).get("__slots__") for cls in type(value).__mro__)
    if hidden or not hasattr(value, "__dict__") or len(inner) > DEEPEST:
        return {"class_path": path_of(type(value)), "not_known": _mark(value)}
    state = describe(vars(value), inner)
    state = state if len(str(state)) <= LONGEST else sha(state)
    return _named(value, inner) | ({"state": state} if state else {})


def _named(value: Any, inner: Outer) -> Settings:
    return _function(type(value), inner)


def _init_args(arguments: Settings) -> Settings:
    return {"init_args": arguments} if arguments else {}


def _arguments(made: Recorded, inner: Outer) -> Settings:
    """What a constructor was given, and the defaults of the rest.

    An attribute of the same name wins: it was changed after the object was made.
    """
    settings = defaults_of(type(made))
    known = given(made)
    for name, value in (settings | known).items():
        now = _now(made, name, value)
        if isinstance(made, FederatedServer) and name.endswith("optimizer") and callable(now):
            settings[name] = _optimizer(now, made.nets[0], inner) or describe(now, inner)
        else:
            settings[name] = describe(now, inner)
    return settings


def _now(made: Recorded, name: str, value: Any) -> Any:
    """What an argument is by now, where an attribute of its name shows that."""
    if isinstance(made, FederatedServer) and isinstance(value, nn.Module):
        ours = name in ("net", "module") and not isinstance(made.net, Ensemble)
        return made.net if ours else value
    now = vars(made).get(name)
    if type(value) in PLAIN:
        return now if type(now) in PLAIN else value
    return now if value is not None and (isinstance(now, Recorded) or callable(now)) else value


def defaults_of(made: Callable[..., Any], skip: Iterable[str] = ()) -> Settings:
    """The arguments that a config may give to a class or function, with their defaults."""
    parser = ArgumentParser(exit_on_error=False)
    add = parser.add_class_arguments if inspect.isclass(made) else parser.add_function_arguments
    try:
        add(made, None, fail_untyped=False, sub_configs=True, skip={*skip})
        text = parser.dump(parser.get_defaults(), skip_unset=False, skip_validation=True)
        return yaml.safe_load(text) or {}
    except Exception:  # of a user's class, which may be written in any way
        parameters = inspect.signature(made).parameters.items()
        known = {name: each.default for name, each in parameters if each.default is not each.empty}
        return {name: value for name, value in known.items() if name not in skip}


def _optimizer(make: Callable[..., Any], net: nn.Module, inner: Outer) -> Settings | None:
    """What a callable makes of a net's parameters; None if that is not one group of them."""
    parameters = list(net.parameters())
    try:
        made = make(parameters)
    except Exception:  # of a user's function, which training calls alike
        return None
    groups = made.param_groups if isinstance(made, Optimizer) else []
    if [len(group["params"]) for group in groups] != [len(parameters)]:
        return None
    settings = defaults_of(type(made), skip={"params"})
    settings |= {key: groups[0][key] for key in settings if key in groups[0]}
    return _named(made, inner) | _init_args(describe(settings, inner))


def _function(function: Any, inner: Outer) -> Settings:
    """A function or class by its name; by its code, too, where that is not a module's."""
    if isinstance(function, partial):
        try:
            signature = inspect.signature(function.func)
        except ValueError:  # of a function in C
            return _function(function.func, inner) | {"not_known": _mark(function)}
        bound = signature.bind_partial(*function.args, **function.keywords)
        skip = {"params", "optimizer"} - bound.arguments.keys()
        arguments: Settings = describe(defaults_of(function.func, skip), inner)
        for name, value in bound.arguments.items():
            rest = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            arguments |= describe(value if rest else {name: value}, inner)
        return _function(function.func, inner) | _init_args(arguments)
    if isinstance(function, MethodType):
        return _function(function.__func__, inner) | {"of": describe(function.__self__, inner)}
    settings: Settings = {"class_path": path_of(function)}
    if not is_importable(function):
        settings["code"] = code_of(function, lambda value: describe(value, inner))
    return settings


def _net(net: nn.Module, inner: Outer) -> Settings:
    """A net by its arguments where we know them, by its layers otherwise."""
    if not isinstance(net, Recorded):
        return _named(net, inner) | {"layers": _layers(net, inner)}
    settings = _named(net, inner) | _init_args(_arguments(net, inner))
    args, kwargs = vars(net)[GIVEN]
    if isinstance(net, SplitNet | TextClassifier):
        return settings  # the one describes its net by the layers, the other reads files
    layers = _layers(net, inner)
    if type(net).__module__.startswith("fedgkd_pl."):
        with torch.device("meta"):  # no memory and no random numbers
            anew = type(net)(*args, **kwargs)
        if layers == _layers(anew, inner):
            return settings
    return settings | {"layers": layers}  # the user has changed them, or the class is the user's


def _layers(net: nn.Module, inner: Outer) -> str:
    """A digest of a net's modules, their attributes, and the shapes of its weights."""
    parts: list[Any] = []
    inner = (*inner, *net.modules())
    for name, module in net.named_modules():
        own = {key: each for key, each in vars(module).items() if not key.startswith("_")}
        if isinstance(module, LightningModule):
            own["hparams"] = dict(module.hparams)
        parts.append([name, _named(module, inner), describe(own | {"training": None}, inner)])
    for weights in (net.named_parameters(), net.named_buffers()):
        parts += [[name, list(each.shape), each.requires_grad] for name, each in weights]
    return sha(parts)


def _array(value: Tensor | np.ndarray[Any, Any]) -> str:
    """Its type, its shape and, unless it is large, a digest of what it holds."""
    text = f"{value.dtype}{list(value.shape)}".removeprefix("torch.")
    if isinstance(value, np.memmap) and value.filename is not None:
        file = Path(value.filename)
        return f"{text} {file} {file.stat().st_mtime_ns}"
    if value.nbytes > LARGEST or (isinstance(value, np.ndarray) and value.dtype.hasobject):
        return f"{text} {_mark(value)}"
    if isinstance(value, Tensor):
        return f"{text} {digest(value.reshape(-1))[:12]}"
    return f"{text} {sha(np.ascontiguousarray(value).tobytes())}"


def _mark(value: Any) -> str:
    """A text that no other object has, in this process or another."""
    try:
        return _marks.setdefault(value, uuid4().hex[:12])
    except TypeError:  # it has no hash, or cannot be referred to weakly
        return uuid4().hex[:12]
