"""A run's folder: the names of its files, new versions, its lock."""

import re
from dataclasses import dataclass
from itertools import count
from os.path import exists, isdir  # which, unlike Path's, take a name of any length
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from fedgkd_pl.errors import SettingError, StorageError, require
from fedgkd_pl.storage.files import (
    CHECKPOINTS,
    MB,
    PART,
    home_of,
    lock,
    previous,
    read_bytes,
    read_json,
)

if TYPE_CHECKING:
    from filelock import BaseFileLock

AVERAGE = "average.safetensors"
CLIENTS = "clients.csv"
CONFIG = "config.yaml"
ERROR = "error.txt"
FAILURES = "failures.csv"
INPUTS = "model.json"
LAST = "last.ckpt"
LOCAL_MODELS = "local_models.csv"
LOG = "log.txt"  # what a cell of a study printed; beside its folder
METRICS = "metrics.csv"
MODEL = "global.safetensors"
PARTITION = "partition.json"
PERSONALIZED = "personalized.csv"
PREDICTIONS = "predictions.csv"
PROFILE = "profile.csv"
TOKENIZER = "tokenizer.json"
TASKS = "tasks.csv"
SUMMARY = "summary.json"  # written last: a run that has it is finished
OF_PYTHON = "# read off the objects of a run in Python\n"  # begins such a config
FEATURE_MAPS = "features-round*.npz"
EVENTS = "events.out.tfevents.*"


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, ``runs/<name>/version_k``, finished or not."""

    path: Path

    @classmethod
    def new(cls, parent: Path) -> "RunFolder":
        """Makes the next free ``version_k`` of a name; two runs that start at once get two."""
        for number in count():
            path = parent / f"version_{number}"
            try:
                path.mkdir(parents=True)
                break
            except FileExistsError:
                require(parent.is_dir(), "output_dir", "is not a folder", str(parent))
            except NotADirectoryError as error:
                raise SettingError("output_dir", "is not a folder", str(parent)) from error
            except OSError as error:
                raise StorageError(path, error) from error
        return cls(path)

    @classmethod
    def of_checkpoint(cls, file: Path) -> "RunFolder":
        """The run that a checkpoint belongs to."""
        return cls(home_of(file))

    @classmethod
    def versions(cls, parent: Path) -> list["RunFolder"]:
        """The runs of one name, the oldest first."""
        names = [(re.fullmatch(r"version_(\d+)", p.name), p) for p in parent.glob("version_*")]
        return [cls(path) for _, path in sorted((int(m[1]), path) for m, path in names if m)]

    @property
    def config(self) -> Path:
        """All settings; a run that has it was begun."""
        return self.path / CONFIG

    @property
    def summary(self) -> Path:
        """How it went; a run that has it is finished."""
        return self.path / SUMMARY

    @property
    def metrics(self) -> Path:
        """A row for every round."""
        return self.path / METRICS

    @property
    def model(self) -> Path:
        """The final global model."""
        return self.path / MODEL

    @property
    def average(self) -> Path:
        """What AveragedModel made of the global models."""
        return self.path / AVERAGE

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints are."""
        return self.path / CHECKPOINTS

    def is_begun(self) -> bool:
        """Whether it has settings to go on with."""
        return self.config.exists()

    def is_of_python(self) -> bool:
        """Whether its settings were read off objects: a stock Trainer trained it."""
        try:
            return read_bytes(self.config, MB).startswith(OF_PYTHON.encode())
        except OSError:
            return False

    def is_finished(self, rounds: int) -> bool:
        """Whether it has a summary, of so many rounds."""
        try:
            return bool(read_json(self.summary)["rounds"] == rounds)
        except (OSError, ValueError, LookupError, TypeError):
            return False

    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint; None if no round was ever committed."""
        last = self.checkpoints / LAST
        return last if exists(last) or exists(previous(last)) else None

    def lock(self, seconds: float = 0) -> "BaseFileLock":
        """Locks the folder for this process until it ends; waits ``seconds`` for another one."""
        return lock(self.path, seconds=seconds)

    def drop_uncommitted(self, rounds: int) -> None:
        """Removes what an interrupted round left: half files, and a best round after ``rounds``."""
        from fedgkd_pl.storage.checkpoint import round_of  # which imports torch

        for part in self.path.rglob(f".*{PART}"):
            if not isdir(part):
                part.unlink()
        for file in self.checkpoints.glob("*.ckpt"):
            if (round_of(file) or 0) > rounds:
                file.unlink()


def how_to_look(folder: Path) -> str:
    """The command, and the address of the charts: TensorBoard opens on Time Series, tag by tag."""
    address = "http://localhost:6006/#custom_scalars"
    return f"look:  tensorboard --logdir {quote(str(folder))}\n       {address}"
