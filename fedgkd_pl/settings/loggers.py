"""The loggers of a run that keeps a folder."""

from pathlib import Path
from typing import Any

from fedgkd_pl.storage.files import check_held
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger


class RunLogger(TensorBoardLogger):
    """Refuses to write once its folder was replaced by another of that name."""

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Writes values."""
        check_held(Path(self.log_dir))
        super().log_metrics(*args, **kwargs)

    def save(self) -> None:
        """Writes what is left."""
        check_held(Path(self.log_dir))
        super().save()


def with_the_run(logger: Logger, settings: Any, folder: Path) -> Logger:
    """Lightning's CSV files go into the run's folder, unless they have a name of their own."""
    if type(logger) is not CSVLogger or logger.name:
        return logger
    return CSVLogger(**settings["init_args"] | {"save_dir": folder, "name": "csv"})
