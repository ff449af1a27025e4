"""The net. Edit me. A new name goes into __init__.py and config.yaml, too."""

from torch import Tensor, nn


class MyNet(nn.Module):
    """A perceptron, from a batch of samples to a logit for every class.

    Any module will do. Arguments with a type and a default are settings: `model.net.hidden` in
    config.yaml. Few methods, such as FedGen, look inside: they use `features` and `classifier`.
    """

    def __init__(self, inputs: int = 64, hidden: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU())
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        return self.classifier(self.features(x))
