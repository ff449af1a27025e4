"""Folders of images, a folder for every class."""

from collections import deque
from pathlib import Path
from typing import Any

from fedgkd_pl.data.examples import Splits
from fedgkd_pl.data.inputs import Decoder
from fedgkd_pl.data.lazy import SampleError
from fedgkd_pl.data.sources.base import OwnData, class_files, parts_of
from fedgkd_pl.data.sources.dataset import check_workers, lazy_examples
from fedgkd_pl.errors import SettingError
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

ENDINGS = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


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
        check_workers(loader_workers, lazy)
        self.path = path
        self.lazy = lazy
        self.loader_workers = loader_workers
        self.decoder = Decoder(size, grayscale)
        self.augment = augment
        self.reading = self.decoder.reading

    @override
    def load(self) -> Splits:
        tables = {
            split: class_files(folder, ENDINGS) for split, folder in parts_of(self.path).items()
        }
        files = {split: list(table["file"]) for split, table in tables.items()}
        targets = self.class_targets(tables)
        if not self.lazy:
            return self.image_splits(files, targets, self.decoder, self.augment)
        examples: dict[str, Any] = {
            split: lazy_examples(
                _Images(each, targets[split], self.decoder),
                split,
                targets[split],
                random=False,
                workers=self.loader_workers,
            )
            for split, each in files.items()
        }
        splits = self.split(**examples)
        try:  # a broken image ends no run later: what gives no statistics is read as well
            for images in (self.held_out(splits)[1], splits.test):
                deque(images.pieces(), maxlen=0)
            return self.normalised(splits, self.augment)
        except SampleError as error:
            raise SettingError("path", str(error)) from error


class _Images(Dataset[tuple[Tensor, int]]):
    """Images that are decoded when they are asked for."""

    def __init__(self, files: list[Path], targets: Tensor, decoder: Decoder) -> None:
        self.files = files
        self.targets = targets
        self.decoder = decoder
        self.first = decoder.one(files[0])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return self.decoder.one(self.files[row], self.first), int(self.targets[row])
