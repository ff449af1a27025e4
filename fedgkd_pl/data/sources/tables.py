"""Tables with a column of labels: CSV, Parquet and Hugging Face's, and texts in files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from fedgkd_pl.data.datasets.text import Tokenised
from fedgkd_pl.data.examples import Splits
from fedgkd_pl.data.inputs import Decoder
from fedgkd_pl.data.sources.base import (
    OwnData,
    Owners,
    Tables,
    as_labels,
    check_columns,
    class_tables,
    column,
    examples_of,
    numbered,
    numbers,
    reading,
    where,
)
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
        """The table of a file."""
        return read_csv(file, key)

    @override
    def load(self) -> Splits:
        tables = read_tables(self.read, self.path, self.test_path)
        train = tables["train"]
        columns = self.columns or [name for name in train if name not in (self.label, self.owner)]
        if self.regression:
            self.num_classes = 0
            targets = {
                split: numbers(table, [self.label], "label").float()
                for split, table in tables.items()
            }
        else:
            targets = self.class_targets(tables, self.label)
            text = f"each of {len(train)} rows has another label: for numbers, regression: true"
            require(self.num_classes < max(len(train), 10), "label", text, self.label)
        owners = self.column_owners(train, self.owner)
        return self.table_splits(tables, columns, targets, self.standardise, keys=owners)


class ParquetTable(CSVTable):
    """A Parquet file, as :class:`CSVTable`; needs the extra ``parquet``."""

    name = "parquet"

    @override
    def read(self, file: Path, key: str) -> Any:
        import pandas as pd

        wanted = self.columns and list(filter(None, [*self.columns, self.label, self.owner]))
        with reading(file, key):
            return numbered(pd.read_parquet(file, "pyarrow", wanted), file)


class OwnTexts(Tokenised, OwnData):
    """Base of the sources that may hold texts.

    Args:
        tokenizer: a Hugging Face name, a local folder, or a ``vocab.txt`` of WordPieces.
        max_length: longer texts are cut to this many tokens.
        kwargs: those of :class:`OwnData`.
    """


class TextFiles(OwnTexts):
    """Texts: ``.txt`` files in a folder per class, or a ``.csv`` or ``.tsv`` with a header.

    A folder may have folders ``train``, ``test`` and ``val``, each with the classes' folders.

    Args:
        path: the folder or the file.
        tokenizer: a Hugging Face name, a local folder, or a ``vocab.txt`` of WordPieces.
        text: the column of the texts.
        label: the column of the labels.
        owner: the column that names the owner of each text, for ``ByKey``.
        test_path: the file of a test set; by default ``test_fraction`` of the texts are it.
        kwargs: those of :class:`OwnTexts`.
    """

    name = "texts"

    def __init__(
        self,
        path: str,
        tokenizer: str = "distilbert-base-uncased",
        text: str = "text",
        label: str = "label",
        owner: str | None = None,
        test_path: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, **kwargs)
        self.path = path
        self.text = text
        self.label = label
        self.owner = owner
        self.test_path = test_path

    @override
    def load(self) -> Splits:
        path, keys = Path(self.path).expanduser(), None
        if path.is_dir():
            tables = class_tables(path, (".txt",))
            texts = {split: list(map(_read, table["file"])) for split, table in tables.items()}
            targets = self.class_targets(tables)
        else:
            tables = read_tables(read_csv, path, self.test_path)
            texts = {split: column(table, self.text, "text") for split, table in tables.items()}
            keys = self.column_owners(tables["train"], self.owner)
            targets = self.class_targets(tables, self.label)
        return self.split(**self.tokenise(texts, targets, self.text), keys=keys)


def _read(file: Path) -> str:
    with reading(file):
        return file.read_text(encoding="utf-8-sig")


def read_tables(read: Callable[..., Any], path: str | Path, test_path: str | None) -> Tables:
    """The tables of a file and, if there is one, of that of the test set."""
    tables = {"train": read(Path(path).expanduser(), "path")}
    if test_path is not None:
        tables["test"] = read(Path(test_path).expanduser(), "test_path")
    return tables


def read_csv(file: Path, key: str = "path") -> Any:
    """The cells, as texts, of a file with a header; those of a ``.tsv`` end with a tab."""
    import pandas as pd

    tab = "\t" if file.suffix == ".tsv" else ","
    with reading(file, key):  # the header as a row: pandas would rename columns of the same name
        rows = pd.read_csv(
            file, sep=tab, header=None, dtype=object, na_filter=False, encoding="utf-8-sig"
        )
    header = pd.Index(rows.iloc[0])
    require(header.is_unique, key, f"{file} has two columns of one name")
    require(len(rows) > 1, key, f"{file} has no rows")
    return numbered(rows[1:].set_axis(header, axis=1), file)


SPLITS = {"train": "train", "test": "test", "validation": "val"}


class HuggingFace(OwnTexts):
    """A dataset of Hugging Face with its splits ``train``, ``test`` and ``validation``.

    Needs the extra ``hf``. One column of images, of texts or of lists of numbers, or several
    columns of one number each, which are standardised by the training rows.

    Args:
        dataset: its name on the hub, a folder of ``save_to_disk``, or the object.
        label: the column of the labels.
        columns: the column of inputs, or several.
        config: the configuration of a dataset that has several.
        owner: the column that names the owner of each row, for ``ByKey``.
        size: resize images; see :class:`ImageFolders`.
        grayscale: one channel of images instead of three.
        kwargs: those of :class:`OwnTexts`: ``tokenizer`` for texts, ``max_length``.
    """

    name = "huggingface"

    def __init__(
        self,
        dataset: Any,
        label: str = "label",
        columns: str | list[str] = "image",
        config: str | None = None,
        owner: str | None = None,
        size: int | list[int] | None = None,
        grayscale: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.dataset = dataset
        self.label = label
        self.columns = [columns] if isinstance(columns, str) else list(columns)
        require(len(self.columns) > 0, "columns", "must name a column at least")
        self.config = config
        self.owner = owner
        self.decoder = Decoder(size, grayscale)

    @override
    def load(self) -> Splits:
        import pandas as pd

        found, tables = self._splits(), {}
        wanted = {*self.columns, self.label, self.owner}
        for split, rows in found.items():
            require(len(rows) > 0, "dataset", f"{split} has no rows")
            plain = rows.with_format(None)
            cells = {name: list(plain[name]) for name in rows.column_names if name in wanted}
            tables[split] = numbered(pd.DataFrame(cells), split)
            check_columns(tables[split], self.columns, "columns")
        classes = getattr(found["train"].features.get(self.label), "names", None)
        if classes is None:
            targets = self.class_targets(tables, self.label)
        else:  # in their own order, with those that have no sample
            self.class_names, self.num_classes = classes, len(classes)
            targets = {
                split: as_labels(table[self.label].to_numpy(), "label")
                for split, table in tables.items()
            }
        return self._read(tables, targets, self.column_owners(tables["train"], self.owner))

    def _splits(self) -> dict[str, Any]:
        try:
            import datasets
        except ImportError as error:
            reason = f"Hugging Face's datasets need {installs('hf')}"
            raise SettingError("dataset", reason) from error
        found = self.dataset
        if isinstance(found, str):
            saved = Path(found).expanduser()
            here = any((saved / file).is_file() for file in ("state.json", "dataset_dict.json"))
            with reading(found, "dataset"):
                load = datasets.load_dataset
                found = datasets.load_from_disk(saved) if here else load(found, self.config)
        splits = dict(found) if isinstance(found, Mapping) else {"train": found}
        require("train" in splits, "dataset", "must have a split train", ", ".join(splits))
        return {SPLITS[name]: rows for name, rows in splits.items() if name in SPLITS}

    def _read(self, tables: Tables, targets: dict[str, Tensor], owners: Owners | None) -> Splits:
        """The splits, by what the first cell of the only column is."""
        name = self.columns[0]
        first = tables["train"][name].iloc[0] if len(self.columns) == 1 else None
        if not isinstance(first, str | list) and not hasattr(first, "convert"):
            return self.table_splits(tables, self.columns, targets, keys=owners)
        for table in tables.values():
            for row in np.flatnonzero(table[name].isna())[:1]:
                raise SettingError("columns", f"{where(table, row)}, {name!r:.40} is empty")
        cells = {split: table[name].tolist() for split, table in tables.items()}
        if hasattr(first, "convert"):
            return self.image_splits(cells, targets, self.decoder, keys=owners)
        if isinstance(first, str):
            return self.split(**self.tokenise(cells, targets, name), keys=owners)
        examples: dict[str, Any] = {
            split: examples_of(rows, targets[split], "columns") for split, rows in cells.items()
        }
        return self.split(**examples, keys=owners)
