"""Texts as token ids, tokenised at every start and padded per batch: AG News and SST-5."""

import csv
import io
import re
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.downloads import provide, read_text
from fedgkd_pl.data.examples import Examples, Splits, TrimPadding
from fedgkd_pl.data.inputs import TextInputs
from fedgkd_pl.data.sources.base import reading
from fedgkd_pl.errors import at_least, not_negative, require
from fedgkd_pl.models.text import load_transformers
from torch import Tensor, nn
from typing_extensions import override

Texts = tuple[list[str], list[int]]  # the texts and their labels


class Tokenised(FederatedDataModule):
    """Base of data that may be texts.

    Args:
        tokenizer: a Hugging Face name, a local folder, or a ``vocab.txt`` of WordPieces.
        max_length: longer texts are cut to this many tokens.
        kwargs: those of the base that follows.
    """

    tokens: tuple[int, int] | None = None  # the padding and the largest id

    def __init__(self, tokenizer: str | None = None, max_length: int = 128, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        at_least(2, max_length=max_length)
        self.tokenizer = tokenizer
        self.max_length = max_length

    def tokenise(
        self, texts: Mapping[str, list[str]], targets: Mapping[str, Tensor], column: str = "text"
    ) -> dict[str, Any]:
        """The examples of every split; ``column`` is that of the texts, in a table."""
        require(self.tokenizer is not None, "tokenizer", "texts need one")
        name = str(self.tokenizer)
        tokenizer = load_tokenizer(name)
        own = getattr(tokenizer, "backend_tokenizer", None)  # what a tokenizer.json holds
        vocabulary = "" if own is None else own.to_str()
        self.reading = TextInputs(column, name, self.max_length, vocabulary)
        ids = {split: encode(tokenizer, given, self.max_length) for split, given in texts.items()}
        self.tokens = tokenizer.pad_token_id, max(int(each.max()) for each in ids.values())
        trim = TrimPadding(tokenizer.pad_token_id)
        return {split: Examples(each, targets[split], trim) for split, each in ids.items()}

    @override
    def check_net(self, net: nn.Module) -> None:
        """Refuses a net with fewer words, or another padding, than the tokenizer."""
        if self.tokens is not None:
            pad_id, top_id = self.tokens
            size, expected = getattr(net, "vocab_size", None), getattr(net, "pad_id", pad_id)
            reason = f"gives token {top_id}, the net knows {size}: use the encoder's own tokenizer"
            require(size is None or top_id < size, "tokenizer", reason, self.tokenizer)
            reason = f"pads with token {pad_id}, the net expects {expected}"
            require(expected == pad_id, "tokenizer", reason, self.tokenizer)


class TextDataModule(Tokenised):
    """Base of the text datasets; a dataset is a subclass with :meth:`texts`.

    Args:
        data_dir: the folder of the dataset's files.
        tokenizer: a Hugging Face name, a local folder, or a ``vocab.txt`` of WordPieces.
        kwargs: those of :class:`Tokenised` and :class:`FederatedDataModule`.
    """

    def __init__(
        self, data_dir: str, tokenizer: str = "distilbert-base-uncased", **kwargs: Any
    ) -> None:
        super().__init__(tokenizer, **kwargs)
        self.data_dir = Path(data_dir).expanduser()

    @abstractmethod
    def texts(self) -> dict[str, Texts]:
        """The texts and labels of ``train``, ``test`` and, where there is one, ``val``."""

    @override
    def load(self) -> Splits:
        self.prepare_data()
        given = self.texts()
        targets = {split: torch.tensor(labels) for split, (_, labels) in given.items()}
        return Splits(
            **self.tokenise({split: texts for split, (texts, _) in given.items()}, targets)
        )


def encode(tokenizer: Any, texts: list[str], max_length: int) -> Tensor:
    """Token ids, int32, padded on the right to the longest text."""
    encoded = tokenizer(
        texts,
        truncation=True,
        max_length=max_length,
        padding="longest",
        padding_side="right",
        return_attention_mask=False,
        return_tensors="pt",
    )
    return encoded["input_ids"].int()  # type: ignore[no-any-return]


def saved_tokenizer(file: Path, pad_id: int) -> Any:
    """The tokenizer of a ``tokenizer.json``, which pads with ``pad_id``."""
    transformers = load_transformers("tokenizer")
    with reading(file, "tokenizer"):
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_id)
        tokenizer(["a text"], padding="longest")
    return tokenizer


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a name on the hub, a local folder, or a ``vocab.txt`` of WordPieces."""
    transformers = load_transformers("tokenizer")
    with reading(f"{name!r} (a name on the hub, a folder or a vocab.txt)", "tokenizer"):
        if Path(name).is_file():
            words = Path(name).read_text(encoding="utf-8").splitlines()
            tokenizer = transformers.BertTokenizer(vocab={word: n for n, word in enumerate(words)})
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        tokenizer(["a text"], padding="longest")  # fails without a padding token
    return tokenizer


class AGNews(TextDataModule):
    """AG News: headlines and first lines of World, Sports, Business and Sci/Tech news.

    The clients share 60,000 of the 120,000 training rows, the paper's half; the server validates
    on 6,000 others and tests on the official 7,600. A row is "label","title","text", and where the
    title is empty the text stands alone.

    Args:
        data_dir: the folder that holds, or is to hold, ``train.csv`` and ``test.csv``.
        download: fetch the files if they are not there.
        train_samples: how many rows the clients share.
        val_samples: how many others the server validates on.
        kwargs: those of :class:`TextDataModule`.
    """

    name = "ag_news"
    num_classes = 4
    class_names = ("World", "Sports", "Business", "Sci/Tech")
    val_split = "last"
    URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
    MD5 = {  # noqa: RUF012
        "train.csv": "b1a00f826fdfbd249f79597b59e1dc12",
        "test.csv": "d52ea96a97a2d943681189a97654912d",
    }

    def __init__(
        self,
        data_dir: str = "data/ag_news",
        download: bool = True,
        train_samples: int = 60_000,
        val_samples: int = 6_000,
        **kwargs: Any,
    ) -> None:
        super().__init__(data_dir, **kwargs)
        at_least(1, train_samples=train_samples)
        not_negative(val_samples=val_samples)
        self.download = download
        self.train_samples = train_samples
        self.val_samples = val_samples

    @override
    def prepare_data(self) -> None:
        """Downloads the files that are missing, if that is allowed."""
        for name, checksum in self.MD5.items():
            provide(self.data_dir, [name], self.URL + name if self.download else "", checksum)

    @override
    def texts(self) -> dict[str, Texts]:
        rows = self._read("train.csv")
        wanted = self.train_samples + self.val_samples
        reason = f"train.csv has {len(rows)} rows, {self.val_samples} of them to validate on"
        require(wanted <= len(rows), "train_samples", reason, self.train_samples)
        order = np.random.default_rng(0).permutation(len(rows))[:wanted]  # the same for all seeds
        mixed = [rows[row] for row in order]
        parts = {"train": mixed[: self.train_samples], "test": self._read("test.csv")}
        if self.val_samples:
            parts["val"] = mixed[self.train_samples :]
        return {split: tuple(map(list, zip(*part, strict=True))) for split, part in parts.items()}  # type: ignore[misc]

    def _read(self, name: str) -> list[tuple[str, int]]:
        content = read_text(self.data_dir / name, self.MD5[name])
        rows = []
        for label, title, body in csv.reader(io.StringIO(content)):
            text = f"{title} {body}".replace("\\", " ")  # a backslash stands for a line's end
            rows.append((" ".join(text.split()), int(label) - 1))
        return rows


LEAF = re.compile(r"\([0-4] ([^()]+)\)")
ESCAPED = {"``": '"', "''": '"', "\\/": "/", "\\*": "*"}
ESCAPED |= {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]"}


class SST5(TextDataModule):
    """SST-5: 8,544 sentences of films' reviews in five degrees of sentiment.

    All training sentences go to the clients; the treebank's own 1,101 are the validation set and
    its 2,210 the test set. Only whole sentences are used, the label being the root's.

    Args:
        data_dir: the folder that holds, or is to hold, ``train.txt``, ``dev.txt``, ``test.txt``.
        download: fetch the treebank if it is not there.
        kwargs: those of :class:`TextDataModule`.
    """

    name = "sst5"
    num_classes = 5
    class_names = ("very negative", "negative", "neutral", "positive", "very positive")
    val_split = "last"
    URL = "https://nlp.stanford.edu/sentiment/trainDevTestTrees_PTB.zip"
    SHA256 = {  # noqa: RUF012  (the zip has no published checksum, its files do not change)
        "train": "e2f3f41b0b1e6d4dddc0effe3bfc2d27ed8928079aa9a03d652311614fc5feb7",
        "val": "0e9336aed6e4730e19f58d00a77b3f0297efdb755f7b5e598c98a05e3f97ea40",
        "test": "6e54806dee95cf80cd918e7dfb3f6770f6df24bf826f289a4d1f709e1c8f6761",
    }
    FILES = {"train": "train.txt", "val": "dev.txt", "test": "test.txt"}  # noqa: RUF012

    def __init__(self, data_dir: str = "data/sst5", download: bool = True, **kwargs: Any) -> None:
        super().__init__(data_dir, **kwargs)
        self.download = download

    @override
    def prepare_data(self) -> None:
        """Downloads the treebank if it is missing and that is allowed."""
        url, names = self.URL if self.download else "", list(self.FILES.values())
        provide(self.data_dir, names, url, None, inside="trees")

    @override
    def texts(self) -> dict[str, Texts]:
        splits: dict[str, Texts] = {}
        for split, name in self.FILES.items():
            content = read_text(self.data_dir / name, self.SHA256[split])
            trees = [line for line in content.splitlines() if line.strip()]
            splits[split] = [sentence_of(tree) for tree in trees], [int(tree[1]) for tree in trees]
        return splits


def sentence_of(tree: str) -> str:
    """The sentence of a tree like ``(3 (2 Good) (2 film))``, whose root has the label 3."""
    sentence = " ".join(LEAF.findall(tree))
    for escaped, plain in ESCAPED.items():
        sentence = sentence.replace(escaped, plain)
    return sentence
