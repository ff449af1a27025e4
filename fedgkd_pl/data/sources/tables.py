"""Tables of numbers with a column of labels: CSV and Parquet."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.raw import Cells
from fedgkd_pl.data.sources.base import OwnData, read_text
from fedgkd_pl.data.transforms import Scale
from fedgkd_pl.errors import SettingError, installs, require
from torch import Tensor

Columns = Mapping[str, Sequence[Any]]  # the cells of every column


class CSVTable(OwnData):
    """A CSV file with a header: columns of numbers, and one of labels.

    Args:
        path: the file; rows are counted from 1, without the header.
        label: the column of the labels, which may be names or numbers, or of what is learned.
        columns: the columns of inputs; by default all but those of labels and owners.
        test_path: another file, the test set; by default ``test_fraction`` of the rows are it.
        owner: the column that names the owner of each row, for ``ByKey``.
        standardise: shift and scale every column to mean 0 and standard deviation 1 over the
            training rows (without those for validation and test).
        regression: the column ``label`` holds numbers to learn, not classes.
        kwargs: those of :class:`OwnData`.
    """

    name = "csv"

    def __init__(
        self,
        path: str,
        label: str,
        columns: list[str] | None = None,
        test_path: str | None = None,
        owner: str | None = None,
        standardise: bool = True,
        regression: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.path = path
        self.label = label
        self.columns = columns
        self.test_path = test_path
        self.owner = owner
        self.standardise = standardise
        self.regression = regression

    def read(self, file: Path, key: str) -> Columns:
        """The columns of a file."""
        return read_csv(file, key)

    def load(self) -> Splits:
        """See :meth:`FederatedDataModule.load`."""
        file = Path(self.path).expanduser()
        cells = self.read(file, "path")
        left_out = {self.label, *([self.owner] if self.owner else [])}
        columns = self.columns or [name for name in cells if name not in left_out]
        if self.regression:
            self.num_classes = 0
        else:
            labels = column(cells, self.label, "label", file)
            self.take_names(labels)
            text = f"each of {len(labels)} rows has another label: for numbers, regression: true"
            require(self.num_classes < max(len(labels), 10), "label", text, self.label)
        keys = None
        if self.owner is not None:
            keys = self.take_owners(column(cells, self.owner, "owner", file))
        train = self._examples(cells, columns, file)
        test = None
        if self.test_path is not None:
            file = Path(self.test_path).expanduser()
            test = self._examples(self.read(file, "test_path"), columns, file)
        splits = self.split(train, test, keys=keys)
        fitting = self.fitting(splits).inputs
        splits, self.reading = standardised(splits, fitting, columns, self.standardise)
        return splits

    def _examples(self, cells: Columns, columns: Sequence[str], file: Path) -> Examples:
        if self.regression:
            targets = numbers(cells, [self.label], file, "label").float()
        else:
            targets = self.row_targets(column(cells, self.label, "label", file), file)
        return Examples(numbers(cells, columns, file), targets, Scale(1))


class ParquetTable(CSVTable):
    """A Parquet file, as :class:`CSVTable`; needs the extra ``parquet``.

    Args:
        path: the file; rows are counted from 1.
        label: the column of the labels, which may be names or numbers.
        kwargs: those of :class:`CSVTable`.
    """

    name = "parquet"

    def __init__(self, path: str, label: str, **kwargs: Any) -> None:
        super().__init__(path, label, **kwargs)

    def read(self, file: Path, key: str) -> Columns:
        """The columns of a file."""
        wanted = [self.label, *(self.columns or ()), *([self.owner] if self.owner else [])]
        return read_parquet(file, key, wanted if self.columns else None)


def read_parquet(file: Path, key: str, columns: list[str] | None = None) -> Columns:
    """The cells of some columns of a file, by default of all."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise SettingError(key, f"Parquet needs {installs('parquet')}", file) from error
    require(file.is_file(), key, f"{file}: there is no such file")
    try:
        table = parquet.read_table(file, columns=columns)
    except Exception as error:  # a damaged file fails in any way
        raise SettingError(key, f"{file} cannot be read ({error!s:.100})") from error
    return {name: table[name].to_numpy() for name in table.column_names}


def read_csv(file: Path, key: str = "path") -> dict[str, list[str]]:
    """The cells of every column of a file with a header, or of a ``.tsv``."""
    tab = "\t" if file.suffix == ".tsv" else ","
    rows = csv.reader(io.StringIO(read_text(file, key), newline=""), delimiter=tab, strict=True)
    body: list[list[str]] = []
    try:
        header = next(rows, [])
        require(len(header) > 0, key, f"{file} has no header")
        twice = next((name for name in header if header.count(name) > 1), None)
        require(twice is None, key, f"{file} has two columns of the name {twice!r:.40}")
        for row in rows:
            if not row:
                continue
            body.append(row)
            reason = f"{file}, row {len(body)} has {len(row)} cells, the header {len(header)}"
            require(len(row) == len(header), key, reason)
    except csv.Error as error:
        raise SettingError(key, f"{file}, line {rows.line_num}: {error}") from error
    require(len(body) > 0, key, f"{file} has no rows")
    return {name: [row[place] for row in body] for place, name in enumerate(header)}


def column(cells: Columns, name: str, key: str, file: Path) -> list[str]:
    """The cells of a column of names, none of them empty."""
    require(name in cells, key, f"{file} has no column {name!r:.40}, but {', '.join(cells)}")
    texts = [_name(cell) for cell in cells[name]]
    for row, text in enumerate(texts, 1):
        require(bool(text), key, f"{file}, row {row}, column {name!r:.40} is empty")
    return texts


def _name(cell: Any) -> str:
    if cell is None or cell != cell:  # NaN
        return ""
    whole = isinstance(cell, float) and cell.is_integer()
    return str(int(cell) if whole else cell).strip()


def numbers(cells: Columns, columns: Sequence[str], file: Path, key: str = "columns") -> Tensor:
    """Rows × columns, float64; a cell that is no number is named."""
    require(len(columns) > 0, key, f"{file} has no columns of inputs")
    table = np.empty((len(next(iter(cells.values()))), len(columns)))
    for place, name in enumerate(columns):
        require(name in cells, key, f"{file} has no column {name!r:.40}, but {', '.join(cells)}")
        try:
            table[:, place] = np.asarray(cells[name], dtype=np.float64)
        except (TypeError, ValueError) as error:
            row, cell = next(bad for bad in enumerate(cells[name], 1) if not _is_number(bad[1]))
            what = "is empty" if cell in ("", None) else f"is no number: {cell!r:.40}"
            hint = "leave the column out with columns, or make it numbers"
            reason = f"{file}, row {row}, column {name!r:.40} {what} ({hint})"
            raise SettingError(key, reason) from error
        bad_rows = np.flatnonzero(~np.isfinite(table[:, place]))
        if len(bad_rows):
            what = f"row {bad_rows[0] + 1}, column {name!r:.40} is empty, NaN or infinite"
            raise SettingError(key, f"{file}, {what}: fill it, or leave the row out")
    return torch.from_numpy(table)


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return True


def standardised(
    splits: Splits, fitting: Tensor, columns: Sequence[str], standardise: bool = True
) -> tuple[Splits, Cells]:
    """The splits as float32, by default with mean 0 and deviation 1 over ``fitting``; and by what.

    A column that is constant there is only shifted.
    """
    mean, deviation = np.zeros(len(columns)), np.ones(len(columns))
    if standardise:
        mean, spread = fitting.numpy().mean(axis=0), fitting.numpy().std(axis=0)
        deviation = np.where(spread > 0, spread, 1.0)
    cells = Cells(tuple(columns), tuple(mean.tolist()), tuple(deviation.tolist()))

    def change(examples: Examples) -> Examples:
        return replace(examples, inputs=scaled(examples.inputs, cells))

    val = None if splits.val is None else change(splits.val)
    changed = replace(splits, train=change(splits.train), test=change(splits.test), val=val)
    return changed, cells


def scaled(values: Tensor, cells: Cells) -> Tensor:
    """Rows of a table, float64, as they are stored."""
    mean, deviation = np.asarray(cells.mean), np.asarray(cells.deviation)
    return torch.from_numpy(((values.numpy() - mean) / deviation).astype(np.float32))
