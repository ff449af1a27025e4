"""CIFAR-10 and CIFAR-100, as the paper cuts them: 45,000 for clients, 5,000 validation."""

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.downloads import extract, fetch, read_checked
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.raw import Pictures
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
    class_names: Sequence[str] = (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    )
    reading = Pictures()
    val_split = "last"
    MEAN = (0.4914, 0.4822, 0.4465)
    STD = (0.2470, 0.2435, 0.2616)
    SOURCE = "CIFAR10"  # torchvision knows the address, the files and their checksums
    LABELS = "labels"

    def __init__(
        self, data_dir: str = "data", download: bool = True, augment: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.data_dir = Path(data_dir).expanduser()
        self.download = download
        self.augment = augment

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
            content = _unpickle(read_checked(file, checksum), name)
            match content:
                case {
                    "data": np.ndarray(shape=(rows, 3072), dtype=np.uint8) as pixels,
                    self.LABELS: list(classes),
                }:
                    fits = rows == len(classes)
                case _:
                    fits = False
            what = f"data (32 × 32 images) and {self.LABELS}, one for each"
            require(fits, "data_dir", f"{name} does not hold {what}")
            for row, label in enumerate(classes):
                if type(label) is not int or not 0 <= label < self.num_classes:
                    reason = f"{name} has a label outside 0..{self.num_classes - 1} at {row}"
                    raise SettingError("data_dir", reason)
            images.append(torch.from_numpy(pixels).view(-1, 3, 32, 32))
            labels.append(torch.tensor(classes, dtype=torch.int64))
        padding = 4 if self.augment else 0
        transform = ImageTransform(self.MEAN, self.STD, padding=padding, flip=self.augment)
        return Examples(torch.cat(images), torch.cat(labels), transform)


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
    LABELS = "fine_labels"

    def __init__(self, data_dir: str = "data", **kwargs: Any) -> None:
        super().__init__(data_dir, **kwargs)


# What CIFAR's pickles may name, of NumPy 1 and 2; Python 3 writes "encode".
_NAMES = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("_codecs", "encode"),
}


class _Arrays(pickle.Unpickler):
    """Reads pickled arrays; for known files only: others could still use up the memory."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _unpickle(content: bytes, name: str) -> Any:
    try:
        return _Arrays(io.BytesIO(content), encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError) as error:
        reason = f"{name} cannot be read ({error!s:.200}): delete it and fetch it again"
        raise SettingError("data_dir", reason) from error
