"""A small perceptron, for the digits."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU between them.

    Args:
        in_features: numbers per sample.
        hidden: width of each hidden layer.
        num_classes: number of classes.
    """

    def __init__(
        self, in_features: int = 64, hidden: Sequence[int] = (64,), num_classes: int = 10
    ) -> None:
        super().__init__()
        widths = [in_features, *hidden]
        layers: list[nn.Module] = []
        for width, following in pairwise(widths):
            layers += [nn.Linear(width, following), nn.ReLU()]
        self.features = nn.Sequential(nn.Flatten(), *layers)
        self.classifier = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits.

        Args:
            x: batch × anything; flattened.
        """
        logits: Tensor = self.classifier(self.features(x))
        return logits
