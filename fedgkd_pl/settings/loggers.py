"""The loggers of a run that keeps a folder."""

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger


def with_the_run(logger: Logger, settings: Any, folder: Path) -> Logger:
    """Lightning's CSV files go into the run's folder, unless they have a name of their own."""
    if type(logger) is not CSVLogger or logger.name:
        return logger
    return CSVLogger(**settings["init_args"] | {"save_dir": folder, "name": "csv"})
