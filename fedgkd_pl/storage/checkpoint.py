"""Checkpoints: plain values and tensors in one file, with a checksum over every bit.

A file of ours is a safetensors file that any reader of that format opens. Beside the tensors it
has their structure and all plain values as JSON, in a tensor of bytes called ``tree``; its last 32
bytes, a tensor too, are the SHA-256 of all bytes before them.
Clients' states are files beside it, of which it has the checksums (:mod:`.states`).
Nothing in it can be run. Lightning's own ``.ckpt`` files are read as well, as plain data.
"""

import hashlib
import json
import stat
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fedgkd_pl.errors import StorageError
from fedgkd_pl.storage.states import FOLDER, SIZE, StateDamaged, StateStore
from torch import Tensor

FORMAT, VERSION = "fedgkd_pl", "1"
DIGEST, TREE = "sha256", "tree"
STATES = "states"  # marks a list of files beside the checkpoint
RECORD = "run"  # among the callbacks' states: what a run has recorded so far
ZIP = b"PK\x03\x04"
LARGEST_HEADER = 100_000_000  # of the safetensors format
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# What may be raised by reading something else as a checkpoint.
_NOT_OURS = (LookupError, TypeError, ValueError, AttributeError, RecursionError, MemoryError)


class CheckpointDamaged(ValueError):
    """A file that is no sound checkpoint; the text says why."""


def fingerprint(settings: Any) -> str:
    """The SHA-256 of plain values, such as the settings that decide a result."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


# -- writing -----------------------------------------------------------------------------------


def encode(checkpoint: dict[str, Any]) -> Iterator[bytes | memoryview]:
    """The file of a checkpoint (plain values and tensors), in pieces that are not copied."""
    tensors: dict[str, Tensor] = {}
    tree = _to_json(checkpoint, "", tensors)
    settings = checkpoint.get("callbacks", {}).get(RECORD, {}).get("config")
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "round": str(checkpoint.get("global_step")),
        "fingerprint": fingerprint(settings),
    }
    tensors[TREE] = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
    header: dict[str, Any] = {"__metadata__": manifest}
    end = 0
    for name in sorted(tensors, key=lambda name: -tensors[name].element_size()):  # aligned
        tensor = tensors[name]
        header[name] = _entry(_DTYPES[tensor.dtype], tensor.shape, end, tensor.nbytes)
        end += tensor.nbytes
    header[DIGEST] = _entry("U8", [32], end, 32)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LARGEST_HEADER:
        raise StorageError("checkpoint", f"{len(tensors)} tensors are more than one file can hold")
    digest = hashlib.sha256()
    for chunk in _chunks(text, [tensors[name] for name in header if name in tensors]):
        digest.update(chunk)
        yield chunk
    yield digest.digest()


def _chunks(header: bytes, tensors: list[Tensor]) -> Iterator[bytes | memoryview]:
    yield struct.pack("<Q", len(header)) + header
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data


def _entry(dtype: str, shape: Any, start: int, size: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + size]}


def _to_json(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON; what JSON cannot express is an object of one key."""
    if isinstance(value, Tensor) and value.dtype in _DTYPES:
        while path in tensors or path in (DIGEST, TREE):  # {"a.b": …} beside {"a": {"b": …}}
            path += "'"
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, StateStore):
        return {STATES: _to_json(value.index(), f"{path}.{STATES}", tensors)}
    if isinstance(value, dict):
        pairs = [
            [key, _to_json(item, f"{path}.{key}" if path else str(key), tensors)]
            for key, item in value.items()
        ]
        if all(type(key) is str for key in value):
            return {"dict": dict(pairs)}
        if all(type(key) in (str, int) for key in value):
            return {"pairs": pairs}
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
        CheckpointDamaged: it is not whole, not a checkpoint, or not to be trusted.
    """
    checkpoint = _read(Path(path))
    try:
        for store in stores_of(checkpoint) if states else ():
            store.check()
    except StateDamaged as error:
        raise CheckpointDamaged(f"cannot be used: {error}") from error
    return checkpoint


def stores_of(checkpoint: dict[str, Any]) -> list[StateStore]:
    """What a checkpoint has in files of their own."""
    ours = checkpoint.get("fedgkd_pl")
    values = ours.values() if isinstance(ours, dict) else ()  # a stranger's may be anything
    return [value for value in values if isinstance(value, StateStore) and len(value)]


def _read(path: Path) -> dict[str, Any]:
    try:
        info = path.lstat()
        if stat.S_ISLNK(info.st_mode):
            target = path.resolve(strict=True)
            if target.parent != path.parent.resolve():
                raise CheckpointDamaged("is a link to another folder")
            info = target.stat()
        if not stat.S_ISREG(info.st_mode):
            raise CheckpointDamaged("is not a file")
        with path.open("rb") as file:
            start = file.read(4)
            if start == ZIP:
                return _read_lightning(path, info.st_size)
            size = int.from_bytes(start + file.read(4), "little")
            if size > min(info.st_size, LARGEST_HEADER):
                raise CheckpointDamaged("cannot be read as a checkpoint")
            if _whole_size(file.read(size)) != info.st_size:
                raise CheckpointDamaged("is cut off, or no checkpoint")
        return _decode(path.read_bytes(), size, path.parent / FOLDER)
    except FileNotFoundError as error:
        raise CheckpointDamaged("is not there") from error
    except OSError as error:
        raise CheckpointDamaged(f"cannot be read: {error.strerror}") from error


def _whole_size(header: bytes) -> int:
    """The size of a file with this header, compared before the rest is read."""
    try:
        entries = json.loads(header).items()
        ends = [entry["data_offsets"][1] for name, entry in entries if name != "__metadata__"]
        return 8 + len(header) + int(max(ends))
    except _NOT_OURS as error:
        raise CheckpointDamaged("cannot be read as a checkpoint") from error


def is_sound(path: Path) -> bool:
    """Whether a file is worth keeping as the previous one."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[:4] == ZIP or _is_sealed(content)  # Lightning's has no checksum


def _is_sealed(content: bytes) -> bool:
    return hashlib.sha256(memoryview(content)[:-32]).digest() == content[-32:]


def _decode(content: bytes, size: int, states: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    if not _is_sealed(content):
        raise CheckpointDamaged("is damaged or no checkpoint (its checksum is wrong)")
    try:
        manifest = json.loads(content[8 : 8 + size])["__metadata__"]
        if (manifest["format"], manifest["version"]) != (FORMAT, VERSION):
            raise CheckpointDamaged(f"has format version {manifest['version']}, this is {VERSION}")
        tensors = load(content)
        tree = json.loads(tensors[TREE].numpy().tobytes())
        checkpoint = _from_json(tree, tensors, states)
    except CheckpointDamaged:
        raise
    except StateDamaged as error:
        raise CheckpointDamaged(f"cannot be used: {error}") from error
    except (*_NOT_OURS, SafetensorError) as error:
        raise CheckpointDamaged("is not a checkpoint") from error
    if not isinstance(checkpoint, dict):
        raise CheckpointDamaged("is not a checkpoint")
    callbacks = checkpoint.get("callbacks")
    if isinstance(callbacks, dict) and "RunFiles" in callbacks:  # its name before 0.1.0
        callbacks.setdefault(RECORD, callbacks.pop("RunFiles"))
    return checkpoint


def round_of(path: Path) -> int | None:
    """The round that a checkpoint's header names, unchecked; None if it names none."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, LARGEST_HEADER)))
        return int(header["__metadata__"]["round"])
    except (OSError, *_NOT_OURS):
        return None


def referred_states(path: Path) -> set[bytes] | None:
    """The checksums of the states that a checkpoint refers to; None if that cannot be read."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
            if start == ZIP:
                return set()
            size = int.from_bytes(start + file.read(4), "little")
            header = json.loads(file.read(min(size, LARGEST_HEADER)))
            names: set[bytes] = set()
            for key, entry in header.items():
                if key.endswith(f".{STATES}.digests"):
                    first, last = entry["data_offsets"]
                    file.seek(8 + size + first)
                    digests = file.read(last - first)
                    names |= {digests[n : n + SIZE] for n in range(0, len(digests), SIZE)}
            return names
    except FileNotFoundError:
        return set()
    except (OSError, *_NOT_OURS):
        return None


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
    if tag == STATES:
        return StateStore.of_index(_from_json(content, tensors, states), states)
    pairs = content.items() if tag == "dict" else content
    return {key: _from_json(item, tensors, states) for key, item in pairs}


def _read_lightning(path: Path, size: int) -> dict[str, Any]:
    """A file of ``torch.save``, by torch's reader that runs nothing."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members) or size < sum(
            member.file_size for member in members
        ):
            raise CheckpointDamaged("unpacks to more than it holds")
        checkpoint: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except CheckpointDamaged:
        raise
    except Exception as error:  # torch.load raises many classes
        raise CheckpointDamaged("cannot be read as a checkpoint") from error
    if not isinstance(checkpoint, dict):
        raise CheckpointDamaged("is not a checkpoint")
    return checkpoint
