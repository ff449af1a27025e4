"""Datasets of Hugging Face: images, texts or numbers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.inputs import ImageInputs, decode
from fedgkd_pl.data.mapped import as_tensor
from fedgkd_pl.data.sources.arrays import transform_for
from fedgkd_pl.data.sources.base import in_order
from fedgkd_pl.data.sources.images import check_size, normalised
from fedgkd_pl.data.sources.tables import column, numbers
from fedgkd_pl.data.sources.text import OwnTexts
from fedgkd_pl.errors import SettingError, installs, require
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
        check_size(size)
        self.dataset = dataset
        self.label = label
        self.columns = [columns] if isinstance(columns, str) else list(columns)
        require(len(self.columns) > 0, "columns", "must name a column at least")
        self.config = config
        self.owner = owner
        self.form = size, grayscale

    @override
    def load(self) -> Splits:
        wanted = dict.fromkeys([*self.columns, self.label, *([self.owner] if self.owner else [])])
        cells: dict[str, dict[str, list[Any]]] = {}
        found = self._splits()
        for split, rows in found.items():
            for name in wanted:
                key = {self.label: "label", self.owner: "owner"}.get(name, "columns")
                known = ", ".join(rows.column_names)
                reason = f"{split} has no column {name!r:.40}, but {known}"
                require(name in rows.column_names, key, reason)
            plain = rows.with_format(None)
            cells[split] = {name: list(plain[name]) for name in wanted}
            require(len(rows) > 0, "dataset", f"{split} has no rows")
        classes = getattr(found["train"].features[self.label], "names", None)
        labels = {
            split: column(each, self.label, "label", Path(split)) for split, each in cells.items()
        }
        self.take_names(labels["train"])
        if classes is not None:  # in their own order, with those that have no sample
            self.class_names = [str(number) for number in range(len(classes))]
            self.num_classes = len(classes)
        targets = {split: self.row_targets(values, split) for split, values in labels.items()}
        self.class_names = classes or self.class_names
        keys = None
        if self.owner is not None:
            owners = column(cells["train"], self.owner, "owner", Path("train"))
            keys = self.take_owners(owners, len(owners))
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
        require("train" in splits, "dataset", "must have a split train", ", ".join(splits))
        return {SPLITS[name]: rows for name, rows in splits.items() if name in SPLITS}

    def _examples(self, cells: Any, targets: Any, keys: Any) -> Splits:
        values = {split: rows[self.columns[0]] for split, rows in cells.items()}
        first = values["train"][0] if len(self.columns) == 1 else None
        images, texts = hasattr(first, "convert"), isinstance(first, str)
        for split, rows in values.items():
            gap = rows.index(None) + 1 if (images or texts) and None in rows else 0
            require(not gap, "columns", f"{split}, row {gap}, {self.columns[0]!r:.40} is empty")
        if texts:
            return self.split(*in_order(self.tokenise(values, targets, self.columns[0])), keys=keys)
        if images:
            pixels = decode([image for each in values.values() for image in each], *self.form)
            lengths = [len(each) for each in values.values()]
            tensors = dict(zip(values, pixels.split(lengths), strict=True))
        elif isinstance(first, list):
            tensors = {split: as_tensor(rows, "columns") for split, rows in values.items()}
        else:
            tensors = {s: numbers(rows, self.columns, Path(s)) for s, rows in cells.items()}
        examples = {
            split: Examples(tensor, targets[split], transform_for(tensor, None, None))
            for split, tensor in tensors.items()
        }
        splits = self.split(*in_order(examples), keys=keys)
        if images:
            self.reading = ImageInputs(resize=self.form[0] is not None)
            return normalised(splits, self.training_part(splits))
        return splits if isinstance(first, list) else self.standardised(splits, self.columns)


def _fetch(name: str, config: str | None) -> Any:
    from datasets import load_dataset

    return load_dataset(name, config)
