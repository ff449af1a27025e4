"""Sound data files, and texts without a checksum."""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fedgkd_pl import SST5, AGNews
from PIL import Image

from tests.support.datasets import WORDS, write_ag_news, write_sst5


def small_texts(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Small texts of both datasets and a vocabulary; their checksums are not compared."""
    write_sst5(folder / "sst5", patch)
    write_ag_news(folder / "ag_news", patch)
    patch.setattr(SST5, "SHA256", dict.fromkeys(SST5.SHA256))
    patch.setattr(AGNews, "MD5", {})
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return folder


def sst5(folder: Path) -> SST5:
    return SST5(data_dir=str(folder / "sst5"), tokenizer=str(folder / "vocab.txt"), num_clients=2)


def ag_news(folder: Path) -> AGNews:
    return AGNews(data_dir=str(folder / "ag_news"), train_samples=3, val_samples=2)


TREE = b"(3 (2 a) (2 film))\n"


def image(size: tuple[int, int] = (64, 64), form: str = "JPEG") -> bytes:
    out = io.BytesIO()
    Image.effect_noise(size, 50).save(out, form)
    return out.getvalue()


def as_texts(name: str, content: bytes, folder: Path) -> None:
    (folder / name).write_bytes(content)
    data = sst5(folder) if name.startswith("sst5") else ag_news(folder)
    texts, labels = data.texts()["test"]
    assert len(texts) == len(labels) and all(label in range(data.num_classes) for label in labels)


Parse = Callable[[bytes, Path], Any]
FORMATS: dict[str, tuple[Callable[[], bytes], Parse]] = {  # for tests.support.fuzz
    "trees": (lambda: TREE * 20, partial(as_texts, "sst5/test.txt")),
    "rows": (
        lambda: b'"1","The ""news""","a film\\is, good"\n' * 20,
        partial(as_texts, "ag_news/test.csv"),
    ),
}
