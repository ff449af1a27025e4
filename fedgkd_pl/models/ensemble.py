"""Several nets as one, which says what they say on average."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Member(nn.Module):
    """A net of an ensemble, and whether it has been trained.

    Args:
        net: any module from inputs to logits.
    """

    trained: Tensor

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("trained", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        """The net's logits."""
        logits: Tensor = self.net(x)
        return logits


class Ensemble(nn.Module):
    """The mean of the logits of those members that have been trained; of all, if none has.

    What the server has where clients have nets of their own. Which members count are numbers among
    its weights, not code, so that an exported ensemble is the same.

    Args:
        nets: the members; none where their number is not known yet.
    """

    def __init__(self, nets: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.fill(nets)

    def fill(self, nets: Sequence[nn.Module]) -> None:
        """Has these members and no others, none of them trained."""
        self.members = nn.ModuleList(Member(net) for net in nets)

    @staticmethod
    def prefix(number: int) -> str:
        """The prefix of a member's weights among those of the ensemble."""
        return f"members.{number}.net."

    @staticmethod
    def mark(number: int) -> str:
        """The name of the mark that a member has been trained."""
        return f"members.{number}.trained"

    @staticmethod
    def size(names: Sequence[str]) -> int:
        """The number of members of an ensemble whose weights have these names."""
        return sum(name.startswith("members.") and name.endswith(".trained") for name in names)

    @staticmethod
    def trained(state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The part of an ensemble's weights that is of members that have been trained."""
        numbers = {name: int(name.split(".")[1]) for name in state}
        return {name: t for name, t in state.items() if state[Ensemble.mark(numbers[name])]}

    @property
    def nets(self) -> list[nn.Module]:
        """The members' nets."""
        return [member.net for member in self.members]  # type: ignore[misc]

    def features(self, x: Tensor) -> Tensor:
        """The members' features, side by side; for nets that have ``features``."""
        return torch.cat([net.features(x).flatten(1) for net in self.nets], dim=1)  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        """Mean logits."""
        logits = torch.stack([member(x) for member in self.members])
        trained = torch.stack([member.trained for member in self.members])  # type: ignore[misc]
        counts = torch.where(trained.any(), trained, torch.ones_like(trained)).to(logits.dtype)
        total = (logits * counts.view(-1, *[1] * (logits.dim() - 1))).sum(0)
        return total / counts.sum()
