"""The cost of a run: the seconds of each part of a round, and bytes sent so far."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fedgkd_pl.callbacks.evaluate import RowsFile
from fedgkd_pl.federation.callback import FederatedCallback
from fedgkd_pl.federation.message import ClientUpdate
from fedgkd_pl.runs.folder import PROFILE
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

CLIENTS = ("student", "teacher", "transfer")
PARTS = (*CLIENTS, "aggregation", "training", "evaluation", "other")


class RoundProfile(RowsFile):
    """Measures the parts of every round; writes ``profile.csv`` and prints a table at the end.

    Clients that train side by side share the seconds that the server waits for them, in proportion
    to what each part took. On a GPU steps run ahead of Python, so that student and teacher are
    separated less sharply there. In a run without :class:`~fedgkd_pl.RunFiles` no file is written.
    """

    file = PROFILE
    columns = ("round", *PARTS)

    def __init__(self) -> None:
        self.row: dict[str, float] = {}  # of the round that is measured; empty outside of training

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self.row, self.last = dict.fromkeys(PARTS, 0.0), time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """The server's step begins."""
        self._lap("other")

    @override
    def on_client_end(
        self, trainer: Trainer, pl_module: LightningModule, update: ClientUpdate, cohort_size: int
    ) -> None:
        """Adds a client's seconds."""
        for name in CLIENTS:
            self.row[name] += update.seconds.get(name, 0.0)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """The server's step is done."""
        self._lap("aggregation")
        self.row["aggregation"] -= pl_module.waited + pl_module.trained
        self.row["training"] = pl_module.trained
        total = sum(self.row[name] for name in CLIENTS)
        if not total:  # nobody succeeded
            total = self.row["student"] = 1.0
        for name in CLIENTS:
            self.row[name] *= pl_module.waited / total

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluation begins."""
        self._lap("other")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluation is done."""
        self._lap("evaluation")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Closes the round, and writes it; what follows, such as a checkpoint, is of the next."""
        self._lap("other")
        self.add(pl_module.round, *(round(self.row[part], 6) for part in PARTS))
        self.row = dict.fromkeys(PARTS, 0.0)
        super().on_train_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the table."""
        self.row = {}
        print(profile_table(self.rows))

    def _lap(self, part: str) -> None:
        """Adds the seconds since the last lap to a part of the round."""
        if self.row:
            now = time.perf_counter()
            self.row[part] += now - self.last
            self.last = now


def profile_table(rows: Sequence[Mapping[str, float]]) -> str:
    """The seconds of the first round, which starts workers and compiles, and of the mean other."""
    import pandas as pd

    table = pd.DataFrame(rows, columns=PARTS)
    seconds = pd.DataFrame({"first round": table.iloc[0], "others": table[1:].mean()})
    seconds["%"] = 100 * seconds["others"] / seconds["others"].sum()
    seconds.loc["a round"] = seconds.sum()
    return f"\nseconds of a round\n{seconds.to_string(float_format='%.3f', na_rep='')}"


MEGABYTE = 10**6


class Communication(FederatedCallback):
    """Logs what was sent since the run began, and the seconds of every round.

    ``comm/total_mb_down`` and ``comm/total_mb_up`` are in 10⁶ bytes, over all clients and rounds,
    failed ones included; a resumed run counts on. ``time/clients``, the seconds that the server
    waited for clients, and ``time/evaluation``, those of the validation and test sets, go to the
    loggers alone and not into ``metrics.csv``, which must be the same for every run of the same
    settings.
    """

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
