"""AG News: four classes of news, half of it used as in the paper's table."""

import csv
import io
from typing import Any

import numpy as np
from fedgkd_pl.data.datasets.text import TextDataModule, Texts
from fedgkd_pl.data.downloads import provide, read_text
from fedgkd_pl.errors import at_least, not_negative, require
from typing_extensions import override


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
        columns = {split: zip(*part, strict=True) for split, part in parts.items()}
        return {split: (list(texts), list(labels)) for split, (texts, labels) in columns.items()}

    def _read(self, name: str) -> list[tuple[str, int]]:
        content = read_text(self.data_dir / name, self.MD5[name])
        rows = []
        for label, title, body in csv.reader(io.StringIO(content)):
            text = f"{title} {body}".replace("\\", " ")  # a backslash stands for a line's end
            rows.append((" ".join(text.split()), int(label) - 1))
        return rows
