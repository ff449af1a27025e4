"""ResNet-8 with GroupNorm, the paper's net for CIFAR."""

from collections import OrderedDict

from fedgkd_pl.errors import require
from torch import Tensor, nn
from torch.nn.functional import relu


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """He's initialisation; with torch's own, skewed clients stay at their majority class."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


class _BasicBlock(nn.Module):
    """Two 3 × 3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, group_size: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, outputs, 3, stride)
        self.norm1 = nn.GroupNorm(outputs // group_size, outputs)
        self.conv2 = _conv(outputs, outputs, 3)
        self.norm2 = nn.GroupNorm(outputs // group_size, outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                _conv(inputs, outputs, 1, stride), nn.GroupNorm(outputs // group_size, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(out + self.shortcut(x))


class ResNet8(nn.Module):
    """ResNet-8 for 32 × 32 images: three stages of one basic block, 16/32/64 channels.

    78,042 parameters with 10 classes, 83,892 with 100.

    Args:
        num_classes: number of classes.
        group_size: channels per GroupNorm group.
        in_channels: channels of the images.
    """

    def __init__(self, num_classes: int = 10, group_size: int = 16, in_channels: int = 3) -> None:
        super().__init__()
        require(group_size in (1, 2, 4, 8, 16), "group_size", "must divide 16", group_size)
        self.features = nn.Sequential(
            OrderedDict(
                stem=_conv(in_channels, 16, 3),
                norm=nn.GroupNorm(16 // group_size, 16),
                relu=nn.ReLU(),
                stage1=_BasicBlock(16, 16, 1, group_size),
                stage2=_BasicBlock(16, 32, 2, group_size),
                stage3=_BasicBlock(32, 64, 2, group_size),
                pool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
            )
        )
        self.classifier = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits.

        Args:
            x: batch × channels × height × width.
        """
        logits: Tensor = self.classifier(self.features(x))
        return logits
