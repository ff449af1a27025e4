"""The files of :class:`~fedgkd_pl.FeatureMap`."""

import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from fedgkd_pl.errors import StorageError
from fedgkd_pl.plots.plane import FeatureMapData
from fedgkd_pl.storage.reading import MB, read_bytes

ARRAYS = ("global_points", "local_points", "labels")
NUMBERS = ("global_acc", "local_acc", "client", "round")
LARGEST = 64 * MB
CLASSES = 1_000
DAMAGE = (
    *(OSError, ValueError, KeyError, IndexError, EOFError, MemoryError, NotImplementedError),
    *(RuntimeError, zipfile.BadZipFile, zlib.error),
)


def read_feature_map(path: str | Path, name: str = "") -> FeatureMapData:
    """A map that :class:`~fedgkd_pl.FeatureMap` wrote; nothing in the file is run.

    Args:
        path: of ``features-round<NNN>.npz``.
        name: of the run, for titles.

    Raises:
        StorageError: there is no such file, or it is damaged.
    """
    try:
        content = io.BytesIO(read_bytes(path, LARGEST))
        with zipfile.ZipFile(content) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > LARGEST:
            raise ValueError("unpacks to more than it may hold")
        with np.load(content, allow_pickle=False) as file:
            arrays = {key: file[key] for key in ARRAYS}
            numbers = {key: file[key].item() for key in NUMBERS}
    except FileNotFoundError as error:
        raise StorageError(path, error) from error
    except DAMAGE as error:
        raise StorageError(path, "is not a whole feature map") from error
    labels, points = arrays["labels"], [arrays["global_points"], arrays["local_points"]]
    types = (labels.dtype.kind in "iu", *(p.dtype.kind == "f" for p in points))
    known = all(isinstance(numbers[k], int | float) and abs(numbers[k]) < 2**31 for k in NUMBERS)
    if not (all(types) and known and labels.ndim == 1 and len(labels) > 0):
        raise StorageError(path, "is not a feature map")
    if not 0 <= int(labels.min()) <= int(labels.max()) < CLASSES:
        raise StorageError(path, "is not a feature map: its labels are no classes")
    shape = (*labels.shape, 2)
    if arrays["global_points"].shape != shape or arrays["local_points"].shape != shape:
        raise StorageError(path, "is not a feature map: its points and labels do not match")
    return FeatureMapData(**arrays, **numbers, name=name)


def encode_feature_map(data: FeatureMapData) -> bytes:
    """A map as the content of an ``.npz`` file."""
    content = io.BytesIO()
    arrays: dict[str, Any] = {name: np.array(getattr(data, name)) for name in (*ARRAYS, *NUMBERS)}
    np.savez(content, **arrays)
    return content.getvalue()
