"""Folders of images, a folder for every class."""

import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.raw import Pictures
from fedgkd_pl.data.reading import SampleError
from fedgkd_pl.data.sources.base import OwnData, children, names_of, parts_of
from fedgkd_pl.data.sources.dataset import check_workers, lazy_examples
from fedgkd_pl.data.transforms import ImageTransform, Scale
from fedgkd_pl.errors import SettingError, require
from torch import Tensor
from torch.utils.data import Dataset

ENDINGS = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
Size = int | list[int] | None
Listings = dict[str, list[tuple[Path, str]]]


class ImageFolders(OwnData):
    """Images in a folder per class, as torchvision's ``ImageFolder``.

    The classes are the folders' names. Where there is a folder ``train``, it holds them, and
    ``test`` and ``val`` beside it are the other splits. Images are kept as bytes in memory and
    normalised by the training images' mean and standard deviation of each channel.

    Args:
        path: the folder of the classes, or of ``train`` and ``test``.
        size: resize all images to this height and width, [height, width] or one number for both;
            without it they must all have the same size.
        grayscale: one channel instead of three.
        augment: random crop (padding 4) and flip in training.
        lazy: decodes images when a batch needs them, where not all fit into memory, and each once
            before, to check it and for mean and deviation; the results are the same.
        loader_workers: where ``lazy``: processes that decode ahead, for each that trains.
        kwargs: those of :class:`OwnData`.
    """

    name = "images"

    def __init__(
        self,
        path: str,
        size: int | list[int] | None = None,
        grayscale: bool = False,
        augment: bool = False,
        lazy: bool = False,
        loader_workers: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_size(size)
        check_workers(loader_workers, lazy)
        self.path = path
        self.lazy = lazy
        self.loader_workers = loader_workers
        self.size = size
        self.grayscale = grayscale
        self.augment = augment
        self.reading = Pictures(resize=size is not None)

    def load(self) -> Splits:
        """See :meth:`FederatedDataModule.load`."""
        folders = parts_of(Path(self.path).expanduser())
        listings = {split: list_images(folder) for split, folder in folders.items()}
        names = names_of(listings["train"], folders["train"])
        self.take_names(label for _, label in listings["train"])
        examples = self._lazy(listings) if self.lazy else self._decoded(listings)
        parts = (examples["train"], examples.get("test"), examples.get("val"))
        splits = self.split(*parts, names=names)
        try:
            if self.lazy:  # the others are read for the statistics; a broken one ends no run later
                for images in self.judging(splits):
                    deque(images.pieces(), maxlen=0)
            return normalised(splits, self.fitting(splits), self.augment)
        except SampleError as error:
            raise SettingError("path", str(error)) from error

    def _decoded(self, listings: Listings) -> dict[str, Examples]:
        images = decode([file for files in listings.values() for file, _ in files], *self._form())
        examples = {}
        for split, files in listings.items():
            targets = self.file_targets(files)
            examples[split] = Examples(images[: len(files)], targets, Scale(255))
            images = images[len(files) :]
        return examples

    def _lazy(self, listings: Listings) -> dict[str, Examples]:
        examples: dict[str, Examples] = {}
        for split, files in listings.items():
            targets = self.file_targets(files)
            images = _Images([file for file, _ in files], targets, *self._form())
            examples[split] = lazy_examples(
                images, split, targets, random=False, workers=self.loader_workers
            )
        return examples

    def _form(self) -> tuple[Size, bool]:
        return self.size, self.grayscale


class _Images(Dataset[tuple[Tensor, int]]):
    """Images that are decoded when they are asked for."""

    def __init__(self, files: list[Path], targets: Tensor, size: Size, grayscale: bool) -> None:
        self.files = [str(file) for file in files]
        self.targets = targets
        self.form = size, grayscale
        self.first: Tensor | None = None  # which all others must be like

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        image = decode([Path(self.files[row])], *self.form)[0]
        if self.first is None:
            self.first = decode([Path(self.files[0])], *self.form)[0]
        if image.shape != self.first.shape:
            sides = " × ".join(map(str, image.shape[1:]))
            reason = f"{self.files[row]} is {sides} (height × width), {self.files[0]} is another"
            raise SettingError("size", f"{reason}: give size, to resize all")
        return image, int(self.targets[row])


def check_size(size: Size) -> None:
    """Refuses what is no height and width."""
    sides = [size] if isinstance(size, int) else size or [1]
    fits = len(sides) <= 2 and all(side >= 1 for side in sides)
    require(fits, "size", "must be a number of pixels, or [height, width]", size)


def list_images(folder: Path) -> list[tuple[Path, str]]:
    """Every image of a folder of classes, with its class."""
    listing: list[tuple[Path, str]] = []
    classes = [child for child in children(folder) if child.is_dir()]
    require(len(classes) > 0, "path", f"{folder} has no folders, one for each class")
    for child in classes:
        files = sorted(file for file in child.rglob("*") if file.suffix.lower() in ENDINGS)
        reason = f"{child} has no images ({', '.join(ENDINGS)}): a class needs some"
        require(len(files) > 0, "path", reason)
        listing += [(file, child.name) for file in files]
    return listing


def decode(sources: Sequence[Any], size: Size, grayscale: bool) -> Tensor:
    """Images as bytes, samples × channels × height × width.

    Args:
        sources: files, or images of Pillow's.
        size: to resize to; None where all must be of one size.
    """
    from PIL import Image

    sides = [size, size] if isinstance(size, int) else (size and [size[0], size[-1]])
    pixels: Any = None
    for row, source in enumerate(sources):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                image = Image.open(source) if isinstance(source, Path) else source
                image = image.convert("L" if grayscale else "RGB")
        except Exception as error:  # Pillow raises many classes
            raise SettingError("path", f"{_place(source, row)} cannot be decoded") from error
        if sides:
            image = image.resize((sides[1], sides[0]), Image.Resampling.BILINEAR)
        array = np.asarray(image).reshape(image.height, image.width, -1).transpose(2, 0, 1)
        if pixels is None:
            pixels = np.empty((len(sources), *array.shape), dtype=np.uint8)
        if array.shape != pixels.shape[1:]:
            first = f"{pixels.shape[2]} × {pixels.shape[3]} (height × width)"
            reason = f"{_place(sources[0], 0)} is {first}, {_place(source, row)} is "
            reason += f"{image.height} × {image.width}: give size, to resize all"
            raise SettingError("size", reason)
        pixels[row] = array
    require(pixels is not None, "path", "there are no images")
    return torch.from_numpy(pixels)


def _place(source: Any, row: int) -> str:
    return str(source) if isinstance(source, Path) else f"the image of row {row + 1}"


def normalised(splits: Splits, fitting: Examples, augment: bool) -> Splits:
    """The splits with a transform to mean 0 and deviation 1 of each channel over ``fitting``."""
    count = 0
    total = squares = torch.zeros(fitting.inputs.shape[1], dtype=torch.float64)
    for piece in fitting.pieces():
        for images in piece.split(256):  # eight times as large as float64
            wide = images.double() / 255
            count += wide[:, 0].numel()
            total = total + wide.sum((0, 2, 3))
            squares = squares + (wide**2).sum((0, 2, 3))
    mean = total / count
    variance = squares / count - mean**2
    deviation = torch.where(variance > 1e-12, variance.clamp_min(0).sqrt(), 1.0)
    padding = 4 if augment else 0
    transform = ImageTransform(mean.tolist(), deviation.tolist(), padding, augment)

    def change(examples: Examples) -> Examples:
        return replace(examples, transform=transform)

    val = None if splits.val is None else change(splits.val)
    return replace(splits, train=change(splits.train), test=change(splits.test), val=val)
