"""Folders: of images by class, of a file or folder for every client, of LEAF's JSON.

Last, the constructors of all sources of own data.
"""

import json
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.examples import Examples, Scale, Splits, Transform
from fedgkd_pl.data.inputs import Decoder
from fedgkd_pl.data.partition import ByKey, Partition
from fedgkd_pl.data.sources.base import (
    Arrays,
    OwnData,
    as_labels,
    class_files,
    class_tables,
    examples_of,
    joined,
    parts_of,
    read_pairs,
    reading,
    visible,
)
from fedgkd_pl.data.sources.dataset import LightningData, SampleError, TorchDataset, lazy_examples
from fedgkd_pl.data.sources.tables import CSVTable, HuggingFace, ParquetTable, TextFiles, read_csv
from fedgkd_pl.errors import SettingError, at_least, require
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
        at_least(0, loader_workers=loader_workers)
        require(lazy or not loader_workers, "loader_workers", "must be 0, or lazy true")
        self.path = path
        self.lazy = lazy
        self.loader_workers = loader_workers
        self.decoder = Decoder(size, grayscale)
        self.augment = augment

    @override
    def load(self) -> Splits:
        tables = class_tables(self.path, ENDINGS)
        files = {split: list(table["file"]) for split, table in tables.items()}
        targets = self.class_targets(tables)
        if not self.lazy:
            return self.image_splits(files, targets, self.decoder, self.augment)
        examples: dict[str, Any] = {
            split: lazy_examples(
                _Images(each, targets[split], self.decoder),
                split,
                random=False,
                workers=self.loader_workers,
            )
            for split, each in files.items()
        }
        splits = self.split(**examples)
        try:  # a broken image ends no run later: what gives no statistics is read as well
            for images in (self.held_out(splits)[1], splits.test):
                deque(images.pieces(), maxlen=0)
            return self.normalised(splits, self.decoder, self.augment)
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


class ClientFiles(OwnData):
    """A folder with a ``.csv``, an ``.npz`` or a folder of images by class for every client.

    A client is what a file or folder is named after; they are numbered in the order of the names.
    Where there is a folder ``train``, it holds them, and those of ``test`` (not of clients that
    are not in ``train``) are together the test set; by default each client gives a part of its
    own to the test set.

    Args:
        path: the folder.
        label: the column of the labels, in ``.csv`` files.
        columns: the columns of inputs, in ``.csv`` files; by default all others.
        standardise: as in :class:`CSVTable`, over the training rows of all clients.
        size: resize images; see :class:`ImageFolders`.
        grayscale: one channel of images instead of three.
        num_clients: by default one for each file or folder.
        partition: by default a client is an owner.
        kwargs: those of :class:`OwnData`.
    """

    name = "clients"

    def __init__(
        self,
        path: str,
        label: str = "label",
        columns: list[str] | None = None,
        standardise: bool = True,
        size: int | list[int] | None = None,
        grayscale: bool = False,
        num_clients: int | None = None,
        partition: Partition = ByKey(),  # noqa: B008
        **kwargs: Any,
    ) -> None:
        self.files = {split: visible(folder) for split, folder in parts_of(path).items()}
        for split, files in self.files.items():
            require(len(files) > 0, "path", f"{path} has no clients", split)
        number = len(self.files["train"]) if num_clients is None else num_clients
        super().__init__(num_clients=number, partition=partition, **kwargs)
        self.path = path
        self.label = label
        self.columns = columns
        self.standardise = standardise
        self.decoder = Decoder(size, grayscale)

    @override
    def load(self) -> Splits:
        import pandas as pd

        files = [file for each in self.files.values() for file in each]
        kind, *others = {file.suffix if file.is_file() else "" for file in files}
        reason = f"{self.path} must hold folders, .csv or .npz files, all of one kind"
        require(kind in READERS and not others, "path", reason)
        parts = {
            split: {file.stem: READERS[kind](file) for file in each}
            for split, each in self.files.items()
        }
        fits = len(parts["train"]) == len(self.files["train"])
        require(fits, "path", f"{self.path}: two clients have one name")
        owners = self.part_owners(parts)
        if kind == ".npz":
            return self.split(**{split: joined(each) for split, each in parts.items()}, **owners)  # type: ignore[arg-type]
        tables = {split: pd.concat(list(each.values())) for split, each in parts.items()}
        if kind == "":
            images = {split: list(table["file"]) for split, table in tables.items()}
            return self.image_splits(images, self.class_targets(tables), self.decoder, **owners)
        targets = self.class_targets(tables, self.label)
        first = next(iter(parts["train"].values()))
        columns = self.columns or [name for name in first if name != self.label]
        return self.table_splits(tables, columns, targets, self.standardise, **owners)


def _read_arrays(file: Path) -> Examples:
    x, y, *_ = read_pairs(file, "path")
    examples = examples_of(x, as_labels(y, "path"), "path")
    fits = len(examples.inputs) == len(examples) > 0
    require(fits, "path", f"{file} must have samples, and a label for each of them")
    return examples


READERS: dict[str, Callable[[Path], Any]] = {
    ".csv": read_csv,
    ".npz": _read_arrays,
    "": partial(class_files, endings=ENDINGS),
}


class Leaf(OwnData):
    """LEAF's files: ``train/*.json`` and ``test/*.json``, or only the first.

    A client is a user; they are numbered in the order of their names. Inputs must be numbers, as
    FEMNIST's, and labels class numbers.

    Args:
        path: the folder of ``train`` and ``test``, or of the files.
        shape: of a sample, such as [1, 28, 28]; by default as it is stored.
        num_classes: by default the largest class number and one.
        num_clients: by default one for each user.
        partition: by default a client is a user.
        kwargs: those of :class:`OwnData`.
    """

    name = "leaf"

    def __init__(
        self,
        path: str,
        shape: list[int] | None = None,
        num_classes: int | None = None,
        num_clients: int | None = None,
        partition: Partition = ByKey(),  # noqa: B008
        **kwargs: Any,
    ) -> None:
        self.path = path
        self.shape = shape
        self.users = self._read()
        number = len(self.users["train"]) if num_clients is None else num_clients
        super().__init__(num_clients=number, partition=partition, **kwargs)
        self.set_classes(num_classes, ())

    @override
    def load(self) -> Splits:
        users, self.users = self.users or self._read(), {}  # which would be a second copy
        owners = self.part_owners(users)
        return self.split(**{split: joined(owned) for split, owned in users.items()}, **owners)  # type: ignore[arg-type]

    def _read(self) -> dict[str, dict[str, Examples]]:
        transform, parts = Scale(1, self.shape), parts_of(self.path)
        wanted = [split for split in ("train", "test") if split in parts]
        return {split: read_users(parts[split], transform) for split in wanted}


def read_users(folder: Path, transform: Transform) -> dict[str, Examples]:
    """What every user of the files of a folder has, by name."""
    users: dict[str, Examples] = {}
    for file in visible(folder, "*.json"):
        with reading(file):
            content = json.loads(file.read_text(encoding="utf-8-sig"))
            data = {name: content["user_data"][name] for name in content["users"]}
        for name, own in data.items():
            where = f"{file}, user {name!r:.40}"
            with reading(where):
                inputs = torch.from_numpy(np.asarray(own["x"], dtype=np.float32))
                labels = torch.from_numpy(np.asarray(own["y"]))
            fits = inputs.shape[:1] == labels.shape and len(labels) > 0
            require(fits, "path", f"{where}: x and y must have the same length, not 0")
            require(name not in users, "path", f"{where} is there twice")
            users[name] = Examples(inputs, labels, transform)
    require(len(users) > 0, "path", f"{folder} has no .json files with users")
    return dict(sorted(users.items()))


class FederatedData:
    """Own data in one line: ``FederatedData.from_csv("cars.csv", label="kind", num_clients=10)``.

    Each constructor makes an object of the class that a YAML file names.
    """

    from_arrays = Arrays
    from_dataset = TorchDataset
    from_image_folder = ImageFolders
    from_csv = CSVTable
    from_parquet = ParquetTable
    from_huggingface = HuggingFace
    from_text = TextFiles
    from_clients = ClientFiles
    from_leaf = Leaf
    from_datamodule = LightningData
