"""Residual nets with GroupNorm or BatchNorm for small images.

He et al., Deep Residual Learning for Image Recognition, CVPR 2016. The nets for 32 × 32 images
have three stages of 16, 32 and 64 channels; those for 64 × 64 images are ImageNet's with a 3 × 3
stem of stride 1 and no max-pool.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from fedgkd_pl.errors import require
from fedgkd_pl.models.heads import Classifier, projection_of
from torch import Tensor, nn
from torch.nn.functional import relu

Norm = Callable[[int], nn.Module]
Conv = Callable[[int, int, int, int], nn.Module]  # inputs, outputs, kernel, stride


class StandardConv2d(nn.Conv2d):
    """A convolution whose filters have mean 0 and variance 1 when they are used.

    Qiao et al., Micro-Batch Training with Batch-Channel Normalization and Weight Standardization,
    2019.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The convolution of a batch of images."""
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), correction=0, keepdim=True)
        weight = (self.weight - mean) * (variance + 1e-5).rsqrt()
        return self._conv_forward(x, weight, self.bias)  # type: ignore[no-any-return]


def _conv(
    inputs: int, outputs: int, kernel: int, stride: int = 1, cls: type[nn.Conv2d] = nn.Conv2d
) -> nn.Conv2d:
    """A convolution with He's initialisation (see PAPERS.md)."""
    conv = cls(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


class _Block(nn.Module):
    """Convolutions beside a shortcut, which is a 1 × 1 convolution where the shape changes.

    Two of 3 × 3; or, where the channels are to expand, of 1 × 1, 3 × 3 and 1 × 1.
    """

    def __init__(
        self, inputs: int, width: int, stride: int, expansion: int, conv: Conv, norm: Norm
    ) -> None:
        super().__init__()
        outputs = width * expansion
        shapes = [(width, 3, stride), (outputs, 3, 1)]
        if expansion > 1:
            shapes = [(width, 1, 1), (width, 3, stride), (outputs, 1, 1)]
        layers: list[nn.Module] = []
        channels = inputs
        for following, kernel, step in shapes:
            layers += [conv(channels, following, kernel, step), norm(following), nn.ReLU()]
            channels = following
        self.residual = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(conv(inputs, outputs, 1, stride), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.residual(x) + self.shortcut(x))


class ResNet(Classifier):
    """Any of the residual nets.

    Args:
        blocks: how many blocks each stage has.
        widths: channels of each stage; every stage but the first halves the image.
        block: ``basic`` or ``bottleneck``.
        num_classes: number of classes.
        norm: ``group`` or ``batch``.
        group_size: channels per group of GroupNorm.
        projection: width of a projection head before the classifier (MOON, FedGKD+: 256); None
            for none.
        in_channels: channels of the images.
        weight_standard: give the filters of every convolution mean 0 and variance 1 when they are
            used, which goes well with GroupNorm; another net than the paper's.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        widths: Sequence[int],
        block: Literal["basic", "bottleneck"] = "basic",
        num_classes: int = 10,
        norm: Literal["group", "batch"] = "group",
        group_size: int = 16,
        projection: int | None = None,
        in_channels: int = 3,
        weight_standard: bool = False,
    ) -> None:
        super().__init__()
        require(len(blocks) == len(widths) > 0, "blocks", "must have as many stages as widths")
        fits = group_size >= 1 and not any(width % group_size for width in widths)
        require(fits, "group_size", f"must divide the widths {list(widths)}", group_size)

        def normalise(channels: int) -> nn.Module:
            if norm == "batch":
                return nn.BatchNorm2d(channels)
            return nn.GroupNorm(channels // group_size, channels)

        conv = partial(_conv, cls=StandardConv2d if weight_standard else nn.Conv2d)
        expansion = 1 if block == "basic" else 4
        channels = widths[0]
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            stem=conv(in_channels, channels, 3), norm=normalise(channels), relu=nn.ReLU()
        )
        for stage, (count, width) in enumerate(zip(blocks, widths, strict=True), 1):
            stack = nn.Sequential()
            for number in range(count):
                stride = 2 if stage > 1 and number == 0 else 1
                stack.append(_Block(channels, width, stride, expansion, conv, normalise))
                channels = width * expansion
            layers[f"stage{stage}"] = stack
        layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
        layers["projection"], width = projection_of(channels, projection)
        self.features = nn.Sequential(layers)
        self.classifier = nn.Linear(width, num_classes)


class _SmallResNet(ResNet):
    """A net for 32 × 32 images: ``blocks`` in each of three stages.

    Args:
        num_classes: number of classes.
        kwargs: ``norm``, ``projection`` and others of :class:`ResNet`.
    """

    blocks: int

    def __init__(self, num_classes: int = 10, **kwargs: Any) -> None:
        super().__init__([self.blocks] * 3, [16, 32, 64], num_classes=num_classes, **kwargs)


class ResNet8(_SmallResNet):
    """ResNet-8 for 32 × 32 images: 78,042 parameters with 10 classes.

    Args:
        num_classes: number of classes.
        kwargs: ``norm``, ``projection`` and others of :class:`ResNet`.
    """

    blocks = 1


class ResNet20(_SmallResNet):
    """ResNet-20 for 32 × 32 images.

    Args:
        num_classes: number of classes.
        kwargs: ``norm``, ``projection`` and others of :class:`ResNet`.
    """

    blocks = 3


class ResNet32(_SmallResNet):
    """ResNet-32 for 32 × 32 images.

    Args:
        num_classes: number of classes.
        kwargs: ``norm``, ``projection`` and others of :class:`ResNet`.
    """

    blocks = 5


class ResNet56(_SmallResNet):
    """ResNet-56 for 32 × 32 images.

    Args:
        num_classes: number of classes.
        kwargs: ``norm``, ``projection`` and others of :class:`ResNet`.
    """

    blocks = 9


class ResNet18(ResNet):
    """ResNet-18 for 64 × 64 images: a 3 × 3 stem, no max-pool.

    Args:
        num_classes: number of classes.
        kwargs: ``norm``, ``projection`` and others of :class:`ResNet`.
    """

    def __init__(self, num_classes: int = 200, **kwargs: Any) -> None:
        super().__init__([2, 2, 2, 2], [64, 128, 256, 512], num_classes=num_classes, **kwargs)


class ResNet50(ResNet):
    """ResNet-50 for 64 × 64 images: 23,910,152 parameters with 200 classes.

    Args:
        num_classes: number of classes.
        kwargs: ``norm``, ``projection`` and others of :class:`ResNet`.
    """

    def __init__(self, num_classes: int = 200, **kwargs: Any) -> None:
        super().__init__([3, 4, 6, 3], [64, 128, 256, 512], "bottleneck", num_classes, **kwargs)
