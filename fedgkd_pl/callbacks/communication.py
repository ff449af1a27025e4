"""The cost of a run: bytes sent so far, seconds per round."""

import time
from typing import Any

from fedgkd_pl.federation.callback import FederatedCallback
from lightning.pytorch import LightningModule, Trainer

MEGABYTE = 10**6


class Communication(FederatedCallback):
    """Logs what was sent since the run began, and the seconds of every round.

    ``comm/total_mb_down`` and ``comm/total_mb_up`` are in 10⁶ bytes, over all clients and rounds,
    failed ones included; a resumed run counts on. ``time/clients``, the seconds that the server
    waited for clients, and ``time/evaluation``, those of the validation and test sets, go to the
    loggers alone and not into ``metrics.csv``, which must be the same for every run of the same
    settings.
    """

    def __init__(self) -> None:
        self.begun = 0.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Logs the round; the server has counted it already."""
        sent = {"down": pl_module.bytes_down, "up": pl_module.bytes_up}
        pl_module.log_round({f"comm/total_mb_{way}": n / MEGABYTE for way, n in sent.items()})
        _log_seconds(trainer, pl_module, "time/clients", pl_module.waited)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluation begins."""
        self.begun = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Logs its seconds, before a checkpoint may be written."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            seconds = time.perf_counter() - self.begun
            _log_seconds(trainer, pl_module, "time/evaluation", seconds)


def _log_seconds(trainer: Trainer, pl_module: Any, name: str, seconds: float) -> None:
    for logger in trainer.loggers:
        logger.log_metrics({name: seconds}, step=pl_module.round)
