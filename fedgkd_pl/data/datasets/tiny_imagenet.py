"""Tiny-ImageNet-200: decoded once into memory-mapped arrays."""

import hashlib
import io
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.downloads import extract, fetch, read_checked, read_text
from fedgkd_pl.data.examples import Examples, Splits, digest
from fedgkd_pl.data.mapped import open_map
from fedgkd_pl.data.raw import Pictures
from fedgkd_pl.data.transforms import ImageTransform
from fedgkd_pl.errors import SettingError, StorageError, require
from fedgkd_pl.storage.files import commit

Listing = list[tuple[Path, int]]


class TinyImageNet(FederatedDataModule):
    """Tiny-ImageNet-200: 64 × 64 images of 200 classes, grey ones made colour.

    Its test labels are secret, so its 10,000 validation images are the test set here, and the
    server keeps a tenth of the 100,000 training images for validation. The first start decodes
    the images into ``<data_dir>/tiny-imagenet-200/decoded`` (1.4 GB); later ones check that file
    and map it.

    Args:
        data_dir: the folder that holds, or is to hold, ``tiny-imagenet-200``.
        download: fetch the archive (240 MB) if it is not there.
        augment: random crop and flip in training.
        kwargs: those of :class:`FederatedDataModule`.
    """

    name = "tiny_imagenet"
    num_classes = 200
    reading = Pictures()
    val_split = "last"
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
            extract(archive, self.MD5, [self.root.name], self.data_dir)
        reason = f"tiny-imagenet-200 is not there: {instead}"
        require(self.root.is_dir(), "data_dir", reason, str(self.data_dir))

    def load(self) -> Splits:
        """See :meth:`FederatedDataModule.load`."""
        self.prepare_data()
        names = read_text(self.root / "wnids.txt", None).split()
        annotations = read_text(self.root / "val" / "val_annotations.txt", None)
        count = len(set(names))
        reason = f"wnids.txt names {count} classes, not {self.num_classes}, or has a bad name"
        require(count == self.num_classes and all(map(_is_name, names)), "data_dir", reason)
        classes = {name: number for number, name in enumerate(names)}
        self.class_names = names
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
            reason = f"train/{name} has {len(files)} images, not {self.PER_CLASS}"
            require(len(files) == self.PER_CLASS, "data_dir", reason)
            listing += [(file, label) for file in files]
        # Mixed once and for all, so that the last tenth, the validation set, has every class.
        order = np.random.default_rng(0).permutation(len(listing))
        return [listing[index] for index in order]

    def _test(self, classes: dict[str, int], annotations: str) -> Listing:
        listing: Listing = []
        for line in annotations.splitlines():
            file, name = line.split("\t")[:2] if "\t" in line else (line, "")
            reason = f"val_annotations.txt: {file!r:.80} is no image of a known class"
            require(name in classes and _is_name(file), "data_dir", reason)
            listing.append((self.root / "val" / "images" / file, classes[name]))
        reason = f"val_annotations.txt names {len(listing)} images, not {self.TEST}"
        require(len(listing) == self.TEST, "data_dir", reason)
        return listing

    def _decoded(self, name: str, files: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The images of a listing, from the decoded file if there is one that is sound."""
        target = self.root / "decoded" / f"{name}.pixels"
        labels = target.with_suffix(".labels")  # which start with the digest of both
        with suppress(OSError, ValueError):
            content = labels.read_bytes()
            decoded = _mapped(target, content[64:])
            if digest(*decoded).encode() == content[:64]:
                return decoded
        listing = files()
        try:
            known = _decode(listing, target)
            decoded = _mapped(target, known)
            commit(labels, [digest(*decoded).encode(), known])
        except OSError as error:
            raise StorageError(target.parent, error) from error
        return decoded


def _is_name(name: str) -> bool:
    return Path(name).name == name and name.isprintable() and len(name) < 100


def _mapped(pixels: Path, labels: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    known = np.frombuffer(bytearray(labels), np.int64)
    images = open_map(str(pixels.absolute()), "|u1", (len(known), 3, 64, 64), 0)
    return images, torch.from_numpy(known)


def _decode(listing: Listing, target: Path) -> bytes:
    """Writes the pixels, and returns the labels."""
    from rich.progress import track

    target.parent.mkdir(exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as out:
            for file, _ in track(listing, f"decoding {target.stem.split('-')[0]}"):
                out.write(_pixels(file))
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return np.array([label for _, label in listing], dtype=np.int64).tobytes()


def _pixels(file: Path) -> bytes:
    from PIL import Image

    content = read_checked(file, None)
    try:
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            if image.size == (64, 64):  # checked before decoding, because of bombs
                return np.asarray(image.convert("RGB")).transpose(2, 0, 1).tobytes()
    except Exception as error:  # Pillow raises many classes
        raise SettingError("data_dir", f"{file} cannot be decoded: fetch it again") from error
    raise SettingError("data_dir", f"{file} is not 64 × 64: fetch it again")
