"""What an optimizer remembers of its weights, as tensors by name that a client keeps.

A name is the weight's and torch's for the tensor. Weights have the names that a method gives them
("…/exp_avg", counts of steps as floats) or else their number ("3.exp_avg", counts as doubles): runs
are saved with both.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.federation.message import State
from fedgkd_pl.federation.optimizer import first_optimizer
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer

Named = Mapping[str, nn.Parameter]


def empty_state(build: OptimizerCallable | None, weights: Named | Iterable[nn.Parameter]) -> State:
    """The state of an optimizer of such weights, all zeros; found by a step of copies."""
    assert build is not None  # which only modules do without
    named = isinstance(weights, Mapping)
    pairs = weights.items() if isinstance(weights, Mapping) else enumerate(weights)
    copies = {str(n): nn.Parameter(torch.zeros_like(w), w.requires_grad) for n, w in pairs}
    optimizer = first_optimizer(build(copies.values()))
    for copy in copies.values():
        copy.grad = torch.zeros_like(copy) if copy.requires_grad else None
    try:
        optimizer.step()
    except Exception as error:  # such as of one that asks for the loss again
        reason = "its state is to be kept, and it takes no plain steps: take another, or keep none"
        raise SettingError("optimizer", reason, type(optimizer).__name__) from error
    held = [value for values in optimizer.state.values() for value in values.values()]
    plain = all(value is None or isinstance(value, Tensor) for value in held)
    text = "keeps something else than tensors from step to step: take another, or keep none"
    require(plain, "optimizer", text, type(optimizer).__name__)
    found = state_of(optimizer, {}, copies if named else None)
    return {name: torch.zeros_like(tensor) for name, tensor in found.items()}


def state_of(optimizer: Optimizer, empty: State, named: Named | None = None) -> State:
    """The state of an optimizer; of weights that it has never moved what ``empty`` has."""
    state = dict(empty)
    for prefix, weight in _weights(optimizer, named):
        for name, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, Tensor):
                state[prefix + name] = _kept(value, weight, named is None)
    return state


def load_state(optimizer: Optimizer, state: State, named: Named | None = None) -> None:
    """Gives a new optimizer a state; weights whose part of it is all zeros stay new."""
    parts: dict[str, State] = {}
    for name, tensor in state.items():
        prefix, key = re.split(r"(?<=[./])(?=[^./]+$)", name)
        parts.setdefault(prefix, {})[key] = tensor
    weights = list(_weights(optimizer, named))
    used = {
        number: {key: _laid_out(tensor, weight) for key, tensor in parts[prefix].items()}
        for number, (prefix, weight) in enumerate(weights)
        if any(tensor.any() for tensor in parts.get(prefix, {}).values())
    }
    if used:
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": used, "param_groups": groups})
    for number, part in used.items() if named else ():  # torch gives numbers the weight's type
        weight = weights[number][1]
        held = optimizer.state[weight]
        numbers = {n: t for n, t in part.items() if not t.dim() and weight.dim()}
        held |= {n: t.to(held[n].device) for n, t in numbers.items()}


def _weights(optimizer: Optimizer, named: Named | None) -> Iterator[tuple[str, nn.Parameter]]:
    """In the order of ``state_dict``, each with the beginning of its names."""
    names = {weight: f"{name}/" for name, weight in (named or {}).items()}
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for number, weight in enumerate(weights):
        yield f"{number}." if named is None else names[weight], weight


def _kept(value: Tensor, weight: Tensor, as_double: bool) -> Tensor:
    """A copy; counts have one type, whatever torch counts in."""
    value = value.detach().cpu().clone()
    if value.dim():
        return value
    count = torch.float64 if as_double else torch.float32
    return value.to(count if weight.dim() else torch.promote_types(count, weight.dtype))


def _laid_out(tensor: Tensor, weight: Tensor) -> Tensor:
    """A copy, in memory as the weight is: files and messages lose that."""
    like = weight.detach() if tensor.shape == weight.shape else tensor
    return torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
