"""CIFAR-10 and CIFAR-100, as the paper cuts them: 45,000 for clients, 5,000 validation."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.files import read_checked, unpickle_arrays
from fedgkd_pl.data.resident import Examples, Splits
from fedgkd_pl.data.transforms import ImageTransform
from fedgkd_pl.errors import SettingError, require


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
    SOURCE = "CIFAR10"  # torchvision knows the address, the files and their checksums
    LABELS = "labels"

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
        source = self._source()
        folder = self.data_dir / source.base_folder
        if folder.is_dir():
            return
        there, reason = self.data_dir.is_dir(), "download is off"
        if self.download:
            try:
                source(str(self.data_dir), download=True)
                return
            except (RuntimeError, OSError) as error:
                reason = " ".join(str(error).split()) or type(error).__name__
        if not there and self.data_dir.is_dir() and not any(self.data_dir.iterdir()):
            self.data_dir.rmdir()  # torchvision made it, and nothing came
        raise SettingError(
            "data_dir",
            f"{source.base_folder} is not there and could not be downloaded ({reason}): "
            "put that folder into it",
            str(self.data_dir),
        )

    def load(self) -> Splits:
        """See :meth:`FederatedDataModule.load`."""
        self.prepare_data()
        source = self._source()
        return Splits(self._read(source.train_list), self._read(source.test_list))

    def _source(self) -> Any:
        from torchvision import datasets

        return getattr(datasets, self.SOURCE)

    def _read(self, files: list[tuple[str, str]]) -> Examples:
        images, labels = [], []
        for name, checksum in files:
            file = self.data_dir / self._source().base_folder / name
            content = unpickle_arrays(read_checked(file, checksum), name)
            pixels, classes = np.asarray(content["data"]), np.asarray(content[self.LABELS])
            require(
                pixels.dtype == np.uint8 and pixels.shape == (len(classes), 3072),
                "data_dir",
                f"{name} does not hold one 32 × 32 image for each of its {len(classes)} labels",
            )
            require(
                bool(((classes >= 0) & (classes < self.num_classes)).all()),
                "data_dir",
                f"{name} has a label outside 0..{self.num_classes - 1}",
            )
            images.append(torch.from_numpy(pixels).view(-1, 3, 32, 32))
            labels.append(torch.from_numpy(classes.astype(np.int64)))
        padding = 4 if self.augment else 0
        transform = ImageTransform(self.MEAN, self.STD, padding=padding, flip=self.augment)
        return Examples(torch.cat(images), torch.cat(labels), transform)


class CIFAR100(CIFAR10):
    """CIFAR-100: 32 × 32 colour images of 100 classes.

    The last 5,000 training images stay with the server for validation. In training every image is
    cropped at random (padding 4) and flipped.

    Args:
        data_dir: the folder that holds, or is to hold, ``cifar-100-python``.
        kwargs: those of :class:`CIFAR10`.
    """

    name = "cifar100"
    num_classes = 100
    MEAN = (0.5071, 0.4865, 0.4409)
    STD = (0.2673, 0.2564, 0.2762)
    SOURCE = "CIFAR100"
    LABELS = "fine_labels"

    def __init__(self, data_dir: str = "data", **kwargs: Any) -> None:
        super().__init__(data_dir, **kwargs)
