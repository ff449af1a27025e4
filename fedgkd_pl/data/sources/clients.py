"""A file or a folder for every client: the owners that the data comes from."""

from pathlib import Path
from typing import Any

import torch
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.inputs import ImageInputs
from fedgkd_pl.data.mapped import as_tensor
from fedgkd_pl.data.partition import ByKey, Partition
from fedgkd_pl.data.sources.arrays import as_labels, read_pairs, transform_for
from fedgkd_pl.data.sources.base import (
    OwnData,
    children,
    class_files,
    in_order,
    owners_of,
    parts_of,
)
from fedgkd_pl.data.sources.images import ENDINGS, check_size, normalised
from fedgkd_pl.data.sources.tables import column, numbers, read_csv
from fedgkd_pl.errors import require
from torch import Tensor
from typing_extensions import override

Files = dict[str, list[Path]]
Found = dict[Path, tuple[Tensor, Tensor]]  # inputs and targets


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
        self.parts = parts_of(path)
        found = children(self.parts["train"])
        require(len(found) > 0, "path", f"{self.parts['train']} has no clients")
        number = len(found) if num_clients is None else num_clients
        super().__init__(num_clients=number, partition=partition, **kwargs)
        check_size(size)
        self.path = path
        self.label = label
        self.columns = columns
        self.standardise = standardise
        self.form = size, grayscale

    @override
    def load(self) -> Splits:
        files = {split: children(folder) for split, folder in self.parts.items()}
        names = self.owner_names = [file.stem for file in files["train"]]
        require(len(set(names)) == len(names), "path", f"{self.path}: two clients have one name")
        kinds = {file.suffix if file.is_file() else "" for each in files.values() for file in each}
        readers = {".csv": self._tables, ".npz": self._arrays, "": self._images}
        reason = f"{self.path} must hold folders, .csv or .npz files, all of one kind"
        require(len(kinds) == 1 and kinds <= readers.keys(), "path", reason)
        (kind,) = kinds
        found = readers[kind](files)
        examples, keys = {}, {}
        for split, each in files.items():
            inputs, targets = zip(*(found[file] for file in each), strict=True)
            values = torch.cat(inputs)
            transform = transform_for(values, None, None)
            examples[split] = Examples(values, torch.cat(targets), transform)
            sizes = [(file.stem, len(found[file][1])) for file in each]
            keys[split] = owners_of(sizes, names)
        self.count_classes(examples["train"].targets)
        splits = self.split(*in_order(examples), keys=keys["train"], test_keys=keys.get("test"))
        if kind == "":
            self.reading = ImageInputs(resize=self.form[0] is not None)
            return normalised(splits, self.training_part(splits))
        if kind == ".csv":
            return self.standardised(splits, self.used, self.standardise)
        return splits

    def _tables(self, files: Files) -> Found:
        cells = {file: read_csv(file) for each in files.values() for file in each}
        labels = {file: column(each, self.label, "label", file) for file, each in cells.items()}
        self.take_names(label for file in files["train"] for label in labels[file])
        first = cells[files["train"][0]]
        self.used = self.columns or [name for name in first if name != self.label]
        return {
            file: (numbers(table, self.used, file), self.row_targets(labels[file], file))
            for file, table in cells.items()
        }

    def _arrays(self, files: Files) -> Found:
        found: Found = {}
        for file in (file for each in files.values() for file in each):
            x, y, *_ = read_pairs(file, "path")
            inputs, targets = as_tensor(x, "path"), as_labels(y, "path")
            require(len(targets) > 0, "path", f"{file} has no samples")
            fits = len(inputs) == len(targets)
            require(fits, "path", f"{file}: inputs and labels must have the same length")
            found[file] = inputs, targets
            first = next(iter(found.values()))[0]
            alike = (inputs.shape[1:], inputs.dtype) == (first.shape[1:], first.dtype)
            actual = f"{inputs.dtype} of shape {tuple(inputs.shape[1:])}"
            reason = f"{file}: samples must be like those of {next(iter(found)).name}"
            require(alike, "path", reason, actual)
        return found

    def _images(self, files: Files) -> Found:
        listings = {file: class_files(file, ENDINGS) for each in files.values() for file in each}
        self.take_names(label for folder in files["train"] for _, label in listings[folder])
        images = self.decoded(listings, *self.form)
        return {folder: (part.inputs, part.targets) for folder, part in images.items()}
