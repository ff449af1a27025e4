"""Folders of images, a folder for every class."""

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.inputs import ImageInputs, decode
from fedgkd_pl.data.lazy import SampleError
from fedgkd_pl.data.sources.base import (
    Listing,
    OwnData,
    changed,
    class_files,
    in_order,
    names_of,
    parts_of,
)
from fedgkd_pl.data.sources.dataset import check_workers, lazy_examples
from fedgkd_pl.data.transforms import ImageTransform
from fedgkd_pl.errors import SettingError, require
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

ENDINGS = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
Size = int | list[int] | None


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
        self.form = size, grayscale
        self.augment = augment
        self.reading = ImageInputs(resize=size is not None)

    @override
    def load(self) -> Splits:
        folders = parts_of(self.path)
        listings = {split: class_files(folder, ENDINGS) for split, folder in folders.items()}
        names = names_of(listings["train"], folders["train"])
        self.take_names(label for _, label in listings["train"])
        examples = self._lazy(listings) if self.lazy else self.decoded(listings, *self.form)
        splits = self.split(*in_order(examples), names=names)
        try:
            if self.lazy:  # the others are read for the statistics; a broken one ends no run later
                for images in self.held_out_splits(splits):
                    deque(images.pieces(), maxlen=0)
            return normalised(splits, self.training_part(splits), self.augment)
        except SampleError as error:
            raise SettingError("path", str(error)) from error

    def _lazy(self, listings: dict[str, Listing]) -> dict[str, Examples]:
        examples: dict[str, Examples] = {}
        for split, files in listings.items():
            targets = self.file_targets(files)
            images = _Images([file for file, _ in files], targets, *self.form)
            workers = self.loader_workers
            examples[split] = lazy_examples(images, split, targets, random=False, workers=workers)
        return examples


class _Images(Dataset[tuple[Tensor, int]]):
    """Images that are decoded when they are asked for."""

    def __init__(self, files: list[Path], targets: Tensor, size: Size, grayscale: bool) -> None:
        self.files = files
        self.targets = targets
        self.form = size, grayscale
        self.shape = decode(files[:1], *self.form).shape[1:]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        (image,) = decode([self.files[row]], *self.form)
        sizes = f"is {[*image.shape[1:]]} (height, width), {self.files[0]} {[*self.shape[1:]]}"
        reason = f"{self.files[row]} {sizes}; give size, to resize all"
        require(image.shape == self.shape, "size", reason)
        return image, int(self.targets[row])


def check_size(size: Size) -> None:
    """Checks a setting of height and width."""
    sides = [size] if isinstance(size, int) else size or [1]
    fits = len(sides) <= 2 and all(side >= 1 for side in sides)
    require(fits, "size", "must be a number of pixels, or [height, width]", size)


def normalised(splits: Splits, fitting: Examples, augment: bool = False) -> Splits:
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
    return changed(splits, lambda examples: replace(examples, transform=transform))
