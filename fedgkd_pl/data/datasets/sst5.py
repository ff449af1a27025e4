"""SST-5: the Stanford Sentiment Treebank, sentences only."""

import re
from typing import Any

from fedgkd_pl.data.datasets.text import TextDataModule, Texts
from fedgkd_pl.data.downloads import provide, read_text
from typing_extensions import override

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
