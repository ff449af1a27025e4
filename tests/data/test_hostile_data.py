"""Data files that are damaged or mean harm, and ``load()`` that gives what cannot be trained on."""

import hashlib
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import TinyImageNet
from fedgkd_pl.data.downloads import read_checked
from fedgkd_pl.data.examples import Examples, Scale, Splits, digest
from fedgkd_pl.errors import SettingError

from tests.conftest import Table
from tests.support.datasets import image, write_tiny

# -- files -------------------------------------------------------------------------------------


def test_what_is_not_the_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    with (tmp_path / "large").open("wb") as out:
        out.truncate(10 * 2**30)
    (tmp_path / "changed").write_bytes(b"!")
    for kind in ("pipe", "folder", "large", "nowhere", "device", "changed"):
        with pytest.raises(SettingError, match=f"^data_dir: .*{kind}"):
            read_checked(tmp_path / kind, "0" * 32)


def as_large_as_can_be() -> bytes:
    """A decompression bomb: 65,500 × 65,500 pixels in a header, 12 GB if they were decoded."""
    content = image()
    place = content.index(b"\xff\xc0") + 5
    return content[:place] + struct.pack(">HH", 65_500, 65_500) + content[place + 4 :]


IMAGES = [b"", image()[:-100], image()[:300], image((63, 64)), as_large_as_can_be(), b"an image"]


def test_what_is_no_image_of_the_right_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_tiny(tmp_path, monkeypatch)
    for content in IMAGES:
        (root / "val" / "images" / "val_3.JPEG").write_bytes(content)
        with pytest.raises(SettingError, match=r"^data_dir: .*val_3\.JPEG"):
            TinyImageNet(data_dir=str(tmp_path), num_clients=3, download=False).setup()
        assert {file.name.split("-")[0] for file in root.glob("decoded/*")} == {"train"}


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


def with_train(**changes: Any) -> Splits:
    return replace(SOUND, train=examples(**changes))


def with_test(rows: int = 3, **changes: Any) -> Splits:
    return replace(SOUND, test=examples(rows, **changes))


SOUND = Splits(examples(), examples(3))
NAN, INF = float("nan"), float("-inf")
BAD: dict[str, tuple[Any, str]] = {
    "one label less": (with_train(targets=torch.arange(3)), "train has 3 labels"),
    "labels of floats": (with_train(targets=torch.arange(4.0)), "train labels"),
    "label too large": (with_train(targets=torch.tensor([0, 2, 3, 3])), "train label at 2"),
    "NaN": (with_train(inputs=with_value(NAN, 3)), "train input at 3"),
    "Inf": (with_test(inputs=with_value(INF, 1, 3)), "test input at 1"),
    "NaN far in": (with_test(9000, inputs=with_value(NAN, 8999, 9000)), "test input at 8999"),
    "no test samples": (with_test(0), "test"),
    "no training samples": (with_train(rows=0), "train"),
    "another shape": (with_test(inputs=torch.zeros(3, 5)), "test inputs"),
    "another type": (replace(SOUND, val=examples(inputs=torch.zeros(4, 2).half())), "val inputs"),
    "a transform that fails": (with_train(transform=lambda x, _: x.view(5)), "transform"),
    "a transform to arrays": (with_train(transform=lambda x, _: x.numpy()), "transform"),
    "keys too few": (replace(SOUND, keys=np.arange(3)), "keys"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_of_the_users_own_is_refused_before_the_run(case: str) -> None:
    splits, named = BAD[case]
    with pytest.raises(SettingError, match=named) as error:
        Own(splits).setup()
    assert error.value.key == "data"


def test_a_dataset_must_say_its_classes() -> None:
    for attribute, value in (("num_classes", None), ("class_names", ["a", "b"])):
        data = Own(SOUND)
        setattr(data, attribute, value)
        with pytest.raises(SettingError) as error:
            data.setup()
        assert error.value.key == attribute


@pytest.mark.parametrize(
    "splits",
    [
        replace(SOUND, val=examples(0)),
        Splits(*(examples(4, inputs=torch.ones(4, n, dtype=torch.int32)) for n in (5, 3))),
        Splits(*(examples(4, inputs=torch.full((4, 2), 6e4).half()) for _ in range(2))),
    ],
    ids=["no validation", "texts of other lengths", "large"],
)
def test_sound_data_of_the_users_own_is_taken(splits: Splits) -> None:
    assert len(Own(splits).client_data.examples) == 4


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


def test_a_digest_reads_a_tensor_in_its_order_whatever_its_layout() -> None:
    table = torch.arange(60_000).view(10_000, 6)
    assert digest(table.T.contiguous()) == digest(table.T) != digest(table)
    assert digest(table[::2]) == digest(table[::2].clone())
    assert digest(table.to(torch.bfloat16)) != digest(table.to(torch.float16))
    assert digest(table[:2], table[2:]) != digest(table)
