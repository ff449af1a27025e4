"""A run's folder: its files, versions and lock; what its settings and its rows say, without torch.

Settings are compared by dotted key, those that decide a result alone. The rows of ``metrics.csv``
become the accuracies that people report, or the losses of a run that has no accuracy.
"""

import re
from dataclasses import dataclass
from itertools import count
from os.path import exists, isdir, isfile, islink, lexists, samefile  # of names of any length
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from fedgkd_pl.errors import StorageError, require
from fedgkd_pl.storage.files import CHECKPOINTS, MB, PART, lock, previous, read_bytes, read_json

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
OWN = (  # at the top of a run's folder: what runs write, and commands that are given no file
    *(AVERAGE, CLIENTS, ERROR, FAILURES, FEATURE_MAPS, INPUTS, LOCAL_MODELS, METRICS, MODEL),
    *(PARTITION, PERSONALIZED, PREDICTIONS, PROFILE, SUMMARY, TASKS, TOKENIZER),
    *("*.yaml", "events.out.*", ".*"),
)


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
            except (FileExistsError, NotADirectoryError):
                require(parent.is_dir(), "output_dir", "is not a folder", str(parent))
            except OSError as error:
                raise StorageError(path, error) from error
        return cls(path)

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


def check_output(output: str | Path, *inputs: str | Path, key: str = "output") -> None:
    """Refuses to write over an input, a file of a run, or what is no regular file."""
    is_new = not lexists(output)
    is_plain = is_new or (isfile(output) and not islink(output))
    require(is_plain, key, "must be a regular file, or a new one", output)
    taken = not is_new and any(exists(each) and samefile(each, output) for each in inputs)
    require(not taken, key, "is the input; give another file", output)
    file = Path(output).resolve()
    for home in file.parents:
        own = home / CHECKPOINTS in file.parents or any(map(file.match, OWN))
        own = own and isfile(home / CONFIG) and isfile(home / INPUTS)
        require(not own, key, "is a file of a run; give another one", output)


def how_to_look(folder: Path) -> str:
    """The command, and the address of the charts: TensorBoard opens on Time Series, tag by tag."""
    address = "http://localhost:6006/#custom_scalars"
    return f"look:  tensorboard --logdir {quote(str(folder))}\n       {address}"


# What may differ when a run is resumed: where it runs and what is recorded, not what is computed.
FIXED = ("seed_everything", "model", "data", "trainer.precision", "trainer.gradient_clip")
THREADS = "model.init_args.engine.init_args.threads"  # of an engine, this alone changes numbers
FREE = (
    "model.init_args.engine.",
    "model.init_args.max_failed_rounds",
    "data.init_args.data_dir",
    "data.init_args.path",
    "data.init_args.test_path",
    "data.init_args.download",
    "data.init_args.loader_workers",
    "data.init_args.eval_batch_size",
)


def fixed_settings(settings: Any) -> dict[str, Any]:
    """The settings that decide the result, by dotted key."""
    return {
        key: value
        for key, value in flatten(settings).items()
        if key == THREADS or (key.startswith(FIXED) and not key.startswith(FREE))
    }


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A nested mapping as dotted keys; lists stay whole."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    dot = f"{prefix}." if prefix else ""
    return {k: v for key, value in tree.items() for k, v in flatten(value, dot + str(key)).items()}


def short(key: str) -> str:
    """A key as it is typed, without ``init_args``."""
    return key.replace(".init_args", "")


Row = dict[str, float]
AVERAGE_ACC = "average/acc"  # test accuracy of AveragedModel's model


def accuracy_summary(
    rows: list[Row], test: str = "test/acc", val: str = "val/acc", score: str = "acc"
) -> dict[str, Any]:
    """The numbers people report, from the rows of ``metrics.csv``.

    The paper's number is the best test accuracy over rounds, which picks its round on the test
    set; ``test_acc_at_best_val`` picks it on the validation set.

    Args:
        test: the column that is reported.
        val: the column that ``test_acc_at_best_val`` chooses its round by.
        score: what the numbers are called: acc, or loss, of which less is better.
    """
    best_of = min if score == "loss" else max
    tested = [row for row in rows if test in row]
    final = rows[-1].get(test) if rows else None  # of the last model, or of none
    last_10 = [row[test] for row in tested[-10:]]
    best = best_of(tested, key=lambda row: row[test], default=None)
    validated = [row for row in tested if val in row]
    chosen = best_of(validated, key=lambda row: row[val], default=None)
    return {
        "rounds": len(rows),
        f"best_test_{score}": best[test] if best else None,
        "best_round": int(best["round"]) if best else None,
        f"final_test_{score}": final,
        f"mean_last_10_test_{score}": sum(last_10) / len(last_10) if last_10 else None,
        f"test_{score}_at_best_val": chosen[test] if chosen else None,
    }


def loss_summary(rows: list[Row]) -> dict[str, Any]:
    """The same of the test loss, of which less is better; empty for a run with an accuracy."""
    if any("test/acc" in row for row in rows) or not any("test/loss" in row for row in rows):
        return {}
    return {"score": "loss", **accuracy_summary(rows, "test/loss", "val/loss", "loss")}


def average_summary(rows: list[Row]) -> dict[str, Any]:
    """The same of the averaged model; empty for a run that has none."""
    if not any(AVERAGE_ACC in row for row in rows):
        return {}
    return accuracy_summary(rows, AVERAGE_ACC, "average/val_acc")
