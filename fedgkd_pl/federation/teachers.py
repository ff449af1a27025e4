"""Teachers: past global models on the server, a frozen net on the client."""

from collections import deque
from copy import deepcopy

import torch
from fedgkd_pl.federation.aggregate import WeightedMean
from fedgkd_pl.federation.message import State
from torch import Tensor, nn


class TeacherBuffer:
    """The last M aggregated global models.

    Args:
        size: M.
    """

    def __init__(self, size: int) -> None:
        self.models: deque[State] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self.models)

    def append(self, state: State) -> None:
        """Takes the newest global model in; beyond M the oldest goes.

        Args:
            state: its parameters and buffers; copied.
        """
        self.models.append({name: t.detach().cpu().clone() for name, t in state.items()})

    def mean(self) -> State:
        """The uniform mean of the models there are, the whole state."""
        mean = WeightedMean()
        for model in self.models:
            mean.add(model)
        return mean.mean()


class FrozenNet:
    """A net that only gives targets.

    Not a module on purpose: a teacher held as a submodule would enter the client's ``state_dict``
    and be put into train mode with it.

    Args:
        net: copied; its weights are replaced by :meth:`load`.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = deepcopy(net).cpu().requires_grad_(False).eval()

    def load(self, state: State, device: torch.device) -> None:
        """Takes a model's weights and buffers.

        Args:
            state: all of them.
            device: where batches will come from.
        """
        self.net.to(device).load_state_dict(state)

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """What the teacher's classifier sees, without a gradient.

        Args:
            x: a batch.
        """
        features: Tensor = self.net.features(x)  # type: ignore[operator]
        return features

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """The teacher's logits, without a gradient.

        Args:
            x: a batch.
        """
        logits: Tensor = self.net(x)
        return logits
