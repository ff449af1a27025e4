"""Resident data, batches, augmentation, cohorts."""

import hashlib
import io
import pickle
import tarfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import CIFAR10, CIFAR100, SST5, AGNews, Digits, TinyImageNet
from fedgkd_pl.data.downloads import provide
from fedgkd_pl.data.examples import ImageTransform
from fedgkd_pl.errors import SettingError

from tests.conftest import Table
from tests.support.datasets import write_cifar


def test_digits_splits() -> None:
    data = Digits(num_clients=10, val_fraction=0.1)
    data.setup()
    owned = sum(map(len, data.client_data.index))
    assert (owned, len(data.val), len(data.test)) == (1293, 144, 360)
    x, y = next(iter(data.test_dataloader()))
    assert x.shape == (360, 64) and 0 <= x.min() and x.max() == 1
    assert y.dtype == torch.int64 and set(y.tolist()) == set(range(10))
    rows = torch.cat([data.client_data.examples.inputs, data.val.inputs, data.test.inputs])
    from sklearn.datasets import load_digits

    assert sorted(map(tuple, rows.tolist())) == sorted(
        map(tuple, load_digits().data.astype(int).tolist())
    )


def test_batches_cover_a_client_once_per_pass_in_new_orders() -> None:
    data = Table(sizes=(10, 7), batch_size=4)
    x, _ = data.arrays()[1]
    loader = data.client_data.batches(1, round=3)
    passes = [torch.cat([rows for rows, _ in loader]).numpy() for _ in range(2)]
    assert [len(y) for _, y in loader] == [4, 3] and len(loader) == 2
    for rows in passes:
        assert sorted(map(tuple, rows)) == sorted(map(tuple, x))
    assert not np.array_equal(*passes)


def test_augmentation_is_a_crop_and_flip_of_each_image() -> None:
    """Every output must be one of the 9 × 9 crops of the padded image, flipped or not."""
    images = torch.randint(1, 256, (40, 3, 6, 6), dtype=torch.uint8)
    transform = ImageTransform((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), padding=4)
    out = (transform(images, torch.Generator().manual_seed(0)) * 255).round().to(torch.uint8)
    places, flips = set(), set()
    for image, result in zip(images, out, strict=True):
        padded = np.pad(image.numpy(), ((0, 0), (4, 4), (4, 4)))
        found = [
            (top, left, flip)
            for top in range(9)
            for left in range(9)
            for flip in (False, True)
            if np.array_equal(
                padded[:, top : top + 6, left : left + 6][:, :, :: -1 if flip else 1], result
            )
        ]
        assert len(found) == 1, "not a crop of its image"
        places.add(found[0][:2])
        flips.add(found[0][2])
    assert len(places) > 25 and flips == {False, True}  # each image on its own


@pytest.mark.parametrize(
    "bad",
    [
        *({key: -1} for key in ("num_clients", "participation", "batch_size", "seed")),
        *({key: -1} for key in ("val_fraction", "client_val_fraction")),
        {"client_val_fraction": 0.5, "client_test_fraction": 0.5},
        {"participation": 0.01},
        {"unseen_clients": 20},
    ],
)
def test_bad_settings(bad: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=f"^{next(iter(bad))}: "):
        Digits(**bad)


@pytest.mark.parametrize("cls", [CIFAR10, CIFAR100])
def test_cifar_reads_the_published_files(
    cls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar(tmp_path, monkeypatch, cls.num_classes)
    data = cls(data_dir=str(tmp_path), num_clients=4, batch_size=16, download=False)
    data.setup()
    assert data.client_data.index.sizes.tolist() == [45] * 4
    assert (len(data.val), len(data.test)) == (20, 40)
    assert int(data.client_data.examples.targets.max()) == cls.num_classes - 1
    first = pickle.loads(next(tmp_path.glob("*/train_1")).read_bytes())
    image = data.client_data.examples.inputs[0]
    assert torch.equal(image, torch.from_numpy(first["data"][0].reshape(3, 32, 32)))
    x, _ = next(iter(data.client_data.batches(0, 1)))
    assert x.shape == (16, 3, 32, 32) and x.dtype == torch.float32


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("canary"),))


def test_cifar_unpickles_nothing_whose_checksum_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_cifar(tmp_path, monkeypatch)
    for name in ("train_3", "test", "batches.meta"):
        file = tmp_path / "cifar-10-batches-py" / name
        sound = file.read_bytes()
        file.write_bytes(pickle.dumps(Evil()))
        with pytest.raises(SettingError, match=r"^data_dir: .*cifar-10-batches-py is damaged"):
            CIFAR10(data_dir=str(tmp_path), num_clients=4).setup()
        file.write_bytes(sound)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("cls", [CIFAR10, CIFAR100, TinyImageNet, SST5, AGNews])
def test_without_a_network_one_line_says_what_to_put_where(
    cls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingError, match=r"^data_dir: .*put .*"):
        cls(data_dir=str(tmp_path / "data"), download=False).prepare_data()
    monkeypatch.setattr(urllib.request, "urlopen", refuse)  # as without a network
    with pytest.raises(SettingError, match=r"^data_dir: .*no network.*put .*"):
        cls(data_dir=str(tmp_path / "data")).prepare_data()
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def refuse(*args: Any, **kwargs: Any) -> None:
    raise urllib.error.URLError("no network")


def pack(archive: Path, name: str, link: str = "") -> str:
    """An archive with a file and a link of these names; its MD5."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w") as zipped:
            zipped.writestr(name, "content")
    else:
        with tarfile.open(archive, "w:gz") as tar:
            member = tarfile.TarInfo(name)
            member.size = 7
            tar.addfile(member, io.BytesIO(b"content"))
            if link:
                member = tarfile.TarInfo(link)
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
                tar.addfile(member)
    return hashlib.md5(archive.read_bytes()).hexdigest()


@pytest.mark.parametrize("suffix", [".zip", ".tar.gz"])
def test_archives_are_unpacked_within_their_folder(suffix: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    archive, url = folder / f"archive{suffix}", f"http://nowhere/archive{suffix}"
    provide(folder, ["top"], url, pack(archive, "in/top/b.txt"), inside="in")
    assert (folder / "top" / "b.txt").read_text() == "content"
    pack(archive, "c/d.txt")  # sound, but not what is meant
    with pytest.raises(SettingError, match=r"^data_dir: .* damaged"):
        provide(folder, ["c"], url, "0" * 32)
    for name, link in ("../out.txt", ""), ("top/c.txt", "../linked"), ("other", ""):
        with pytest.raises(SettingError, match=r"^data_dir: .* damaged"):
            provide(folder, ["c"], url, pack(archive, name, link))
    archive.write_bytes(archive.read_bytes()[:-20])
    with pytest.raises(SettingError, match=r"^data_dir: .* damaged"):
        provide(folder, ["c"], url, None)
    found = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.*")}
    assert found == {f"data/{archive.name}", "data/top/b.txt"}


def test_real_cifar_normalisation(real_data: Path) -> None:
    """The constants are the data's: all training images, per channel."""
    data = CIFAR10(data_dir=str(real_data))
    pixels = data.load().train.inputs.double() / 255
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx(CIFAR10.MEAN, abs=5e-5)
    assert pixels.std((0, 2, 3)).tolist() == pytest.approx(CIFAR10.STD, abs=1e-4)


def test_unseen_and_empty_clients_are_never_drawn() -> None:
    data = Table(sizes=(5, 0, 5, 5, 5, 5), unseen_clients=2, participation=0.5)
    data.setup()
    loader = data.train_dataloader()
    drawn = set()
    for epoch in range(30):
        loader.set_epoch(epoch)
        assert len(loader.cohort()) == 2
        drawn |= set(loader.cohort())
    assert drawn == {0, 2, 3} == set(data.eligible)
    with pytest.raises(SettingError, match="only 2 clients have data, a round needs 3"):
        Table(sizes=(5, 0, 5)).setup()
