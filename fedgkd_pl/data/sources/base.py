"""What all sources of own data have in common: classes, owners, the test set."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.errors import SettingError, require
from numpy.typing import NDArray
from torch import Tensor

log = logging.getLogger("fedgkd_pl")
Owners = NDArray[np.int64]


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
            require(plain, "name", "must be fit for a file's name", name)
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
            self.partition.take_source(len(train), np.arange(len(train)), names)
            return Splits(train, test, val, keys, test_keys)
        size = round(self.test_fraction * len(train))
        rest, rows = self._draw(train, keys, size, np.random.default_rng(0))
        reason = f"takes none of {len(train)} samples: each class, or owner, keeps its last one"
        require(len(rows) > 0, "test_fraction", reason, self.test_fraction)
        self.partition.take_source(len(train), rest.numpy(), names)
        test_keys = None if keys is None else keys[rows.numpy()]
        keys = None if keys is None else keys[rest.numpy()]
        return Splits(train.view(rest), train.view(rows), val, keys, test_keys)

    def fitting(self, splits: Splits) -> Examples:
        """What statistics may be taken of: the training data without the validation part."""
        if splits.val is not None:
            return splits.train
        return splits.train.view(self._hold_out(splits.train, splits.keys)[0])

    def judging(self, splits: Splits) -> list[Examples]:
        """All other samples: those of validation and test."""
        val = splits.val
        if val is None:
            val = splits.train.view(self._hold_out(splits.train, splits.keys)[1])
        return [val, splits.test]

    def take_names(self, labels: Iterable[str]) -> None:
        """Makes the classes from the labels of all training samples, numbers in their order."""
        names = set(labels)
        numbers = all(name.removeprefix("-").isdecimal() for name in names)
        self.class_names = sorted(names, key=int) if numbers else sorted(names)
        self.num_classes = len(names)

    def take_owners(self, owners: Any) -> Owners:
        """A number for every sample's owner, in the order of their names, which are kept."""
        names, numbers = np.unique(np.asarray(owners), return_inverse=True)
        self.owner_names = [str(name) for name in names]
        return numbers.astype(np.int64)

    def row_targets(self, labels: Sequence[str], table: str | Path) -> Tensor:
        """The class number of every row's label."""
        return self._targets((f"{table}, row {n}", label) for n, label in enumerate(labels, 1))

    def file_targets(self, files: Sequence[tuple[Path, str]]) -> Tensor:
        """The class number of every file of a listing of files and labels."""
        return self._targets(files)

    def _targets(self, samples: Iterable[tuple[str | Path, str]]) -> Tensor:
        numbers = {name: number for number, name in enumerate(self.class_names)}
        targets = []
        for where, label in samples:
            reason = f"{where}: the label {label!r:.40} is in no training sample"
            require(label in numbers, "data", reason)
            targets.append(numbers[label])
        return torch.tensor(targets, dtype=torch.int64)


def owners_of(sizes: Iterable[tuple[str, int]], names: Sequence[str]) -> Owners:
    """The number of every sample's owner, which is its place among ``names``; -1 of a stranger.

    ``sizes``: the owners of the samples in their order, and how many each has.
    """
    numbers = {name: number for number, name in enumerate(names)}
    owners = [(numbers.get(name, -1), size) for name, size in sizes]
    return np.array([owner for owner, size in owners for _ in range(size)], dtype=np.int64)


def children(folder: Path, key: str = "path") -> list[Path]:
    """What is in a folder, by name; hidden files are left out."""
    try:
        return sorted(file for file in folder.iterdir() if not file.name.startswith("."))
    except OSError as error:
        raise SettingError(key, f"{folder}: {error.strerror}") from error


def names_of(files: Sequence[tuple[Path, str]], folder: Path) -> list[str]:
    """What files of a folder of classes are called in a partition: class/file."""
    return [file.relative_to(folder).as_posix() for file, _ in files]


def parts_of(folder: Path) -> dict[str, Path]:
    """The folders ``train``, ``test`` and ``val`` of a source, or all of it as ``train``."""
    names = {"train": "train", "test": "test", "val": "val", "valid": "val", "validation": "val"}
    found = {names[file.name]: file for file in children(folder) if file.name in names}
    return found if "train" in found else {"train": folder}


def read_text(file: Path, key: str = "path") -> str:
    """The text of a file of the user's."""
    try:
        require(file.exists(), key, f"{file}: there is no such file")
        require(file.is_file(), key, f"{file} is no file")
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SettingError(key, f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingError(key, f"{file} is not UTF-8 at byte {error.start}") from error
