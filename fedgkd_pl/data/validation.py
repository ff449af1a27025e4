"""Checks of what any ``load()`` gives, so that bad data stops a run before it starts."""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from fedgkd_pl.data.examples import PIECE, Examples, Splits
from fedgkd_pl.data.partition import Labels, Partition
from fedgkd_pl.errors import SettingError, require
from torch import Tensor

log = logging.getLogger("fedgkd_pl")
TOKENS = torch.int32, torch.int64  # of texts, which may be longer in one split


def check_splits(splits: Splits, num_classes: int | None, class_names: Sequence[str] = ()) -> None:
    """Refuses data that would fail in the middle of a run, or train on nonsense."""
    known = isinstance(num_classes, int) and num_classes >= 0
    require(known, "num_classes", "must say how many classes there are, 0 of numbers", num_classes)
    assert num_classes is not None
    fits = len(set(class_names)) == len(class_names) and len(class_names) in (0, num_classes)
    require(fits, "class_names", f"must name each of {num_classes} classes once", class_names)
    for split in ("train", "test", "val"):
        examples = getattr(splits, split)
        if split != "val" or examples is not None:
            _check_form(split, examples, splits.train)
            _check_labels(split, examples.targets, num_classes)
            if len(examples):
                _check_inputs(split, examples)
    if (keys := splits.keys) is not None:
        fits = np.issubdtype(keys.dtype, np.integer) and len(keys) == len(splits.train)
        require(fits, "data", "keys must be integers, the owner of every train sample")


def _check_form(split: str, examples: Examples, train: Examples) -> None:
    for what in ("inputs", "targets"):
        given, first = getattr(examples, what), getattr(train, what)
        shape, expected = tuple(given.shape[1:]), tuple(first.shape[1:])
        texts = len(shape) == len(expected) == 1 and given.dtype in TOKENS
        alike = given.dtype == first.dtype and (shape == expected or texts)
        reason = f"{split} {what} must be like train's, {first.dtype} of shape {expected}"
        require(alike, "data", reason, f"{given.dtype} of shape {shape}")
    count = len(examples.inputs if examples.rows is None else examples.rows)
    reason = f"{split} has {len(examples)} labels, and must have as many as inputs"
    require(count == len(examples), "data", reason, count)
    require(count > 0 or split == "val", "data", f"there are no {split} samples")


def _check_labels(split: str, targets: Tensor, num_classes: int) -> None:
    right = targets.dtype == (torch.int64 if num_classes else torch.float32)
    right = right and (targets.ndim != 2 or not num_classes)  # classes of pixels have two more
    wanted = "one int64 per sample" if num_classes else "float32"
    reason = f"{split} labels must be {wanted}; several labels of zeros and ones must be float32"
    require(right, "data", reason, f"{targets.dtype} of shape {tuple(targets.shape)}")
    outside = (targets < 0) | (targets >= num_classes) if num_classes else ~targets.isfinite()
    for bad in torch.nonzero(outside)[:1]:
        value = "in 0 .. num_classes - 1" if num_classes else "finite"
        reason = f"{split} label at {int(bad[0])} must be {value}"
        raise SettingError("data", reason, targets[tuple(bad)].item())


def _check_inputs(split: str, examples: Examples) -> None:
    few = examples[:2]
    try:
        few.transform(few.inputs, None).to("cpu")
    except Exception as error:  # the user's may fail in any way
        text = f"the transform of the {split} inputs fails: {type(error).__name__}: {error}"
        raise SettingError("data", " ".join(text.split())) from error
    if examples.inputs.is_floating_point():
        for piece, values in enumerate(examples.held()):  # the mask of all would be large
            check_finite(values, "data", f"{split} input at", PIECE * piece, examples.rows)


def check_finite(
    values: Tensor, key: str, where: str = "row", first: int = 1, rows: Tensor | None = None
) -> None:
    """Names the first row with NaN or Inf, by its number from ``first`` or in ``rows``."""
    if values.is_floating_point() and not values.sum().isfinite():  # ten times faster than all
        for bad in torch.nonzero(~values.isfinite())[:1]:  # none if only the sum was too large
            row = int(bad[0]) + first
            row = row if rows is None else int(rows[row])
            raise SettingError(key, f"{where} {row} has NaN or Inf; fill it, or leave the row out")


def warn_of_owners(keys: Labels | None, partition: Partition) -> None:
    """Says that the owners of the data are not the clients: a config's partition may be left over.

    A partition that names every sample is nobody's oversight.
    """
    if keys is not None and not partition.by_owner and not partition.of_all:
        name, count = type(partition).__name__, len(np.unique(keys))
        hint = f"for a client per owner: data.partition: ByKey, data.num_clients: {count}"
        log.warning("%s shares out anew the samples of %d owners; %s", name, count, hint)
