"""The two checkpoints of a run: its best round and its last."""

import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint


class BestRound(ModelCheckpoint):
    """Lightning's ModelCheckpoint, which a resume into a new folder does not make forgetful."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the best round so far over, file and all; Lightning would start anew.

        Args:
            state_dict: what an earlier run saved.
        """
        best = Path(state_dict["best_model_path"])
        if state_dict["dirpath"] != self.dirpath and self.dirpath and best.is_file():
            here = Path(self.dirpath) / best.name
            here.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(best, here)
            score = state_dict["best_model_score"]
            state_dict = state_dict | {
                "dirpath": self.dirpath,
                "best_model_path": str(here),
                "best_k_models": {str(here): score},
                "kth_best_model_path": str(here),
                "kth_value": score,
                "last_model_path": "",
            }
        super().load_state_dict(state_dict)


class LastRound(ModelCheckpoint):
    """``last.ckpt``, written after every round.

    ModelCheckpoint's own ``save_last`` is written only with a new best one.
    """

    def __init__(self) -> None:
        super().__init__(
            filename="last", save_on_train_epoch_end=True, enable_version_counter=False
        )
