"""What reads data files, a sound file for each, and texts without a checksum."""

import gzip
import hashlib
import io
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fedgkd_pl import CIFAR10, SST5, AGNews
from fedgkd_pl.data.datasets import tiny_imagenet
from fedgkd_pl.data.downloads import extract
from fedgkd_pl.data.examples import Examples
from PIL import Image

from tests.support.datasets import WORDS, write_ag_news, write_sst5


def everything(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def tar(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.GNU_FORMAT) -> bytes:
    """A folder ``top`` with a good file in it, then these."""
    out = io.BytesIO()
    good = tarfile.TarInfo("top/good")
    good.size = 4
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for info, data in [(good, b"good"), *members]:
            archive.addfile(info, io.BytesIO(data) if data else None)
    return gzip.compress(out.getvalue(), 1)


def member(name: str, data: bytes = b"evil", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def zipped(*members: tuple[str, bytes], **fields: Any) -> bytes:
    """A folder ``top`` with a good file in it, then these, all with these fields of ZipInfo."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("top/good", b"good")
        for name, data in members:
            archive.writestr(name, data)
        for info in archive.infolist()[1:]:
            for field, value in fields.items():
                setattr(info, field, value)  # in the central directory, which is written last
    return out.getvalue()


def python2_pickle(pixels: Any, labels: list[int]) -> bytes:
    """As the authors of CIFAR wrote it."""
    data = pixels.tobytes()
    size = struct.pack("<HcH", len(pixels), b"M", pixels.shape[1])
    return (
        b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03("
        + b"".join(b"K" + bytes([label]) for label in labels)
        + b"eU\x04dataq\x04cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06"
        b"K\x00\x85U\x01b\x87Rq\x07(K\x01M" + size + b"\x86cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01"
        b"\x87Rq\t(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T" + struct.pack("<I", len(data)) + data + b"tbu."
    )


def pixels(rows: int = 2, width: int = 3072) -> Any:
    return np.random.default_rng(0).integers(0, 256, (rows, width), dtype=np.uint8)


def read_cifar(content: bytes, folder: Path) -> Examples:
    """A file of CIFAR-10, where the sound one has the checksum of ``python2_pickle``."""
    known = hashlib.md5(python2_pickle(pixels(), [1, 2])).hexdigest()
    return read_known(content, folder, known)


def read_known(content: bytes, folder: Path, checksum: str) -> Examples:
    file = folder / "cifar-10-batches-py" / "batch"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    return CIFAR10(data_dir=str(folder))._read([("batch", checksum)])


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


def small_tar() -> bytes:
    return gzip.decompress(tar(member("top/in/a", b"a" * 600)))


def unpack(content: bytes, folder: Path, suffix: str) -> None:
    archive = folder / f"archive{suffix}"
    archive.write_bytes(content)
    target = folder / "target"
    target.mkdir(exist_ok=True)
    before = everything(folder) - everything(target)
    try:
        extract(archive, None, ["top/good"], target)
    finally:
        assert {file.name for file in everything(target)} <= {"good"}
        assert everything(folder) - everything(target) == before


def decode(content: bytes, folder: Path) -> None:
    (folder / "image.JPEG").write_bytes(content)
    assert len(tiny_imagenet._pixels(folder / "image.JPEG")) == 3 * 64 * 64


def as_texts(name: str, content: bytes, folder: Path) -> None:
    (folder / name).write_bytes(content)
    data = sst5(folder) if name.startswith("sst5") else ag_news(folder)
    texts, labels = data.texts()["test"]
    assert len(texts) == len(labels) and all(label in range(data.num_classes) for label in labels)


Parse = Callable[[bytes, Path], Any]
FORMATS: dict[str, tuple[Callable[[], bytes], Parse]] = {
    "CIFAR": (lambda: python2_pickle(pixels(), [1, 2]), read_cifar),
    "gzip": (
        lambda: gzip.compress(small_tar()),
        lambda content, folder: unpack(content, folder, ".tar.gz"),
    ),
    "tar": (
        small_tar,
        lambda content, folder: unpack(gzip.compress(content, 1), folder, ".tar.gz"),
    ),
    "zip": (
        lambda: zipped(("top/", b""), ("top/a", b"ab" * 300)),
        lambda content, folder: unpack(content, folder, ".zip"),
    ),
    "JPEG": (image, decode),
    "trees": (
        lambda: TREE * 20,
        lambda content, folder: as_texts("sst5/test.txt", content, folder),
    ),
    "rows": (
        lambda: b'"1","The ""news""","a film\\is, good"\n' * 20,
        lambda content, folder: as_texts("ag_news/test.csv", content, folder),
    ),
}
