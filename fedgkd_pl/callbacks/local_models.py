"""Each client's own model, evaluated after local training."""

from typing import Any

import numpy as np
from fedgkd_pl.callbacks.evaluate import Split, SplitCallback
from fedgkd_pl.callbacks.rows import RowsFile
from fedgkd_pl.federation.message import ClientUpdate, Message
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.runs.folder import LOCAL_MODELS
from lightning.pytorch import Trainer
from typing_extensions import override

COLUMNS = ["round", "client", "samples", "acc", "loss"]


class LocalModels(RowsFile, SplitCallback):
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

    file = LOCAL_MODELS
    columns = COLUMNS

    def __init__(
        self, every_n_rounds: int = 1, split: Split = "test", max_samples: int | None = None
    ) -> None:
        super().__init__(every_n_rounds, split, max_samples)
        self.rows: list[dict[str, float]] = []
        self.results: list[dict[str, float]] = []  # of this round, until it is done

    @override
    def on_broadcast(
        self, trainer: Trainer, pl_module: FederatedServer, message: Message, cohort: Any
    ) -> None:
        """Starts the round."""
        self.results = []

    @override
    def on_client_end(
        self, trainer: Trainer, pl_module: FederatedServer, update: ClientUpdate, cohort_size: int
    ) -> None:
        """Evaluates a client's model."""
        runner = self.runner_of(pl_module)
        if runner and update.weights:  # which stay with clients, perhaps
            acc, loss = runner.score(runner.logits(update.weights, client=update.client))
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
