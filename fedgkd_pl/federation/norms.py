"""BatchNorm, and batches of one sample, which have no statistics."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class BatchNorms:
    """The BatchNorm layers of a net that are in training mode; not those that a user has frozen."""

    def __init__(self, net: nn.Module) -> None:
        self.layers = [m for m in net.modules() if isinstance(m, _BatchNorm) and m.training]

    def expect(self, samples: int = 2) -> None:
        """To be called before a batch: for one sample, layers use what they have gathered."""
        for layer in self.layers:
            layer.train(samples > 1)
