"""Arrays: in memory, in ``.npz``, or mapped from ``.npy``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.examples import Examples, Splits, Transform
from fedgkd_pl.data.mapped import MappedTensor, as_tensor
from fedgkd_pl.data.sources.base import OwnData
from fedgkd_pl.data.transforms import Ids, Scale
from fedgkd_pl.errors import SettingError, require
from torch import Tensor

# Inputs and labels as an .npz names them, the first pair that it has.
NAMES = (("inputs", "targets"), ("x", "y"), ("x_train", "y_train"), ("X", "y"))
TEST_NAMES = (("test_inputs", "test_targets"), ("x_test", "y_test"))


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
        require(num_classes is None or num_classes >= 1, "num_classes", "must be at least 1")
        self.given = (inputs, targets), (test_inputs, test_targets)
        self.owners = owners
        if num_classes is not None:
            self.num_classes = num_classes
        self.class_names = class_names or ()
        self.scale = scale
        self.shape = shape
        self.transform = transform

    def load(self) -> Splits:
        """See :meth:`FederatedDataModule.load`."""
        (inputs, targets), (test_inputs, test_targets) = self.given
        if targets is None:
            inputs, targets, *theirs = self._pairs(inputs)
            if theirs and test_inputs is None:
                test_inputs, test_targets = theirs
        if test_inputs is not None and test_targets is None:
            test_inputs, test_targets, *_ = self._pairs(test_inputs, "test_inputs")
        train = self._examples(inputs, targets, "")
        if not hasattr(self, "num_classes"):
            self.num_classes = len(self.class_names) or count_classes(train.targets)
        test = None if test_inputs is None else self._examples(test_inputs, test_targets, "test_")
        keys = None
        if self.owners is not None:
            owners = np.asarray(read_array(self.owners, "owners"))
            require(owners.ndim == 1, "owners", "must be one number or name per sample")
            reason = f"there are {len(train)} samples: give the owner of each"
            require(len(owners) == len(train), "owners", reason, len(owners))
            keys = self.take_owners(owners)
        return self.split(train, test, keys=keys)

    def _pairs(self, source: Any, key: str = "inputs") -> list[Any]:
        """Inputs and labels of an ``.npz`` and, where it has them, those of its test set."""
        npz = isinstance(source, str | Path) and str(source).endswith(".npz")
        require(npz, key.replace("inputs", "targets"), "must be given")
        arrays = read_array(source, key)
        for pair in NAMES:
            if set(pair) <= arrays.keys():
                test = next((list(p) for p in TEST_NAMES if set(p) <= arrays.keys()), [])
                return [arrays[name] for name in [*pair, *test]]
        raise SettingError(key, f"{source} has no inputs and targets, nor x and y")

    def _examples(self, inputs: Any, targets: Any, split: str) -> Examples:
        values = as_tensor(read_array(inputs, f"{split}inputs"), f"{split}inputs")
        labels = as_labels(targets, f"{split}targets")
        reason = f"there are {len(values)} inputs: give a label for each"
        require(len(labels) == len(values), f"{split}targets", reason, len(labels))
        require(len(values) > 0, f"{split}inputs", "there are no samples")
        if not isinstance(values, MappedTensor):  # of which the check of all data names the row
            check_finite(values, f"{split}inputs")
        return Examples(values, labels, self._transform(values))

    def _transform(self, values: Tensor) -> Transform:
        if self.transform is not None:
            return self.transform
        return transform_for(values, self.scale, self.shape)


def transform_for(values: Tensor, scale: float | None, shape: Sequence[int] | None) -> Transform:
    """How a net gets such numbers; see :class:`Arrays`."""
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
    try:
        if file.suffix == ".npy":
            return np.load(file, mmap_mode="r", allow_pickle=False)
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except OSError as error:
        raise SettingError(key, f"{file}: {error.strerror or 'cannot be read'}") from error
    except Exception as error:  # a damaged file fails in any way
        raise SettingError(key, f"{file} cannot be read ({error!s:.100})") from error


def check_finite(values: Tensor, key: str) -> None:
    """Raises an error that names the first row, from 1, with a number that is none."""
    if values.is_floating_point() and not values.sum().isfinite():
        for bad in torch.nonzero(~values.isfinite())[:1]:  # none if only the sum was too large
            reason = f"row {int(bad[0]) + 1} has NaN or Inf: fill it, or leave the row out"
            raise SettingError(key, reason)


def count_classes(targets: Tensor) -> int:
    """The largest class number and one; 0 of numbers that are no classes."""
    return 0 if targets.is_floating_point() else int(targets.max()) + 1


def as_labels(source: Any, key: str) -> Tensor:
    """Class numbers in memory, as int64, or numbers to learn, as float32."""
    labels = as_tensor(read_array(source, key), key)
    reason = "must be a class number, or numbers, for every sample"
    require(labels.ndim >= 1 and not labels.is_complex(), key, reason, labels.dtype)
    check_finite(labels, key)
    kind = torch.float32 if labels.is_floating_point() else torch.int64
    return labels.to(kind, copy=True)
