"""Teachers: past global models on the server, a frozen net on the client."""

from collections import deque
from collections.abc import Iterable
from copy import deepcopy
from typing import Any, TypeVar

import torch
from fedgkd_pl.federation.aggregate import WeightedMean
from fedgkd_pl.federation.message import State
from torch import Tensor, nn

T = TypeVar("T")


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

    def mean(self) -> State:
        """The uniform mean of the models there are, the whole state."""
        mean = WeightedMean()
        for model in self:
            mean.add(model)
        return mean.mean()


class MovingAverage:
    """An exponential moving average of global models, with what its start lacks divided out.

    After t models it is Σ_i (1−α) α^{t−i} w_i / (1 − α^t), in double precision; of integers, such
    as counts of batches, the largest.

    Args:
        decay: α.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.reset()

    def __len__(self) -> int:
        return self.count

    def reset(self) -> None:
        """Drops everything."""
        self.count = 0
        self.weight = 0.0  # of the models so far, all together
        self.total: State = {}
        self.dtypes: dict[str, torch.dtype] = {}

    def start(self, state: State) -> None:
        """Begins at a model as if there had always been no other."""
        self.append(state, share=1.0)

    def append(self, state: State, share: float | None = None) -> None:
        """Takes the newest model in."""
        share = 1 - self.decay if share is None else share
        self.count += 1
        self.weight = (1 - share) * self.weight + share
        for name, tensor in state.items():
            value, before = tensor.detach().cpu(), self.total.get(name)
            self.dtypes[name] = value.dtype
            if value.is_floating_point():
                new = value.double() * share
                self.total[name] = new if before is None else before * (1 - share) + new
            else:
                self.total[name] = value.clone() if before is None else before.maximum(value)

    def mean(self) -> State:
        """The average so far, in the types of the models."""
        return {
            name: (total / self.weight).to(self.dtypes[name])
            if total.is_floating_point()
            else total
            for name, total in self.total.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """What there is."""
        names = {name: str(dtype).removeprefix("torch.") for name, dtype in self.dtypes.items()}
        return {"count": self.count, "weight": self.weight, "total": self.total, "dtypes": names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.count, self.weight, self.total = state["count"], state["weight"], state["total"]
        self.dtypes = {name: getattr(torch, dtype) for name, dtype in state["dtypes"].items()}


class FrozenNet:
    """A copy of a net that only gives targets.

    Not a module on purpose: a teacher held as a submodule would enter the client's ``state_dict``
    and be put into train mode with it.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = deepcopy(net).cpu().requires_grad_(False).eval()

    def load(self, state: State, device: torch.device) -> None:
        """Takes a model's weights and buffers, for batches on a device."""
        self.net.to(device).load_state_dict(state)

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """What the teacher's classifier sees, without a gradient."""
        features: Tensor = self.net.features(x)  # type: ignore[operator]
        return features

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """The teacher's logits, without a gradient."""
        logits: Tensor = self.net(x)
        return logits
