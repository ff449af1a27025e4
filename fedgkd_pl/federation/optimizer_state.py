"""The state of an optimizer as tensors by name, which a client keeps from round to round."""

from copy import deepcopy

import torch
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.federation.message import State
from fedgkd_pl.federation.steps import first_optimizer
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer


def empty_state(build: OptimizerCallable, net: nn.Module) -> State:
    """What the state of a net's optimizer is like, all zeros; found by a step of a copy."""
    net = deepcopy(net)
    optimizer = first_optimizer(build(net.parameters()))
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    name = type(optimizer).__name__
    try:
        optimizer.step()
    except Exception as error:  # such as of one that asks for the loss again
        reason = "the state of a client's lasts over rounds, and this one takes no plain steps"
        raise SettingError("optimizer", reason, name) from error
    for values in optimizer.state_dict()["state"].values():
        plain = all(value is None or isinstance(value, Tensor) for value in values.values())
        require(plain, "optimizer", "keeps something else than tensors from step to step", name)
    return {name: torch.zeros_like(tensor) for name, tensor in _flat(optimizer).items()}


def state_of(optimizer: Optimizer, empty: State) -> State:
    """The state of an optimizer; of weights that it has never moved what ``empty`` has."""
    return empty | _flat(optimizer)


def load_state(optimizer: Optimizer, state: State) -> None:
    """Gives a new optimizer a state; weights whose part of it is all zeros stay new."""
    parts: dict[int, State] = {}
    for name, tensor in state.items():
        number, _, key = name.partition(".")
        parts.setdefault(int(number), {})[key] = tensor.clone()
    used = {n: part for n, part in parts.items() if any(t.any() for t in part.values())}
    if used:
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": used, "param_groups": groups})


def _flat(optimizer: Optimizer) -> State:
    """By number of the weight and name; counts of steps as doubles, whatever torch counts in."""
    return {
        f"{number}.{name}": value.double() if value.dim() == 0 else value
        for number, values in optimizer.state_dict()["state"].items()
        for name, value in (
            (name, value.detach().cpu().clone())
            for name, value in values.items()
            if isinstance(value, Tensor)
        )
    }
