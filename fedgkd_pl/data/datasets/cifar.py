"""CIFAR-10 and CIFAR-100, as the paper cuts them: 45,000 for clients, 5,000 validation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.downloads import extract, fetch
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.inputs import ImageInputs
from fedgkd_pl.data.transforms import ImageTransform
from fedgkd_pl.errors import SettingError, require
from typing_extensions import override


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
    class_names: Sequence[str] = (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    )
    reading = ImageInputs()
    val_split = "last"
    MEAN = (0.4914, 0.4822, 0.4465)
    STD = (0.2470, 0.2435, 0.2616)
    SOURCE = "CIFAR10"  # torchvision knows the address, the files and their checksums

    def __init__(
        self, data_dir: str = "data", download: bool = True, augment: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.data_dir = Path(data_dir).expanduser()
        self.download = download
        self.augment = augment

    @override
    def prepare_data(self) -> None:
        """Downloads and extracts the archive if it is missing and that is allowed."""
        source = self._source()
        folder = self.data_dir / source.base_folder
        instead = f"put the folder {folder.name} into it"
        if self.download and not folder.is_dir():
            archive = self.data_dir / source.filename
            fetch(source.url, archive, source.tgz_md5, instead)
            extract(archive, source.tgz_md5, [folder.name], self.data_dir)
        reason = f"{folder.name} is not there: {instead}"
        require(folder.is_dir(), "data_dir", reason, str(self.data_dir))

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
        padding = 4 if self.augment else 0
        transform = ImageTransform(self.MEAN, self.STD, padding=padding, flip=self.augment)
        return Splits(_examples(train, transform), _examples(test, transform))

    def _source(self) -> Any:
        from torchvision import datasets

        return getattr(datasets, self.SOURCE)


def _examples(split: Any, transform: ImageTransform) -> Examples:
    images = torch.from_numpy(split.data.transpose(0, 3, 1, 2))  # torchvision has channels last
    return Examples(images.contiguous(), torch.tensor(split.targets), transform)


FINE = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch
crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house
kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree
plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark
shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table
tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
""".split()


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
    class_names = FINE
    MEAN = (0.5071, 0.4865, 0.4409)
    STD = (0.2673, 0.2564, 0.2762)
    SOURCE = "CIFAR100"

    def __init__(self, data_dir: str = "data", **kwargs: Any) -> None:
        super().__init__(data_dir, **kwargs)
