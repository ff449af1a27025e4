"""Tiny-ImageNet-200: decoded once into memory-mapped arrays."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.files import fetch, read_checked, unzip
from fedgkd_pl.data.resident import Examples, Splits
from fedgkd_pl.data.transforms import ImageTransform
from fedgkd_pl.errors import SettingError, require

Listing = list[tuple[Path, int]]


class TinyImageNet(FederatedDataModule):
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

    def __init__(
        self, data_dir: str = "data", download: bool = True, augment: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.data_dir = Path(data_dir).expanduser()
        self.root = self.data_dir / "tiny-imagenet-200"
        self.download = download
        self.augment = augment

    def prepare_data(self) -> None:
        """Downloads and extracts the archive if it is missing and that is allowed."""
        if self.root.is_dir():
            return
        instead = "put the folder tiny-imagenet-200 into it"
        archive = self.data_dir / "tiny-imagenet-200.zip"
        if self.download:
            fetch(self.URL, archive, self.MD5, instead)
            unzip(archive, self.data_dir)
        require(
            self.root.is_dir(),
            "data_dir",
            f"tiny-imagenet-200 is not there: {instead}",
            str(self.data_dir),
        )

    def load(self) -> Splits:
        """See :meth:`FederatedDataModule.load`."""
        self.prepare_data()
        names = self._text("wnids.txt").split()
        annotations = self._text("val/val_annotations.txt")
        require(
            len(set(names)) == self.num_classes,
            "data_dir",
            f"wnids.txt names {len(set(names))} classes, not {self.num_classes}",
        )
        classes = {name: number for number, name in enumerate(names)}
        key = hashlib.sha256(("\n".join(names) + annotations).encode()).hexdigest()[:12]
        augment = {"padding": 4 if self.augment else 0, "flip": self.augment}
        transform = ImageTransform(self.MEAN, self.STD, **augment)  # type: ignore[arg-type]
        train = self._decoded(f"train-{key}", lambda: self._train(classes))
        test = self._decoded(f"test-{key}", lambda: self._test(classes, annotations))
        return Splits(Examples(*train, transform), Examples(*test, transform))

    def _train(self, classes: dict[str, int]) -> Listing:
        listing: Listing = []
        for name, label in classes.items():
            files = sorted((self.root / "train" / name / "images").glob("*.JPEG"))
            require(
                len(files) == self.PER_CLASS,
                "data_dir",
                f"train/{name} has {len(files)} images, not {self.PER_CLASS}",
            )
            listing += [(file, label) for file in files]
        # Mixed once and for all, so that the last tenth, the validation set, has every class.
        order = np.random.default_rng(0).permutation(len(listing))
        return [listing[place] for place in order]

    def _test(self, classes: dict[str, int], annotations: str) -> Listing:
        listing: Listing = []
        for line in annotations.splitlines():
            file, name = line.split("\t")[:2] if "\t" in line else (line, "")
            require(
                name in classes,
                "data_dir",
                f"val_annotations.txt: {file} has no known class",
            )
            listing.append((self.root / "val" / "images" / file, classes[name]))
        require(
            len(listing) == self.TEST,
            "data_dir",
            f"val_annotations.txt names {len(listing)} images, not {self.TEST}",
        )
        return listing

    def _decoded(self, name: str, files: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The images of a listing, from the decoded file if there is one."""
        target = self.root / "decoded" / f"{name}.npy"
        labels = target.with_suffix(".labels.npy")
        if not (target.is_file() and labels.is_file()):
            _decode(files(), target, labels)
        images = np.load(target, mmap_mode="c")  # pages are read when used, and never written
        return torch.from_numpy(images), torch.from_numpy(np.load(labels))

    def _text(self, name: str) -> str:
        return read_checked(self.root / name, None).decode()


def _decode(listing: Listing, target: Path, labels: Path) -> None:
    from PIL import Image, UnidentifiedImageError
    from rich.progress import track

    target.parent.mkdir(exist_ok=True)
    part = target.with_suffix(".part")
    shape = (len(listing), 3, 64, 64)
    array = np.lib.format.open_memmap(part, mode="w+", dtype=np.uint8, shape=shape)
    try:
        for row, (file, _) in enumerate(track(listing, f"decoding {target.stem.split('-')[0]}")):
            with Image.open(file) as image:
                pixels = np.asarray(image.convert("RGB"))
            require(pixels.shape == (64, 64, 3), "data_dir", f"{file.name} is not 64 × 64")
            array[row] = pixels.transpose(2, 0, 1)
    except (OSError, UnidentifiedImageError) as error:
        part.unlink()
        raise SettingError("data_dir", f"{file.name} cannot be decoded", str(file)) from error
    except SettingError:
        part.unlink()
        raise
    array.flush()
    np.save(labels, np.array([label for _, label in listing], dtype=np.int64))
    part.replace(target)
