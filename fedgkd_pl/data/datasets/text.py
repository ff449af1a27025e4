"""Texts as token ids: tokenised at every start, padded per batch."""

from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.inputs import TextInputs
from fedgkd_pl.errors import SettingError, at_least, require
from fedgkd_pl.models.text import load_transformers
from torch import Tensor, nn
from typing_extensions import override

Texts = tuple[list[str], list[int]]  # the texts and their labels


class TrimPadding:
    """Cuts a batch to its longest text.

    Args:
        pad_id: the token that fills rows up.
    """

    random = False

    def __init__(self, pad_id: int) -> None:
        self.pad_id = pad_id

    def __call__(self, ids: Tensor, generator: torch.Generator | None) -> Tensor:
        """The ids, padded on the right, as batch × longest; nothing is random."""
        longest = int((ids != self.pad_id).sum(dim=1).max())
        return ids[:, : max(1, longest)].long()


class TextDataModule(FederatedDataModule):
    """Base of the text datasets; a dataset is a subclass with :meth:`texts`.

    Args:
        data_dir: the folder of the dataset's files.
        tokenizer: a Hugging Face name, a local folder, or a ``vocab.txt`` of WordPieces.
        max_length: longer texts are cut to this many tokens.
        kwargs: those of :class:`FederatedDataModule`.
    """

    def __init__(
        self,
        data_dir: str,
        tokenizer: str = "distilbert-base-uncased",
        max_length: int = 128,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        at_least(2, max_length=max_length)
        self.data_dir = Path(data_dir).expanduser()
        self.tokenizer = tokenizer
        self.max_length = max_length

    @abstractmethod
    def texts(self) -> dict[str, Texts]:
        """The texts and labels of ``train``, ``test`` and, where there is one, ``val``."""

    @override
    def load(self) -> Splits:
        self.prepare_data()
        tokenizer = load_tokenizer(self.tokenizer)
        self.pad_id, text = tokenizer.pad_token_id, vocabulary_of(tokenizer)
        self.reading = TextInputs("text", self.tokenizer, self.max_length, text)
        examples: dict[str, Any] = {}
        for split, (texts, labels) in self.texts().items():
            require(len(texts) > 0, "data_dir", f"{self.name} has no {split} samples")
            ids = encode(tokenizer, texts, self.max_length)
            targets = torch.tensor(labels, dtype=torch.int64)
            examples[split] = Examples(ids, targets, TrimPadding(self.pad_id))
        self.top_id = max(int(part.inputs.max()) for part in examples.values())
        return Splits(**examples)

    @override
    def check_net(self, net: nn.Module) -> None:
        check_tokens(net, self.tokenizer, self.pad_id, self.top_id)


def check_tokens(net: nn.Module, tokenizer: str, pad_id: int, top_id: int) -> None:
    """Refuses a net with fewer words, or another padding, than the tokenizer."""
    size, expected = getattr(net, "vocab_size", None), getattr(net, "pad_id", pad_id)
    reason = f"gives token {top_id}, the net knows {size}: use the encoder's own tokenizer"
    require(size is None or top_id < size, "tokenizer", reason, tokenizer)
    reason = f"pads with token {pad_id}, the net expects {expected}"
    require(expected == pad_id, "tokenizer", reason, tokenizer)


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
    ids: Tensor = encoded["input_ids"].int()
    return ids


def vocabulary_of(tokenizer: Any) -> str:
    """A tokenizer's own file, ``tokenizer.json``; empty for one that has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "" if backend is None else str(backend.to_str())


def saved_tokenizer(file: Path, pad_id: int) -> Any:
    """The tokenizer of a ``tokenizer.json``, which pads with ``pad_id``."""
    transformers = load_transformers("tokenizer")
    try:
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_id)
        tokenizer(["a text"], padding="longest")
    except Exception as error:  # a damaged one fails in any way
        raise SettingError("tokenizer", "is damaged", file) from error
    return tokenizer


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a name on the hub, a local folder, or a ``vocab.txt`` of WordPieces."""
    transformers = load_transformers("tokenizer")
    try:
        if Path(name).is_file():
            words = Path(name).read_text(encoding="utf-8").splitlines()
            tokenizer = transformers.BertTokenizer(vocab={word: n for n, word in enumerate(words)})
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        tokenizer(["a text"], padding="longest")  # fails without a padding token
    except Exception as error:  # a damaged one fails in any way
        reason = "not found here nor on the hub, or damaged, or without a padding token"
        hint = "give a local folder or a vocab.txt"
        raise SettingError("tokenizer", f"{reason}; {hint}", name) from error
    return tokenizer
