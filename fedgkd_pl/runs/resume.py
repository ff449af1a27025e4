"""The two checkpoints that a run keeps, its best round and its last, and how it goes on from one.

Which checkpoint is meant, what is in it, and whether a run may go on from it.
"""

from collections.abc import Collection
from contextlib import suppress
from os.path import exists, isdir, isfile, lexists  # unlike Path's, these take a name of any length
from pathlib import Path
from typing import Any

import torch
from fedgkd_pl.errors import SettingError, StorageError, require
from fedgkd_pl.federation.checks import SCORES
from fedgkd_pl.runs.folder import LAST, RunFolder, short
from fedgkd_pl.storage.checkpoint import (
    RECORD,
    CheckpointDamaged,
    copy_checkpoint,
    load_newest,
    read_checkpoint,
)
from fedgkd_pl.storage.files import CHECKPOINTS, previous
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from typing_extensions import override

Checkpoint = dict[str, Any]


class BestRound(ModelCheckpoint):
    """Lightning's ModelCheckpoint, which also keeps its files on a resume into a new folder."""

    scored = -1  # the last epoch that was validated
    source: Path | None = None  # the folder of the checkpoint that the run goes on from

    def take_score(self, scores: Collection[str]) -> None:
        """Where there is no accuracy to choose the best round by, it is the one of least loss."""
        if self.monitor == "val/acc" and "acc" not in scores:
            self.monitor, self.mode, self.kth_value = "val/loss", "min", torch.tensor(torch.inf)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Lightning would start anew in another folder. Files come from `source` only, wherever a
        # stranger's checkpoint says that they are.
        if self.dirpath:
            folder = Path(self.dirpath)
            here = {path: folder / Path(path).name for path in state_dict["best_k_models"]}
            for file in here.values():
                if self.source is not None and not lexists(file):
                    with suppress(CheckpointDamaged):  # a hostile one may name any file
                        read_checkpoint(self.source / file.name, states=True)
                        copy_checkpoint(self.source / file.name, file)
            scores = state_dict["best_k_models"].items()
            state_dict = state_dict | {
                "dirpath": self.dirpath,
                "best_model_path": str(here.get(state_dict["best_model_path"], "")),
                "best_k_models": {str(here[path]): score for path, score in scores},
                "kth_best_model_path": str(here.get(state_dict["kth_best_model_path"], "")),
                "last_model_path": "",
            }
        super().load_state_dict(state_dict)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.scored = trainer.current_epoch
        super().on_validation_end(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # a round without validation has only an older score
        if self.scored == trainer.current_epoch or not str(self.monitor).startswith(SCORES):
            super().on_train_epoch_end(trainer, pl_module)


class LastRound(ModelCheckpoint):
    """``last.ckpt``, written after every round.

    ModelCheckpoint's own ``save_last`` is written only with a new best one.
    """

    def __init__(self) -> None:
        name = Path(LAST).stem
        super().__init__(filename=name, save_on_train_epoch_end=True, enable_version_counter=False)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass  # nothing of an earlier run, of whose folder Lightning would warn


def find_checkpoint(name: str) -> Path:
    """The file of ``--ckpt_path``: a file, or the last of a run's folder."""
    file = RunFolder(Path(name)).last_checkpoint() or Path(name)
    require(not isdir(file), "ckpt_path", f"no {CHECKPOINTS}/{LAST} in this folder", name)
    require(exists(file) or exists(previous(file)), "ckpt_path", "no such file", name)
    return file


def checkpoint_of(folder: RunFolder, name: str) -> Path:
    """A checkpoint of a run: its ``last``, its ``best`` by validation, or a file of it."""
    if name not in ("last", "best"):
        file = find_checkpoint(name)
        ours = folder.path.resolve() in file.resolve().parents
        require(ours, "ckpt_path", "belongs to another run", name)
        return file
    last = folder.last_checkpoint()
    if last is None:
        raise SettingError("run", f"has no {CHECKPOINTS}/{LAST}", folder.path)
    if name == "last":
        return last
    states = load_checkpoint(last)[0]["callbacks"].items()
    for path in [state["best_model_path"] for key, state in states if key.startswith("BestRound")]:
        if isfile(best := folder.checkpoints / Path(path).name):
            return best
    text = "the run kept no best round: give last, or a checkpoint file"
    raise SettingError("ckpt_path", text, name)


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
        text = f"the run began with {saved.get(changed[0])}"
        text += f"; also changed: {', '.join(map(short, changed[1:6]))}" * (len(changed) > 1)
        raise SettingError(short(changed[0]), text, settings.get(changed[0]))


def check_net(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Refuses a checkpoint of another net."""
    saved, ours = checkpoint["state_dict"], model.state_dict()
    for name in sorted(saved.keys() | ours.keys()):
        there, here = (tuple(s[name].shape) if name in s else None for s in (saved, ours))
        text = f"holds another net: {name} is {there} there and {here} here"
        require(there == here, "ckpt_path", text)
