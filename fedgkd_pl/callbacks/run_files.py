"""What a run leaves in its folder, beside checkpoints and the TensorBoard file."""

import csv
import json
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fedgkd_pl
from fedgkd_pl.data.heterogeneity import bubble_chart
from fedgkd_pl.federation.message import to_safetensors
from fedgkd_pl.federation.server import FederatedServer
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

Row = dict[str, float]


class RunFiles(Callback):
    """Writes ``partition.json``, ``metrics.csv``, ``global.safetensors`` and ``summary.json``.

    The rows travel in the checkpoint, so a resumed run's files are as complete as those of a run
    that was never stopped.

    Args:
        folder: where to; by default that of the Trainer's logger.
        config: the settings that decide the result, kept in the checkpoint so that a resume with
            other ones can be refused.
        config_text: all settings, for ``config.yaml``; None writes no such file.
    """

    def __init__(
        self,
        folder: str | None = None,
        config: dict[str, Any] | None = None,
        config_text: str | None = None,
    ) -> None:
        self.folder = folder
        self.config = config or {}
        self.config_text = config_text
        self.rows: dict[int, Row] = {}
        self.seconds = 0.0  # of earlier sessions
        self.started = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {
            "config": self.config,
            "rows": list(self.rows.values()),
            "seconds": self.elapsed(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From the checkpoint.

        Args:
            state_dict: what :meth:`state_dict` gave.
        """
        self.rows = {int(row["round"]): row for row in state_dict["rows"]}
        self.seconds = state_dict["seconds"]

    def elapsed(self) -> float:
        """Seconds of training, over all sessions of the run."""
        return self.seconds + time.perf_counter() - self.started

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes who owns what."""
        self.started = time.perf_counter()
        summary = _server(pl_module).datamodule.summary()
        self._write(trainer, "partition.json", json.dumps(summary) + "\n")
        if self.config_text is not None:
            self._write(trainer, "config.yaml", self.config_text)
        if isinstance(trainer.logger, TensorBoardLogger):
            chart = bubble_chart(summary["counts"], summary["dataset"])
            trainer.logger.experiment.add_figure("partition", chart)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Starts the round's row with what the clients told."""
        server = _server(pl_module)
        self.rows[server.round] = {"round": server.round, **server.report}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adds the evaluation to the round's row, before a checkpoint may be written."""
        row = self.rows.get(_server(pl_module).round)
        if row is None or trainer.sanity_checking:
            return
        for name, value in trainer.callback_metrics.items():
            if name.startswith(("val/", "test/")) and "/class_acc/" not in name:
                row[name] = float(value)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the rows."""
        columns = ["round", "val/acc", "val/loss", "test/acc", "test/loss"]
        columns += sorted({name for row in self.rows.values() for name in row} - set(columns))
        rows = [self.rows[number] for number in sorted(self.rows)]
        with (self._folder(trainer) / "metrics.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the global model and the summary."""
        server = _server(pl_module)
        model = to_safetensors(server.global_state())
        (self._folder(trainer) / "global.safetensors").write_bytes(model)
        accuracies = accuracy_summary(list(self.rows.values()))
        summary = {
            "method": type(server).__name__,
            "dataset": server.datamodule.name,
            "seed": server.datamodule.seed,
            **accuracies,
            "bytes_down": server.bytes_down,
            "bytes_up": server.bytes_up,
            "wall_seconds": round(self.elapsed(), 3),
            "versions": _versions(),
        }
        self._write(trainer, "summary.json", json.dumps(summary, indent=2) + "\n")
        logger = trainer.logger
        if isinstance(logger, TensorBoardLogger) and accuracies["best_test_acc"] is not None:
            scores = {f"hp/{k}": v for k, v in accuracies.items() if k.endswith("test_acc")}
            logger.log_hyperparams(self.config, scores)  # TensorBoard's HPARAMS page

    def _folder(self, trainer: Trainer) -> Path:
        folder = Path(self.folder or trainer.log_dir or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _write(self, trainer: Trainer, name: str, text: str) -> None:
        (self._folder(trainer) / name).write_text(text, encoding="utf-8")


def accuracy_summary(rows: list[Row]) -> dict[str, float | None]:
    """The numbers people report, from the rows of ``metrics.csv``.

    The paper's number is the best test accuracy over rounds, which picks its round on the test
    set; ``test_acc_at_best_val`` picks it on the validation set.

    Args:
        rows: one per round.
    """
    tested = [row for row in rows if "test/acc" in row]
    last_10 = [row["test/acc"] for row in tested[-10:]]
    best = max(tested, key=lambda row: row["test/acc"], default=None)
    validated = [row for row in tested if "val/acc" in row]
    chosen = max(validated, key=lambda row: row["val/acc"], default=None)
    return {
        "rounds": len(rows),
        "best_test_acc": best["test/acc"] if best else None,
        "best_round": int(best["round"]) if best else None,
        "final_test_acc": tested[-1]["test/acc"] if tested else None,
        "mean_last_10_test_acc": sum(last_10) / len(last_10) if last_10 else None,
        "test_acc_at_best_val": chosen["test/acc"] if chosen else None,
    }


def _server(module: LightningModule) -> FederatedServer:
    assert isinstance(module, FederatedServer)
    return module


def _versions() -> dict[str, str]:
    packages = ("torch", "lightning", "torchvision", "torchmetrics", "numpy")
    return {
        "fedgkd_pl": fedgkd_pl.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }
