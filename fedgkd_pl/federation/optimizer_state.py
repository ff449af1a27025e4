"""What an optimizer remembers of its weights, as tensors by name that a client keeps.

A name is the weight's and torch's for the tensor: ``layer.weight/exp_avg``. Counts of steps are
floats.
"""

from collections.abc import Iterator, Mapping

import torch
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.federation.message import State
from fedgkd_pl.federation.optimizer import first_optimizer
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer

Named = Mapping[str, nn.Parameter]


def empty_state(build: OptimizerCallable | None, named: Named) -> State:
    """The state of an optimizer of such weights, all zeros; found by a step of copies."""
    assert build is not None  # which only modules do without
    copies = {n: nn.Parameter(torch.zeros_like(w), w.requires_grad) for n, w in named.items()}
    optimizer = first_optimizer(build(copies.values()))
    for copy in copies.values():
        copy.grad = torch.zeros_like(copy) if copy.requires_grad else None
    try:
        optimizer.step()
    except Exception as error:  # such as of one that asks for the loss again
        text = "must take plain steps, so that its state can be kept"
        raise SettingError("optimizer", text, type(optimizer).__name__) from error
    held = [value for values in optimizer.state.values() for value in values.values()]
    plain = all(value is None or isinstance(value, Tensor) for value in held)
    require(plain, "optimizer", "must keep nothing but tensors", type(optimizer).__name__)
    return {name: torch.zeros_like(t) for name, t in state_of(optimizer, {}, copies).items()}


def state_of(optimizer: Optimizer, empty: State, named: Named) -> State:
    """The state of an optimizer; of weights that it has never moved what ``empty`` has."""
    state = dict(empty)
    for prefix, weight in _weights(optimizer, named):
        for name, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, Tensor):
                state[f"{prefix}/{name}"] = _kept(value, weight)
    return state


def load_state(optimizer: Optimizer, state: State, named: Named) -> None:
    """Gives a new optimizer a state; weights whose part of it is all zeros stay new."""
    parts: dict[str, State] = {}
    for name, tensor in state.items():
        weight_name, _, key = name.rpartition("/")
        parts.setdefault(weight_name, {})[key] = tensor
    weights = list(_weights(optimizer, named))
    used = {
        number: {key: _laid_out(tensor, weight) for key, tensor in parts[name].items()}
        for number, (name, weight) in enumerate(weights)
        if any(tensor.any() for tensor in parts.get(name, {}).values())
    }
    if used:
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": used, "param_groups": groups})
    for number, part in used.items():  # torch gives numbers the weight's type
        weight = weights[number][1]
        held = optimizer.state[weight]
        numbers = {n: t for n, t in part.items() if not t.dim() and weight.dim()}
        held |= {n: t.to(held[n].device) for n, t in numbers.items()}


def _weights(optimizer: Optimizer, named: Named) -> Iterator[tuple[str, nn.Parameter]]:
    """In the order of ``state_dict``, each with its name."""
    names = {weight: name for name, weight in named.items()}
    for group in optimizer.param_groups:
        yield from ((names[weight], weight) for weight in group["params"])


def _kept(value: Tensor, weight: Tensor) -> Tensor:
    """A copy; counts have one type, whatever torch counts in."""
    value = value.detach().cpu().clone()
    if value.dim():
        return value
    return (
        value.float()
        if weight.dim()
        else value.to(torch.promote_types(torch.float32, weight.dtype))
    )


def _laid_out(tensor: Tensor, weight: Tensor) -> Tensor:
    """A copy, in memory as the weight is: files and messages lose that."""
    like = weight.detach() if tensor.shape == weight.shape else tensor
    return torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
