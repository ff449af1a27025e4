"""Tiny-ImageNet's layout, with a few images."""

import shutil
from pathlib import Path

import pytest
import torch
from fedgkd_pl import TinyImageNet
from fedgkd_pl.data.examples import MappedTensor

from tests.support.datasets import write_tiny

NAMES = ("n01", "n02", "n03")


def test_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path, monkeypatch)
    data = TinyImageNet(data_dir=str(tmp_path), num_clients=3, download=False)
    data.setup()
    train = data.client_data.examples
    assert train[:].inputs.shape == (27, 3, 64, 64) and train.inputs.dtype == torch.uint8
    assert (len(data.val), len(data.test)) == (3, 6)
    for split in (train, data.val, data.test, data.client_data.owned(0)):
        assert isinstance(split.inputs, MappedTensor)  # nothing copies the decoded file
    labels = torch.cat([train.targets, data.val.targets])
    assert labels.bincount().tolist() == [10, 10, 10]
    assert data.test.targets.tolist() == [0, 1, 2, 0, 1, 2]
    # Each class was given its own brightness: the right picture has the right label, grey or not.
    for examples in (train, data.val, data.test):
        brightness = examples[:].inputs.float().mean((1, 2, 3))
        torch.testing.assert_close(brightness, 20.0 + 80 * examples.targets, atol=2, rtol=0)
    x, _ = next(iter(data.client_data.batches(0, 1)))
    assert x.shape[1:] == (3, 64, 64)


def test_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_tiny(tmp_path, monkeypatch)
    first = TinyImageNet(data_dir=str(tmp_path), num_clients=3)
    first.setup()
    shutil.rmtree(root / "train")
    shutil.rmtree(root / "val" / "images")
    again = TinyImageNet(data_dir=str(tmp_path), num_clients=3)
    again.setup()
    assert torch.equal(first.test.inputs, again.test.inputs)
    assert first.fingerprint() == again.fingerprint()
