"""Checkpoints: plain values and tensors in one safetensors file, sealed by a checksum.

The structure and all plain values are JSON, in a tensor of bytes called ``tree``. Nothing in it can
be run.

What clients keep between rounds is beside the checkpoints that refer to it: a file per state, named
by the SHA-256 of its content. So a checkpoint writes the states that are new and lists the others,
checkpoints share files, and a damaged file is found out by its name.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from fedgkd_pl.errors import StorageError
from fedgkd_pl.storage import files
from fedgkd_pl.storage.files import (
    commit,
    home_of,
    previous,
    printable,
    sync_folder,
    to_safetensors,
)
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from safetensors import safe_open
from torch import Tensor
from typing_extensions import override

State = dict[str, Tensor]
FOLDER = "states"  # beside checkpoints


class StateStore(MutableMapping[int, State]):
    """States by client, always on disk.

    Args:
        names: the files of states, by client, that a checkpoint refers to.
        source: their folder. New files go to a temporary folder until :meth:`save` names another.
    """

    def __init__(self, names: Mapping[int, str] | None = None, source: Path | None = None) -> None:
        self.names = dict(names or {})
        self._source = source and source.absolute()
        self._home: Path | None = None  # of new files
        self._temporary: TemporaryDirectory[str] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[int]:
        return iter(self.names)

    def __contains__(self, client: object) -> bool:
        return client in self.names

    def __getitem__(self, client: int) -> State:
        from safetensors.torch import load

        name = self.names[client]
        state = load(read_state(self._folder(name), name))  # in an order of its own
        return dict(sorted(state.items()))

    def __setitem__(self, client: int, state: State) -> None:
        if self._home is None:
            self._temporary = TemporaryDirectory(prefix="fedgkd_pl-states-")
            self._home = Path(self._temporary.name)
        content = to_safetensors(state)
        name = f"{hashlib.sha256(content).hexdigest()}.safetensors"
        commit(self._home / name, [content], sync=False)
        before, self.names[client] = self.names.get(client), name
        self._discard(before)

    def __delitem__(self, client: int) -> None:
        self._discard(self.names.pop(client))

    def __reduce__(self) -> Any:
        """A copy, in this process or another, has files of its own."""
        return StateStore, (), None, None, iter(self.items())

    def _folder(self, name: str) -> Path:
        """Where the file of a state is: among the new ones, or where the checkpoint is."""
        if self._source is None or (self._home is not None and (self._home / name).exists()):
            assert self._home is not None
            return self._home
        return self._source

    def _discard(self, name: str | None) -> None:
        """Removes a replaced file from the temporary folder, which no checkpoint refers to."""
        if self._temporary is not None and name is not None and name not in self.names.values():
            (Path(self._temporary.name) / name).unlink(missing_ok=True)

    def save(self, folder: Path) -> None:
        """Makes a folder beside a checkpoint hold every state, on the disk when this returns."""
        folder = folder.absolute()
        if folder != self._home:
            # at first, what a file of this name holds is not known
            known = set() if self._temporary else {file.name for file in folder.glob("*")}
            for name in {*self.names.values()} - known:
                if self._folder(name) != folder:
                    commit(folder / name, [read_state(self._folder(name), name)], sync=False)
            self.close()
            self._home, self._source = folder, None
        sync_folder(folder)

    def check(self) -> None:
        """Reads every file; StorageError if one is missing or damaged."""
        for name in self.names.values():
            read_state(self._folder(name), name)

    def close(self) -> None:
        """Removes the temporary folder; Python does, unless a process ends without cleaning up."""
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = self._home = None


def read_state(folder: Path, name: str) -> bytes:
    """The file of a state, compared with its name; StorageError if it is another or none."""
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise StorageError(folder / name, error) from error
    if f"{hashlib.sha256(content).hexdigest()}.safetensors" != name:
        raise StorageError(folder / name, "is damaged")
    return content


FORMAT = "fedgkd_pl 2"
TREE = "tree"
RECORD = "run"  # among the callbacks' states: what a run has recorded so far
# Constructor arguments: engines, nets, functions. A method is built from its config instead.
_NEVER_READ = ("hyper_parameters", "hparams_", "datamodule_h")  # what their keys begin with
HALF = "half_done"  # of our part of a checkpoint: the round that its server's step is within
# Files in the state of a ModelCheckpoint, beside best_k_models.
KEPT = ("best_model_path", "kth_best_model_path", "last_model_path")
log = logging.getLogger("fedgkd_pl")


class CheckpointDamaged(ValueError):
    """A file that is no sound checkpoint; the text says why."""


# -- writing -----------------------------------------------------------------------------------


def encode(checkpoint: dict[str, Any]) -> bytes:
    """The file of a checkpoint: plain values and tensors."""
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_to_json(checkpoint, "", tensors)).encode()
    tensors[TREE] = torch.frombuffer(bytearray(tree), dtype=torch.uint8)
    return seal(tensors, format=FORMAT, round=str(checkpoint.get("global_step")))


def seal(tensors: State, **metadata: str) -> bytes:
    """A safetensors file with a checksum of all that it holds."""
    return to_safetensors(tensors, metadata | {"sha256": _checksum(metadata, tensors)})


def _checksum(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str:
    """The SHA-256 of all that a file holds."""
    digest = hashlib.sha256(" ".join(metadata[key] for key in sorted(metadata)).encode())
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
        if not path.is_file():
            raise CheckpointDamaged(f"no such file: {path}")
        with safe_open(path, "pt") as file:
            if (found := file.metadata()["format"]) != FORMAT:
                raise CheckpointDamaged(f"{path}: has format {found}, this is {FORMAT}")
        tensors = read_sealed(path)
        tree = json.loads(tensors[TREE].numpy().tobytes())
        checkpoint = dict(_from_json(tree, tensors, path.parent / FOLDER))
        for store in stores_of(checkpoint) if states else ():
            store.check()
    except CheckpointDamaged:
        raise
    except Exception as error:  # the file may hold anything
        which = error if isinstance(error, StorageError) else path  # that of a state, or this one
        raise CheckpointDamaged(f"damaged: {which}") from error
    return checkpoint


def read_sealed(path: Path) -> State:
    """The tensors of a file of :func:`seal`, or of one that has nothing but tensors.

    Raises:
        Exception: of any class; the file is damaged.
    """
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
    if metadata and metadata.pop("sha256") != _checksum(metadata, tensors):
        raise ValueError("the checksum is wrong")
    return tensors


def stores_of(checkpoint: dict[str, Any]) -> list[StateStore]:
    """What a checkpoint has in files of their own."""
    values = checkpoint.get("fedgkd_pl", {}).values()
    return [value for value in values if isinstance(value, StateStore) and len(value)]


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
    if not path.is_file():
        return set()
    try:
        with safe_open(path, "pt") as file:
            tree = file.get_tensor(TREE).numpy().tobytes()
    except Exception as error:  # the file may hold anything
        if path.suffix != ".ckpt":
            return set()
        raise CheckpointDamaged(f"damaged: {path}") from error
    return {name.decode() for name in re.findall(rb"[0-9a-f]{64}\.safetensors", tree)}


# -- Lightning ---------------------------------------------------------------------------------


class SafeCheckpointIO(CheckpointIO):
    """Lightning's extension point for checkpoints; every server installs it on its Trainer.

    A file that is replaced is kept as ``*.previous.ckpt``, and used where the newest one is
    damaged or missing.

    Args:
        resumes: whether what is read goes on, and so needs what clients keep.
    """

    def __init__(self, resumes: bool = True) -> None:
        self.resumes = resumes
        self.held = False  # whether the last checkpoint was not written
        self.newest: Path | None = None  # the last that was

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        # First the clients' states that are new, then the file that refers to them; only then
        # goes what nothing refers to any more. Half a round, which callbacks save when an error
        # ends a run, is not written: nothing could go on from it.
        path, half = Path(path), checkpoint.get("fedgkd_pl", {}).get(HALF)
        if half is not None:
            if not self.held:
                last = f"the last commit is {self.newest}" if self.newest else "there is no commit"
                log.warning("round %d is half done: %s is not written; %s", half, path, last)
            self.held = True
            return
        kept = {key: value for key, value in checkpoint.items() if not key.startswith(_NEVER_READ)}
        stores, sound = stores_of(kept), False
        with suppress(CheckpointDamaged):
            sound = bool(read_checkpoint(path))  # and so worth keeping as the previous one
        try:
            for store in stores:
                store.save(path.parent / FOLDER)
            commit(path, [encode(kept)], keep_previous=sound)
            self.newest, self.held = path, False
        finally:
            _clean(stores, path.parent)

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint, self.newest = load_newest(Path(path), self.resumes)
        return checkpoint

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        for file in () if self.held else (Path(path), previous(Path(path))):
            file.unlink(missing_ok=True)


def _clean(stores: list[StateStore], folder: Path) -> None:
    """Removes the states that no checkpoint of a folder refers to."""
    if not stores:
        return
    names = {name for store in stores for name in store.names.values()}
    with suppress(CheckpointDamaged):  # nobody knows what a damaged file needs
        for file in folder.iterdir():
            names |= referred_states(file) if file.is_file() else set()
        for state in (folder / FOLDER).glob("*.safetensors"):
            if state.name not in names:
                state.unlink(missing_ok=True)
                files.reached("removed", state)


def copy_checkpoint(source: Path, target: Path) -> None:
    """Takes a checkpoint to the folder of another run, with the states it refers to."""
    for name in referred_states(source):
        content = read_state(source.parent / FOLDER, name)
        commit(target.parent / FOLDER / name, [content], sync=False)
    commit(target, [source.read_bytes()])


def load_newest(path: Path, states: bool = False) -> tuple[dict[str, Any], Path]:
    """The content of a checkpoint and its file: the one asked for, or the previous one.

    ``states``: what clients keep must be sound, too; see :func:`read_checkpoint`.
    """
    file = path
    try:
        checkpoint = read_checkpoint(path, states)
    except CheckpointDamaged as error:
        file = previous(path)
        try:
            checkpoint = read_checkpoint(file, states)
        except CheckpointDamaged:
            raise error from None
        log.warning("%s: going on from %s, the one before", error, file.name)
    try:
        outside = list(_files_outside(checkpoint, file))
    except Exception as error:  # the state may be anything
        raise CheckpointDamaged(f"damaged: {file}") from error
    if outside:
        raise CheckpointDamaged(f"names a file outside its folder: {printable(outside[0])}")
    return checkpoint, file


def _files_outside(checkpoint: dict[str, Any], file: Path) -> Iterator[str]:
    """The files elsewhere that callbacks' states name, which the callbacks would remove.

    ModelCheckpoint trusts the names of a state whose ``dirpath`` is its own.
    """
    for state in checkpoint.get("callbacks", {}).values():
        folder = Path(state.get("dirpath") or home_of(file)).resolve()
        for name in (*state.get("best_k_models", {}), *map(state.get, KEPT)):
            if name and not Path(name).resolve().is_relative_to(folder):
                yield name
