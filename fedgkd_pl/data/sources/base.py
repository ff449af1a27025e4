"""What all sources of own data have in common: classes, owners, the test set."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.inputs import TableInputs, decode
from fedgkd_pl.data.transforms import Scale
from fedgkd_pl.errors import SettingError, require
from numpy.typing import NDArray
from torch import Tensor

log = logging.getLogger("fedgkd_pl")
Owners = NDArray[np.int64]
Listing = list[tuple[Path, str]]  # files and their classes


class OwnData(FederatedDataModule):
    """Base of the sources of own data; a source is a subclass with ``load()``.

    Args:
        test_fraction: the part of the samples that is the test set, where the source has none of
            its own: taken from every class alike, or from every owner where owners are the
            clients, and the same for every seed.
        name: in tables and file names; by default the source's.
        kwargs: those of :class:`FederatedDataModule`.
    """

    def __init__(self, test_fraction: float = 0.2, name: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        require(0 < test_fraction < 1, "test_fraction", "must be in (0, 1)", test_fraction)
        self.test_fraction = test_fraction
        if name is not None:
            plain = 0 < len(name) < 100 and name.isprintable() and Path(name).name == name
            require(plain, "name", "must be a valid file name", name)
            self.name = name

    def split(
        self,
        train: Examples,
        test: Examples | None = None,
        val: Examples | None = None,
        keys: Owners | None = None,
        test_keys: Owners | None = None,
        names: Sequence[str] = (),
    ) -> Splits:
        """The splits of a source, with a test set cut from ``train`` where it has none.

        ``names``: the file of every sample of ``train``, where each has one of its own.
        """
        require(len(train) > 0, "data", f"{self.name} has no training samples")
        if test is not None:
            missing = set(test.labels.tolist()) - set(train.labels.tolist())
            if missing:
                log.warning("test has samples of classes %s, training has none", sorted(missing))
            self.partition.take_source(np.arange(len(train)), names)
            return Splits(train, test, val, keys, test_keys)
        size = round(self.test_fraction * len(train))
        rest, rows = self._draw(train, keys, size, np.random.default_rng(0))
        reason = f"takes none of {len(train)} samples: each class, or owner, keeps its last one"
        require(len(rows) > 0, "test_fraction", reason, self.test_fraction)
        self.partition.take_source(rest.numpy(), names)
        test_keys = None if keys is None else keys[rows.numpy()]
        keys = None if keys is None else keys[rest.numpy()]
        return Splits(train.view(rest), train.view(rows), val, keys, test_keys)

    def training_part(self, splits: Splits) -> Examples:
        """The training data without the validation part, of which statistics may be taken."""
        if splits.val is not None:
            return splits.train
        return splits.train.view(self._hold_out(splits.train, splits.keys)[0])

    def held_out_splits(self, splits: Splits) -> list[Examples]:
        """The samples of validation and test."""
        if splits.val is not None:
            return [splits.val, splits.test]
        return [splits.train.view(self._hold_out(splits.train, splits.keys)[1]), splits.test]

    def set_classes(self, number: int | None, names: Sequence[str] | None) -> None:
        """Keeps the classes that the user gave."""
        if number is not None:
            require(number >= 1, "num_classes", "must be at least 1", number)
            self.num_classes = number
        self.class_names = names or ()

    def count_classes(self, targets: Tensor) -> None:
        """Counts the classes, where the user did not: none of floats."""
        if not hasattr(self, "num_classes"):
            largest = -1 if targets.is_floating_point() else int(targets.max())
            self.num_classes = len(self.class_names) or largest + 1

    def take_names(self, labels: Iterable[str]) -> None:
        """Makes the classes from the labels of all training samples, numbers in their order."""
        names = set(labels)
        numbers = all(name.removeprefix("-").isdecimal() for name in names)
        self.class_names = sorted(names, key=int) if numbers else sorted(names)
        self.num_classes = len(names)

    def class_numbers(self, labels: Sequence[str], where: Callable[[int], object]) -> Tensor:
        """The class number of every sample's label; ``where`` names a sample for errors."""
        numbers = {name: number for number, name in enumerate(self.class_names)}
        for row, label in enumerate(labels):
            if label not in numbers:
                reason = f"{where(row)}: the label {label!r:.40} is in no training sample"
                raise SettingError("data", reason)
        return torch.tensor([numbers[label] for label in labels], dtype=torch.int64)

    def row_targets(self, labels: Sequence[str], table: str | Path) -> Tensor:
        """The class number of every row of a table."""
        return self.class_numbers(labels, lambda row: f"{table}, row {row + 1}")

    def file_targets(self, files: Listing) -> Tensor:
        """The class number of every file."""
        return self.class_numbers([label for _, label in files], lambda row: files[row][0])

    def decoded(
        self, listings: Mapping[Any, Listing], size: int | list[int] | None, grayscale: bool
    ) -> dict[Any, Examples]:
        """The images of every listing in memory, all of one size."""
        sources = [file for files in listings.values() for file, _ in files]
        images = decode(sources, size, grayscale).split([len(f) for f in listings.values()])
        return {
            key: Examples(part, self.file_targets(files), Scale(255))
            for part, (key, files) in zip(images, listings.items(), strict=True)
        }

    def standardised(
        self, splits: Splits, columns: Sequence[str], standardise: bool = True
    ) -> Splits:
        """The splits as float32, by default with mean 0 and deviation 1 over the training part.

        A column that is constant there is only shifted.
        """
        fitting = self.training_part(splits).inputs.numpy()
        mean, deviation = np.zeros(len(columns)), np.ones(len(columns))
        if standardise:
            mean, spread = fitting.mean(axis=0), fitting.std(axis=0)
            deviation = np.where(spread > 0, spread, 1.0)
        table = TableInputs(tuple(columns), tuple(mean.tolist()), tuple(deviation.tolist()))
        self.reading = table
        return changed(splits, lambda part: replace(part, inputs=table.scaled(part.inputs)))

    def take_owners(self, owners: Any, length: int) -> Owners:
        """A number for every sample's owner, in the order of their names, which are kept."""
        owners = np.asarray(owners)
        reason = f"must be one number or name for each of {length} samples"
        require(owners.shape == (length,), "owners", reason, owners.shape)
        names, numbers = np.unique(owners, return_inverse=True)
        self.owner_names = [str(name) for name in names]
        return numbers.astype(np.int64)


def in_order(
    examples: Mapping[str, Examples],
) -> tuple[Examples, Examples | None, Examples | None]:
    """The examples of train, test and val."""
    return examples["train"], examples.get("test"), examples.get("val")


def changed(splits: Splits, change: Callable[[Examples], Examples]) -> Splits:
    """The splits, each of them changed."""
    val = None if splits.val is None else change(splits.val)
    return replace(splits, train=change(splits.train), test=change(splits.test), val=val)


def owners_of(sizes: Iterable[tuple[str, int]], names: Sequence[str]) -> Owners:
    """The number of every sample's owner, which is its place among ``names``; -1 of a stranger.

    ``sizes``: the owners of the samples in their order, and how many each has.
    """
    numbers = {name: number for number, name in enumerate(names)}
    owners = [(numbers.get(name, -1), size) for name, size in sizes]
    return np.array([owner for owner, size in owners for _ in range(size)], dtype=np.int64)


def children(folder: Path) -> list[Path]:
    """The files and folders in a folder, by name; hidden ones are left out."""
    try:
        return sorted(file for file in folder.iterdir() if not file.name.startswith("."))
    except OSError as error:
        raise SettingError("path", f"{folder}: {error.strerror}") from error


def class_files(folder: Path, endings: Sequence[str]) -> Listing:
    """Every file of a folder of classes, with its class."""
    files: Listing = []
    classes = [child for child in children(folder) if child.is_dir()]
    require(len(classes) > 0, "path", f"{folder} has no folders, one for each class")
    for child in classes:
        own = sorted(file for file in child.rglob("*") if file.suffix.lower() in endings)
        require(len(own) > 0, "path", f"{child} has no files ({', '.join(endings)})")
        files += [(file, child.name) for file in own]
    return files


def names_of(files: Listing, folder: Path) -> list[str]:
    """The names of the files of a folder of classes in a partition: class/file."""
    return [file.relative_to(folder).as_posix() for file, _ in files]


def parts_of(path: str) -> dict[str, Path]:
    """The folders ``train``, ``test`` and ``val`` of a source, or all of it as ``train``."""
    folder = Path(path).expanduser()
    names = {"train": "train", "test": "test", "val": "val", "valid": "val", "validation": "val"}
    found = {names[file.name]: file for file in children(folder) if file.name in names}
    return found if "train" in found else {"train": folder}


def read_text(file: Path, key: str = "path") -> str:
    """The text of a file of the user's."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SettingError(key, f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingError(key, f"{file} is not UTF-8 at byte {error.start}") from error
