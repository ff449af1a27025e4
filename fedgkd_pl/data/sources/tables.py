"""Tables of numbers with a column of labels: CSV and Parquet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.sources.base import OwnData, in_order
from fedgkd_pl.data.transforms import Scale
from fedgkd_pl.errors import SettingError, installs, require
from torch import Tensor
from typing_extensions import override


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

    def read(self, file: Path, key: str) -> Any:
        """The columns of a file."""
        return read_csv(file, key)

    @override
    def load(self) -> Splits:
        file = Path(self.path).expanduser()
        cells = self.read(file, "path")
        columns = self.columns or [c for c in cells if c not in (self.label, self.owner)]
        if self.regression:
            self.num_classes = 0
        else:
            labels = column(cells, self.label, "label", file)
            self.take_names(labels)
            text = f"each of {len(labels)} rows has another label: for numbers, regression: true"
            require(self.num_classes < max(len(labels), 10), "label", text, self.label)
        keys = None
        if self.owner is not None:
            keys = self.take_owners(column(cells, self.owner, "owner", file), len(cells))
        examples = {"train": self._examples(cells, columns, file)}
        if self.test_path is not None:
            file = Path(self.test_path).expanduser()
            examples["test"] = self._examples(self.read(file, "test_path"), columns, file)
        return self.standardised(self.split(*in_order(examples), keys), columns, self.standardise)

    def _examples(self, cells: Any, columns: Sequence[str], file: Path) -> Examples:
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

    @override
    def read(self, file: Path, key: str) -> Any:
        wanted = [self.label, *(self.columns or ()), *([self.owner] if self.owner else [])]
        return read_parquet(file, key, wanted if self.columns else None)


def read_parquet(file: Path, key: str, columns: list[str] | None = None) -> Any:
    """Some columns of a file, by default all."""
    import pandas as pd

    try:
        return pd.read_parquet(file, columns=columns)
    except ImportError as error:
        raise SettingError(key, f"Parquet needs {installs('parquet')}", file) from error
    except Exception as error:  # a damaged file fails in any way
        raise SettingError(key, f"{file} cannot be read ({error!s:.200})") from error


def read_csv(file: Path, key: str = "path") -> Any:
    """The columns, as texts, of a file with a header; cells of a ``.tsv`` end with a tab."""
    import pandas as pd

    tab = "\t" if file.suffix == ".tsv" else ","
    try:  # the header is read as a row: pandas would rename columns of the same name
        rows = pd.read_csv(
            file, sep=tab, header=None, dtype=object, na_filter=False, encoding="utf-8-sig"
        )
    except (OSError, ValueError) as error:  # pandas names the line
        why = " ".join(str(error).split())
        raise SettingError(key, f"{file} cannot be read ({why:.200})") from error
    header = rows.iloc[0].tolist()
    twice = sorted({name for name in header if header.count(name) > 1})
    require(not twice, key, f"{file} has two columns of the name", ", ".join(twice))
    require(len(rows) > 1, key, f"{file} has no rows")
    return rows[1:].set_axis(header, axis=1)


def column(cells: Any, name: str, key: str, file: Path) -> list[str]:
    """The cells of a column of names, none of them empty."""
    require(name in cells, key, f"{file} has no column {name!r:.40}, but {', '.join(cells)}")
    texts = [_name(cell) for cell in cells[name]]
    row = texts.index("") + 1 if "" in texts else 0
    require(row == 0, key, f"{file}, row {row}, column {name!r:.40} is empty")
    return texts


def _name(cell: Any) -> str:
    if cell is None or cell != cell:  # NaN
        return ""
    whole = isinstance(cell, float) and cell.is_integer()
    return str(int(cell) if whole else cell).strip()


def numbers(cells: Any, columns: Sequence[str], file: Path, key: str = "columns") -> Tensor:
    """Rows × columns, float64; a cell that is no number is named."""
    import pandas as pd

    require(len(columns) > 0, key, f"{file} has no columns of inputs")
    table = []
    for name in columns:
        require(name in cells, key, f"{file} has no column {name!r:.40}, but {', '.join(cells)}")
        given = list(cells[name])
        try:
            values = np.asarray(given, dtype=np.float64)
        except (TypeError, ValueError):
            values = np.asarray(pd.to_numeric(pd.Series(given), errors="coerce"), dtype=np.float64)
        for row in np.flatnonzero(~np.isfinite(values))[:1]:
            reason = f"{file}, row {row + 1}, column {name!r:.40} must be a number; fill it, or "
            reason += "leave out the row or column"
            raise SettingError(key, reason, f"{given[row]!r:.40}")
        table.append(values)
    return torch.from_numpy(np.stack(table, axis=1))
