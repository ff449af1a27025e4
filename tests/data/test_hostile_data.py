"""Data files that mean harm, or are damaged: refused in one line, and nothing is written."""

import gzip
import hashlib
import io
import os
import pickle
import stat
import struct
import tarfile
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import CIFAR10, SST5, TinyImageNet
from fedgkd_pl.data import downloads
from fedgkd_pl.data.datasets import cifar
from fedgkd_pl.data.downloads import extract, fetch, read_checked
from fedgkd_pl.data.examples import Examples, Splits, digest
from fedgkd_pl.data.transforms import Scale
from fedgkd_pl.errors import SettingError, StorageError
from fedgkd_pl.storage.tensors import to_safetensors

from tests.conftest import Given, Table, script
from tests.support.datasets import write_cifar, write_sst5, write_tiny
from tests.support.formats import (
    FORMATS,
    TREE,
    ag_news,
    everything,
    image,
    member,
    pixels,
    python2_pickle,
    read_cifar,
    read_known,
    small_texts,
    sst5,
    tar,
    zipped,
)
from tests.support.fuzzing import mutations

TEN_GB = 10 * 2**30


# -- archives ----------------------------------------------------------------------------------


def link(kind: bytes, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return member("top/link", b"", type=kind, linkname=target)


def declared(size: int) -> bytes:
    """A header that promises ``size`` bytes, and nothing behind it."""
    info = tarfile.TarInfo("top/large")
    info.size = size
    good = gzip.decompress(tar())[:1024]
    return gzip.compress(good + info.tobuf(tarfile.GNU_FORMAT) + bytes(1024), 1)


def sparse() -> bytes:
    """GNU's old form: type S, the true size in its own field, one kilobyte of it stored."""
    info = tarfile.TarInfo("top/sparse")
    info.size, info.type = 512, tarfile.GNUTYPE_SPARSE
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[386:410] = b"%011o\0%011o\0" % (0, 512)
    block[483:495] = b"\x80" + TEN_GB.to_bytes(11, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return gzip.compress(gzip.decompress(tar())[:1024] + block + bytes(1536), 1)


PAX = tarfile.PAX_FORMAT
TARS: dict[str, Callable[[Path], bytes]] = {
    "parent": lambda outside: tar(member("../evil")),
    "parent, further in": lambda outside: tar(member("top/../../evil")),
    "parent, Windows": lambda outside: tar(member("top\\..\\..\\evil")),
    "absolute": lambda outside: tar(member(str(outside / "evil"))),
    "absolute, Windows": lambda outside: tar(member("C:\\evil")),
    "parent folder": lambda outside: tar(member("../evil", b"", type=tarfile.DIRTYPE)),
    "parent in a pax header": lambda outside: tar(
        member("top/a", pax_headers={"path": "../evil"}), form=PAX
    ),
    "link out": lambda outside: tar(link(tarfile.SYMTYPE, "/etc/passwd")),
    "link within": lambda outside: tar(link(tarfile.SYMTYPE, "good")),
    "through a link": lambda outside: tar(
        link(tarfile.SYMTYPE, str(outside)), member("top/link/evil")
    ),
    "hard link": lambda outside: tar(link(tarfile.LNKTYPE, "top/good")),
    "hard link out": lambda outside: tar(link(tarfile.LNKTYPE, "/etc/passwd")),
    "device": lambda outside: tar(member("top/zero", b"", type=tarfile.CHRTYPE, devmajor=1)),
    "disk": lambda outside: tar(member("top/sda", b"", type=tarfile.BLKTYPE, devmajor=8)),
    "pipe": lambda outside: tar(member("top/pipe", b"", type=tarfile.FIFOTYPE)),
    "sparse": lambda outside: sparse(),
    "sparse in a pax header": lambda outside: tar(
        member("top/a", pax_headers={"GNU.sparse.realsize": str(TEN_GB)}), form=PAX
    ),
    "declared size": lambda outside: declared(TEN_GB),
    "negative size": lambda outside: declared(-512),
    "deep": lambda outside: tar(member("a/" * 40 + "evil")),
    "file and folder": lambda outside: tar(member("top/a"), member("top/a/b")),
    "cut off": lambda outside: tar(member("top/a", b"a" * 5000))[:-20],
    "no archive": lambda outside: b"not an archive",
    "empty": lambda outside: b"",
    "bomb": lambda outside: tar(member("top/zeros", bytes(2**22))),
    "bomb behind the end": lambda outside: gzip.compress(gzip.decompress(tar()) + bytes(2**22)),
}


def with_mode(kind: int) -> Callable[[Path], bytes]:
    return lambda outside: zipped(("top/a", b"/etc/passwd"), external_attr=(kind | 0o644) << 16)


def other_method(method: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("top/a", b"evil")
    return out.getvalue()


ZIPS: dict[str, Callable[[Path], bytes]] = {
    "parent": lambda outside: zipped(("../evil", b"evil")),
    "parent, further in": lambda outside: zipped(("top/../../evil", b"evil")),
    "parent, Windows": lambda outside: zipped(("top\\..\\..\\evil", b"evil")),
    "absolute": lambda outside: zipped((str(outside / "evil"), b"evil")),
    "absolute, Windows": lambda outside: zipped(("C:/evil", b"evil")),
    "NUL": lambda outside: zipped(("top/aXb", b"evil")).replace(b"aXb", b"a\0b"),
    "link": with_mode(stat.S_IFLNK),
    "device": with_mode(stat.S_IFCHR),
    "disk": with_mode(stat.S_IFBLK),
    "pipe": with_mode(stat.S_IFIFO),
    "declared size": lambda outside: zipped(("top/a", b"evil"), file_size=TEN_GB),
    "larger than declared": lambda outside: zipped(
        ("top/a", bytes(2**19)), file_size=10, CRC=zlib.crc32(bytes(10))
    ),
    "smaller than declared": lambda outside: zipped(("top/a", b"evil"), file_size=9),
    "wrong checksum": lambda outside: zipped(("top/a", b"evil"), CRC=1),
    "encrypted": lambda outside: zipped(("top/a", b"evil"), flag_bits=1),
    "another method": lambda outside: other_method(zipfile.ZIP_LZMA),
    "deep": lambda outside: zipped(("a/" * 2000 + "evil", b"evil")),
    "file and folder": lambda outside: zipped(("top/a", b""), ("top/a/b", b"")),
    "cut off": lambda outside: zipped(("top/a", b"evil" * 99))[:-30],
    "no archive": lambda outside: b"not an archive",
    "empty": lambda outside: b"",
    "bomb": lambda outside: zipped(*[(f"top/{n}", bytes(2**19)) for n in range(4)]),
}
ARCHIVES = [(".tar.gz", name, build) for name, build in TARS.items()]
ARCHIVES += [(".zip", name, build) for name, build in ZIPS.items()]


@pytest.mark.parametrize(
    ("suffix", "build"), [pytest.param(s, b, id=f"{s[1:]}: {n}") for s, n, b in ARCHIVES]
)
def test_hostile_archives_are_refused_and_nothing_is_written(
    suffix: str, build: Callable[[Path], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "LARGEST", 2**20)
    folder = tmp_path / "root" / "data"
    folder.mkdir(parents=True)
    archive = folder / f"archive{suffix}"
    archive.write_bytes(build(tmp_path))
    before = everything(tmp_path)
    with pytest.raises(SettingError, match="fetch it again") as error:
        extract(archive, None, ["top"], folder)
    assert error.value.key == "data_dir" and "\n" not in str(error.value)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_sound_archives_are_unpacked(form: int, tmp_path: Path) -> None:
    folder_ = member("top/in", b"", type=tarfile.DIRTYPE)
    own_time = member("top/in/a", b"a" * 700, mtime=1.5)  # a pax header that decides nothing
    (tmp_path / "a.tar.gz").write_bytes(
        tar(folder_, own_time, member("top/out", b"out"), form=form)
    )
    (tmp_path / "a.zip").write_bytes(
        zipped(("top/in/", b""), ("top/in/a", b"a" * 700), ("top/out", b"out"))
    )
    for name in ("a.tar.gz", "a.zip"):
        target = tmp_path / f"from {name}"
        target.mkdir()
        extract(tmp_path / name, None, ["top/in", "top/good"], target)
        assert {path.name for path in target.iterdir()} == {"in", "good"}  # only what was wanted
        assert (target / "in" / "a").read_bytes() == b"a" * 700
        assert (target / "good").read_bytes() == b"good"


def test_an_archive_without_what_is_wanted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(zipped())
    with pytest.raises(SettingError, match="it has no other"):
        extract(tmp_path / "a.zip", None, ["other"], tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["a.zip"]


def test_the_checksum_is_compared_before_the_archive_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.zip").write_bytes(zipped())
    monkeypatch.setattr(zipfile, "ZipFile", None)  # calling it would fail
    with pytest.raises(SettingError, match="not the original"):
        extract(tmp_path / "a.zip", "0" * 32, ["top"], tmp_path)


def test_a_full_disk_is_a_storage_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.zip").write_bytes(zipped())

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(StorageError, match="No space left on device"):
            extract(tmp_path / "a.zip", None, ["top"], tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["a.zip"]


def test_a_killed_extraction_is_not_taken_for_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(zipped(("top/a", b"a"), ("top/b", b"b")))
    killed = script(
        "import os\n"
        "from pathlib import Path\n"
        "from fedgkd_pl.data.downloads import extract\n"
        "write = Path.write_bytes\n"
        "Path.write_bytes = lambda file, data: os._exit(9) if file.name == 'b' "
        "else write(file, data)\n"
        "extract(Path('a.zip'), None, ['top'], Path())\n",
        tmp_path,
    )
    assert killed.returncode == 9, killed.stderr
    assert not (tmp_path / "top").exists() and len(list(tmp_path.glob("*.part/top/a"))) == 1
    extract(tmp_path / "a.zip", None, ["top"], tmp_path)
    assert (tmp_path / "top" / "b").read_bytes() == b"b"


def test_a_download_that_was_cut_off_is_not_taken_for_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(url: str, root: str, name: str, md5: str | None) -> None:
        (Path(root) / name).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("torchvision.datasets.utils.download_url", cut_off)
    with pytest.raises(KeyboardInterrupt):
        fetch("https://nowhere", tmp_path / "file", None, "")
    assert not (tmp_path / "file").exists()


@pytest.fixture
def cifar_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sound archive of a small CIFAR-10, in an otherwise empty folder."""
    from torchvision.datasets import CIFAR10 as Source

    write_cifar(tmp_path / "source", monkeypatch)
    archive = tmp_path / "data" / Source.filename
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as out:
        out.add(tmp_path / "source" / Source.base_folder, Source.base_folder)
    monkeypatch.setattr(Source, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    return archive


def test_cifar_comes_out_of_its_archive(cifar_archive: Path) -> None:
    data = CIFAR10(data_dir=str(cifar_archive.parent), num_clients=4)
    data.setup()
    assert len(data.test) == 40
    assert {p.name for p in cifar_archive.parent.iterdir()} == {
        cifar_archive.name,
        "cifar-10-batches-py",
    }


def test_a_changed_cifar_archive_is_refused(cifar_archive: Path) -> None:
    cifar_archive.write_bytes(cifar_archive.read_bytes()[:-1] + b"!")
    with pytest.raises(SettingError, match=r"tar\.gz is damaged or not the original"):
        CIFAR10(data_dir=str(cifar_archive.parent)).setup()
    assert list(cifar_archive.parent.iterdir()) == [cifar_archive]


def zip_of(folder: Path, target: Path, top: str) -> None:
    with zipfile.ZipFile(target, "w") as out:
        for file in sorted(folder.rglob("*")):
            out.write(file, f"{top}/{file.relative_to(folder)}")


def test_the_treebank_comes_out_of_its_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sst5(tmp_path / "source", monkeypatch)
    (tmp_path / "sst5").mkdir()
    zip_of(tmp_path / "source", tmp_path / "sst5" / "trainDevTestTrees_PTB.zip", "trees")
    data = SST5(data_dir=str(tmp_path / "sst5"))
    data.prepare_data()
    assert [len(texts) for texts, _ in data.texts().values()] == [40, 8, 10]
    assert len(list((tmp_path / "sst5").iterdir())) == 4


def test_tiny_imagenet_comes_out_of_its_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_tiny(tmp_path / "source", monkeypatch)
    archive = tmp_path / "tiny-imagenet-200.zip"
    zip_of(root, archive, root.name)
    monkeypatch.setattr(TinyImageNet, "MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    data = TinyImageNet(data_dir=str(tmp_path), num_clients=3)
    data.setup()
    assert len(data.test) == 6


@pytest.mark.parametrize("kind", ["pipe", "folder", "large", "nowhere", "device"])
def test_what_is_no_file_is_not_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "LARGEST", 2**20)
    file = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "large":
        with file.open("wb") as out:
            out.truncate(TEN_GB)
    with pytest.raises(SettingError, match=r"x: No such file|x is no file of at most"):
        read_checked(file, None)


# -- pickles -----------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["Python 2", 2, 3, 4])
def test_sound_pickles_are_read_as_pickle_reads_them(protocol: Any, tmp_path: Path) -> None:
    content = {"data": pixels(), "labels": [7, 9]}
    blob = (
        python2_pickle(pixels(), [7, 9])
        if protocol == "Python 2"
        else pickle.dumps(content, protocol=protocol)
    )
    theirs, ours = pickle.loads(blob, encoding="latin1"), cifar._unpickle(blob, "batch")
    assert theirs.keys() == ours.keys() and theirs["labels"] == ours["labels"]
    assert np.array_equal(theirs["data"], ours["data"])
    examples = read_known(blob, tmp_path, hashlib.md5(blob).hexdigest())
    assert torch.equal(examples.inputs.flatten(1), torch.from_numpy(pixels()))
    assert examples.targets.tolist() == [7, 9]


def test_real_pickles_are_read_as_pickle_reads_them(real_data: Path) -> None:
    content = (real_data / "cifar-10-batches-py" / "data_batch_3").read_bytes()
    theirs, ours = pickle.loads(content, encoding="latin1"), cifar._unpickle(content, "batch")
    assert theirs.keys() == ours.keys()
    assert np.array_equal(theirs["data"], ours["data"])
    assert all(theirs[key] == ours[key] for key in theirs if key != "data")


class Call:
    """Pickled, a call of anything."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
BYTE = b"cnumpy\ndtype\nU\x02u1\x85R"
BOMB = b"\x80\x02]q\x00" + b"".join(b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(60))
PICKLES: dict[str, bytes] = {
    "os.system": pickle.dumps({"data": Call(os.system, "touch canary"), "labels": []}),
    "os.system, old": b"cposix\nsystem\n(U\x0ctouch canarytR.",
    "os.system, INST": b"(S'touch canary'\niposix\nsystem\n.",
    "os.system, OBJ": b"(cposix\nsystem\nU\x0ctouch canaryo.",
    "eval": pickle.dumps(Call(eval, "open('canary', 'w')")),
    "numpy.load": b"cnumpy\nload\n(U\x06canarytR.",
    "NEWOBJ": b"\x80\x02cnumpy\nndarray\n(J\xff\xff\xff\x7ft\x81.",
    "ndarray called": b"cnumpy\nndarray\n(J\xff\xff\xff\x7ft\x85R.",
    "encode by another codec": b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00hex\x86R.",
    "encode what is no text": b"c_codecs\nencode\nK\x01X\x06\x00\x00\x00latin1\x86R.",
    "a call of a text": b"U\x0c_codecs encodeX\x01\x00\x00\x00aX\x06\x00\x00\x00latin1\x86R.",
    "objects": pickle.dumps({"data": np.array([[Path, "a"]], dtype=object), "labels": [1]}),
    "a type with fields": pickle.dumps({"data": np.zeros((1, 3072), "u1,u1"), "labels": [1]}),
    "terabyte": b"\x80\x02" + ARRAY + b"\x8a\x06\x00\x00\x00\x00\x00\x01\x85U\x01b\x87R.",
    "terabyte filled": b"\x80\x02"
    + ARRAY
    + b"K\x00\x85U\x01b\x87R(K\x01J\x00\x00\x00\x40J\x00\x04\x00\x00\x86"
    + BYTE
    + b"\x89U\x04aaaatb.",
    "many dimensions": b"\x80\x02"
    + ARRAY
    + b"K\x00\x85U\x01b\x87R(K\x01("
    + b"J\xff\xff\xff\x7f" * 50_000
    + b"t"
    + BYTE
    + b"\x89U\x04aaaatb.",
    "large memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "large string": b"\x80\x02T\xff\xff\xff\x7faaaa.",
    "large bytes": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7faaaa.",
    "large bytearray": b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7faaaa.",
    "large frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.",
    "buffer": b"\x80\x05\x97.",
    "persistent": b"Pcanary\n.",
    "extension": b"\x80\x02\x82\x01.",
    "long number": b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
    "decimal": b"I" + b"9" * 100_000 + b"\n.",
    "deep tuple": b"\x80\x02N" + b"\x85" * 20_000 + b".",
    "deep list": b"\x80\x02]" + b"(]" * 20_000 + b"e" * 20_000 + b".",
    "deep key": b"\x80\x02}N" + b"\x85" * 20_000 + b"K\x01s.",
    "key to hash for ever": b"\x80\x02}K\x01q\x00"
    + b"".join(b"h%c\x86q%c" % (n, n + 1) for n in range(60))
    + b"K\x01s.",
    "labels that double": b"\x80\x02}(U\x06labels" + BOMB[2:] + b"u.",
    "list of itself": b"\x80\x02}U\x06labels]q\x00h\x00as.",
    "no end": b"\x80\x02}",
    "nothing to return": b".",
    "mark without a stack": b"((((u.",
    "empty": b"",
    "not a pickle": b"\x89PNG\r\n\x1a\n",
    "zip": zipped(),
    "a list": pickle.dumps([1, 2]),
    "an integer": pickle.dumps(1),
    "no labels": pickle.dumps({"data": pixels()}),
    "no data": pickle.dumps({"labels": [1, 2]}),
    "labels of CIFAR-100": pickle.dumps({"data": pixels(), "fine_labels": [1, 2]}),
    "list of pixels": pickle.dumps({"data": [[0] * 3072] * 2, "labels": [1, 2]}),
    "wrong image size": pickle.dumps({"data": pixels(width=784), "labels": [1, 2]}),
    "floats": pickle.dumps({"data": pixels() / 255, "labels": [1, 2]}),
    "signed bytes": pickle.dumps({"data": pixels().astype(np.int8), "labels": [1, 2]}),
    "one label less": pickle.dumps({"data": pixels(), "labels": [1]}),
    "label too large": pickle.dumps({"data": pixels(), "labels": [1, 10]}),
    "label negative": pickle.dumps({"data": pixels(), "labels": [1, -1]}),
    "label not integer": pickle.dumps({"data": pixels(), "labels": [1, "2"]}),
    "label true": pickle.dumps({"data": pixels(), "labels": [1, True]}),
    "label nothing": pickle.dumps({"data": pixels(), "labels": [1, None]}),
    "labels as text": pickle.dumps({"data": pixels(), "labels": "12"}),
}


@pytest.mark.parametrize("content", [pytest.param(c, id=name) for name, c in PICKLES.items()])
def test_hostile_pickles_are_refused_at_once(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with pytest.raises(SettingError) as error:
            read_cifar(content, tmp_path)
        assert time.perf_counter() - start < 20 and tracemalloc.get_traced_memory()[1] < 2e8
    finally:
        tracemalloc.stop()
    assert error.value.key == "data_dir" and len(str(error.value)) < 400
    assert "batch" in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "canary").exists()


CALLS = ["os.system", "os.system, old", "os.system, INST", "os.system, OBJ", "eval", "numpy.load"]


@pytest.mark.parametrize("name", [*CALLS, "objects"])
def test_a_pickle_with_a_known_checksum_may_name_arrays_only(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = PICKLES[name]
    with pytest.raises(SettingError, match=r"batch cannot be read \(it names \w+\."):
        read_known(content, tmp_path, hashlib.md5(content).hexdigest())
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", list(PICKLES)[list(PICKLES).index("a list") :])
def test_a_pickle_with_a_known_checksum_must_hold_images_and_labels(
    name: str, tmp_path: Path
) -> None:
    content = PICKLES[name]
    with pytest.raises(SettingError, match=r"does not hold data|label outside 0\.\.9 at 1"):
        read_known(content, tmp_path, hashlib.md5(content).hexdigest())


def test_a_pickle_may_not_take_for_ever_nor_copy_its_pixels_again_and_again(tmp_path: Path) -> None:
    again = python2_pickle(pixels(1, 6), [1])[:-3] + b"q\x10b"
    for content in (b"N" * 1_000_001 + b".", again + b"h\x07h\x10b" * 9 + b"."):
        with pytest.raises(SettingError, match="damaged or not the original"):
            read_cifar(content, tmp_path)


def test_a_pickle_cut_anywhere_is_refused(tmp_path: Path) -> None:
    blob = python2_pickle(pixels(1, 12), [7])
    known = hashlib.md5(blob).hexdigest()
    for length in range(len(blob)):
        with pytest.raises(SettingError):
            read_known(blob[:length], tmp_path, known)


def test_a_pickle_with_any_bit_flipped_is_refused(tmp_path: Path) -> None:
    blob = bytearray(python2_pickle(pixels(1, 12), [7]))
    known = hashlib.md5(blob).hexdigest()
    for place in range(8 * len(blob)):
        blob[place // 8] ^= 1 << place % 8
        with pytest.raises(SettingError):
            read_known(bytes(blob), tmp_path, known)
        blob[place // 8] ^= 1 << place % 8
    assert hashlib.md5(blob).hexdigest() == known


# -- texts -------------------------------------------------------------------------------------


@pytest.fixture
def unchecked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return small_texts(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "line",
    [
        b"(7 (2 a))",
        b"(-1 (2 a))",
        b"(3.5 (2 a))",
        b"(3 (7 a))",
        b"( (2 a))",
        b"(3 (2 a)",
        b"(3 (2 a)))",
        b"(3 (2 a)) (3 (2 b))",
        b"(3 (2 a)) b",
        b")3 (2 a)(",
        b"(3 junk (2 a))",
        b"(3 (2 a) junk)",
        b"(3 )",
        b"()",
        b"a film",
        b"\0",
        b"(" * 100_000,
        b"(2 " * 100_000,
        b"(2 a)" * 100_000,
    ],
    ids=lambda line: line[:20].decode(),
)
def test_what_is_no_tree_is_refused_by_its_line(line: bytes, unchecked: Path) -> None:
    (unchecked / "sst5" / "dev.txt").write_bytes(TREE + line + b"\n" + TREE)
    with pytest.raises(SettingError, match=r"dev\.txt:2 is not a tree") as error:
        sst5(unchecked).texts()
    assert error.value.key == "data_dir"


@pytest.mark.parametrize(
    "line",
    [
        b'"1","a"',
        b'"1","a","b","c"',
        b'"0","a","b"',
        b'"5","a","b"',
        b'"1.0","a","b"',
        b'" 1","a","b"',
        b'"","a","b"',
        b'"World","a","b"',
        b'"12","a","b"',
        b'"1","a","b',
        b'"1","a"x,"b"',
        b"",
        b"\0",
        b'"1","a","' + b"b" * 200_000 + b'"',
    ],
    ids=lambda line: line[:20].decode(),
)
def test_what_is_no_row_is_refused_by_its_line(line: bytes, unchecked: Path) -> None:
    (unchecked / "ag_news" / "test.csv").write_bytes(b'"1","a","b"\n' + line + b"\n")
    with pytest.raises(SettingError, match=r"test\.csv:[23] is not label") as error:
        ag_news(unchecked).texts()
    assert error.value.key == "data_dir"


@pytest.mark.parametrize("content", [b"\xff\xfe", "(3 (2 é))".encode("latin1"), b"\xed\xa0\x80"])
def test_what_is_not_utf_8_is_refused(content: bytes, unchecked: Path) -> None:
    for file, data in ("sst5/test.txt", sst5), ("ag_news/test.csv", ag_news):
        (unchecked / file).write_bytes(content)
        with pytest.raises(SettingError, match="is not UTF-8 at byte") as error:
            data(unchecked).texts()
        assert error.value.key == "data_dir"


def cache_of(folder: Path) -> Path:
    (cache,) = (folder / "sst5" / "tokenised").iterdir()
    return cache


def seal(blob: bytes) -> bytes:
    return hashlib.sha256(blob).digest() + blob


def sealed(**changes: Any) -> bytes:
    ids, labels = torch.ones(4, 3, dtype=torch.int32), torch.arange(4)
    tensors = {
        f"{s}/{k}": v for s in ("train", "test") for k, v in (("ids", ids), ("labels", labels))
    }
    tensors |= {"pad_id": torch.tensor(0)} | {k.replace("_", "/", 1): v for k, v in changes.items()}
    return seal(to_safetensors({name: t for name, t in tensors.items() if t is not None}))


CACHES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda sound: b"",
    "cut off": lambda sound: sound[:-1],
    "one bit": lambda sound: sound[:-1] + bytes([sound[-1] ^ 1]),
    "pickle": lambda sound: seal(PICKLES["os.system"]),
    "header of 2⁶³ bytes": lambda sound: seal(b"\xff" * 7 + b"\x7f{}"),
    "no header": lambda sound: seal(b""),
    "no test": lambda sound: sealed(test_ids=None),
    "no labels": lambda sound: sealed(train_labels=None),
    "negative token": lambda sound: sealed(train_ids=-torch.ones(4, 3, dtype=torch.int32)),
    "long text": lambda sound: sealed(train_ids=torch.ones(4, 500, dtype=torch.int32)),
    "flat text": lambda sound: sealed(train_ids=torch.ones(4, dtype=torch.int32)),
    "label too large": lambda sound: sealed(train_labels=torch.arange(4) + 3),
    "label less": lambda sound: sealed(train_labels=torch.arange(3)),
    "floats": lambda sound: sealed(train_labels=torch.arange(4.0)),
    "no samples": lambda sound: sealed(
        test_ids=torch.ones(0, 3, dtype=torch.int32), test_labels=torch.arange(0)
    ),
}


@pytest.mark.parametrize("change", [pytest.param(c, id=name) for name, c in CACHES.items()])
def test_a_damaged_cache_of_tokens_is_made_again(
    change: Callable[[bytes], bytes], unchecked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(unchecked)
    first = sst5(unchecked)
    first.setup()
    cache = cache_of(unchecked)
    sound = cache.read_bytes()
    cache.write_bytes(change(sound))
    again = sst5(unchecked)
    again.setup()
    assert again.fingerprint() == first.fingerprint() and cache.read_bytes() == sound
    assert again.top_id == first.top_id and not (unchecked / "canary").exists()


def test_the_caches_of_the_test_above_are_read_when_they_are_sound(unchecked: Path) -> None:
    sst5(unchecked).setup()
    cache_of(unchecked).write_bytes(sealed())
    data = sst5(unchecked)
    data.setup()
    assert len(data.test) == 4 and data.top_id == 1


# -- Tiny-ImageNet -----------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("rich.progress.track", lambda rows, *args: rows)
    return write_tiny(tmp_path, monkeypatch)


def load_tiny(root: Path) -> TinyImageNet:
    data = TinyImageNet(data_dir=str(root.parent), num_clients=3, download=False)
    data.setup()
    return data


def as_large_as_can_be() -> bytes:
    """A decompression bomb: 65,500 × 65,500 pixels in a header, 12 GB if they were decoded."""
    content = image()
    place = content.index(b"\xff\xc0") + 5
    return content[:place] + struct.pack(">HH", 65_500, 65_500) + content[place + 4 :]


IMAGES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "cut off": lambda: image()[:-100],
    "header only": lambda: image()[:300],
    "small": lambda: image((63, 64)),
    "large": lambda: image((64, 65)),
    "bomb": as_large_as_can_be,
    "PNG": lambda: image(form="PNG"),
    "PostScript": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\n",
    "text": lambda: b"an image",
}


@pytest.mark.parametrize("build", [pytest.param(b, id=name) for name, b in IMAGES.items()])
def test_what_is_no_image_of_the_right_size_is_refused(
    build: Callable[[], bytes], tiny: Path
) -> None:
    (tiny / "val" / "images" / "val_3.JPEG").write_bytes(build())
    reason = r"val_3\.JPEG (cannot be decoded|is not 64 × 64)"
    with pytest.raises(SettingError, match=reason) as error:
        load_tiny(tiny)
    assert error.value.key == "data_dir" and not list(tiny.rglob("*.part"))


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("wnids.txt", "n01\n", ""),
        ("wnids.txt", "n01", "n02"),
        ("wnids.txt", "n01", "../train/n01"),
        ("wnids.txt", "n01", "/etc"),
        ("wnids.txt", "n01", "n\0"),
        ("wnids.txt", "n01", "n" * 5000),
        ("val/val_annotations.txt", "val_0.JPEG", "val_9.JPEG"),
        ("val/val_annotations.txt", "val_0.JPEG", "../images/val_0.JPEG"),
        ("val/val_annotations.txt", "val_0.JPEG", "/dev/zero"),
        ("val/val_annotations.txt", "val_0.JPEG", "\0"),
        ("val/val_annotations.txt", "val_0.JPEG", ".."),
        ("val/val_annotations.txt", "val_0.JPEG", ""),
        ("val/val_annotations.txt", "val_0.JPEG", "v" * 5000),
        ("val/val_annotations.txt", "n01", "n99"),
        ("val/val_annotations.txt", "\t", " "),
        ("val/val_annotations.txt", "val_0.JPEG\tn01\t0\t0\t62\t62\n", ""),
    ],
)
def test_a_wrong_list_of_images_is_refused(file: str, old: str, new: str, tiny: Path) -> None:
    text = (tiny / file).read_text()
    assert old in text
    (tiny / file).write_text(text.replace(old, new, 1))
    with pytest.raises(SettingError) as error:
        load_tiny(tiny)
    assert error.value.key == "data_dir" and len(str(error.value)) < 400


def test_a_pipe_among_the_images_is_not_waited_for(tiny: Path) -> None:
    file = tiny / "val" / "images" / "val_3.JPEG"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(SettingError, match=r"val_3\.JPEG is no file"):
        load_tiny(tiny)


@pytest.mark.parametrize("suffix", ["pixels", "labels"])
@pytest.mark.parametrize(
    "change",
    [
        lambda sound: b"",
        lambda sound: sound[:-8],
        lambda sound: sound[:-1],
        lambda sound: sound[:-1] + bytes([sound[-1] ^ 1]),
        lambda sound: PICKLES["os.system"],
    ],
    ids=["empty", "cut off", "byte less", "one bit", "pickle"],
)
def test_damaged_decoded_images_are_decoded_again(
    suffix: str, change: Callable[[bytes], bytes], tiny: Path
) -> None:
    before = load_tiny(tiny).fingerprint()
    (file,) = (tiny / "decoded").glob(f"test-*.{suffix}")
    sound = file.read_bytes()
    file.write_bytes(change(sound))
    assert load_tiny(tiny).fingerprint() == before and file.read_bytes() == sound


def test_a_folder_that_cannot_take_the_decoded_images_is_a_storage_error(tiny: Path) -> None:
    (tiny / "decoded").write_text("a file where the folder belongs")
    with pytest.raises(StorageError, match="decoded"):
        load_tiny(tiny)


# -- data of the user's own --------------------------------------------------------------------


class Own(Table):
    """A user's dataset whose ``load`` is given."""

    def __init__(self, splits: Any, **kwargs: Any) -> None:
        super().__init__(**({"sizes": (2, 2)} | kwargs))
        self.splits = splits

    def load(self) -> Splits:
        return self.splits  # type: ignore[no-any-return]


def examples(rows: int = 4, **changes: Any) -> Examples:
    inputs = torch.arange(rows * 2.0).view(rows, 2)
    return replace(Examples(inputs, torch.arange(rows) % 3, Scale(1)), **changes)


def with_value(value: float, row: int, rows: int = 4) -> torch.Tensor:
    inputs = torch.zeros(rows, 2)
    inputs[row, 1] = value
    return inputs


def as_it_is(inputs: torch.Tensor, generator: Any) -> torch.Tensor:
    return inputs


SOUND = Splits(examples(), examples(3))
BAD: dict[str, tuple[Any, str]] = {
    "nothing": (None, "load() must return Splits"),
    "a tuple": ((examples(), examples()), "load() must return Splits"),
    "one label less": (
        replace(SOUND, train=examples(targets=torch.arange(3))),
        "train has 4 inputs and 3 labels",
    ),
    "one input less": (
        replace(SOUND, test=examples(3, inputs=torch.zeros(2, 2))),
        "test has 2 inputs and 3 labels",
    ),
    "labels of floats": (
        replace(SOUND, train=examples(targets=torch.arange(4.0))),
        "train labels must be one int64 per sample",
    ),
    "labels of 32 bits": (
        replace(SOUND, test=examples(3, targets=torch.arange(3, dtype=torch.int32))),
        "test labels must be one int64 per sample: labels.long() in load() (got torch.int32",
    ),
    "one-hot labels": (
        replace(SOUND, train=examples(targets=torch.eye(4).long())),
        "of shape (4, 4)",
    ),
    "label too large": (
        replace(SOUND, train=examples(targets=torch.tensor([0, 2, 3, 3]))),
        "train label at 2 is outside 0..2: correct it, or num_classes (got 3)",
    ),
    "label negative": (
        replace(SOUND, val=examples(targets=torch.tensor([0, 2, 0, -1]))),
        "val label at 3 is outside 0..2: correct it, or num_classes (got -1)",
    ),
    "NaN": (
        replace(SOUND, train=examples(inputs=with_value(float("nan"), 3))),
        "train input at 3 has NaN or Inf",
    ),
    "Inf": (
        replace(SOUND, test=examples(3, inputs=with_value(float("-inf"), 1, 3))),
        "test input at 1 has NaN or Inf",
    ),
    "NaN far in": (
        replace(SOUND, test=examples(9000, inputs=with_value(float("nan"), 8999, 9000))),
        "test input at 8999 has NaN or Inf",
    ),
    "NaN in half": (
        replace(SOUND, train=examples(inputs=with_value(float("nan"), 0).half())),
        "train input at 0 has NaN or Inf",
    ),
    "no test samples": (replace(SOUND, test=examples(0)), "there are no test samples"),
    "no test": (replace(SOUND, test=None), "test must be Examples"),
    "no training samples": (replace(SOUND, train=examples(0)), "there are no train samples"),
    "another shape": (
        replace(SOUND, test=examples(3, inputs=torch.zeros(3, 5))),
        "test inputs must be like those of train, torch.float32 of shape (2,)",
    ),
    "another type": (
        replace(SOUND, val=examples(inputs=torch.zeros(4, 2, dtype=torch.uint8))),
        "val inputs must be like those of train",
    ),
    "arrays": (
        replace(SOUND, train=examples(inputs=np.zeros((4, 2)))),
        "train inputs must be a tensor, a row per sample (got ndarray)",
    ),
    "complex": (
        replace(SOUND, train=examples(inputs=torch.zeros(4, 2).cfloat(), transform=as_it_is)),
        "the transform must give train inputs as a net takes them",
    ),
    "doubles": (
        replace(SOUND, test=examples(3, inputs=torch.zeros(3, 2).double(), transform=as_it_is)),
        "the transform must give test inputs as a net takes them: float32, or token ids (got torch",
    ),
    "a transform that fails": (
        replace(SOUND, train=examples(transform=lambda x, generator: x.view(5))),
        "the transform of the train inputs fails: shape '[5]' is invalid",
    ),
    "a transform to arrays": (
        replace(SOUND, train=examples(transform=lambda x, generator: x.numpy())),
        "(got float32)",
    ),
    "keys too few": (replace(SOUND, keys=np.arange(3)), "keys must be integers"),
    "keys of floats": (replace(SOUND, keys=np.arange(4.0)), "keys must be integers"),
}


@pytest.mark.parametrize(
    ("splits", "reason"), [pytest.param(*case, id=name) for name, case in BAD.items()]
)
def test_bad_data_of_the_users_own_is_refused_before_the_run(splits: Any, reason: str) -> None:
    with pytest.raises(SettingError) as error:
        Own(splits).setup()
    assert error.value.key == "data" and reason in str(error.value)


def test_a_dataset_must_say_how_many_classes_it_has() -> None:
    data = Own(SOUND)
    data.num_classes = 0
    with pytest.raises(SettingError) as error:
        data.setup()
    assert error.value.key == "num_classes"


@pytest.mark.parametrize(
    "splits",
    [
        SOUND,
        replace(SOUND, val=examples(0)),
        replace(SOUND, keys=np.arange(4)),
        Splits(*(examples(4, inputs=torch.ones(4, n, dtype=torch.int32)) for n in (5, 3))),
        Splits(*(examples(4, inputs=torch.zeros(4)) for _ in range(2))),
        Splits(*(examples(4, inputs=torch.full((4, 2), 6e4).half()) for _ in range(2))),
    ],
    ids=["plain", "no validation", "keys", "texts of other lengths", "one number each", "large"],
)
def test_sound_data_of_the_users_own_is_taken(splits: Splits) -> None:
    data = Own(splits)
    data.setup()
    assert len(data.client_data.examples) == 4


# -- fingerprints ------------------------------------------------------------------------------


def test_the_fingerprint_is_the_same_everywhere() -> None:
    """The number is of the bytes: little-endian, rows in order, shapes and types before them."""
    data = Own(SOUND, eval_batch_size=7)
    expected = hashlib.sha256()
    for array in (
        np.arange(8, dtype="<f4").reshape(4, 2),
        np.array([0, 1, 2, 0], dtype="<i8"),
        np.zeros((0, 2), dtype="<f4"),
        np.zeros(0, dtype="<i8"),
        np.arange(6, dtype="<f4").reshape(3, 2),
        np.array([0, 1, 2], dtype="<i8"),
        np.array([0, 2, 4], dtype="<i8"),
        data.client_data.index.samples.astype("<i4"),
    ):
        expected.update(f"torch.{array.dtype.name} {array.shape};".encode() + array.tobytes())
    assert data.fingerprint() == expected.hexdigest() == data.fingerprint()


def test_the_fingerprint_does_not_depend_on_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set()
    for folder in ("here", "there"):
        write_cifar(tmp_path / folder, monkeypatch)
        found.add(CIFAR10(data_dir=str(tmp_path / folder), num_clients=4, seed=0).fingerprint())
    assert len(found) == 1


def test_any_change_of_the_data_changes_the_fingerprint() -> None:
    one = with_value(1.0, 2)
    changed = [
        SOUND,
        replace(SOUND, train=examples(inputs=examples().inputs + one)),
        replace(SOUND, train=examples(targets=torch.tensor([0, 1, 2, 1]))),
        replace(SOUND, test=examples(3, inputs=examples(3).inputs + one[:3])),
        replace(SOUND, test=examples(3, targets=torch.tensor([0, 1, 1]))),
        replace(SOUND, test=examples(4)),
        replace(SOUND, val=examples(3)),
        replace(SOUND, val=examples(3, inputs=examples(3).inputs + 1)),
        replace(
            SOUND,
            train=examples(inputs=examples().inputs.double()),
            test=examples(3, inputs=examples(3).inputs.double()),
        ),
    ]
    partitions: list[dict[str, Any]] = [
        {"partition": Given([[0, 1], [2, 3]])},
        {"partition": Given([[0, 2], [1, 3]])},
        {"partition": Given([[0, 1, 2], [3]])},
    ]
    found = {Own(splits).fingerprint() for splits in changed}
    found |= {Own(SOUND, **settings, partition_seed=5).fingerprint() for settings in partitions}
    assert len(found) == len(changed) + len(partitions)


def test_a_digest_reads_a_tensor_in_its_order_whatever_its_layout() -> None:
    table = torch.arange(60_000).view(10_000, 6)
    assert digest(table.T.contiguous()) == digest(table.T) != digest(table)
    assert digest(table[::2]) == digest(table[::2].clone())
    assert digest(table[:, 1]) == digest(table[:, 1].clone())
    assert digest(table.to(torch.bfloat16)) != digest(table.to(torch.float16))
    assert digest(table[:2], table[2:]) != digest(table)


# -- mutations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_mutated_files_give_data_or_are_refused(name: str, unchecked: Path) -> None:
    build, parse = FORMATS[name]
    parse(build(), unchecked)
    refused, start = 0, time.perf_counter()
    for content in islice(mutations(build(), seed=0), 200):
        try:
            parse(content, unchecked)
        except SettingError as error:
            refused += 1
            assert error.key in ("data_dir", "train_samples") and "\n" not in str(error)
            assert len(str(error)) < 600
    assert 20 < refused < 200 and time.perf_counter() - start < 60
