"""Small nets: a perceptron, for the digits and the toy, and a convolutional net."""

from collections.abc import Sequence
from itertools import pairwise

from fedgkd_pl.errors import at_least
from fedgkd_pl.models.heads import Classifier, projection_of
from torch import nn

POOLED = 4  # rows and columns that the linear layer of the CNN sees


class MLP(Classifier):
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


class CNN(Classifier):
    """Convolutions with ReLU and max-pooling, then a hidden linear layer; images of any size.

    151,882 parameters with the default widths and 10 classes.

    Args:
        channels: of each 3 × 3 convolution, behind which height and width are halved.
        hidden: width of the linear layer.
        in_channels: of the images.
        num_classes: number of classes.
        projection: width of a projection head before the classifier; None for none.
    """

    def __init__(
        self,
        channels: Sequence[int] = (32, 64),
        hidden: int = 128,
        in_channels: int = 3,
        num_classes: int = 10,
        projection: int | None = None,
    ) -> None:
        super().__init__()
        at_least(1, hidden=hidden, in_channels=in_channels, num_classes=num_classes)
        at_least(1, channels=min(channels, default=0))
        layers: list[nn.Module] = []
        width = in_channels
        for following in channels:
            layers += [nn.Conv2d(width, following, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            width = following
        layers += [nn.AdaptiveAvgPool2d(POOLED), nn.Flatten()]
        layers += [nn.Linear(width * POOLED**2, hidden), nn.ReLU()]
        head, width = projection_of(hidden, projection)
        self.features = nn.Sequential(*layers, head)
        self.classifier = nn.Linear(width, num_classes)
