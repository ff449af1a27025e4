"""Raw inputs become the dataset's, by what a run keeps and without the data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from fedgkd_pl import Digits, FederatedData
from fedgkd_pl.data.examples import Scale
from fedgkd_pl.data.inputs import Decoder, ImageInputs, RawInputs, describe_inputs, read_inputs
from fedgkd_pl.errors import SettingError
from PIL import Image

from tests.support.datasets import WORDS
from tests.support.sources import table_rows, write_csv, write_images


def kept(data: Any) -> RawInputs:
    """What is left of a data module's inputs in a run's folder."""
    data.setup()
    return read_inputs(json.loads(json.dumps(describe_inputs(data.test, data.reading))))


def seen(data: Any) -> torch.Tensor:
    """The test set as the net saw it."""
    inputs: torch.Tensor = data.test.transform(data.test.inputs, None)
    return inputs


@pytest.mark.parametrize("flat", [True, False])
def test_digits_as_arrays_and_as_images(flat: bool) -> None:
    data = Digits(flat=flat, num_clients=2)
    raw = kept(data)
    pixels = data.test.inputs[:5].reshape(5, 8, 8).numpy()
    assert torch.equal(raw(data.test.inputs.double().numpy()), seen(data))
    images = [Image.fromarray((image * 15.9375).round().astype(np.uint8)) for image in pixels]
    assert torch.equal(raw(images), seen(data)[:5])
    assert torch.equal(raw(data.test.inputs[0].numpy()), seen(data)[:1])


@pytest.mark.parametrize(("size", "grayscale"), [(None, True), ([4, 6], False)])
def test_images_are_read_as_those_of_training(tmp_path: Path, size: Any, grayscale: bool) -> None:
    write_images(tmp_path / "train", 6, side=8)
    write_images(tmp_path / "test", 2, side=8)
    files = [tmp_path / "test" / f"{name}/{n}.png" for name in ("blue", "red") for n in (0, 1)]
    settings: dict[str, Any] = {"size": size, "grayscale": grayscale, "num_clients": 2}
    data = FederatedData.from_image_folder(str(tmp_path), **settings)
    raw = kept(data)
    assert torch.equal(raw(files), seen(data))
    assert torch.equal(raw([Image.open(file) for file in files]), seen(data))
    if size is None:
        with pytest.raises(SettingError, match=r"^input: .*\[9, 8\].*\[8, 8\]"):
            raw(Image.new("RGB", (8, 9)))


def test_images_of_any_mode_are_scaled_or_refused(tmp_path: Path) -> None:
    """Pillow would clip pixels of more than 8 bits to 255; in training and in ``predict`` alike."""
    raw = RawInputs((1, 2, 2), torch.uint8, ImageInputs((1, 2, 2)), Scale(1))
    wide = np.array([[0, 257], [25_700, 65_535]])
    narrow = Image.fromarray((wide // 257).astype(np.uint8))
    sound = {
        "wide.png": Image.fromarray(wide.astype(np.uint16)),  # I;16
        "wide.pgm": Image.fromarray(wide.astype(np.uint16)),  # which Pillow opens as I
        "wide.tif": Image.fromarray(wide.astype(np.uint16)),
        "large-endian.tif": Image.fromarray(wide.astype(">u2")),  # I;16B
    }
    sound |= {f"{mode}.png": narrow.convert(mode) for mode in ("L", "LA", "P", "RGB", "RGBA")}
    sound |= {"P.png": narrow.convert("P", palette=Image.Palette.ADAPTIVE)}
    sound |= {"CMYK.tif": narrow.convert("RGB").convert("CMYK")}
    for name, image in sound.items():
        image.save(tmp_path / name)
        pixels = Decoder(grayscale=True)([tmp_path / name])
        assert pixels.tolist() == [[[[0, 1], [100, 255]]]], name
        assert torch.equal(raw(tmp_path / name), pixels.float()), name
        colours = Decoder()([tmp_path / name])
        assert torch.equal(colours, pixels.expand(1, 3, 2, 2)), name
    for name, kind in (("float.tif", np.float32), ("whole.tif", np.int32)):
        Image.fromarray(wide.astype(kind)).save(tmp_path / name)
        for read, key in ((Decoder(), "path"), (raw, "input")):
            with pytest.raises(SettingError, match=f"{name} cannot be decoded") as error:
                read([tmp_path / name])
            assert error.value.key == key


def test_the_filter_of_resized_images_is_written_down(tmp_path: Path) -> None:
    """With another one, a net that was exported names another class for the same photo."""
    write_images(tmp_path, 3, side=9)
    data = FederatedData.from_image_folder(str(tmp_path), size=[4, 6], num_clients=2)
    data.setup()
    reading = describe_inputs(data.test, data.reading)["reading"]
    assert reading["resize"] == "bilinear" and reading["shape"] == (3, 4, 6)
    photo = Image.open(tmp_path / "red/0.png")
    by_hand = photo.resize((6, 4), Image.Resampling[reading["resize"].upper()])
    expected = torch.from_numpy(np.array(by_hand)).permute(2, 0, 1)
    assert torch.equal(kept(data).stored(photo)[0], expected)
    data = FederatedData.from_image_folder(str(tmp_path), num_clients=2)
    data.setup()
    assert describe_inputs(data.test, data.reading)["reading"]["resize"] is None


@pytest.mark.parametrize("standardise", [True, False])
def test_tables(tmp_path: Path, standardise: bool) -> None:
    rows = table_rows(9, seed=1)
    files = {
        key: str(write_csv(tmp_path / f"{key}.csv", ["a", "b", "kind"], each))
        for key, each in (("path", table_rows(40)), ("test_path", rows))
    }
    data = FederatedData.from_csv(label="kind", standardise=standardise, num_clients=2, **files)
    raw = kept(data)
    assert torch.equal(raw([row[:2] for row in rows]), seen(data))
    table = pd.DataFrame(rows, columns=["a", "b", "kind"])
    assert torch.equal(raw(table[["kind", "b", "a"]]), seen(data))
    red = pd.DataFrame({"a": ["red"], "b": [1]})
    for bad in (table[["kind", "b"]], red, red.replace("red", np.nan), [[1.0, 2.0, 3.0]]):
        with pytest.raises(SettingError, match=r"^inputs: "):
            raw(bad)


def test_arrays_of_any_kind() -> None:
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
    content = describe_inputs(data.test, data.reading)
    assert "vocabulary" not in content["reading"]
    own = tmp_path / "tokenizer.json"
    own.write_text(data.reading.vocabulary)  # type: ignore[union-attr]
    (tmp_path / "vocab.txt").unlink()
    raw = read_inputs(json.loads(json.dumps(content)), own)
    assert torch.equal(raw([text for text, _ in test]), seen(data))
    assert raw("good").tolist() == [[WORDS.index(word) for word in ("[CLS]", "good", "[SEP]")]]
    with pytest.raises(SettingError, match=r"^inputs: "):
        raw([1, 2])


def mirrored(x: torch.Tensor, _: Any) -> torch.Tensor:
    return x.flip(1)


def test_a_transform_of_ones_own_is_not_guessed() -> None:
    x, y = np.ones((8, 2), np.float32), np.arange(8) % 2
    raw = kept(FederatedData.from_arrays(x, y, transform=mirrored, num_clients=2))
    with pytest.raises(SettingError, match=r"^transform: "):
        raw(x)


def test_inputs_that_do_not_fit() -> None:
    raw = kept(Digits(num_clients=2))
    pair = [torch.zeros(64), torch.zeros(63)]
    numbers = [np.full((1, 64), value) for value in (np.nan, 0.5, -1, 256)]
    for inputs in [*numbers, np.zeros((0, 64)), np.zeros((2, 8, 9)), [], "a text", pair]:
        with pytest.raises(SettingError, match=r"^inputs: "):
            raw(inputs)


@pytest.mark.parametrize(
    "change", [{"dtype": "load"}, {"reading": {"kind": "os"}}, {"transform": {"kind": "eval"}}]
)
def test_what_describe_would_not_write_is_an_error(change: dict[str, Any]) -> None:
    sound = {"shape": [2], "dtype": "float32", "reading": None, "transform": {"kind": "ids"}}
    assert read_inputs(sound).shape == (2,)
    with pytest.raises((KeyError, TypeError, ValueError)):
        read_inputs(sound | change)
