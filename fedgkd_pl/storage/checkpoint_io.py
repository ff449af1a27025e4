"""How Lightning writes and reads our checkpoints: atomically, keeping the previous file."""

import logging
import re
from pathlib import Path
from typing import Any

from fedgkd_pl.errors import StorageError
from fedgkd_pl.storage.checkpoint import (
    CheckpointDamaged,
    encode,
    is_sound,
    read_checkpoint,
    referred_states,
    stores_of,
)
from fedgkd_pl.storage.files import commit, home_of, previous
from fedgkd_pl.storage.reading import printable
from fedgkd_pl.storage.states import FOLDER, StateStore, copy_states
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

# Constructor arguments: engines, nets, functions. A method is built from its config instead.
_NEVER_READ = (
    *("hyper_parameters", "hparams_name", "hparams_type"),
    *("datamodule_hyper_parameters", "datamodule_hparams_name"),
)
HALF = "half_done"  # of our part of a checkpoint: the round that its server's step is within
# Files in the state of a ModelCheckpoint, beside best_k_models.
KEPT = ("best_model_path", "kth_best_model_path", "last_model_path")
log = logging.getLogger("fedgkd_pl")


class SafeCheckpointIO(CheckpointIO):
    """Lightning's extension point for checkpoints; every server installs it on its Trainer.

    A file that is replaced is kept as ``*.previous.ckpt``, and used where the newest one is
    damaged or missing.
    """

    resumes = True  # whether what is read goes on, and so needs what clients keep
    held = False  # whether the last checkpoint was not written
    newest: Path | None = None  # the last that was

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint atomically; ``storage_options`` is not used.

        First the clients' states that are new, then the file that refers to them; only then goes
        what nothing refers to any more. Half a round, which callbacks save when an error ends a
        run, is not written: nothing could go on from it.
        """
        ours = checkpoint.get("fedgkd_pl")
        if isinstance(ours, dict) and HALF in ours:
            if not self.held:
                last = f"the last commit is {self.newest}" if self.newest else "there is no commit"
                log.warning("round %d is half done: %s is not written; %s", ours[HALF], path, last)
            self.held = True
            return
        kept = {key: value for key, value in checkpoint.items() if key not in _NEVER_READ}
        path = Path(path)
        stores = stores_of(kept)
        try:
            for store in stores:
                store.save(path.parent / FOLDER)
            commit(path, encode(kept), keep_previous=is_sound(path))
        except StorageError:
            _clean(stores, path.parent)
            raise
        self.newest, self.held = path, False
        _clean(stores, path.parent)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a checkpoint, or the previous one, always to the CPU; nothing in it is run."""
        checkpoint, self.newest = load_newest(Path(path), self.resumes)
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a checkpoint and the previous one, unless the one to replace it is not there."""
        for file in () if self.held else (Path(path), previous(Path(path))):
            file.unlink(missing_ok=True)


def _clean(stores: list[StateStore], folder: Path) -> None:
    """Removes the states that no checkpoint of a folder refers to."""
    names = {name for store in stores for name in store.names()}
    for file in folder.iterdir() if stores and folder.is_dir() else ():
        referred = referred_states(file) if file.is_file() else set()
        if referred is None and file.suffix == ".ckpt":
            return  # nobody knows what a damaged file needs
        names |= referred or set()
    for store in stores:
        store.clean(folder / FOLDER, names)


def copy_checkpoint(source: Path, target: Path) -> None:
    """Takes a checkpoint to the folder of another run, with the states it refers to."""
    names = referred_states(source) or set()
    copy_states(names, source.parent / FOLDER, target.parent / FOLDER)
    commit(target, [source.read_bytes()])


def load_newest(path: Path, states: bool = False) -> tuple[dict[str, Any], Path]:
    """The content of a checkpoint and its file: the one asked for, or the previous one.

    ``states``: what clients keep must be sound, too; see :func:`read_checkpoint`.
    """
    try:
        checkpoint, file = read_checkpoint(path, states), path
    except CheckpointDamaged as error:
        file = previous(path)
        try:
            checkpoint = read_checkpoint(file, states)
        except CheckpointDamaged:
            raise error from None
        log.warning("%s %s: going on from %s, the one before", path, error, file.name)
    _check_callbacks(checkpoint.get("callbacks", {}), file)
    return checkpoint, file


def _check_callbacks(states: Any, file: Path) -> None:
    """Refuses states that name files elsewhere, which callbacks would write and remove.

    ModelCheckpoint trusts the names of a state whose ``dirpath`` is its own, so these must be
    within it; what other callbacks name, such as SpikeDetection, within the checkpoint's run.
    """
    if not isinstance(states, dict) or not all(isinstance(s, dict) for s in states.values()):
        raise CheckpointDamaged("is not a checkpoint")
    home = home_of(file)
    for state in states.values():
        kept = state.get("best_k_models", {})
        named = [name for key in KEPT if (name := state.get(key, "")) != ""]
        if not isinstance(kept, dict) or not all(isinstance(n, str) for n in (*kept, *named)):
            raise CheckpointDamaged("is not a checkpoint")
        dirpath = state.get("dirpath")
        for name in (*kept, *named):
            _check_inside(name, Path(dirpath) if isinstance(dirpath, str) else home)
        for key, name in state.items():
            if isinstance(name, str) and name and key not in (*KEPT, "dirpath"):
                if re.search("path|dir|file|folder", str(key)):
                    _check_inside(name, home)


def _check_inside(name: str, folder: Path) -> None:
    try:
        path = Path(name)
        inside = ".." not in path.parts and path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # a NUL, a loop of links
        inside = False
    if not inside:
        raise CheckpointDamaged(f"names a file outside its folder: {printable(name)}")
