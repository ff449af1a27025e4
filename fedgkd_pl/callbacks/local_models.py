"""What each client's own model is worth after local training."""

from typing import Any

import numpy as np
from fedgkd_pl.callbacks.evaluate import Split, SplitCallback
from fedgkd_pl.federation.message import ClientUpdate, Message
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.runs.files import csv_text, run_folder
from fedgkd_pl.runs.folder import LOCAL_MODELS
from fedgkd_pl.storage.files import write_text
from lightning.pytorch import LightningModule, Trainer

COLUMNS = ["round", "client", "samples", "acc", "loss"]


class LocalModels(SplitCallback):
    """Evaluates every client's model as it comes back, on the server's data.

    Logs ``local/acc_mean``, ``_std``, ``_min`` and ``_max``, and ``local/loss_mean``, over the
    clients that answered (each counts once). The models themselves are in ``local_models.csv``
    beside ``metrics.csv``, a row each: round, client, its training samples, accuracy, loss. In a
    run without :class:`~fedgkd_pl.RunFiles` no file is written. The rows travel in the checkpoint,
    so a resumed run's file is that of a run that was never stopped.

    For methods whose clients keep their models (FedDistill), these are the models that count.

    Args:
        every_n_rounds: evaluates in rounds n, 2n, ….
        split: the server's data to evaluate on, ``test`` or ``val``.
        max_samples: this many of them at most, the same random ones in every run; null for all.
    """

    def __init__(
        self, every_n_rounds: int = 1, split: Split = "test", max_samples: int | None = None
    ) -> None:
        super().__init__(every_n_rounds, split, max_samples)
        self.rows: list[dict[str, float]] = []
        self.results: list[dict[str, float]] = []  # of this round, until it is done

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From the checkpoint."""
        self.rows = list(state_dict["rows"])

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """A new run starts without rows; those of a checkpoint come after this hook."""
        if stage == "fit" and trainer.current_epoch == 0:
            self.rows = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drops the rows of rounds that were never committed from the file."""
        self._write(trainer)

    def on_broadcast(
        self, trainer: Trainer, pl_module: FederatedServer, message: Message, cohort: Any
    ) -> None:
        """Starts the round."""
        self.results = []

    def on_client_end(
        self, trainer: Trainer, pl_module: FederatedServer, update: ClientUpdate, cohort_size: int
    ) -> None:
        """Evaluates a client's model."""
        if runner := self.runner_of(pl_module):
            acc, loss = runner.score(runner.logits(update.weights))
            values = (pl_module.round, update.client, update.num_samples, acc, loss)
            self.results.append(dict(zip(COLUMNS, values, strict=True)))

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Logs the round."""
        if not self.results:
            return
        accs = np.array([row["acc"] for row in self.results])
        losses = np.array([row["loss"] for row in self.results])
        pl_module.log_round(
            {
                "local/acc_mean": float(accs.mean()),
                "local/acc_std": float(accs.std()),
                "local/acc_min": float(accs.min()),
                "local/acc_max": float(accs.max()),
                "local/loss_mean": float(losses.mean()),
            }
        )
        self.rows += sorted(self.results, key=lambda row: row["client"])
        self.results = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the rows."""
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if folder := run_folder(trainer):
            write_text(folder / LOCAL_MODELS, csv_text(COLUMNS, self.rows))
