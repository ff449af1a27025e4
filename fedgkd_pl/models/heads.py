"""The layers between a net's features and its classes; several nets as one ensemble."""

from collections.abc import Sequence

import torch
from fedgkd_pl.errors import SettingError, at_least, require
from fedgkd_pl.storage.recorded import Recorded
from torch import Tensor, nn


class ProjectionHead(nn.Sequential):
    """MOON's and FedGKD+'s head: Linear, ReLU, Linear; on the way to the classifier.

    Args:
        in_features: width d of the features.
        out_features: width of the projection.
    """

    def __init__(self, in_features: int, out_features: int = 256) -> None:
        super().__init__(
            nn.Linear(in_features, in_features), nn.ReLU(), nn.Linear(in_features, out_features)
        )


class Classifier(nn.Module, Recorded):
    """Base of nets that are split into ``features`` and ``classifier``, the last layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch."""
        return self.classifier(self.features(x))  # type: ignore[operator, no-any-return]


class SplitNet(Classifier):
    """A net of torchvision, timm or your own, split into features and classifier.

    Args:
        net: a net whose last layer is a ``Linear``.
        head: the name of that layer, such as ``fc``, ``classifier.1`` or ``head``.
        num_classes: replaces the layer by one with this many classes; None keeps it.
        projection: width of a projection head in front of it; None for none.
    """

    def __init__(
        self,
        net: nn.Module,
        head: str = "fc",
        num_classes: int | None = None,
        projection: int | None = None,
    ) -> None:
        super().__init__()
        last = dict(net.named_modules()).get(head)
        if not isinstance(last, nn.Linear):
            raise SettingError("head", f"must name a Linear layer of {type(net).__name__}", head)
        owner, _, name = head.rpartition(".")
        setattr(net.get_submodule(owner), name, nn.Identity())
        self.backbone = net
        self.projection, width = projection_of(last.in_features, projection)
        if num_classes is not None or projection is not None:
            last = nn.Linear(width, last.out_features if num_classes is None else num_classes)
        self.classifier = last

    def features(self, x: Tensor) -> Tensor:
        """The input of the classifier."""
        return self.projection(self.backbone(x))  # type: ignore[no-any-return]


def require_classifier(net: nn.Module, method: str) -> nn.Linear:
    """The last layer of a net split into features and classifier; others are refused."""
    last = getattr(net, "classifier", None)
    if isinstance(last, nn.Linear) and hasattr(net, "features"):
        return last
    reason = f"{method} needs features and a Linear classifier (SplitNet gives them to any net)"
    raise SettingError("net", reason)


def require_projection(net: nn.Module, method: str) -> None:
    """Refuses a net without a projection head, rather than change it silently."""
    has_one = any(isinstance(module, ProjectionHead) for module in net.modules())
    reason = f"{method} needs a projection head: set projection of the net, such as 256"
    require(has_one, "net", reason)


def projection_of(width: int, projection: int | None) -> tuple[nn.Module, int]:
    """The optional projection head on features, and the width behind it."""
    if projection is None:
        return nn.Identity(), width
    at_least(1, projection=projection)
    return ProjectionHead(width, projection), projection


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
        return self.net(x)  # type: ignore[no-any-return]


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
        return (logits * counts.view(-1, *[1] * (logits.dim() - 1))).sum(0) / counts.sum()
