"""Datasets of Hugging Face: images, texts or numbers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.mapped import as_tensor
from fedgkd_pl.data.raw import Pictures
from fedgkd_pl.data.sources.arrays import transform_for
from fedgkd_pl.data.sources.images import check_size, decode, normalised
from fedgkd_pl.data.sources.tables import column, numbers, standardised
from fedgkd_pl.data.sources.text import OwnTexts
from fedgkd_pl.data.transforms import Scale
from fedgkd_pl.errors import SettingError, installs, require

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
        check_size(size)
        self.dataset = dataset
        self.label = label
        self.columns = [columns] if isinstance(columns, str) else list(columns)
        require(len(self.columns) > 0, "columns", "must name a column at least")
        self.config = config
        self.owner = owner
        self.size = size
        self.grayscale = grayscale

    def load(self) -> Splits:
        """See :meth:`FederatedDataModule.load`."""
        wanted = dict.fromkeys([*self.columns, self.label, *([self.owner] if self.owner else [])])
        cells: dict[str, dict[str, list[Any]]] = {}
        found = self._splits()
        for split, rows in found.items():
            for name in wanted:
                columns = rows.column_names
                reason = f"{split} has no column {name!r:.40}, but {', '.join(columns)}"
                key = {self.label: "label", self.owner: "owner"}.get(name, "columns")
                require(name in columns, key, reason)
            plain = rows.with_format(None)
            cells[split] = {name: list(plain[name]) for name in wanted}
            require(len(cells[split][self.label]) > 0, "dataset", f"{split} has no rows")
        names = getattr(found["train"].features[self.label], "names", None)
        labels = {split: self._labels(split, rows, names) for split, rows in cells.items()}
        self.take_names(labels["train"])
        if names is not None:  # in their own order, with those that have no sample
            self.class_names, self.num_classes = list(names), len(names)
        targets = {split: self.row_targets(values, split) for split, values in labels.items()}
        keys = None
        if self.owner is not None:
            keys = self.take_owners(column(cells["train"], self.owner, "owner", Path("train")))
        return self._examples(cells, targets, keys)

    def _splits(self) -> dict[str, Any]:
        try:
            import datasets
        except ImportError as error:
            reason = f"Hugging Face's datasets need {installs('hf')}"
            raise SettingError("dataset", reason) from error
        found = self.dataset
        if isinstance(found, str):
            try:
                saved = Path(found).expanduser()
                here = any((saved / f).is_file() for f in ("state.json", "dataset_dict.json"))
                found = datasets.load_from_disk(saved) if here else _fetch(found, self.config)
            except Exception as error:  # the hub and damaged files raise many classes
                line = (str(error).splitlines() or [type(error).__name__])[0]
                raise SettingError("dataset", f"cannot be read ({line:.200})", found) from error
        splits = dict(found) if isinstance(found, Mapping) else {"train": found}
        reason = f"must have a split train, and has {', '.join(map(str, splits))}"
        require("train" in splits, "dataset", reason)
        return {SPLITS[name]: rows for name, rows in splits.items() if name in SPLITS}

    def _labels(self, split: str, cells: Mapping[str, list[Any]], names: Any) -> list[str]:
        if names is None:
            return column(cells, self.label, "label", Path(split))
        for row, label in enumerate(cells[self.label], 1):
            known = isinstance(label, int) and 0 <= label < len(names)
            reason = f"{split}, row {row}: {label!r:.40} is none of {len(names)} classes"
            require(known, "label", reason)
        return [names[label] for label in cells[self.label]]

    def _examples(self, cells: Any, targets: Any, keys: Any) -> Splits:
        first = cells["train"][self.columns[0]][0]
        single = len(self.columns) == 1
        values = {split: rows[self.columns[0]] for split, rows in cells.items()}
        if single and isinstance(first, str):
            self._no_gaps(values, str)
            examples = self.tokenise(values, targets, self.columns[0])
        elif single and hasattr(first, "convert"):  # an image of Pillow's
            self._no_gaps(values, type(first))
            pixels = decode([i for images in values.values() for i in images], *self._form())
            parts = torch.split(pixels, [len(images) for images in values.values()])
            pairs = zip(values, parts, strict=True)
            examples = {split: Examples(part, targets[split], Scale(255)) for split, part in pairs}
        elif single and isinstance(first, list):
            tensors = {split: as_tensor(rows, "columns") for split, rows in values.items()}
            examples = {
                split: Examples(tensor, targets[split], transform_for(tensor, None, None))
                for split, tensor in tensors.items()
            }
        else:
            examples = {
                split: Examples(numbers(rows, self.columns, Path(split)), targets[split], Scale(1))
                for split, rows in cells.items()
            }
        splits = self.split(examples["train"], examples.get("test"), examples.get("val"), keys)
        if single and hasattr(first, "convert"):
            self.reading = Pictures(resize=self.size is not None)
            return normalised(splits, self.fitting(splits), augment=False)
        if not single or not isinstance(first, str | list):
            splits, self.reading = standardised(splits, self.fitting(splits).inputs, self.columns)
        return splits

    def _form(self) -> tuple[Any, bool]:
        return self.size, self.grayscale

    def _no_gaps(self, values: Mapping[str, list[Any]], kind: type) -> None:
        for split, cells in values.items():
            for row, cell in enumerate(cells, 1):
                reason = f"{split}, row {row}, column {self.columns[0]!r:.40} is empty"
                require(cell is not None, "columns", reason)


def _fetch(name: str, config: str | None) -> Any:
    from datasets import load_dataset

    return load_dataset(name, config)
