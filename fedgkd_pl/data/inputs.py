"""How samples lie in files, and from there to a net's inputs: what a run keeps of its data."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fedgkd_pl.data.examples import Transform
from fedgkd_pl.data.mapped import DTYPES, as_tensor
from fedgkd_pl.data.transforms import Ids, ImageTransform, Scale
from fedgkd_pl.data.validation import check_finite
from fedgkd_pl.errors import SettingError, require
from torch import Tensor

if TYPE_CHECKING:
    from fedgkd_pl.data.datamodule import FederatedDataModule

LARGEST = 2**28  # numbers of a sample


@dataclass(frozen=True)
class ImageInputs:
    """Images as bytes, channels first.

    Attributes:
        shape: channels, height and width; by default those of a stored sample.
        resize: whether images of other sizes are resized, as those of training were.
        largest: what the brightest pixel is stored as.
    """

    shape: tuple[int, int, int] | None = None
    resize: bool = False
    largest: int = 255


@dataclass(frozen=True)
class TableInputs:
    """Rows of a table, as float32 after (cell - mean) / deviation.

    Attributes:
        columns: those of the inputs, in their order.
        mean: one number for each column.
        deviation: one number for each column.
    """

    columns: tuple[str, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def scaled(self, values: Tensor) -> Tensor:
        """Rows of a table, float64, as they are stored."""
        shifted = (values.numpy() - np.asarray(self.mean)) / np.asarray(self.deviation)
        return torch.from_numpy(shifted.astype(np.float32))


@dataclass(frozen=True)
class TextInputs:
    """Texts as token ids, padded on the right.

    Attributes:
        column: that of the texts, in a table.
        tokenizer: its name, folder or ``vocab.txt``.
        max_length: longer texts are cut to this many tokens.
        vocabulary: the tokenizer's own file, as text; empty where it has none.
    """

    column: str
    tokenizer: str
    max_length: int
    vocabulary: str = field(default="", repr=False)


InputFormat = ImageInputs | TableInputs | TextInputs
FORMATS: dict[str, Any] = {"images": ImageInputs, "table": TableInputs, "texts": TextInputs}


def decode(sources: Sequence[Any], size: int | list[int] | None, grayscale: bool) -> Tensor:
    """Images as bytes, samples × channels × height × width.

    Args:
        sources: files, or images of Pillow's.
        size: to resize to; None where all must be of one size.
        grayscale: one channel instead of three.
    """
    from PIL import Image

    sides = [size, size] if isinstance(size, int) else (size and [size[0], size[-1]])
    pixels: Any = np.empty(0, np.uint8)
    for row, source in enumerate(sources):
        name = str(source) if isinstance(source, Path) else f"the image of row {row + 1}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                image = Image.open(source) if isinstance(source, Path) else source
                wide = image.mode == "I" and image.format in ("PNG", "PPM")  # as Pillow has them
                if wide or image.mode.startswith("I;16"):
                    image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
                known = image.mode not in ("I", "F")  # which Pillow would clip
                image = image.convert("L" if grayscale else "RGB")
        except Exception as error:  # Pillow raises many classes
            raise SettingError("path", f"{name} cannot be decoded ({error!s:.100})") from error
        require(known, "path", f"{name} must have 8 or 16 bits a channel; convert it")
        if sides:
            image = image.resize((sides[1], sides[0]), Image.Resampling.BILINEAR)
        array = np.asarray(image).reshape(image.height, image.width, -1).transpose(2, 0, 1)
        if row == 0:
            pixels = np.empty((len(sources), *array.shape), dtype=np.uint8)
        if array.shape != pixels.shape[1:]:
            first = f"{pixels.shape[2]} × {pixels.shape[3]}"
            reason = f"{name} is {image.height} × {image.width} (height × width), the first {first}"
            raise SettingError("size", f"{reason}; give size, to resize all")
        pixels[row] = array
    return torch.from_numpy(pixels)


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
    reading: InputFormat | None
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
        reading = self.reading
        several = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
        if isinstance(reading, TextInputs):
            from fedgkd_pl.data.datasets.text import encode

            fits = bool(several) and all(isinstance(text, str) for text in several)
            require(fits, "inputs", "must be a text, or texts", type(inputs).__name__)
            return encode(self.tokenizer, several, reading.max_length)
        if isinstance(reading, TableInputs):
            if isinstance(inputs, Mapping) or hasattr(inputs, "columns"):  # such as pandas'
                missing = [name for name in reading.columns if name not in inputs]
                require(not missing, "inputs", f"must have the columns {', '.join(missing)}")
                columns = [np.asarray(inputs[name]) for name in reading.columns]
                try:
                    inputs = np.column_stack([cells.astype(np.float64) for cells in columns])
                except ValueError as error:  # it names the cell
                    raise SettingError("inputs", str(error)) from error
            return reading.scaled(self._batch(inputs, torch.float64))
        if isinstance(reading, ImageInputs) and several and all(map(_is_image, several)):
            return torch.cat([self._image(reading, image) for image in several])
        return self._batch(inputs, self.dtype)

    def _image(self, reading: ImageInputs, source: Any) -> Tensor:
        """An image of Pillow's, or the path of one, as it is stored."""
        channels, *sides = reading.shape or self.shape
        name = str(source) if isinstance(source, Path) else "an image"
        try:
            pixels = decode([source], sides if reading.resize else None, channels == 1)
        except SettingError as error:
            raise SettingError("input", error.reason) from error
        actual = list(pixels.shape[2:])
        reason = f"{name} is {actual} (height, width), the run's images are {sides}; resize it"
        require(actual == sides, "input", reason)
        if reading.largest != 255:
            pixels = (pixels.float() * reading.largest / 255).round()
        return pixels.reshape(1, *self.shape).to(self.dtype)

    def _batch(self, inputs: Any, dtype: torch.dtype) -> Tensor:
        """An array, or arrays, of the right shape and type."""
        if isinstance(inputs, list | tuple) and inputs and isinstance(inputs[0], Tensor):
            require(len({each.shape for each in inputs}) == 1, "inputs", "must be of one shape")
            inputs = torch.stack(list(inputs))
        values = as_tensor(inputs, "inputs")
        sides = self.reading.shape if isinstance(self.reading, ImageInputs) else None
        images = [] if sides is None else [sides, sides[1:] if sides[0] == 1 else sides]
        values = values[None] if values.shape in (self.shape, *images) else values
        if values.shape[1:] in images:  # that are stored flat
            values = values.reshape(len(values), *self.shape)
        wanted = " × ".join(map(str, self.shape)) or "one number"
        reason = f"a sample must be {wanted}, with one row per sample"
        require(values.shape[1:] == self.shape, "inputs", reason, tuple(values.shape))
        require(len(values) > 0, "inputs", "there are none")
        check_finite(values, "inputs")
        stored = values.to(dtype)
        if not dtype.is_floating_point:
            fits = bool((stored == values).all())
            require(fits, "inputs", f"must be whole numbers that {dtype} can hold")
        return stored


def _is_image(source: Any) -> bool:
    return isinstance(source, Path) or hasattr(source, "convert")


def describe_inputs(data: "FederatedDataModule") -> dict[str, Any]:
    """What of a data module's test set :func:`read_inputs` needs, as JSON takes it."""
    from fedgkd_pl.data.datasets.text import TrimPadding

    examples, reading, fields = data.test, data.reading, None
    shape, dtype = tuple(examples.inputs.shape[1:]), examples.inputs.dtype
    bytes_of_image = dtype == torch.uint8 and len(shape) == 3 and shape[0] in (1, 3)
    if reading is None and bytes_of_image:
        reading = ImageInputs()
    if isinstance(reading, ImageInputs) and reading.shape is None:
        reading = replace(reading, shape=(shape[0], shape[1], shape[2]))
    if reading is not None:
        kinds = {value: name for name, value in FORMATS.items()}
        fields = {"kind": kinds[type(reading)], **asdict(reading)}
        fields.pop("vocabulary", None)  # a file of its own
    transform: Any = examples.transform
    kind = type(transform)  # not a subclass, which may do anything
    described: dict[str, Any] = {"kind": "own", "name": f"{kind.__module__}.{kind.__qualname__}"}
    if kind is ImageTransform:
        described = {"kind": "normalise", "mean": transform.mean, "std": transform.std}
    elif kind is Scale:
        sides = None if transform.shape is None else transform(examples[:1].inputs, None).shape[1:]
        described = {"kind": "scale", "maximum": float(transform.maximum), "shape": sides}
    elif kind is Ids:
        described = {"kind": "ids"}
    elif kind is TrimPadding:
        described = {"kind": "trim", "pad_id": transform.pad_id}
    name = str(dtype).removeprefix("torch.")
    return {"shape": shape, "dtype": name, "reading": fields, "transform": described}


class OwnTransform:
    """Stands for a transform of the user's, which a run's folder does not hold."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, inputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Refuses to guess."""
        reason = f"{self.name!r:.100} is not in the run's folder; apply it, and call net"
        raise SettingError("transform", reason)


def read_inputs(content: Any, vocabulary: Path | None = None) -> RawInputs:
    """What :func:`describe_inputs` gave; ValueError for anything that is none of it.

    Args:
        content: of a file that may be a stranger's.
        vocabulary: the tokenizer's own file; by default it is found by its name.
    """
    try:
        return _raw_inputs(content, vocabulary)
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError("has other keys or values") from error


def _raw_inputs(content: Any, vocabulary: Path | None) -> RawInputs:
    from fedgkd_pl.data.datasets.text import TrimPadding, load_tokenizer, saved_tokenizer

    shape, dtype = tuple(map(int, content["shape"])), content["dtype"]
    reading: Any = None
    tokenizer = None
    if (fields := content["reading"]) is not None:
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        kind: Any = values.pop("kind")
        reading = FORMATS[kind](**values)
    match content["transform"]:
        case {"kind": "normalise", "mean": mean, "std": std}:
            transform: Any = ImageTransform(mean, std, padding=0, flip=False)
        case {"kind": "scale", "maximum": maximum, "shape": sides}:
            transform = Scale(maximum, sides)
        case {"kind": "ids"}:
            transform = Ids()
        case {"kind": "trim", "pad_id": int(pad_id)}:
            transform = TrimPadding(pad_id)
            if vocabulary is not None and vocabulary.is_file():
                tokenizer = saved_tokenizer(vocabulary, pad_id)
            else:
                tokenizer = load_tokenizer(reading.tokenizer)
        case {"kind": "own", "name": str(name)}:
            transform = OwnTransform(name)
        case _:
            raise ValueError("has another transform")
    if dtype not in DTYPES or prod(shape) >= LARGEST:
        raise ValueError("has another shape or dtype")
    return RawInputs(shape, getattr(torch, dtype), reading, transform, tokenizer)
