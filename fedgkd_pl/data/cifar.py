"""CIFAR-10, as the paper cuts it: 45,000 for the clients, 5,000 validation, 10,000 test."""

from pathlib import Path
from typing import Any

import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.resident import Examples
from fedgkd_pl.data.transforms import ImageTransform
from fedgkd_pl.errors import SettingError


class CIFAR10(FederatedDataModule):
    """CIFAR-10: 32 × 32 colour images of 10 classes.

    The last 5,000 training images stay with the server for validation. In training every image is
    cropped at random (padding 4) and flipped.

    Args:
        data_dir: the folder that holds, or is to hold, ``cifar-10-batches-py``.
        download: fetch the archive if it is not there.
        augment: random crop and flip in training.
        kwargs: those of :class:`FederatedDataModule`.
    """

    name = "cifar10"
    num_classes = 10
    MEAN = (0.4914, 0.4822, 0.4465)
    STD = (0.2470, 0.2435, 0.2616)

    def __init__(
        self,
        data_dir: str = "data",
        download: bool = True,
        augment: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.data_dir = Path(data_dir).expanduser()
        self.download = download
        self.augment = augment

    def prepare_data(self) -> None:
        """Downloads the archive if it is missing and that is allowed."""
        self._read(train=False, download=self.download)

    def load(self) -> tuple[Examples, Examples]:
        """See :meth:`FederatedDataModule.load`."""
        return self._read(train=True), self._read(train=False)

    def _read(self, train: bool, download: bool = False) -> Examples:
        from torchvision.datasets import CIFAR10 as Source

        try:
            source = Source(str(self.data_dir), train=train, download=download)
        except (RuntimeError, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise SettingError(
                "data_dir",
                f"CIFAR-10 is not there and could not be downloaded ({reason}): "
                "put the folder cifar-10-batches-py into it",
                str(self.data_dir),
            ) from error
        inputs = torch.from_numpy(source.data).permute(0, 3, 1, 2).contiguous()
        transform = ImageTransform(
            self.MEAN, self.STD, padding=4 if self.augment else 0, flip=self.augment
        )
        return Examples(inputs, torch.tensor(source.targets), transform)
