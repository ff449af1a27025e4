"""Checkpoints: plain values and tensors in one safetensors file, sealed by a checksum.

The structure and all plain values are JSON, in a tensor of bytes called ``tree``. Clients' states
are files beside the checkpoint, of which it has the names (:mod:`.states`). Nothing in it can be
run. Lightning's own ``.ckpt`` files are read as well, as plain data.
"""

import hashlib
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from fedgkd_pl.errors import StorageError
from fedgkd_pl.storage.states import FOLDER, StateStore
from fedgkd_pl.storage.tensors import to_safetensors
from safetensors import safe_open
from torch import Tensor

FORMAT = "fedgkd_pl 2"
TREE = "tree"
RECORD = "run"  # among the callbacks' states: what a run has recorded so far


class CheckpointDamaged(ValueError):
    """A file that is no sound checkpoint; the text says why."""


# -- writing -----------------------------------------------------------------------------------


def encode(checkpoint: dict[str, Any]) -> bytes:
    """The file of a checkpoint: plain values and tensors."""
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_to_json(checkpoint, "", tensors)).encode()
    tensors[TREE] = torch.frombuffer(bytearray(tree), dtype=torch.uint8)
    metadata = {"format": FORMAT, "round": str(checkpoint.get("global_step"))}
    return to_safetensors(tensors, metadata | {"sha256": _checksum(metadata, tensors)})


def _checksum(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str:
    """The SHA-256 of all that a file holds."""
    digest = hashlib.sha256(f"{metadata['format']} {metadata['round']}".encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _to_json(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON; what JSON cannot express is an object of one key."""
    if isinstance(value, Tensor):
        while path in tensors or path == TREE:  # {"a.b": …} beside {"a": {"b": …}}
            path += "'"
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, StateStore):
        return {"states": [*value.names.items()]}
    if isinstance(value, dict):
        pairs = [
            [key, _to_json(item, f"{path}.{key}" if path else str(key), tensors)]
            for key, item in value.items()
        ]
        if all(type(key) in (str, int) for key in value):
            return {"dict": pairs}
    if isinstance(value, list | tuple):
        items = [_to_json(item, f"{path}.{n}", tensors) for n, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a NumPy number
        return value.item()
    raise StorageError(path, f"a checkpoint keeps plain values and tensors, not {type(value)}")


# -- reading -----------------------------------------------------------------------------------


def read_checkpoint(path: str | Path, states: bool = False) -> dict[str, Any]:
    """A checkpoint's content, on the CPU; the whole file is checked first.

    Args:
        path: its file.
        states: check what clients keep, too. A run that goes on needs it; a model does not.

    Raises:
        CheckpointDamaged: it is missing, not whole, or not a checkpoint.
    """
    path = Path(path)
    try:
        checkpoint = _read(path)
        for store in stores_of(checkpoint) if states else ():
            store.check()
    except CheckpointDamaged:
        raise
    except Exception as error:  # the file may hold anything
        which = error if isinstance(error, StorageError) else path  # that of a state, or this one
        raise CheckpointDamaged(f"damaged: {which}") from error
    return checkpoint


def stores_of(checkpoint: dict[str, Any]) -> list[StateStore]:
    """What a checkpoint has in files of their own."""
    values = checkpoint.get("fedgkd_pl", {}).values()
    return [value for value in values if isinstance(value, StateStore) and len(value)]


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointDamaged(f"no such file: {path}")
    if zipfile.is_zipfile(path):
        return dict(torch.load(path, weights_only=True, map_location="cpu"))
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        if metadata["format"] != FORMAT:
            raise CheckpointDamaged(f"{path}: has format {metadata['format']}, this is {FORMAT}")
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
    if metadata["sha256"] != _checksum(metadata, tensors):
        raise ValueError("the checksum is wrong")
    tree = json.loads(tensors[TREE].numpy().tobytes())
    return dict(_from_json(tree, tensors, path.parent / FOLDER))


def _from_json(value: Any, tensors: dict[str, Tensor], states: Path) -> Any:
    if isinstance(value, list):
        return [_from_json(item, tensors, states) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "tensor":
        return tensors[content]
    if tag == "tuple":
        return tuple(_from_json(item, tensors, states) for item in content)
    if tag == "states":
        return StateStore(dict(content), states)
    return {key: _from_json(item, tensors, states) for key, item in content}


def round_of(path: Path) -> int | None:
    """The round that a checkpoint names, unchecked; None if it names none."""
    try:
        with safe_open(path, "pt") as file:
            return int(file.metadata()["round"])
    except Exception:  # the file may hold anything
        return None


def referred_states(path: Path) -> set[str]:
    """The files of the states that a checkpoint refers to, unchecked; none of other files.

    Raises:
        CheckpointDamaged: nobody can say.
    """
    if not path.is_file() or zipfile.is_zipfile(path):
        return set()
    try:
        with safe_open(path, "pt") as file:
            tree = file.get_tensor(TREE).numpy().tobytes()
    except Exception as error:  # the file may hold anything
        if path.suffix != ".ckpt":
            return set()
        raise CheckpointDamaged(f"damaged: {path}") from error
    return {name.decode() for name in re.findall(rb"[0-9a-f]{64}\.safetensors", tree)}
