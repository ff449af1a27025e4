"""Texts of the user's own: a file per text in a folder per class, or a table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedgkd_pl.data.datasets.text import (
    TrimPadding,
    check_tokens,
    encode,
    load_tokenizer,
    vocabulary_of,
)
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.inputs import TextInputs
from fedgkd_pl.data.sources.base import OwnData, class_files, column, parts_of, reading
from fedgkd_pl.data.sources.tables import read_csv, read_tables
from fedgkd_pl.errors import require
from torch import Tensor, nn
from typing_extensions import override


class OwnTexts(OwnData):
    """Base of the sources that may hold texts.

    Args:
        tokenizer: a Hugging Face name, a local folder, or a ``vocab.txt`` of WordPieces.
        max_length: longer texts are cut to this many tokens.
        kwargs: those of :class:`OwnData`.
    """

    def __init__(self, tokenizer: str | None = None, max_length: int = 128, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        require(max_length >= 2, "max_length", "must be at least 2", max_length)
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.tokens: tuple[int, int] | None = None  # the padding and the largest id

    def tokenise(
        self, texts: Mapping[str, list[str]], targets: Mapping[str, Tensor], column: str
    ) -> dict[str, Any]:
        """The examples of every split; ``column`` is that of the texts, in a table."""
        require(self.tokenizer is not None, "tokenizer", "texts need one")
        tokenizer = load_tokenizer(str(self.tokenizer))
        text = vocabulary_of(tokenizer)
        self.reading = TextInputs(column, str(self.tokenizer), self.max_length, text)
        ids = {
            split: encode(tokenizer, content, self.max_length) for split, content in texts.items()
        }
        self.tokens = tokenizer.pad_token_id, max(int(each.max()) for each in ids.values())
        trim = TrimPadding(tokenizer.pad_token_id)
        return {split: Examples(each, targets[split], trim) for split, each in ids.items()}

    @override
    def check_net(self, net: nn.Module) -> None:
        if self.tokens is not None:
            check_tokens(net, str(self.tokenizer), *self.tokens)


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
            tables = {
                split: class_files(folder, (".txt",)) for split, folder in parts_of(path).items()
            }
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
