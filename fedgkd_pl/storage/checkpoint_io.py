"""How Lightning writes and reads our checkpoints: atomically, keeping the previous file."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedgkd_pl.storage.checkpoint import (
    CheckpointDamaged,
    encode,
    read_checkpoint,
    referred_states,
    stores_of,
)
from fedgkd_pl.storage.files import commit, home_of, previous
from fedgkd_pl.storage.reading import printable
from fedgkd_pl.storage.states import FOLDER, StateStore, clean, read_state
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from typing_extensions import override

# Constructor arguments: engines, nets, functions. A method is built from its config instead.
_NEVER_READ = ("hyper_parameters", "hparams_", "datamodule_h")  # what their keys begin with
HALF = "half_done"  # of our part of a checkpoint: the round that its server's step is within
# Files in the state of a ModelCheckpoint, beside best_k_models.
KEPT = ("best_model_path", "kth_best_model_path", "last_model_path")
log = logging.getLogger("fedgkd_pl")


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
        stores = stores_of(kept)
        try:
            for store in stores:
                store.save(path.parent / FOLDER)
            commit(path, [encode(kept)], keep_previous=_is_sound(path))
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


def _is_sound(path: Path) -> bool:
    """Whether a file is worth keeping as the previous one."""
    try:
        read_checkpoint(path)
    except CheckpointDamaged:
        return False
    return True


def _clean(stores: list[StateStore], folder: Path) -> None:
    """Removes the states that no checkpoint of a folder refers to."""
    if not stores:
        return
    names = {name for store in stores for name in store.names.values()}
    with suppress(CheckpointDamaged):  # nobody knows what a damaged file needs
        for file in folder.iterdir():
            names |= referred_states(file) if file.is_file() else set()
        clean(folder / FOLDER, names)


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
