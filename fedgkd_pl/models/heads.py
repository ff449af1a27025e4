"""The layers between a net's features and its classes."""

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
        logits: Tensor = self.classifier(self.features(x))  # type: ignore[operator]
        return logits


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
            reason = f"must name a Linear layer of {type(net).__name__}"
            raise SettingError("head", reason, head)
        owner, _, name = head.rpartition(".")
        setattr(net.get_submodule(owner), name, nn.Identity())
        self.backbone = net
        self.projection, width = projection_of(last.in_features, projection)
        if num_classes is not None or projection is not None:
            last = nn.Linear(width, last.out_features if num_classes is None else num_classes)
        self.classifier = last

    def features(self, x: Tensor) -> Tensor:
        """The input of the classifier."""
        features: Tensor = self.projection(self.backbone(x))
        return features


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
