"""How samples lie in files, and from there to a net's inputs: what a run keeps of its data."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.examples import (
    DTYPES,
    Examples,
    Ids,
    ImageTransform,
    Scale,
    Transform,
    TrimPadding,
    as_tensor,
)
from fedgkd_pl.data.validation import check_finite
from fedgkd_pl.errors import SettingError, require
from numpy.typing import NDArray
from torch import Tensor

Pixels = NDArray[np.uint8]
FILTER = "bilinear"  # of Pillow, by which images are resized


@dataclass(frozen=True)
class ImageInputs:
    """Images as bytes, channels first.

    Attributes:
        shape: channels, height and width; by default those of a stored sample.
        resize: the filter of Pillow by which images of other sizes are resized, as those of
            training were; None where they are refused.
        largest: what the brightest pixel is stored as.
    """

    shape: tuple[int, int, int] | None = None
    resize: str | None = None
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


@dataclass(frozen=True)
class Decoder:
    """Makes bytes of images, all of one size; call it with files, or images of Pillow's.

    Attributes:
        size: to resize to, [height, width] or one number for both; None where all have one size.
        grayscale: one channel instead of three.
    """

    size: int | list[int] | None = None
    grayscale: bool = False

    def __post_init__(self) -> None:
        sides = [self.size] if isinstance(self.size, int) else self.size or [1]
        fits = len(sides) <= 2 and all(side >= 1 for side in sides)
        require(fits, "size", "must be a number of pixels, or [height, width]", self.size)

    def __call__(self, sources: Sequence[Any], first: Pixels | None = None) -> Tensor:
        """The images as bytes, samples × channels × height × width, of the size of ``first``."""
        first = self.one(sources[0]) if first is None else first
        pixels = np.empty((len(sources), *first.shape), dtype=np.uint8)
        for row, source in enumerate(sources):
            pixels[row] = self.one(source, first)
        return torch.from_numpy(pixels)

    def one(self, source: Any, like: Pixels | None = None) -> Pixels:
        """An image as bytes, channels × height × width, of the size of another one."""
        from PIL import Image

        name = str(source) if isinstance(source, Path) else "an image"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                image = Image.open(source) if isinstance(source, Path) else source
                image = _of_8_bits(image).convert("L" if self.grayscale else "RGB")
        except Exception as error:  # Pillow raises many classes
            raise SettingError("path", f"{name} cannot be decoded ({error!s:.100})") from error
        if self.size is not None:
            height, width = np.broadcast_to(self.size, 2).tolist()
            image = image.resize((width, height), Image.Resampling[FILTER.upper()])
        pixels = np.asarray(image).reshape(image.height, image.width, -1).transpose(2, 0, 1)
        if like is not None and like.shape != pixels.shape:
            sizes = "{1} × {2} (height × width), the first {4} × {5}"
            sizes = sizes.format(*pixels.shape, *like.shape)
            raise SettingError("size", f"{name} is {sizes}; give size, to resize all")
        return pixels


def _of_8_bits(image: Any) -> Any:
    """An image of which Pillow clips no pixel."""
    from PIL import Image

    wide = image.mode == "I" and image.format in ("PNG", "PPM")  # as Pillow has them
    if wide or image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("it must have 8 or 16 bits a channel; convert it")
    return image


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
                their order, or a DataFrame; of texts, strings; of anything else, arrays. One
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
            if hasattr(inputs, "columns"):  # pandas', which may have others, in another order
                missing = [name for name in reading.columns if name not in inputs]
                require(not missing, "inputs", f"must have the columns {', '.join(missing)}")
                inputs = inputs[list(reading.columns)]
            return reading.scaled(self._batch(inputs, torch.float64))
        images = all(isinstance(each, Path) or hasattr(each, "convert") for each in several)
        if isinstance(reading, ImageInputs) and several and images:
            return torch.cat([self._image(reading, image) for image in several])
        return self._batch(inputs, self.dtype)

    def _image(self, reading: ImageInputs, source: Any) -> Tensor:
        """An image of Pillow's, or the path of one, as it is stored."""
        channels, *sides = reading.shape or self.shape
        try:
            pixels = Decoder(sides if reading.resize else None, channels == 1)([source])
        except SettingError as error:
            raise SettingError("input", error.reason) from error
        actual = list(pixels.shape[2:])
        reason = f"an image is {actual} (height, width), the run's are {sides}; resize it"
        require(actual == sides, "input", reason, source)
        if reading.largest != 255:
            pixels = (pixels.float() * reading.largest / 255).round()
        return pixels.reshape(1, *self.shape).to(self.dtype)

    def _batch(self, inputs: Any, dtype: torch.dtype) -> Tensor:
        """An array, or arrays, of the right shape and type."""
        values = as_tensor(inputs, "inputs")
        values = values[None] if values.shape == self.shape else values
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


def describe_inputs(examples: Examples, reading: InputFormat | None) -> dict[str, Any]:
    """What of a data module's samples and files :func:`read_inputs` needs, as JSON takes it."""
    fields = None
    shape, dtype = tuple(examples.inputs.shape[1:]), examples.inputs.dtype
    if reading is None and dtype == torch.uint8 and len(shape) == 3 and shape[0] in (1, 3):
        reading = ImageInputs()
    if isinstance(reading, ImageInputs) and reading.shape is None:
        reading = replace(reading, shape=(shape[0], shape[1], shape[2]))
    if reading is not None:
        kinds = {value: name for name, value in FORMATS.items()}
        fields = {"kind": kinds[type(reading)], **asdict(reading)}
        fields.pop("vocabulary", None)  # a file of its own
    own = type(examples.transform)
    transform: dict[str, Any] = {"kind": OWN, "name": f"{own.__module__}.{own.__qualname__}"}
    for kind, (known, names) in TRANSFORMS.items():
        if own is known:  # not a subclass, which may do anything
            values = {name: getattr(examples.transform, name) for name in names}
            transform = {"kind": kind, **values}
    name = str(dtype).removeprefix("torch.")
    return {"shape": shape, "dtype": name, "reading": fields, "transform": transform}


def read_inputs(content: Any, vocabulary: Path | None = None) -> RawInputs:
    """What :func:`describe_inputs` gave; any error but SettingError for what is none of it.

    Args:
        content: of a file that may be a stranger's.
        vocabulary: the tokenizer's own file; by default it is found by its name.
    """
    from fedgkd_pl.data.datasets.text import load_tokenizer, saved_tokenizer

    reading: Any = None
    tokenizer = None
    if (fields := content["reading"]) is not None:
        values: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        reading = FORMATS[values.pop("kind")](**values)
    settings = dict(content["transform"])
    kind = settings.pop("kind")
    make = partial(partial, _refuse) if kind == OWN else TRANSFORMS[kind][0]
    transform = make(**settings)
    if isinstance(transform, TrimPadding):
        if vocabulary is not None and vocabulary.is_file():
            tokenizer = saved_tokenizer(vocabulary, transform.pad_id)
        else:
            tokenizer = load_tokenizer(reading.tokenizer)
    dtype = {name: getattr(torch, name) for name in DTYPES}[content["dtype"]]
    return RawInputs(tuple(map(int, content["shape"])), dtype, reading, transform, tokenizer)


OWN = "own"  # of a transform of the user's, which a run's folder does not hold


def _refuse(inputs: Tensor, generator: torch.Generator | None, name: str) -> Tensor:
    reason = f"{name!r:.100} is not in the run's folder; apply it, and call net"
    raise SettingError("transform", reason)


# The transforms that a run's folder can hold, with the settings that count in evaluation.
TRANSFORMS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "normalise": (ImageTransform, ("mean", "std")),
    "scale": (Scale, ("maximum", "shape")),
    "ids": (Ids, ()),
    "trim": (TrimPadding, ("pad_id",)),
}
