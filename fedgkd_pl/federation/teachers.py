"""Means of models, and what teaches: buffers of global models, frozen nets."""

from collections import deque
from collections.abc import Iterable
from copy import deepcopy
from typing import Any, Literal, TypeVar

import torch
from fedgkd_pl.federation.message import State
from fedgkd_pl.federation.own_module import outputs_of
from torch import Tensor, nn


class WeightedMean:
    """Σ n_k w_k / Σ n_k over whole states, streamed: its memory is one model.

    Floats are summed in double precision. Integers (such as BatchNorm's ``num_batches_tracked``)
    have no mean: the largest is kept, so a count stays a count. Where states have different names,
    the mean of each name is over those that have it.
    """

    def __init__(self) -> None:
        self.total: State = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.weights: dict[str, float] = {}  # Σ n_k of every name

    def add(self, state: State, weight: float = 1) -> None:
        """Takes a model in; ``weight`` is n_k."""
        for name, tensor in state.items():
            value = tensor.detach().cpu()
            if value.is_floating_point():
                value = value.double() * weight
                self.total[name] = self.total[name].add_(value) if name in self.total else value
            elif name in self.total:
                self.total[name] = torch.maximum(self.total[name], value)
            else:
                self.total[name] = value.clone()
            self.dtypes[name] = tensor.dtype
            self.weights[name] = self.weights.get(name, 0) + weight

    def scale(self, factor: float) -> None:
        """Makes all models taken in so far count this much less; integers stay as they are."""
        self.weights = {name: weight * factor for name, weight in self.weights.items()}
        for total in self.total.values():
            if total.is_floating_point():
                total.mul_(factor)

    def mean(self, exact: bool = False) -> State:
        """The mean so far; ``exact`` leaves floats in double precision."""
        means: State = {}
        for name, total in self.total.items():
            means[name] = total
            if total.is_floating_point():
                dtype = total.dtype if exact else self.dtypes[name]
                means[name] = (total / self.weights[name]).to(dtype)
        return means


T = TypeVar("T")
TeacherPrecision = Literal["same", "bf16"]


class Recent(deque[T]):
    """The last ``maxlen`` things, of which a checkpoint keeps a list."""

    def state_dict(self) -> list[T]:
        """What there is, the oldest first."""
        return list(self)

    def load_state_dict(self, state: Iterable[T]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.reset()
        self.extend(state)

    def reset(self) -> None:
        """Drops everything."""
        self.clear()


class TeacherBuffer(Recent[State]):
    """The last aggregated global models, M = ``maxlen`` of them."""

    def append(self, state: State) -> None:
        """Takes a copy of the newest model in; beyond M the oldest goes."""
        super().append({name: t.detach().cpu().clone() for name, t in state.items()})

    def start(self, state: State) -> None:
        """Begins at a model that may teach."""
        self.append(state)

    def mean(self) -> State:
        """The uniform mean of the models there are, the whole state."""
        mean = WeightedMean()
        for model in self:
            mean.add(model)
        return mean.mean()


class MovingMean:
    """Σ β^(t−i) w_i / Σ β^(t−i) over the models w_1 … w_t, with the decay β between 0 and 1.

    This is the exponential moving average that starts at zero, divided by 1 − β^t. It is kept in
    double precision; of integers the largest is kept, as in :class:`WeightedMean`.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.reset()

    def __bool__(self) -> bool:
        return bool(self.sum.total)

    def append(self, state: State) -> None:
        """Takes the newest model in."""
        self.sum.scale(self.decay)
        self.sum.add(state)

    def start(self, state: State) -> None:
        """Begins at a model as if it had been the model of all rounds before."""
        self.sum.add(state, 1 / (1 - self.decay))

    def mean(self) -> State:
        """The average, the whole state."""
        return self.sum.mean()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, which has no types beside those of tensors."""
        return {
            "total": {name: tensor.clone() for name, tensor in self.sum.total.items()},
            "like": {n: torch.empty(0, dtype=dtype) for n, dtype in self.sum.dtypes.items()},
            "weight": dict(self.sum.weights),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.sum.total = {name: tensor.clone() for name, tensor in state["total"].items()}
        self.sum.dtypes = {name: tensor.dtype for name, tensor in state["like"].items()}
        self.sum.weights = dict(state["weight"])

    def reset(self) -> None:
        """Drops everything."""
        self.sum = WeightedMean()


class FrozenNet:
    """A copy of a net that only gives targets.

    Not a module on purpose: a teacher held as a submodule would enter the client's ``state_dict``
    and be put into train mode with it.

    Args:
        net: copied.
        precision: ``bf16`` answers in bfloat16 whatever the student trains in, ``same`` in that.
        shares: whether frozen weights are the net's own, on the CPU, which moves with the teacher.
    """

    def __init__(
        self, net: nn.Module, precision: TeacherPrecision = "same", shares: bool = False
    ) -> None:
        frozen = {id(p): p for p in net.parameters() if shares and not p.requires_grad}
        self.net = deepcopy(net, frozen).cpu().requires_grad_(False).eval()
        self.precision: TeacherPrecision = precision
        self._loaded: tuple[State, torch.device] | None = None

    def load(self, state: State, device: torch.device) -> None:
        """Takes a model's weights and buffers, for batches on a device.

        The same model for the next client of a round is there already: a model that travels is
        never changed.
        """
        if self._loaded is None or self._loaded[0] is not state or self._loaded[1] != device:
            self.net.to(device)
            self.net.load_state_dict(self.net.state_dict() | state)  # what is fixed is there
            self._loaded = state, device

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """What the teacher's classifier sees, without a gradient."""
        features: Tensor = self.net.features(x)  # type: ignore[operator]
        return features

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """The teacher's logits, without a gradient."""
        if self.precision == "same":
            return outputs_of(self.net, x)
        with torch.autocast(x.device.type, torch.bfloat16):
            return outputs_of(self.net, x)
