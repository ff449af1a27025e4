"""Arrays in files that are mapped, not read: every process maps the file for itself."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.errors import SettingError, require
from torch import Tensor

DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


class MappedTensor(Tensor):
    """A tensor over a file. Read-only: take rows of it by :class:`Examples`, which copies them.

    It is pickled as the file's name, so worker processes map the same file.
    """

    source: tuple[str, str, tuple[int, ...], int]
    # what is taken out of it is a plain Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return open_map, self.source


def open_map(file: str, dtype: str, shape: tuple[int, ...], offset: int) -> MappedTensor:
    """Maps an array that lies in a file in C order, ``offset`` bytes from its start."""
    array = np.memmap(file, np.dtype(dtype), "r", offset, shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor: MappedTensor = Tensor._make_subclass(MappedTensor, torch.from_numpy(array))
    tensor.source = (file, dtype, shape, offset)
    return tensor


def as_tensor(array: Any, key: str) -> Tensor:
    """A tensor of the same numbers; a memory map stays one.

    Args:
        array: a tensor, an array, or a list of numbers.
        key: the setting that named it, for errors.
    """
    if isinstance(array, Tensor):
        return array.detach().cpu()
    try:
        array = np.asanyarray(array)
    except ValueError as error:
        raise SettingError(key, "rows must be alike, of numbers") from error
    reason = f"must be numbers, of {', '.join(DTYPES)}"
    require(array.dtype.name in DTYPES and array.dtype.isnative, key, reason, array.dtype)
    require(array.ndim > 0, key, "must have a row per sample")
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.memmap):
        usable = array.flags.writeable and array.flags.c_contiguous
        return torch.from_numpy(array if usable else np.array(array, order="C"))
    reason = "a memory map must be of a file, in C order, with its rows in order"
    require(bool(root.filename) and array.flags.c_contiguous, key, reason)
    if array.flags.writeable:
        root.flush()  # what was written must be in the file before others map it
    offset = root.offset + _address(array) - _address(root)
    return open_map(str(Path(str(root.filename)).absolute()), array.dtype.str, array.shape, offset)


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
