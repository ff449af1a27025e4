"""The two checkpoints of a run: its best round and its last."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from fedgkd_pl.federation.checks import SCORES
from fedgkd_pl.runs.folder import LAST
from fedgkd_pl.storage.checkpoint import CheckpointDamaged, copy_checkpoint, read_checkpoint
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override


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
            kept: dict[str, Any] = state_dict["best_k_models"]
            here = {path: str(Path(self.dirpath) / Path(path).name) for path in kept}
            for path, new in here.items():
                if self.source is not None and not os.path.lexists(new):
                    _take(self.source / Path(path).name, Path(new))
            state_dict = state_dict | {
                "dirpath": self.dirpath,
                "best_model_path": here.get(state_dict["best_model_path"], ""),
                "best_k_models": {here[path]: score for path, score in kept.items()},
                "kth_best_model_path": here.get(state_dict["kth_best_model_path"], ""),
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


def _take(source: Path, target: Path) -> None:
    """Copies a checkpoint that is sound; a hostile one may name any file."""
    try:
        read_checkpoint(source, states=True)
    except CheckpointDamaged:
        return
    copy_checkpoint(source, target)


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
