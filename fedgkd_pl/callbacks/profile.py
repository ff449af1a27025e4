"""The seconds of each part of a round."""

import csv
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgkd_pl.federation.callback import FederatedCallback
from fedgkd_pl.federation.message import ClientUpdate
from fedgkd_pl.runs.files import csv_text
from fedgkd_pl.runs.folder import PROFILE
from fedgkd_pl.storage.files import write_text
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

CLIENTS = ("student", "teacher", "transfer")
MEANING = {
    "student": "local steps; with compile: true the teacher, too",
    "teacher": "answers of frozen models, in steps or ahead of them",
    "transfer": "messages to and from worker processes, and their start",
    "aggregation": "the server's mean and step",
    "training": "the server's own training, of methods that have it",
    "evaluation": "validation and test sets",
    "other": "checkpoints, logs, files",
}


class RoundProfile(FederatedCallback):
    """Measures the parts of every round; writes ``profile.csv`` and prints a table at the end.

    Clients that train side by side share the seconds that the server waits for them, in proportion
    to what each part took. On a GPU steps run ahead of Python, so that student and teacher are
    separated less sharply there.

    Args:
        folder: where ``profile.csv`` goes; None for no file.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self.rows: list[dict[str, float]] = []
        self.row: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock; of an interrupted run, keeps the rounds that were committed."""
        self.rows, self.row, self.earlier = [], {}, list[dict[str, Any]]()
        self.round = trainer.current_epoch
        file = Path(self.folder or "") / PROFILE
        if self.folder is not None and file.is_file():
            with file.open() as lines:
                known = list(csv.DictReader(lines))
            self.earlier = [row for row in known if int(row["round"]) <= self.round]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Closes the round before."""
        self._close()
        self.begun = time.perf_counter()
        self.clients = dict.fromkeys(CLIENTS, 0.0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """The server's step begins."""
        self.step = time.perf_counter()

    @override
    def on_client_end(
        self, trainer: Trainer, pl_module: LightningModule, update: ClientUpdate, cohort_size: int
    ) -> None:
        """Adds a client's seconds."""
        for name in CLIENTS:
            self.clients[name] += update.seconds.get(name, 0.0)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """The server's step is done."""
        waited, trained = pl_module.waited, pl_module.trained
        if not any(self.clients.values()):  # nobody succeeded
            self.clients["student"] = 1.0
        total = sum(self.clients.values())
        self.row = {name: waited * seconds / total for name, seconds in self.clients.items()}
        self.row["aggregation"] = time.perf_counter() - self.step - waited - trained
        self.row |= {"training": trained, "evaluation": 0.0}

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluation begins."""
        self.evaluation = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluation is done."""
        self.row["evaluation"] = time.perf_counter() - self.evaluation

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the table."""
        self._close()
        if self.rows:
            print(profile_table(self.rows))

    def _close(self) -> None:
        if not self.row:
            return
        self.row["other"] = time.perf_counter() - self.begun - sum(self.row.values())
        self.rows.append(self.row)
        self.row = {}
        if self.folder is not None:
            rounds = [
                {"round": number, **{name: f"{seconds:.4f}" for name, seconds in row.items()}}
                for number, row in enumerate(self.rows, self.round + 1)
            ]
            text = csv_text(["round", *MEANING], [*self.earlier, *rounds])
            write_text(Path(self.folder) / PROFILE, text)


def profile_table(rows: Sequence[Mapping[str, float]]) -> str:
    """The mean round as a table; the first one, which starts workers and compiles, stands apart."""
    later = rows[1:] or rows
    mean = {name: sum(row[name] for row in later) / len(later) for name in MEANING}
    total = sum(mean.values()) or 1.0
    lines = ["", "where a round's time goes"]
    for name, seconds in mean.items():
        lines.append(f"  {name:<12}{seconds:9.3f} s {seconds / total:6.1%}   {MEANING[name]}")
    first = f"; the first round took {sum(rows[0].values()):.3f} s" if len(rows) > 1 else ""
    return "\n".join([*lines, f"  {'a round':<12}{total:9.3f} s{first}"])
