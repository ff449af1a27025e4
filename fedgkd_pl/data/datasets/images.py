"""Datasets of images: CIFAR-10 and CIFAR-100, as the paper cuts them, and Tiny-ImageNet-200."""

import hashlib
from abc import abstractmethod
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.downloads import provide, read_text
from fedgkd_pl.data.examples import Examples, ImageTransform, Splits, open_map
from fedgkd_pl.data.inputs import ImageInputs
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.storage.files import commit
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


class TinyImageNet(ImageArchive):
    """Tiny-ImageNet-200: 64 × 64 images of 200 classes, grey ones made colour.

    Its test labels are secret, so its 10,000 validation images are the test set here, and the
    server keeps a tenth of the 100,000 training images for validation. The first start decodes
    the images into ``<data_dir>/tiny-imagenet-200/decoded`` (1.4 GB); later ones map that file.

    Args:
        data_dir: the folder that holds, or is to hold, ``tiny-imagenet-200``.
        download: fetch the archive (240 MB) if it is not there.
        augment: random crop and flip in training.
        kwargs: those of :class:`FederatedDataModule`.
    """

    name = "tiny_imagenet"
    num_classes = 200
    MEAN = (0.4802, 0.4481, 0.3975)
    STD = (0.2770, 0.2691, 0.2821)
    PER_CLASS = 500
    TEST = 10_000
    URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
    MD5 = "90528d7ca1a48142e341f4ef8d21d0de"

    @override
    def archive(self) -> tuple[str, str, str]:
        return "tiny-imagenet-200", self.URL, self.MD5

    @property
    def root(self) -> Path:
        """The dataset's folder."""
        return self.data_dir / "tiny-imagenet-200"

    @override
    def load(self) -> Splits:
        self.prepare_data()
        names = read_text(self.root / "wnids.txt", None).split()
        annotations = read_text(self.root / "val" / "val_annotations.txt", None)
        classes = {name: number for number, name in enumerate(names)}
        self.class_names = names
        key = hashlib.sha256(("\n".join(names) + annotations).encode()).hexdigest()[:12]
        numbers = sorted(map(str, range(self.PER_CLASS)))
        train = [f"train/{c}/images/{c}_{number}.JPEG" for c in classes for number in numbers]
        # Mixed once and for all, so that the last tenth, the validation set, has every class.
        order = np.random.default_rng(0).permutation(len(train))
        rows = [line.split("\t") for line in annotations.splitlines()]
        known = all(len(row) > 1 and row[1] in classes for row in rows)
        reason = f"val_annotations.txt must name {self.TEST} images, each of a known class"
        require(known and len(rows) == self.TEST, "data_dir", reason)
        test = [f"val/images/{row[0]}" for row in rows]
        return Splits(
            self._decoded(f"train-{key}", [train[n] for n in order], order // self.PER_CLASS),
            self._decoded(f"test-{key}", test, np.array([classes[row[1]] for row in rows])),
        )

    def _decoded(self, name: str, files: list[str], labels: Any) -> Examples:
        """The images of some files, decoded unless that was done before."""
        target = (self.root / "decoded" / f"{name}.pixels").absolute()
        if not target.exists():
            from rich.progress import track

            images: Any = track(files, f"decoding {name.split('-')[0]}")
            with closing(images) as decoding:
                commit(target, (_pixels(self.root / file) for file in decoding))
        images = open_map(str(target), "|u1", (len(files), 3, 64, 64), 0)
        return Examples(images, torch.from_numpy(labels), self.transform())


def _pixels(file: Path) -> bytes:
    from PIL import Image

    try:
        with Image.open(file, formats=["JPEG"]) as image:
            fits = image.size == (64, 64)  # checked before decoding, because of bombs
            pixels = np.asarray(image.convert("RGB")) if fits else np.zeros(0)
    except Exception as error:  # Pillow raises many classes
        raise SettingError("data_dir", f"{file} cannot be decoded: fetch it again") from error
    require(fits, "data_dir", f"{file} is not 64 × 64: fetch it again")
    return pixels.transpose(2, 0, 1).tobytes()
