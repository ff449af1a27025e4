"""A file or a folder for every client: the owners that the data comes from."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.mapped import as_tensor
from fedgkd_pl.data.partition import ByKey, Partition
from fedgkd_pl.data.raw import Pictures
from fedgkd_pl.data.sources.arrays import NAMES, as_labels, read_array, transform_for
from fedgkd_pl.data.sources.base import OwnData, children, owners_of, parts_of
from fedgkd_pl.data.sources.images import check_size, decode, list_images, normalised
from fedgkd_pl.data.sources.tables import column, numbers, read_csv, standardised
from fedgkd_pl.data.transforms import Scale
from fedgkd_pl.errors import SettingError, require
from torch import Tensor

KINDS = (".csv", ".npz")


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
        self.parts = parts_of(Path(path).expanduser())
        found = children(self.parts["train"])
        require(len(found) > 0, "path", f"{self.parts['train']} has no clients")
        number = len(found) if num_clients is None else num_clients
        super().__init__(num_clients=number, partition=partition, **kwargs)
        check_size(size)
        self.path = path
        self.label = label
        self.columns = columns
        self.used: list[str] = []  # which columns were read
        self.standardise = standardise
        self.size = size
        self.grayscale = grayscale

    def load(self) -> Splits:
        """See :meth:`FederatedDataModule.load`."""
        files = {split: children(folder) for split, folder in self.parts.items()}
        owners = {file.stem: number for number, file in enumerate(files["train"])}
        reason = "two clients have the same name"
        require(len(owners) == len(files["train"]), "path", f"{self.path}: {reason}")
        self.owner_names = list(owners)
        everything = [file for each in files.values() for file in each]
        kinds = {file.suffix if file.is_file() else "folder" for file in everything}
        reason = f"{self.path} must hold {', '.join(KINDS)} files or folders, of one kind, and has"
        known = len(kinds) == 1 and kinds <= {*KINDS, "folder"}
        require(known, "path", f"{reason} {', '.join(sorted(kinds))}")
        (kind,) = kinds
        read = {".csv": self._tables, ".npz": self._arrays, "folder": self._images}[kind]
        sizes: dict[str, list[int]] = {split: [] for split in files}
        examples = read(files, sizes)
        keys = np.repeat(np.arange(len(owners)), sizes["train"])
        names = [file.stem for file in files.get("test", [])]
        test_keys = owners_of(zip(names, sizes.get("test", []), strict=True), list(owners))
        parts = (examples["train"], examples.get("test"), examples.get("val"))
        splits = self.split(*parts, keys, test_keys)
        if kind == "folder":
            self.reading = Pictures(resize=self.size is not None)
            return normalised(splits, self.fitting(splits), augment=False)
        if kind == ".csv":
            fitting = self.fitting(splits).inputs
            splits, self.reading = standardised(splits, fitting, self.used, self.standardise)
        return splits

    def _tables(self, files: dict[str, list[Path]], sizes: dict[str, list[int]]) -> Any:
        cells = {split: [(file, read_csv(file)) for file in each] for split, each in files.items()}
        labels = {
            split: [(file, column(table, self.label, "label", file)) for file, table in each]
            for split, each in cells.items()
        }
        self.take_names(label for _, each in labels["train"] for label in each)
        columns = self.columns
        if columns is None:
            columns = [name for name in cells["train"][0][1] if name != self.label]
        self.used = columns
        examples = {}
        for split, each in cells.items():
            targets = [self.row_targets(of_file, file) for file, of_file in labels[split]]
            sizes[split] += map(len, targets)
            inputs = torch.cat([numbers(table, columns, file) for file, table in each])
            examples[split] = Examples(inputs, torch.cat(targets), Scale(1))
        return examples

    def _arrays(self, files: dict[str, list[Path]], sizes: dict[str, list[int]]) -> Any:
        examples = {}
        for split, each in files.items():
            pairs = [_read_pair(file) for file in each]
            sizes[split] += [len(labels) for _, labels in pairs]
            first = pairs[0][0]
            for file, (inputs, _) in zip(each, pairs, strict=True):
                alike = inputs.shape[1:] == first.shape[1:] and inputs.dtype == first.dtype
                actual = f"{inputs.dtype} of shape {tuple(inputs.shape[1:])}"
                reason = f"{file} has {actual}, unlike {each[0].name}: samples must be alike"
                require(alike, "path", reason)
            inputs, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
            examples[split] = Examples(inputs, targets, transform_for(inputs, None, None))
        self.num_classes = int(examples["train"].targets.max()) + 1
        return examples

    def _images(self, files: dict[str, list[Path]], sizes: dict[str, list[int]]) -> Any:
        listings = {
            split: [list_images(folder) for folder in each] for split, each in files.items()
        }
        self.take_names(label for each in listings["train"] for _, label in each)
        flat = {split: [pair for part in each for pair in part] for split, each in listings.items()}
        pixels = decode(
            [file for pairs in flat.values() for file, _ in pairs], self.size, self.grayscale
        )
        examples = {}
        for split, pairs in flat.items():
            sizes[split] += map(len, listings[split])
            examples[split] = Examples(pixels[: len(pairs)], self.file_targets(pairs), Scale(255))
            pixels = pixels[len(pairs) :]
        return examples


def _read_pair(file: Path) -> tuple[Tensor, Tensor]:
    arrays = read_array(file, "path")
    for names in NAMES:
        if set(names) <= arrays.keys():
            inputs = as_tensor(arrays[names[0]], "path")
            labels = as_labels(arrays[names[1]], "path")
            require(len(labels) > 0, "path", f"{file} has no samples")
            fits = len(inputs) == len(labels)
            reason = f"{file} has {len(inputs)} inputs and {len(labels)} labels"
            require(fits, "path", reason)
            return inputs, labels
    raise SettingError("path", f"{file} has no inputs and targets, nor x and y")
