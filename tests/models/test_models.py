"""The nets are those of the paper."""

from typing import Any

import pytest
import torch
from fedgkd_pl import (
    CNN,
    MLP,
    ResNet,
    ResNet8,
    ResNet18,
    ResNet20,
    ResNet32,
    ResNet50,
    ResNet56,
    SplitNet,
)
from fedgkd_pl.errors import SettingError
from torch import nn


@pytest.mark.parametrize(
    ("net", "parameters", "size"),
    [
        (lambda: ResNet8(10), 78_042, 32),
        (lambda: ResNet8(100), 83_892, 32),
        (lambda: ResNet8(10, projection=256), 100_762, 32),
        (lambda: ResNet8(10, norm="batch"), 78_042, 32),
        (lambda: ResNet20(10), 272_474, 32),
        (lambda: ResNet32(10), 466_906, 32),
        (lambda: ResNet56(10), 855_770, 32),
        (lambda: ResNet50(200), 23_910_152, 64),
        (lambda: CNN(), 151_882, 32),  # 896 + 18,496 + 131,200 + 1,290
        (lambda: CNN([8], 16, num_classes=5, projection=4), 224 + 2_064 + 340 + 25, 20),
    ],
)
def test_resnets(net: Any, parameters: int, size: int) -> None:
    built = net()
    assert sum(p.numel() for p in built.parameters()) == parameters
    images = torch.randn(2, 3, size, size)
    built.eval()
    with torch.no_grad():
        features = built.features(images)
        torch.testing.assert_close(built.classifier(features), built(images))


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_large_resnets_are_torchvisions_but_for_the_stem(name: str) -> None:
    import torchvision

    theirs = getattr(torchvision.models, name)(num_classes=200)
    ours = {"resnet18": ResNet18, "resnet50": ResNet50}[name](200, norm="batch")
    expected = sum(p.numel() for p in theirs.parameters()) - 3 * 64 * (7 * 7 - 3 * 3)
    assert sum(p.numel() for p in ours.parameters()) == expected
    assert not any(isinstance(m, nn.MaxPool2d) for m in ours.modules())


def test_resnet8_layers() -> None:
    net = ResNet8()
    convolutions = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    shapes = [(c.in_channels, c.out_channels, c.kernel_size[0], c.stride[0]) for c in convolutions]
    assert shapes == [
        (3, 16, 3, 1),
        (16, 16, 3, 1),
        (16, 16, 3, 1),
        (16, 32, 3, 2),
        (32, 32, 3, 1),
        (16, 32, 1, 2),
        (32, 64, 3, 2),
        (64, 64, 3, 1),
        (32, 64, 1, 2),
    ]
    norms = [m for m in net.modules() if isinstance(m, nn.GroupNorm)]
    assert len(norms) == 9
    assert all(norm.num_channels // norm.num_groups == 16 for norm in norms)


def test_resnet8_starts_from_hes_initialisation() -> None:
    torch.manual_seed(0)
    conv = ResNet8().features.stage3[0].residual[3]
    assert conv.weight.std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)


def test_mlp() -> None:
    net = MLP(in_features=64, hidden=[32, 16], num_classes=10)
    sizes = [64 * 32 + 32, 32 * 16 + 16, 16 * 10 + 10]
    assert sum(p.numel() for p in net.parameters()) == sum(sizes)
    assert net(torch.randn(3, 1, 8, 8)).shape == (3, 10)
    assert MLP(hidden=[])(torch.randn(3, 64)).shape == (3, 10)
    assert MLP(projection=8).features(torch.randn(3, 64)).shape == (3, 8)


def test_resnet_of_ones_own() -> None:
    assert ResNet([1, 2], [8, 16], group_size=4)(torch.randn(1, 3, 16, 16)).shape == (1, 10)
    for make, key in (
        (lambda: ResNet([1], [8, 16], group_size=4), "blocks"),
        (lambda: ResNet8(group_size=5), "group_size"),
        (lambda: MLP(hidden=[4, 0]), "hidden"),
        (lambda: CNN([]), "channels"),
    ):
        with pytest.raises(SettingError, match=f"^{key}: "):
            make()


@pytest.mark.parametrize("head", ["nowhere", "features"])
def test_split_needs_the_last_linear_layer(head: str) -> None:
    with pytest.raises(SettingError, match="head"):
        SplitNet(MLP(), head=head)


def test_split_keeps_the_layer_it_finds() -> None:
    net = MLP()
    last = net.classifier
    split = SplitNet(net, head="classifier")
    assert split.classifier is last and split.features(torch.randn(2, 64)).shape == (2, 64)
