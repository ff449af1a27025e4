"""Checks of what any ``load()`` gives, so that bad data stops a run before it starts."""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from fedgkd_pl.data.examples import PIECE, Examples, Splits
from fedgkd_pl.data.index import Labels
from fedgkd_pl.data.partition import Partition
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.storage.reading import printable
from torch import Tensor

log = logging.getLogger("fedgkd_pl")


def check_splits(splits: Splits, num_classes: int | None, class_names: Sequence[str] = ()) -> None:
    """Refuses data that would fail in the middle of a run, or train on nonsense."""
    require(isinstance(splits, Splits), "data", "load() must return Splits", type(splits).__name__)
    reason = "a dataset's class must say how many classes it has"
    targets = getattr(splits.train, "targets", None)
    values = isinstance(targets, Tensor) and targets.is_floating_point()
    known = isinstance(num_classes, int) and num_classes >= (0 if values else 1)
    require(known, "num_classes", reason, num_classes)
    assert num_classes is not None
    reason = f"there are {num_classes} classes: name each of them once"
    fits = len(set(class_names)) == len(class_names) and len(class_names) in (0, num_classes)
    require(fits, "class_names", reason, ", ".join(class_names))
    for split in ("train", "test", "val"):
        examples = getattr(splits, split)
        if examples is not None or split != "val":
            _check(split, examples, num_classes)
            _check_alike(split, examples.inputs, splits.train.inputs)
            shapes = [tuple(part.targets.shape[1:]) for part in (examples, splits.train)]
            reason = f"{split} targets must be like those of train, of shape {shapes[1]}"
            require(shapes[0] == shapes[1], "data", reason, shapes[0])
    keys = splits.keys
    if keys is not None:
        fits = np.issubdtype(keys.dtype, np.integer) and len(keys) == len(splits.train)
        reason = "keys must be integers, the owner of every train sample: correct them in load()"
        require(fits, "data", reason)


def warn_of_missing(split: str, held: Examples, train: Examples, names: Sequence[str]) -> None:
    """Says which classes a split lacks that are trained: its accuracy says nothing of them."""
    missing = sorted(set(train.labels.tolist()) - set(held.labels.tolist()))
    if len(held) and missing:
        shown = printable(", ".join(names[label] if names else str(label) for label in missing))
        log.warning("%s has no sample of classes [%s], training has", split, shown)


def warn_of_owners(keys: Labels | None, partition: Partition) -> None:
    """Says that the owners of the data are not the clients: a config's partition may be left over.

    A partition that names every sample is nobody's oversight.
    """
    if keys is not None and not partition.by_owner and not partition.of_all:
        count = len(np.unique(keys))
        text = "the data has %d owners, whose samples %s shares out anew; for a client per owner: "
        text += "data.partition: ByKey, data.num_clients: %d"
        log.warning(text, count, type(partition).__name__, count)


def _check(split: str, examples: Examples, num_classes: int) -> None:
    cls = type(examples).__name__
    require(isinstance(examples, Examples), "data", f"{split} must be Examples", cls)
    inputs, labels = examples.inputs, examples.targets
    for what, values in ("inputs", inputs), ("labels", labels):
        if not isinstance(values, Tensor) or values.ndim == 0:
            cls = type(values).__name__
            raise SettingError("data", f"{split} {what} must be a tensor, a row per sample", cls)
    reason = f"{split} labels must be one int64 per sample: labels.long() in load()"
    actual = f"{labels.dtype} of shape {tuple(labels.shape)}"
    right = labels.dtype == (torch.int64 if num_classes else torch.float32)
    right = right and (labels.ndim != 2 or not num_classes)  # classes of pixels have two more
    if num_classes and labels.ndim == 2:
        reason += "; several labels of zeros and ones must be float32"
    reason = reason if num_classes else f"{split} targets must be float32: targets.float()"
    require(right, "data", reason, actual)
    reason = f"{split} has {len(inputs)} inputs and {len(labels)} labels: load() must give as many"
    given = len(inputs if examples.rows is None else examples.rows)
    require(given == len(labels), "data", reason)
    require(len(labels) > 0 or split == "val", "data", f"there are no {split} samples")
    if num_classes:
        outside = torch.nonzero((labels < 0) | (labels >= num_classes))
    else:
        outside = torch.nonzero(~labels.isfinite())
    if len(outside):
        row = int(outside[0, 0])
        reason = f"label at {row} is outside 0..{num_classes - 1}: correct it, or num_classes"
        reason = reason if num_classes else f"target at {row} must be finite: drop or fix it"
        raise SettingError("data", f"{split} {reason}", labels[tuple(outside[0])].item())
    if len(inputs):
        _check_transform(split, examples[:2])
    if inputs.is_floating_point():
        for piece, rows in enumerate(examples.held()):  # the mask of all would be large
            if rows.sum().isfinite():  # ten times faster than to look at each
                continue
            for bad in torch.nonzero(~rows.isfinite())[:1]:  # none if only the sum was too large
                row = PIECE * piece + int(bad[0])
                row = row if examples.rows is None else int(examples.rows[row])
                reason = f"{split} input at {row} has NaN or Inf: drop or fix it in load()"
                raise SettingError("data", reason)


def _check_transform(split: str, examples: Examples) -> None:
    try:
        given = examples.transform(examples.inputs, None)
    except Exception as error:  # the user's may fail in any way
        line = (str(error).splitlines() or [type(error).__name__])[0]
        reason = f"the transform of the {split} inputs fails: {line}"
        raise SettingError("data", reason) from error
    if not isinstance(given, Tensor) or given.dtype == torch.float64 or given.is_complex():
        actual = getattr(given, "dtype", type(given).__name__)
        reason = f"must give {split} inputs as a net takes them: float32, or token ids"
        raise SettingError("data", f"the transform {reason}", actual)


def _check_alike(split: str, inputs: Tensor, train: Tensor) -> None:
    shape, expected = tuple(inputs.shape[1:]), tuple(train.shape[1:])
    tokens = len(shape) == len(expected) == 1 and inputs.dtype in (torch.int32, torch.int64)
    alike = inputs.dtype == train.dtype and (shape == expected or tokens)  # texts may be longer
    reason = f"{split} inputs must be like those of train, {train.dtype} of shape {expected}"
    require(alike, "data", reason, f"{inputs.dtype} of shape {shape}")
