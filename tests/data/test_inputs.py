"""Raw inputs become what the dataset made of them, by what a run keeps and without the data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import Digits, FederatedData, TinyImageNet, Toy2D
from fedgkd_pl.data.inputs import RawInputs, describe_inputs, read_inputs
from fedgkd_pl.errors import SettingError
from PIL import Image

from tests.support.datasets import WORDS, write_tiny
from tests.support.sources import table_rows, write_csv, write_images, write_leaf


def kept(data: Any) -> RawInputs:
    """What is left of a data module's inputs in a run's folder."""
    data.setup()
    return read_inputs(json.loads(json.dumps(describe_inputs(data))))


def seen(data: Any) -> torch.Tensor:
    """The test set as the net saw it."""
    inputs: torch.Tensor = data.test.transform(data.test.inputs, None)
    return inputs


def test_digits_as_arrays_and_as_images() -> None:
    for flat in (True, False):
        data = Digits(flat=flat, num_clients=2)
        raw = kept(data)
        pixels = data.test.inputs[:5].reshape(5, 8, 8).numpy()
        assert torch.equal(raw(data.test.inputs.double().numpy()), seen(data))
        images = [Image.fromarray((image * 15.9375).round().astype(np.uint8)) for image in pixels]
        assert torch.equal(raw(images), seen(data)[:5])
        for shaped in (pixels, pixels[:, None]):
            assert torch.equal(raw(shaped), seen(data)[:5])
            assert torch.equal(raw(shaped[0]), seen(data)[:1])
        assert torch.equal(raw(images[0]), seen(data)[:1])


def test_images_are_read_as_those_of_training(tmp_path: Path) -> None:
    """Resized where those were; an image of another size is refused where they were not."""
    write_images(tmp_path / "train", 6, side=8)
    write_images(tmp_path / "test", 2, side=8)
    files = [tmp_path / "test" / f"{name}/{n}.png" for name in ("blue", "red") for n in (0, 1)]
    for size in (None, 5, [4, 6]):
        data = FederatedData.from_image_folder(str(tmp_path), size=size, num_clients=2)
        raw = kept(data)
        assert torch.equal(raw(files), seen(data))
        assert torch.equal(raw([Image.open(file) for file in files]), seen(data))
    grey = FederatedData.from_image_folder(str(tmp_path), grayscale=True, num_clients=2)
    raw = kept(grey)
    assert torch.equal(raw(files), seen(grey)) and raw.shape == (1, 8, 8)
    with pytest.raises(SettingError, match=r"^input: an image is 9 × 8 .* images are 8 × 8"):
        raw(Image.new("RGB", (8, 9)))


def test_tiny_imagenet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_tiny(tmp_path, monkeypatch)
    data = TinyImageNet(data_dir=str(tmp_path), download=False, num_clients=2)
    raw = kept(data)
    line = (root / "val" / "val_annotations.txt").read_text().splitlines()[0]
    image = root / "val" / "images" / line.split("\t")[0]
    assert torch.equal(raw(image), seen(data)[:1])


@pytest.mark.parametrize("standardise", [True, False])
def test_tables(tmp_path: Path, standardise: bool) -> None:
    write_csv(tmp_path / "train.csv", ["a", "b", "kind"], table_rows(40))
    rows = table_rows(9, seed=1)
    write_csv(tmp_path / "test.csv", ["a", "b", "kind"], rows)
    files = {"path": str(tmp_path / "train.csv"), "test_path": str(tmp_path / "test.csv")}
    data = FederatedData.from_csv(label="kind", standardise=standardise, num_clients=2, **files)
    raw = kept(data)
    assert torch.equal(raw([row[:2] for row in rows]), seen(data))
    columns = {"kind": [row[2] for row in rows], "b": [row[1] for row in rows]}
    assert torch.equal(raw(columns | {"a": [str(row[0]) for row in rows]}), seen(data))
    with pytest.raises(SettingError, match=r"^inputs: inputs has no column 'a', but b"):
        raw(columns)
    with pytest.raises(SettingError, match=r"^inputs: a sample must be 2, with one row per sample"):
        raw([[1.0, 2.0, 3.0]])


def test_a_table_of_every_client(tmp_path: Path) -> None:
    for split, number in (("train", 12), ("test", 4)):
        for seed, name in enumerate(("ann", "bob")):
            file = tmp_path / split / f"{name}.csv"
            write_csv(file, ["a", "b", "label"], table_rows(number, seed + 2 * number))
    data = FederatedData.from_clients(str(tmp_path))
    raw = kept(data)
    rows = [row[:2] for seed in (8, 9) for row in table_rows(4, seed)]
    assert torch.equal(raw(np.array(rows)), seen(data))


def test_arrays_of_any_kind(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(20) % 2
    for x, shape in (
        (rng.random((20, 4)), None),
        (rng.integers(0, 255, (20, 3, 4, 4)).astype(np.uint8), None),
        (rng.integers(0, 255, (20, 48)).astype(np.uint8), [3, -1, 4]),
        (rng.integers(0, 9, (20, 6)), None),
    ):
        data = FederatedData.from_arrays(x, y, x[:3], y[:3], shape=shape, num_clients=2)
        raw = kept(data)
        assert torch.equal(raw(x[:3]), seen(data))
        assert torch.equal(raw(torch.from_numpy(x[1])), seen(data)[1:2])
    users = {"a": ([[1, 2, 3, 4]] * 4, [0, 1, 0, 1]), "b": ([[4, 3, 2, 1]] * 4, [0, 1, 0, 1])}
    write_leaf(tmp_path / "train" / "all.json", users)
    leaf = FederatedData.from_leaf(str(tmp_path), shape=[1, 2, 2])
    raw = kept(leaf)
    assert raw([1, 2, 3, 4]).tolist() == [[[[1.0, 2.0], [3.0, 4.0]]]]
    toy = Toy2D()
    assert torch.equal(kept(toy)(toy.test.inputs.numpy()), seen(toy))


def test_texts(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    train = [["a very good film", "good"], ["bad news", "bad"]] * 6
    test = [["the film is bad", "bad"], ["good", "good"], ["a very very good film of news", "good"]]
    files = {}
    for split, rows in (("path", train), ("test_path", test)):
        files[split] = str(write_csv(tmp_path / f"{split}.csv", ["text", "label"], rows))
    vocab = str(tmp_path / "vocab.txt")
    data = FederatedData.from_text(**files, tokenizer=vocab, max_length=6, num_clients=2)
    data.setup()
    content = describe_inputs(data)
    assert "vocabulary" not in content["reading"]
    own = tmp_path / "tokenizer.json"
    own.write_text(data.reading.vocabulary)  # type: ignore[union-attr]
    (tmp_path / "vocab.txt").unlink()
    raw = read_inputs(json.loads(json.dumps(content)), own)
    assert torch.equal(raw([text for text, _ in test]), seen(data))
    ids = [WORDS.index(word) for word in ("[CLS]", "good", "[SEP]")]
    assert raw("good").tolist() == [ids]
    with pytest.raises(SettingError, match=r"^inputs: must be a text, or texts"):
        raw([1, 2])
    own.write_text("{}")
    with pytest.raises(SettingError, match=r"^tokenizer: is damaged"):
        read_inputs(content | {"shape": [6]}, own)


class Mirror:
    random = False

    def __call__(self, x: torch.Tensor, _: Any) -> torch.Tensor:
        return x.flip(1)


def test_a_transform_of_ones_own_is_not_guessed() -> None:
    x, y = np.ones((8, 2), np.float32), np.arange(8) % 2
    raw = kept(FederatedData.from_arrays(x, y, transform=Mirror(), num_clients=2))
    with pytest.raises(SettingError, match=r"^transform: .*Mirror, .* not in the run's folder"):
        raw(x)


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        (np.full((1, 64), np.nan), "row 1 has NaN or Inf"),
        (np.full((1, 64), 0.5), "must be whole numbers from 0 to 255"),
        (np.full((1, 64), -1), "must be whole numbers from 0 to 255"),
        (np.full((1, 64), 256), "must be whole numbers from 0 to 255"),
        (np.zeros((0, 64)), "there are none"),
        (np.zeros((2, 8, 9)), "a sample must be 64 whole numbers, .*got \\(2, 8, 9"),
        ([], "a sample must be 64 whole numbers"),
        ("a text", "must be numbers"),
        ([torch.zeros(64), torch.zeros(63)], "must be of one shape"),
    ],
)
def test_inputs_that_do_not_fit(inputs: Any, error: str) -> None:
    raw = kept(Digits(num_clients=2))
    with pytest.raises(SettingError, match=f"^inputs: {error}"):
        raw(inputs)
