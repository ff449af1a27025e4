"""From which checkpoint a run goes on, and whether it may."""

from os.path import exists, isdir, isfile  # which, unlike Path's, take a name of any length
from pathlib import Path
from typing import Any

from fedgkd_pl.errors import SettingError, StorageError, require
from fedgkd_pl.runs.folder import LAST, RunFolder
from fedgkd_pl.runs.settings import short
from fedgkd_pl.storage.checkpoint import RECORD, CheckpointDamaged, load_newest
from fedgkd_pl.storage.files import CHECKPOINTS, previous
from torch import nn

Checkpoint = dict[str, Any]


def find_checkpoint(name: str, parent: Path) -> Path:
    """The file of ``--ckpt_path``: a file, a run folder, ``last`` or ``best`` of ``parent``."""
    newest = name in ("last", "best")
    folders = RunFolder.versions(parent)[::-1] if newest else [RunFolder(Path(name))]
    for folder in folders:
        if (file := folder.last_checkpoint()) is not None:
            return checkpoint_of(folder, name) if newest else file
    require(not newest, "ckpt_path", f"no run in {parent} has a checkpoint", name)
    file = Path(name)
    require(not isdir(file), "ckpt_path", f"no {CHECKPOINTS}/{LAST} in this folder", name)
    require(exists(file) or exists(previous(file)), "ckpt_path", "no such file", name)
    return file


def checkpoint_of(folder: RunFolder, name: str) -> Path:
    """A checkpoint of a run: its ``last``, its ``best`` by validation, or a file of it."""
    last = folder.last_checkpoint()
    if name not in ("last", "best"):
        file = find_checkpoint(name, folder.path)
        ours = folder.path.resolve() in file.resolve().parents
        require(ours, "ckpt_path", "belongs to another run", name)
        return file
    if last is None:
        raise SettingError("run", f"has no {CHECKPOINTS}/{LAST}", str(folder.path))
    if name == "last":
        return last
    states = load_checkpoint(last)[0]["callbacks"].items()
    kept = [state["best_model_path"] for key, state in states if key.startswith("BestRound")]
    files = [folder.checkpoints / Path(path).name for path in kept if path]
    known = [file for file in files if isfile(file)]
    text = "the run kept no best round: give last, or a checkpoint file"
    require(len(known) > 0, "ckpt_path", text, name)
    return known[0]


def load_checkpoint(
    path: Path, resumed: bool = False, states: bool = False
) -> tuple[Checkpoint, Path]:
    """A checkpoint's content, read without running anything in it, and its file.

    If the file is damaged, the one before it is taken.

    Args:
        path: its file.
        resumed: the run goes on in its folder.
        states: what clients keep must be sound, too: it is trained on.
    """
    try:
        checkpoint, path = load_newest(path, states)
    except CheckpointDamaged as error:
        if resumed:
            raise StorageError(path.parent, f"nothing sound to go on from; {error}") from error
        raise SettingError("ckpt_path", str(error)) from error
    whole = {"state_dict", "callbacks", "global_step", "fedgkd_pl"} <= checkpoint.keys()
    require(whole, "ckpt_path", "not a checkpoint of fedgkd_pl", str(path))
    return checkpoint, path


def check_settings(checkpoint: Checkpoint, settings: dict[str, Any]) -> None:
    """Refuses to go on with other deciding settings than a checkpoint's."""
    saved = checkpoint["callbacks"].get(RECORD, {}).get("config")
    require(saved is not None, "ckpt_path", "was not written by fedgkd-pl fit")
    compare_settings(saved, settings)


def compare_settings(saved: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuses other settings than those a run began with; both are by dotted key."""
    keys = sorted(saved.keys() | settings.keys())
    changed = [key for key in keys if saved.get(key) != settings.get(key)]
    if changed:
        key, *others = changed
        text = f"the run began with {saved.get(key)}"
        if others:
            text += f"; also changed: {', '.join(map(short, others[:5]))}"
        raise SettingError(short(key), text, settings.get(key))


def check_net(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Refuses a checkpoint of another net."""
    saved, ours = checkpoint["state_dict"], model.state_dict()
    for name in sorted(saved.keys() | ours.keys()):
        there, here = (tuple(s[name].shape) if name in s else None for s in (saved, ours))
        text = f"holds another net: {name} is {there} there and {here} here"
        require(there == here, "ckpt_path", text)
