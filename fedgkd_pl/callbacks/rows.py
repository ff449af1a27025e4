"""The base of callbacks that write a table, whose rows travel in the checkpoint."""

from typing import Any

from fedgkd_pl.federation.callback import FederatedCallback
from fedgkd_pl.runs.files import csv_text, run_folder
from fedgkd_pl.storage.files import write_text
from lightning.pytorch import LightningModule, Trainer


class RowsFile(FederatedCallback):
    """Base of callbacks that write rows to a CSV file beside ``metrics.csv``.

    A resumed run's file is that of a run that was never stopped. In a run without
    :class:`~fedgkd_pl.RunFiles` no file is written.
    """

    file: str  # its name
    columns: tuple[str, ...]
    rows: list[dict[str, Any]]

    def add(self, *values: float | None) -> None:
        """Adds a row; of None the file has an empty cell."""
        self.rows.append(dict(zip(self.columns, values, strict=True)))

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From the checkpoint."""
        self.rows = list(state_dict["rows"])

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """A new run starts without rows; those of a checkpoint come after this hook."""
        if trainer.current_epoch == 0:
            self.rows = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drops the rows of rounds that were never committed from the file."""
        self._write(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the rows."""
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if folder := run_folder(trainer):
            write_text(folder / self.file, csv_text(list(self.columns), self.rows))
