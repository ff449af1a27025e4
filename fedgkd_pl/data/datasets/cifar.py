"""CIFAR-10 and CIFAR-100, as the paper cuts them: 45,000 for clients, 5,000 validation."""

from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.downloads import provide
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.inputs import ImageInputs
from fedgkd_pl.data.transforms import ImageTransform
from fedgkd_pl.errors import SettingError
from typing_extensions import override


class ImageArchive(FederatedDataModule):
    """Base of the datasets of images; in training every image is cropped and flipped.

    Args:
        data_dir: the folder that holds, or is to hold, the folder of the archive.
        download: fetch the archive if the folder is not there.
        augment: random crop (padding 4) and flip in training.
        kwargs: those of :class:`FederatedDataModule`.
    """

    reading = ImageInputs()
    val_split = "last"
    MEAN: tuple[float, float, float]
    STD: tuple[float, float, float]

    def __init__(
        self, data_dir: str = "data", download: bool = True, augment: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.data_dir = Path(data_dir).expanduser()
        self.download = download
        self.augment = augment

    @abstractmethod
    def archive(self) -> tuple[str, str, str]:
        """The name of the archive's folder, the archive's address and its MD5."""

    @override
    def prepare_data(self) -> None:
        """Downloads and extracts the archive if it is missing and that is allowed."""
        folder, url, checksum = self.archive()
        provide(self.data_dir, [folder], url if self.download else "", checksum)

    def transform(self) -> ImageTransform:
        """Bytes to the net's input."""
        padding = 4 if self.augment else 0
        return ImageTransform(self.MEAN, self.STD, padding=padding, flip=self.augment)


class CIFAR10(ImageArchive):
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

    @override
    def archive(self) -> tuple[str, str, str]:
        source = self._source()
        return source.base_folder, source.url, source.tgz_md5

    @override
    def load(self) -> Splits:
        self.prepare_data()
        source = self._source()
        try:  # nothing is unpickled before torchvision has compared the checksums of all files
            train, test = (source(self.data_dir, train) for train in (True, False))
        except RuntimeError as error:
            folder = self.data_dir / source.base_folder
            reason = f"{folder} is damaged or not the original: delete it and fetch it again"
            raise SettingError("data_dir", reason) from error
        self.class_names = train.classes
        return Splits(self._examples(train), self._examples(test))

    def _examples(self, split: Any) -> Examples:
        images = torch.from_numpy(split.data.transpose(0, 3, 1, 2))  # torchvision: channels last
        return Examples(images.contiguous(), torch.tensor(split.targets), self.transform())

    def _source(self) -> Any:
        from torchvision import datasets

        return getattr(datasets, self.SOURCE)


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
