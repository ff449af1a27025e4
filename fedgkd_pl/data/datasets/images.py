"""Images of an archive that is fetched once."""

from abc import abstractmethod
from pathlib import Path
from typing import Any

from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.downloads import provide
from fedgkd_pl.data.inputs import ImageInputs
from fedgkd_pl.data.transforms import ImageTransform
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
