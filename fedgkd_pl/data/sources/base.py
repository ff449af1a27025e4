"""What all sources of own data have in common (classes, owners, the test set), and arrays."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.examples import (
    Examples,
    Ids,
    ImageTransform,
    MappedTensor,
    Scale,
    Splits,
    Transform,
    as_tensor,
)
from fedgkd_pl.data.inputs import FILTER, Decoder, ImageInputs, TableInputs
from fedgkd_pl.data.validation import check_finite
from fedgkd_pl.errors import SettingError, require
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

Owners = NDArray[np.int64]
# A pandas.DataFrame for every split, with a row for every sample. Its index says where a row is
# from: a file, or the file and the row's number in it.
Tables = dict[str, Any]


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

    # -- splits --------------------------------------------------------------------------------

    def split(
        self,
        train: Examples,
        test: Examples | None = None,
        val: Examples | None = None,
        keys: Owners | None = None,
        test_keys: Owners | None = None,
    ) -> Splits:
        """The splits of a source, with a test set cut from ``train`` where it has none."""
        total = len(train)
        require(total > 0, "data", f"{self.name} has no training samples")
        if not hasattr(self, "num_classes"):
            largest = -1 if train.targets.is_floating_point() else int(train.targets.max())
            self.num_classes = len(self.class_names) or largest + 1
        if test is None:
            size = round(self.test_fraction * total)
            rest, rows = self._draw(train, keys, size, np.random.default_rng(0))
            reason = f"takes none of {total} samples: each class, or owner, keeps its last one"
            require(len(rows) > 0, "test_fraction", reason, self.test_fraction)
            train, test = train.view(rest), train.view(rows)
            if keys is not None:
                keys, test_keys = keys[rest.numpy()], keys[rows.numpy()]
        return Splits(train, test, val, keys, test_keys)

    def held_out(self, splits: Splits) -> tuple[Examples, Examples]:
        """The training data, of which statistics may be taken, and the validation part."""
        if splits.val is not None:
            return splits.train, splits.val
        rest, held = self._hold_out(splits.train, splits.keys)
        return splits.train.view(rest), splits.train.view(held)

    def table_splits(
        self,
        tables: Tables,
        columns: Sequence[str],
        targets: Mapping[str, Tensor],
        standardise: bool = True,
        **known: Any,
    ) -> Splits:
        """Columns of tables, by default with mean 0 and deviation 1 over the training part.

        A column that is constant there is only shifted.
        """
        unowned = known.get("keys") is None
        examples: dict[str, Any] = {
            split: Examples(numbers(table, columns, unowned=unowned), targets[split], Scale(1))
            for split, table in tables.items()
        }
        splits = self.split(**examples, **known)
        mean, deviation = np.zeros(len(columns)), np.ones(len(columns))
        if standardise:
            fitting = self.held_out(splits)[0].inputs.numpy()
            mean, spread = fitting.mean(axis=0), fitting.std(axis=0)
            deviation = np.where(spread > 0, spread, 1.0)
        table = TableInputs(tuple(columns), tuple(mean.tolist()), tuple(deviation.tolist()))
        self.reading = table
        return _each(splits, lambda part: replace(part, inputs=table.scaled(part.inputs)))

    def image_splits(
        self,
        images: Mapping[str, Sequence[Any]],
        targets: Mapping[str, Tensor],
        decoder: Decoder,
        augment: bool = False,
        **known: Any,
    ) -> Splits:
        """Images as bytes in memory, all of one size."""
        first = decoder.one(images["train"][0])
        examples: dict[str, Any] = {
            split: Examples(decoder(each, first), targets[split], Scale(255))
            for split, each in images.items()
        }
        return self.normalised(self.split(**examples, **known), decoder, augment)

    def normalised(self, splits: Splits, decoder: Decoder, augment: bool) -> Splits:
        """The splits with a transform to mean 0 and deviation 1 of each channel in training."""
        self.reading = ImageInputs(resize=None if decoder.size is None else FILTER)
        count, total, squares = 0, torch.zeros(()), torch.zeros(())
        for piece in self.held_out(splits)[0].pieces():
            for images in piece.split(256):  # eight times as large as float64
                wide = images.double() / 255
                count += wide[:, 0].numel()
                total = total + wide.sum((0, 2, 3))
                squares = squares + (wide**2).sum((0, 2, 3))
        mean = total / count
        variance = squares / count - mean**2
        deviation = torch.where(variance > 1e-12, variance.clamp_min(0).sqrt(), 1.0)
        transform = ImageTransform(mean.tolist(), deviation.tolist(), 4 if augment else 0, augment)
        return _each(splits, lambda part: replace(part, transform=transform))

    # -- classes and owners --------------------------------------------------------------------

    def set_classes(self, number: int | None, names: Sequence[str] | None) -> None:
        """Keeps the classes that the user gave."""
        if number is not None:
            require(number >= 1, "num_classes", "must be at least 1", number)
            self.num_classes = number
        self.class_names = names or ()

    def class_targets(self, tables: Tables, label: str = "label") -> dict[str, Tensor]:
        """The class number of every row; the classes are the labels of the training rows."""
        labels = {split: column(table, label) for split, table in tables.items()}
        names = set(labels["train"])
        numbers = all(name.removeprefix("-").isdecimal() for name in names)
        self.class_names = sorted(names, key=int) if numbers else sorted(names)
        self.num_classes = len(names)
        targets = {}
        for split, given in labels.items():
            found = places(given, self.class_names)
            for row in np.flatnonzero(found < 0)[:1]:
                text = f"the label {given[row]!r:.40} is in no training sample"
                raise SettingError("data", f"{where(tables[split], row)}: {text}")
            targets[split] = torch.from_numpy(found)
        return targets

    def take_owners(self, owners: Any, length: int) -> Owners | None:
        """A number for every sample's owner, in the order of their names, which are kept."""
        if owners is None:
            return None
        owners = np.asarray(owners)
        reason = f"must be one number or name for each of {length} samples"
        require(owners.shape == (length,), "owners", reason, owners.shape)
        names, numbers = np.unique(owners, return_inverse=True)
        self.owner_names = [str(name) for name in names]
        return numbers.astype(np.int64)

    def part_owners(self, parts: Mapping[str, Mapping[str, Sized]]) -> dict[str, Any]:
        """Whose the samples of every split are, which lie owner by owner, by their names."""
        names = self.owner_names = list(parts["train"])
        keys = {
            split: places([name for name, own in owned.items() for _ in range(len(own))], names)
            for split, owned in parts.items()
        }
        return {"keys": keys["train"], "test_keys": keys.get("test")}

    def column_owners(self, table: Any, owner: str | None) -> Owners | None:
        """The number of every row's owner, whom the column ``owner`` names."""
        named = owner is not None or not self.partition.by_owner
        require(named, "owner", f"must be the column of the owners, one of {', '.join(table)}")
        return self.take_owners(owner and column(table, owner, "owner"), len(table))


def joined(parts: Mapping[str, Examples]) -> Examples:
    """The examples of all owners, those of one after those of another."""
    first, *_ = parts.values()
    for name, part in parts.items():
        forms = [(each.inputs.dtype, *each.inputs.shape[1:]) for each in (part, first)]
        reason = f"the samples of {name!r:.40} must be like those of the others"
        require(forms[0] == forms[1], "path", reason)
    inputs = torch.cat([part.inputs for part in parts.values()])
    return replace(first, inputs=inputs, targets=torch.cat([p.targets for p in parts.values()]))


def places(values: Iterable[str], among: Sequence[str]) -> NDArray[np.int64]:
    """The place of every value among some others; -1 of one that is not there."""
    place = {value: number for number, value in enumerate(among)}
    return np.array([place.get(value, -1) for value in values], dtype=np.int64)


def _each(splits: Splits, change: Callable[[Examples], Examples]) -> Splits:
    val = None if splits.val is None else change(splits.val)
    return replace(splits, train=change(splits.train), test=change(splits.test), val=val)


# -- files ---------------------------------------------------------------------------------------


@contextmanager
def reading(source: object, key: str = "path") -> Iterator[None]:
    """Makes one line of any error of a library that reads a file of the user's."""
    try:
        yield
    except SettingError:
        raise
    except Exception as error:  # a damaged file fails in any way
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise SettingError(key, f"{source} cannot be read ({text:.200})") from error


def visible(folder: Path, pattern: str = "*") -> list[Path]:
    """The files and folders in a folder, by name, without hidden ones and what these hold.

    A zip file of a Mac's has a hidden file beside every file: ``__MACOSX/photos/._001.png``.
    """

    def hidden(file: Path) -> bool:
        return any(name.startswith((".", "__MACOSX")) for name in file.relative_to(folder).parts)

    with reading(folder):
        return sorted(file for file in folder.glob(pattern) if not hidden(file))


def parts_of(path: str | Path) -> dict[str, Path]:
    """The folders ``train``, ``test`` and ``val`` of a source, or all of it as ``train``."""
    folder = Path(path).expanduser()
    names = {"train": "train", "test": "test", "val": "val", "valid": "val", "validation": "val"}
    found = {names[file.name]: file for file in visible(folder) if file.name in names}
    return found if "train" in found else {"train": folder}


def class_tables(path: str | Path, endings: Sequence[str]) -> Tables:
    """A table of files for every split of a source."""
    return {split: class_files(folder, endings) for split, folder in parts_of(path).items()}


def class_files(folder: Path, endings: Sequence[str]) -> Any:
    """A table of the files of a folder of classes, and their labels."""
    import pandas as pd

    rows: list[tuple[Path, str]] = []
    for child in (child for child in visible(folder) if child.is_dir()):
        files = [file for file in visible(child, "**/*") if file.suffix.lower() in endings]
        require(len(files) > 0, "path", f"{child} has no files ({', '.join(endings)})")
        rows += [(file, child.name) for file in files]
    require(len(rows) > 0, "path", f"{folder} has no folders, one for each class")
    table = pd.DataFrame(rows, columns=["file", "label"], dtype=object)
    return table.set_index(table["file"])


# -- tables --------------------------------------------------------------------------------------


def numbered(table: Any, source: object) -> Any:
    """The table of a file, with the file and the number of each row from 1 as its index."""
    import pandas as pd

    return table.set_index(pd.MultiIndex.from_product([[str(source)], range(1, len(table) + 1)]))


def where(table: Any, row: int) -> str:
    """The file that a row is from, and its number in there if it has one."""
    place = table.index[row]
    return f"{place[0]}, row {place[1]}" if isinstance(place, tuple) else str(place)


def column(table: Any, name: str, key: str = "label") -> list[str]:
    """The cells of a column of names, none of them empty."""
    check_columns(table, [name], key)
    cells = [_name(cell) for cell in table[name]]
    if "" in cells:
        raise SettingError(key, f"{where(table, cells.index(''))}, column {name!r:.40} is empty")
    return cells


def numbers(
    table: Any, columns: Sequence[str], key: str = "columns", unowned: bool = False
) -> Tensor:
    """Rows × columns, float64; a cell that is no number is named.

    ``unowned``: its column may be one of owners, which nobody has named.
    """
    check_columns(table, columns, key)
    cells = table[list(columns)]
    values = np.ascontiguousarray(cells.map(_number).to_numpy(np.float64))  # or means differ
    for row, place in np.argwhere(~np.isfinite(values))[:1]:
        text = f"{where(table, row)}, column {columns[place]!r:.40} must be a number"
        hint = "fill it, or leave out the row or column"
        hint += f", or owner: {columns[place]}" * unowned
        raise SettingError(key, f"{text}; {hint}", f"{cells.iloc[row, place]!r:.40}")
    return torch.from_numpy(values)


def check_columns(table: Any, names: Sequence[str], key: str) -> None:
    """Refuses columns that a table does not have, and none."""
    missing = [f"{name!r:.40}" for name in names if name not in table]
    file = table.index.get_level_values(0)[0]
    reason = f"{file} has no column {', '.join(missing)}, but {', '.join(table)}"
    require(len(names) > 0 and not missing, key, reason)


def _name(cell: Any) -> str:
    if cell is None or cell != cell:  # NaN
        return ""
    return str(int(cell) if isinstance(cell, float) and cell.is_integer() else cell).strip()


def _number(cell: Any) -> float:
    try:
        return float(cell)
    except (TypeError, ValueError):
        return math.nan


# Inputs and labels as an .npz names them, the first pair that it has.
NAMES = (("inputs", "targets"), ("x", "y"), ("x_train", "y_train"), ("X", "y"))
TEST = (("test_inputs", "test_targets"), ("x_test", "y_test"))


class Arrays(OwnData):
    """Inputs and labels as arrays: NumPy, torch, or the paths of ``.npy`` and ``.npz`` files.

    A ``.npy`` file and a ``np.memmap`` stay on disk: nothing copies them as a whole, and worker
    processes map the same file. Bytes (uint8) become floats in [0, 1], other whole numbers stay
    token ids unless ``scale`` is given.

    Args:
        inputs: one row per sample; an ``.npz`` may hold ``inputs`` and ``targets`` (or ``x`` and
            ``y``, or ``x_train``, ``y_train``, ``x_test`` and ``y_test``).
        targets: the class number of every sample; floats are numbers to learn, not classes.
        test_inputs: those of a test set; by default ``test_fraction`` of the samples are it.
        test_targets: their class numbers.
        owners: a number or name per sample, for ``ByKey``.
        num_classes: by default the largest class number and one.
        class_names: in the order of their numbers.
        scale: inputs are divided by it; by default 255 for bytes, 1 for floats.
        shape: of a sample, where it is stored in another one, such as [1, 28, 28].
        transform: makes the net's input, instead of ``scale`` and ``shape``; see docs/data.md.
        kwargs: those of :class:`OwnData`.
    """

    name = "arrays"

    def __init__(
        self,
        inputs: Any,
        targets: Any = None,
        test_inputs: Any = None,
        test_targets: Any = None,
        owners: Any = None,
        num_classes: int | None = None,
        class_names: list[str] | None = None,
        scale: float | None = None,
        shape: list[int] | None = None,
        transform: Transform | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require(scale is None or scale > 0, "scale", "must be positive", scale)
        self.set_classes(num_classes, class_names)
        self.given = inputs, targets, test_inputs, test_targets
        self.owners = owners
        self.scale = scale
        self.shape = shape
        self.transform = transform

    @override
    def load(self) -> Splits:
        inputs, targets, *test = self.given
        if targets is None:
            inputs, targets, *theirs = read_pairs(inputs, "inputs")
            test = theirs if theirs and test[0] is None else test
        examples: dict[str, Any] = {"train": self._examples(inputs, targets, "")}
        if test[0] is not None:
            examples["test"] = self._examples(test[0], test[1], "test_")
        owners = read_array(self.owners, "owners")
        return self.split(**examples, keys=self.take_owners(owners, len(examples["train"])))

    def _examples(self, inputs: Any, targets: Any, split: str) -> Examples:
        key = f"{split}inputs"
        values = as_tensor(read_array(inputs, key), key)
        labels = as_labels(targets, f"{split}targets", len(values))
        if not isinstance(values, MappedTensor):  # of which the check of all data names the row
            check_finite(values, key)
        transform = self.transform or transform_for(values, self.scale, self.shape)
        return Examples(values, labels, transform)


def examples_of(inputs: Any, targets: Tensor, key: str) -> Examples:
    """Numbers of any kind with the usual transform."""
    values = as_tensor(inputs, key)
    return Examples(values, targets, transform_for(values))


def read_pairs(source: Any, key: str) -> list[Any]:
    """Inputs and labels of an ``.npz`` and, where it has them, those of its test set."""
    npz = isinstance(source, str | Path) and str(source).endswith(".npz")
    require(npz, key.replace("inputs", "targets"), "must be given")
    arrays = read_array(source, key)
    found = [[pair for pair in names if set(pair) <= arrays.keys()] for names in (NAMES, TEST)]
    require(bool(found[0]), key, f"{source} must have inputs and targets, or x and y")
    return [arrays[name] for pairs in found for pair in pairs[:1] for name in pair]


def transform_for(
    values: Tensor, scale: float | None = None, shape: Sequence[int] | None = None
) -> Transform:
    """The transform of such numbers to a net's inputs; see :class:`Arrays`."""
    whole = not values.is_floating_point() and values.dtype != torch.bool
    if whole and values.dtype != torch.uint8 and scale is None:
        return Ids()
    usual = 255.0 if values.dtype == torch.uint8 else 1.0
    return Scale(usual if scale is None else scale, shape)


def read_array(source: Any, key: str) -> Any:
    """An array as it is, of an ``.npy`` a memory map, of an ``.npz`` its arrays by name."""
    if not isinstance(source, str | Path):
        return source
    file = Path(source).expanduser()
    reason = "must be an array, or the path of an .npy or .npz file"
    require(file.suffix in (".npy", ".npz"), key, reason, source)
    with reading(file, key):
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        return array if file.suffix == ".npy" else dict(array)


def as_labels(source: Any, key: str, length: int | None = None) -> Tensor:
    """Class numbers in memory, as int64, or numbers to learn, as float32."""
    labels = as_tensor(read_array(source, key), key)
    fits = length in (None, len(labels))
    require(fits, key, f"must be as many as the samples, {length}", len(labels))
    check_finite(labels, key)
    return labels.to(torch.float32 if labels.is_floating_point() else torch.int64, copy=True)
