"""The nets are those of the paper."""

import pytest
import torch
from fedgkd_pl import MLP, ResNet8
from fedgkd_pl.errors import SettingError
from torch import nn


@pytest.mark.parametrize(("classes", "parameters"), [(10, 78_042), (100, 83_892)])
def test_resnet8(classes: int, parameters: int) -> None:
    net = ResNet8(num_classes=classes)
    assert sum(p.numel() for p in net.parameters()) == parameters
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, classes)
    assert net.features(torch.randn(2, 3, 32, 32)).shape == (2, 64)


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
    conv = ResNet8().features.stage3.conv2
    assert conv.weight.std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)


def test_group_size() -> None:
    assert ResNet8(group_size=4)(torch.randn(1, 3, 32, 32)).shape == (1, 10)
    with pytest.raises(SettingError, match="group_size"):
        ResNet8(group_size=5)


def test_mlp() -> None:
    net = MLP(in_features=64, hidden=[32, 16], num_classes=10)
    sizes = [64 * 32 + 32, 32 * 16 + 16, 16 * 10 + 10]
    assert sum(p.numel() for p in net.parameters()) == sum(sizes)
    assert net(torch.randn(3, 1, 8, 8)).shape == (3, 10)
    assert MLP(hidden=[])(torch.randn(3, 64)).shape == (3, 10)
