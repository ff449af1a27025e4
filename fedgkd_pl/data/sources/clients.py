"""A file or a folder for every client: the owners that the data comes from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.inputs import Decoder
from fedgkd_pl.data.mapped import as_tensor
from fedgkd_pl.data.partition import ByKey, Partition
from fedgkd_pl.data.sources.arrays import as_labels, read_pairs, transform_for
from fedgkd_pl.data.sources.base import OwnData, children, class_files, joined, parts_of
from fedgkd_pl.data.sources.images import ENDINGS
from fedgkd_pl.data.sources.tables import read_csv
from fedgkd_pl.errors import require
from typing_extensions import override


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
        self.files = {split: children(folder) for split, folder in parts_of(path).items()}
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
            examples: dict[str, Any] = {split: joined(each) for split, each in parts.items()}
            return self.split(**examples, **owners)
        tables = {split: pd.concat(list(each.values())) for split, each in parts.items()}
        if kind == "":
            images = {split: list(table["file"]) for split, table in tables.items()}
            return self.image_splits(images, self.class_targets(tables), self.decoder, **owners)
        targets = self.class_targets(tables, self.label)
        first = next(iter(parts["train"].values()))
        columns = self.columns or [name for name in first if name != self.label]
        return self.table_splits(tables, columns, targets, self.standardise, **owners)


def _read_images(folder: Path) -> Any:
    return class_files(folder, ENDINGS)


def _read_arrays(file: Path) -> Examples:
    x, y, *_ = read_pairs(file, "path")
    inputs, targets = as_tensor(x, "path"), as_labels(y, "path")
    fits = len(inputs) == len(targets) > 0
    require(fits, "path", f"{file} must have samples, and a label for each of them")
    return Examples(inputs, targets, transform_for(inputs, None, None))


READERS: dict[str, Callable[[Path], Any]] = {
    ".csv": read_csv,
    ".npz": _read_arrays,
    "": _read_images,
}
