"""What the tests of the simulated device train: images and texts of a few bytes."""

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from fedgkd_pl import OtherData, TextClassifier
from fedgkd_pl.data.examples import Examples, ImageTransform, Splits, TrimPadding
from torch import Tensor, nn
from torch.optim import SGD

from tests.conftest import Table
from tests.support.datasets import TINY


def _sim() -> tuple[SimpleNamespace, str]:
    """The device, and why there is none.

    It is there where its folder is on the path of every process, as ``make test-device`` has it.
    """
    if find_spec("simdevice") is None:
        return SimpleNamespace(), "the simulated device is not on the path: make test-device"
    simdevice = import_module("simdevice")
    if not simdevice.loaded():
        lacks = simdevice.missing() or "to be compiled: make test-device"
        return SimpleNamespace(), f"the simulated device needs {lacks}"
    return SimpleNamespace(**(vars(simdevice) | vars(import_module("sim_accelerator")))), ""


sim, absent = _sim()

# torch's plain step: the fused one, which only the CPU takes, rounds in another way
OPTIMIZER = partial(SGD, lr=0.1, momentum=0.9, foreach=False)


class Images(Table):
    """4 × 4 images that are cropped and flipped."""

    def load(self) -> Splits:
        random = torch.Generator().manual_seed(3)
        pixels = torch.randint(256, (len(self.y), 3, 4, 4), generator=random, dtype=torch.uint8)
        transform = ImageTransform((0.5,) * 3, (0.25,) * 3, padding=1)
        all_ = Examples(pixels, torch.from_numpy(self.y), transform)
        return Splits(all_, all_[:6])


def images(**kwargs: Any) -> Images:
    public = OtherData(Images(sizes=(9,), val_fraction=0.1))
    settings: dict[str, Any] = {"sizes": (12, 8), "batch_size": 4, "val_fraction": 0.1}
    return Images(**(settings | {"public": public} | kwargs))


class Texts(Table):
    """Token ids with padding, which is cut off batch by batch."""

    def load(self) -> Splits:
        random = torch.Generator().manual_seed(3)
        ids = torch.randint(1, 20, (len(self.y), 8), generator=random)
        lengths = torch.randint(2, 9, (len(self.y), 1), generator=random)
        ids[torch.arange(8) >= lengths] = 0
        all_ = Examples(ids, torch.from_numpy(self.y), TrimPadding(0))
        return Splits(all_, all_[:6])


def texts(**kwargs: Any) -> Texts:
    return Texts(**({"sizes": (12, 8), "batch_size": 4, "val_fraction": 0.1} | kwargs))


class ConvNet(nn.Module):
    """A convolution, a norm, dropout and two linear layers."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 4, 3, padding=1), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 6), nn.ReLU()),
        )
        self.classifier = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.features(x))
        return out


def conv_net(norm: str = "batch") -> ConvNet:
    torch.manual_seed(0)
    return ConvNet(nn.BatchNorm2d(4) if norm == "batch" else nn.GroupNorm(2, 4))


def text_net() -> TextClassifier:
    torch.manual_seed(0)
    return TextClassifier(num_classes=3, encoder_config=TINY | {"vocab_size": 20})


def far(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of two states, wherever they are."""
    assert a.keys() == b.keys()
    return max((a[n].cpu().double() - b[n].cpu().double()).abs().max().item() for n in a)
