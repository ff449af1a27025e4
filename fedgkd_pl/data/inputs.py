"""From raw inputs to a net's, without the data: what a run keeps of it, and what that becomes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.datasets.text import TrimPadding, encode, load_tokenizer, saved_tokenizer
from fedgkd_pl.data.examples import Examples, Transform
from fedgkd_pl.data.mapped import DTYPES, as_tensor
from fedgkd_pl.data.raw import Cells, Pictures, Reading, Words
from fedgkd_pl.data.sources.arrays import check_finite
from fedgkd_pl.data.sources.images import decode
from fedgkd_pl.data.sources.tables import numbers, scaled
from fedgkd_pl.data.transforms import Ids, ImageTransform, Scale
from fedgkd_pl.errors import SettingError, require
from torch import Tensor

READINGS: dict[str, type[Reading]] = {"images": Pictures, "table": Cells, "texts": Words}
LARGEST = 2**28  # numbers of a sample, and what a whole number may be


@dataclass(frozen=True)
class RawInputs:
    """How raw inputs become those of a net; call it with some of them.

    Attributes:
        shape: of a sample as the dataset stores it.
        dtype: of a sample as the dataset stores it.
        reading: how samples lie in files; None: as arrays of ``shape``.
        transform: from a stored batch to the net's inputs, as in evaluation.
        tokenizer: of texts.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    reading: Reading | None
    transform: Transform
    tokenizer: Any = None

    def __call__(self, inputs: Any) -> Tensor:
        """The net's inputs, a batch; of one sample a batch of one."""
        return self.transform(self.stored(inputs), None)

    def stored(self, inputs: Any) -> Tensor:
        """A batch as the dataset stores it.

        Args:
            inputs: of images, Pillow's or arrays of bytes; of tables, arrays with the columns in
                their order, or columns by name; of texts, strings; of anything else, arrays. One
                sample or several.
        """
        if isinstance(self.reading, Words):
            texts = [inputs] if isinstance(inputs, str) else list(inputs)
            fits = len(texts) > 0 and all(isinstance(text, str) for text in texts)
            require(fits, "inputs", "must be a text, or texts", type(inputs).__name__)
            return encode(self.tokenizer, texts, self.reading.max_length)
        if isinstance(self.reading, Cells):
            columns = self.reading.columns
            if isinstance(inputs, Mapping) or hasattr(inputs, "columns"):  # such as pandas'
                cells = {name: inputs[name] for name in columns if name in inputs}
                require(bool(cells), "inputs", f"must have the columns {', '.join(columns)}")
                return scaled(numbers(cells, columns, Path("inputs"), "inputs"), self.reading)
            return scaled(self._batch(inputs, torch.float64), self.reading)
        if isinstance(self.reading, Pictures):
            several = isinstance(inputs, list | tuple)
            images = inputs if several else [inputs]
            if len(images) > 0 and all(_is_image(image) for image in images):
                return torch.cat([self._picture(image) for image in images])
        return self._batch(inputs, self.dtype)

    def _picture(self, source: Any) -> Tensor:
        """An image of Pillow's, or the path of one, as it is stored."""
        reading = self.reading
        assert isinstance(reading, Pictures)
        channels, height, width = reading.shape or self.shape
        name = str(source) if isinstance(source, Path) else "an image"
        try:
            size = [height, width] if reading.resize else None
            (pixels,) = decode([source], size, grayscale=channels == 1)
        except SettingError as error:
            raise SettingError("input", error.reason) from error
        actual = f"{pixels.shape[1]} × {pixels.shape[2]}"
        reason = f"{name} is {actual} (height × width), the run's images are {height} × {width}"
        require(pixels.shape[1:] == (height, width), "input", f"{reason}: resize it first")
        if reading.largest != 255:
            pixels = (pixels.float() * reading.largest / 255).round()
        stored: Tensor = pixels.reshape(1, *self.shape).to(self.dtype)
        return stored

    def _pictures(self) -> list[tuple[int, ...]]:
        """The shapes of one image, where images are read: with and without its only channel."""
        sides = self.reading.shape if isinstance(self.reading, Pictures) else None
        if sides is None:
            return []
        return [sides, sides[1:]] if sides[0] == 1 else [sides]

    def _batch(self, inputs: Any, dtype: torch.dtype) -> Tensor:
        """An array, or arrays, of the right shape and type."""
        if isinstance(inputs, list | tuple) and inputs and isinstance(inputs[0], Tensor):
            require(len({each.shape for each in inputs}) == 1, "inputs", "must be of one shape")
            inputs = torch.stack(list(inputs))
        values = as_tensor(inputs, "inputs")
        values = values[None] if values.shape in (self.shape, *self._pictures()) else values
        if values.shape[1:] in self._pictures():  # that are stored flat
            values = values.reshape(len(values), *self.shape)
        wanted = " × ".join(map(str, self.shape)) or "one number"
        whole = "" if dtype.is_floating_point else " whole numbers"
        reason = f"a sample must be {wanted}{whole}, with one row per sample"
        require(values.shape[1:] == self.shape, "inputs", reason, tuple(values.shape))
        require(len(values) > 0, "inputs", "there are none")
        check_finite(values, "inputs")
        if not dtype.is_floating_point and values.dtype != dtype:
            kind = torch.iinfo(dtype) if dtype != torch.bool else None
            low, high = (kind.min, kind.max) if kind else (0, 1)
            fits = bool((values == values.round()).all()) if values.is_floating_point() else True
            fits = fits and low <= float(values.min()) and float(values.max()) <= high
            require(fits, "inputs", f"must be whole numbers from {low} to {high}")
        return values.to(dtype)


def _is_image(source: Any) -> bool:
    return isinstance(source, Path) or hasattr(source, "convert")


def describe_inputs(data: FederatedDataModule) -> dict[str, Any]:
    """What of a data module's test set :func:`read_inputs` needs, as JSON takes it."""
    examples = data.test
    shape, dtype = tuple(examples.inputs.shape[1:]), examples.inputs.dtype
    reading = data.reading
    bytes_of_image = dtype == torch.uint8 and len(shape) == 3 and shape[0] in (1, 3)
    if reading is None and bytes_of_image:
        reading = Pictures()
    if isinstance(reading, Pictures) and reading.shape is None:
        reading = Pictures((shape[0], shape[1], shape[2]), reading.resize, reading.largest)
    kinds = {value: name for name, value in READINGS.items()}
    if reading is not None:
        fields = {"kind": kinds[type(reading)], **asdict(reading)}
        fields.pop("vocabulary", None)  # a file of its own
    return {
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "reading": None if reading is None else fields,
        "transform": _described(examples),
    }


def _described(examples: Examples) -> dict[str, Any]:
    transform: Any = examples.transform
    kind = type(transform)  # not a subclass, which may do anything
    if kind is ImageTransform:
        return {"kind": "normalise", "mean": [*transform.mean], "std": [*transform.std]}
    if kind is Scale:
        sides = None if transform.shape is None else transform(examples[:1].inputs, None).shape[1:]
        return {"kind": "scale", "maximum": float(transform.maximum), "shape": sides}
    if kind is Ids:
        return {"kind": "ids"}
    if kind is TrimPadding:
        return {"kind": "trim", "pad_id": transform.pad_id}
    return {"kind": "own", "name": f"{kind.__module__}.{kind.__qualname__}"}


class OwnTransform:
    """Stands for a transform of the user's, which a run's folder does not hold."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, inputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Refuses to guess."""
        reason = "the data's own, is not in the run's folder: apply it, and call net"
        raise SettingError("transform", f"{self.name}, {reason}")


def read_inputs(content: Any, vocabulary: Path | None = None) -> RawInputs:
    """What :func:`describe_inputs` gave; ValueError for anything that it would not give.

    Args:
        content: of a file that may be a stranger's.
        vocabulary: the tokenizer's own file; by default it is found by its name.
    """
    match content:
        case {"shape": list(shape), "dtype": str(name), "reading": read, "transform": form}:
            pass
        case _:
            raise ValueError("has other keys")
    _check(_sizes(shape) and name in DTYPES)
    reading = _reading(read, shape)
    transform = _transform(form, shape)
    tokenizer = None
    if isinstance(reading, Words):
        if not isinstance(transform, TrimPadding):
            raise ValueError("has another transform")
        if vocabulary is not None and vocabulary.is_file():
            tokenizer = saved_tokenizer(vocabulary, transform.pad_id)
        else:
            tokenizer = load_tokenizer(reading.tokenizer)
    return RawInputs(tuple(shape), getattr(torch, name), reading, transform, tokenizer)


def _reading(content: Any, shape: list[int]) -> Reading | None:
    match content:
        case None:
            return None
        case {"kind": "images", "shape": list(sides), "resize": bool(resize), "largest": top}:
            _check(_sizes(sides) and len(sides) == 3 and math.prod(sides) == math.prod(shape))
            _check(sides[0] in (1, 3) and type(top) is int and 0 < top < LARGEST)
            return Pictures((sides[0], sides[1], sides[2]), resize, top)
        case {"kind": "table", "columns": list(names), "mean": mean, "deviation": deviation}:
            _check(shape == [len(names)] and all(isinstance(name, str) for name in names))
            _check(_are_numbers(mean, len(names)) and _are_numbers(deviation, len(names)))
            _check(all(value > 0 for value in deviation))
            return Cells(tuple(names), tuple(mean), tuple(deviation))
        case {"kind": "texts", "column": str(column), "tokenizer": str(name), "max_length": most}:
            _check(type(most) is int and 2 <= most < LARGEST)
            return Words(column, name, most)
    raise ValueError("has another reading")


def _transform(content: Any, shape: list[int]) -> Transform:
    match content:
        case {"kind": "normalise", "mean": mean, "std": std}:
            channels = shape[0] if len(shape) == 3 else -1
            _check(_are_numbers(mean, channels) and _are_numbers(std, channels))
            return ImageTransform(mean, std, padding=0, flip=False)
        case {"kind": "scale", "maximum": maximum, "shape": sides}:
            _check(_are_numbers([maximum], 1) and maximum > 0)
            known = sides is None or (_sizes(sides) and math.prod(sides) == math.prod(shape))
            _check(known)
            return Scale(maximum, sides)
        case {"kind": "ids"}:
            return Ids()
        case {"kind": "trim", "pad_id": int(pad_id)}:
            return TrimPadding(pad_id)
        case {"kind": "own", "name": str(name)}:
            return OwnTransform("".join(filter(str.isprintable, name))[:100])
    raise ValueError("has another transform")


def _check(sound: bool) -> None:
    if not sound:
        raise ValueError("has values out of range")


def _sizes(values: Any) -> bool:
    whole = isinstance(values, list) and all(type(value) is int for value in values)
    return whole and all(value > 0 for value in values) and math.prod(values) < LARGEST


def _are_numbers(values: Sequence[Any], length: int) -> bool:
    fits = isinstance(values, list) and len(values) == length
    return fits and all(type(v) in (int, float) and abs(v) < 1e30 for v in values)
