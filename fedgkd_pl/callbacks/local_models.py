"""Each client's own model, evaluated after local training."""

from typing import Any

from fedgkd_pl.callbacks.evaluate import Score, SplitCallback, SplitRunner, spread
from fedgkd_pl.callbacks.rows import RowsFile
from fedgkd_pl.federation.message import ClientUpdate
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.runs.folder import LOCAL_MODELS
from lightning.pytorch import Trainer
from typing_extensions import override


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
    columns = ("round", "client", "samples", "acc", "loss")

    @override
    def measure(
        self, runner: SplitRunner, server: FederatedServer, update: ClientUpdate
    ) -> tuple[int, Score]:
        return update.num_samples, runner.score(update.weights, client=update.client)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Logs the round."""
        if not self.found:
            return
        scores = [score for _, score in self.found.values()]
        values = spread(scores) | {"acc_max": max(acc for acc, _ in scores)}
        pl_module.log_round({f"local/{name}": value for name, value in values.items()})
        for client, (samples, score) in sorted(self.found.items()):
            self.add(pl_module.round, client, samples, *score)
