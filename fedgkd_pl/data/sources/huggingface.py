"""Datasets of Hugging Face: images, texts or numbers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from fedgkd_pl.data.examples import Splits
from fedgkd_pl.data.inputs import Decoder
from fedgkd_pl.data.sources.arrays import as_labels, examples_of
from fedgkd_pl.data.sources.base import Owners, Tables, numbered, reading, where
from fedgkd_pl.data.sources.tables import OwnTexts
from fedgkd_pl.errors import SettingError, installs, require
from torch import Tensor
from typing_extensions import override

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

        wanted = {name: "columns" for name in self.columns} | {self.label: "label"}
        wanted |= {} if self.owner is None else {self.owner: "owner"}
        found, tables = self._splits(), {}
        for split, rows in found.items():
            require(len(rows) > 0, "dataset", f"{split} has no rows")
            for name, key in wanted.items():
                reason = f"{split} has no column {name!r:.40}, but {', '.join(rows.column_names)}"
                require(name in rows.column_names, key, reason)
            plain = rows.with_format(None)
            tables[split] = numbered(pd.DataFrame({n: list(plain[n]) for n in wanted}), split)
        classes = getattr(found["train"].features[self.label], "names", None)
        if classes is None:
            targets = self.class_targets(tables, self.label)
        else:  # in their own order, with those that have no sample
            self.class_names, self.num_classes = classes, len(classes)
            cells = {split: table[self.label].to_numpy() for split, table in tables.items()}
            targets = {split: as_labels(labels, "label") for split, labels in cells.items()}
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
