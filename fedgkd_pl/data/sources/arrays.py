"""Arrays: in memory, in ``.npz``, or mapped from ``.npy``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.examples import Examples, Ids, Scale, Splits, Transform
from fedgkd_pl.data.mapped import MappedTensor, as_tensor
from fedgkd_pl.data.sources.base import OwnData, reading
from fedgkd_pl.data.validation import check_finite
from fedgkd_pl.errors import require
from torch import Tensor
from typing_extensions import override

# Inputs and labels as an .npz names them, the first pair that it has.
NAMES = (("inputs", "targets"), ("x", "y"), ("x_train", "y_train"), ("X", "y"))
TEST = (("test_inputs", "test_targets"), ("x_test", "y_test"))


class Arrays(OwnData):
    """Inputs and labels as arrays: NumPy, torch, or the paths of ``.npy`` and ``.npz`` files.

    A ``.npy`` file and a ``np.memmap`` stay on disk: nothing copies them as a whole, and worker
    processes map the same file. Bytes (uint8) become floats in [0, 1], other whole numbers stay
    token ids unless ``scale`` is given.

    Args:
        inputs: one row per sample; an ``.npz`` may hold ``inputs`` and ``targets`` (or ``x`` and
            ``y``, or ``x_train``, ``y_train``, ``x_test`` and ``y_test``).
        targets: the class number of every sample; floats are numbers to learn, not classes.
        test_inputs: those of a test set; by default ``test_fraction`` of the samples are it.
        test_targets: their class numbers.
        owners: a number or name per sample, for ``ByKey``.
        num_classes: by default the largest class number and one.
        class_names: in the order of their numbers.
        scale: inputs are divided by it; by default 255 for bytes, 1 for floats.
        shape: of a sample, where it is stored in another one, such as [1, 28, 28].
        transform: makes the net's input, instead of ``scale`` and ``shape``; see docs/data.md.
        kwargs: those of :class:`OwnData`.
    """

    name = "arrays"

    def __init__(
        self,
        inputs: Any,
        targets: Any = None,
        test_inputs: Any = None,
        test_targets: Any = None,
        owners: Any = None,
        num_classes: int | None = None,
        class_names: list[str] | None = None,
        scale: float | None = None,
        shape: list[int] | None = None,
        transform: Transform | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require(scale is None or scale > 0, "scale", "must be positive", scale)
        self.set_classes(num_classes, class_names)
        self.given = inputs, targets, test_inputs, test_targets
        self.owners = owners
        self.scale = scale
        self.shape = shape
        self.transform = transform

    @override
    def load(self) -> Splits:
        inputs, targets, *test = self.given
        if targets is None:
            inputs, targets, *theirs = read_pairs(inputs, "inputs")
            test = theirs if theirs and test[0] is None else test
        examples: dict[str, Any] = {"train": self._examples(inputs, targets, "")}
        if test[0] is not None:
            examples["test"] = self._examples(test[0], test[1], "test_")
        owners = read_array(self.owners, "owners")
        return self.split(**examples, keys=self.take_owners(owners, len(examples["train"])))

    def _examples(self, inputs: Any, targets: Any, split: str) -> Examples:
        key = f"{split}inputs"
        values = as_tensor(read_array(inputs, key), key)
        labels = as_labels(targets, f"{split}targets", len(values))
        if not isinstance(values, MappedTensor):  # of which the check of all data names the row
            check_finite(values, key)
        transform = self.transform or transform_for(values, self.scale, self.shape)
        return Examples(values, labels, transform)


def examples_of(inputs: Any, targets: Tensor, key: str) -> Examples:
    """Numbers of any kind with the usual transform."""
    values = as_tensor(inputs, key)
    return Examples(values, targets, transform_for(values))


def read_pairs(source: Any, key: str) -> list[Any]:
    """Inputs and labels of an ``.npz`` and, where it has them, those of its test set."""
    npz = isinstance(source, str | Path) and str(source).endswith(".npz")
    require(npz, key.replace("inputs", "targets"), "must be given")
    arrays = read_array(source, key)
    found = [[pair for pair in names if set(pair) <= arrays.keys()] for names in (NAMES, TEST)]
    require(bool(found[0]), key, f"{source} must have inputs and targets, or x and y")
    return [arrays[name] for pairs in found for pair in pairs[:1] for name in pair]


def transform_for(
    values: Tensor, scale: float | None = None, shape: Sequence[int] | None = None
) -> Transform:
    """The transform of such numbers to a net's inputs; see :class:`Arrays`."""
    whole = not values.is_floating_point() and values.dtype != torch.bool
    if whole and values.dtype != torch.uint8 and scale is None:
        return Ids()
    usual = 255.0 if values.dtype == torch.uint8 else 1.0
    return Scale(usual if scale is None else scale, shape)


def read_array(source: Any, key: str) -> Any:
    """An array as it is, of an ``.npy`` a memory map, of an ``.npz`` its arrays by name."""
    if not isinstance(source, str | Path):
        return source
    file = Path(source).expanduser()
    reason = "must be an array, or the path of an .npy or .npz file"
    require(file.suffix in (".npy", ".npz"), key, reason, source)
    with reading(file, key):
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        return array if file.suffix == ".npy" else dict(array)


def as_labels(source: Any, key: str, length: int | None = None) -> Tensor:
    """Class numbers in memory, as int64, or numbers to learn, as float32."""
    labels = as_tensor(read_array(source, key), key)
    fits = length in (None, len(labels))
    require(fits, key, f"must be as many as the samples, {length}", len(labels))
    check_finite(labels, key)
    kind = torch.float32 if labels.is_floating_point() else torch.int64
    return labels.to(kind, copy=True)
