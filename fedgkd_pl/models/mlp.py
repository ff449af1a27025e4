"""A small perceptron, for the digits and the toy."""

from collections.abc import Sequence
from itertools import pairwise

from fedgkd_pl.errors import at_least
from fedgkd_pl.models.heads import projection_of
from fedgkd_pl.storage.recorded import Recorded
from torch import Tensor, nn


class MLP(nn.Module, Recorded):
    """Linear layers with ReLU between them.

    Args:
        in_features: numbers per sample.
        hidden: width of each hidden layer.
        num_classes: number of classes.
        projection: width of a projection head before the classifier; None for none.
    """

    def __init__(
        self,
        in_features: int = 64,
        hidden: Sequence[int] = (64,),
        num_classes: int = 10,
        projection: int | None = None,
    ) -> None:
        super().__init__()
        at_least(1, in_features=in_features, num_classes=num_classes, hidden=min(hidden, default=1))
        widths = [in_features, *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for width, following in pairwise(widths):
            layers += [nn.Linear(width, following), nn.ReLU()]
        head, width = projection_of(widths[-1], projection)
        self.features = nn.Sequential(*layers, head)
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch, which is flattened."""
        logits: Tensor = self.classifier(self.features(x))
        return logits
