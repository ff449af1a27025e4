"""What a run leaves in its folder, beside checkpoints and the TensorBoard file.

``model.json`` says what the run's model takes and gives, by which it is used without the data.

``config.yaml`` of a run that was put together in Python is read off its objects. Runs with the same
settings are averaged over their seeds. So objects of this package, optimizers in a ``partial`` and
arrays are described by what they were made with, and anything else gets a mark that nothing else
has: such runs are never taken for alike.
"""

import csv
import inspect
import io
import json
import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from functools import partial
from importlib.metadata import version
from pathlib import Path
from traceback import format_exception
from typing import Any
from uuid import uuid4

import fedgkd_pl
import numpy as np
import torch
import yaml
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.examples import digest
from fedgkd_pl.data.inputs import RawInputs, TextInputs, describe_inputs, read_inputs
from fedgkd_pl.errors import RunFailed, SettingError, StorageError, require
from fedgkd_pl.federation.callback import FederatedCallback
from fedgkd_pl.federation.checks import Task, task_of
from fedgkd_pl.federation.message import ClientFailure
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.methods import title_of, title_of_class
from fedgkd_pl.processes.command import stop_behind
from fedgkd_pl.runs.folder import (
    CONFIG,
    ERROR,
    FAILURES,
    INPUTS,
    METRICS,
    MODEL,
    OF_PYTHON,
    PARTITION,
    SUMMARY,
    TOKENIZER,
    Row,
    accuracy_summary,
    average_summary,
    fixed_settings,
    loss_summary,
)
from fedgkd_pl.storage.checkpoint import RECORD, seal
from fedgkd_pl.storage.files import CHECKPOINTS, MB, commit, printable, read_json, write_text
from fedgkd_pl.storage.recorded import Recorded, given
from jsonargparse import ArgumentParser
from jsonargparse._util import get_import_path
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from typing_extensions import override


@dataclass(frozen=True)
class ModelInputs:
    """What a model takes and gives.

    Attributes:
        task: what was learned.
        num_classes: 0 where that is numbers.
        class_names: in the order of the net's outputs; empty where they have only numbers.
        shape: of one input as the net sees it; of texts, the longest.
        dtype: of inputs as the net sees them.
        raw: from raw inputs to those.
        encoder: the settings of a text net's encoder; None for other nets.
    """

    task: Task
    num_classes: int
    class_names: list[str]
    shape: tuple[int, ...]
    dtype: torch.dtype
    raw: RawInputs
    encoder: dict[str, Any] | None = None

    def example(self) -> Tensor:
        """Two inputs as the net might see them, which are nobody's."""
        shape = (2, *self.shape)
        if self.dtype.is_floating_point:
            generator = torch.Generator().manual_seed(0)
            return torch.rand(shape, generator=generator).to(self.dtype)
        pad_id = getattr(self.raw.transform, "pad_id", 1)
        return torch.full(shape, 0 if pad_id else 1, dtype=self.dtype)


def inputs_files(server: FederatedServer, data: FederatedDataModule) -> dict[str, str]:
    """The files that say it, by name."""
    inputs = server.some_inputs(data)
    shape = list(inputs.shape[1:])
    if isinstance(data.reading, TextInputs):
        shape = list(data.test.inputs.shape[1:])  # which a batch may be cut from
    content = {
        "task": task_of(server, data),
        "num_classes": data.num_classes,
        "class_names": [str(name) for name in data.class_names],
        "net": {"shape": shape, "dtype": str(inputs.dtype).removeprefix("torch.")},
        "raw": describe_inputs(data.test, data.reading),
    }
    config: Any = getattr(getattr(server.net, "encoder", None), "config", None)
    if hasattr(config, "to_json_string"):  # a TextClassifier's
        content["encoder"] = json.loads(config.to_json_string())
    files = {INPUTS: json.dumps(content) + "\n"}
    if isinstance(data.reading, TextInputs) and data.reading.vocabulary:
        files[TOKENIZER] = data.reading.vocabulary
    return files


def read_model(folder: Path) -> ModelInputs:
    """What a run's folder says."""
    file = folder / INPUTS
    require(file.exists(), "run", f"has no {INPUTS}", str(folder))
    try:
        content = read_json(file, 16 * MB)
        return ModelInputs(
            task=content["task"],
            num_classes=int(content["num_classes"]),
            class_names=[printable(name, 100) for name in content["class_names"]],
            shape=tuple(map(int, content["net"]["shape"])),
            dtype=torch.empty(0, dtype=getattr(torch, content["net"]["dtype"])).dtype,
            raw=read_inputs(content["raw"], folder / TOKENIZER),
            encoder=content.get("encoder"),
        )
    except SettingError:  # of the tokenizer
        raise
    except Exception as error:  # the file may hold anything
        raise SettingError("run", f"damaged: {file}") from error


log = logging.getLogger("fedgkd_pl")
PACKAGES = ("torch", "lightning", "torchvision", "torchmetrics", "numpy")
COLUMNS = ["round", "client", "reason", "traceback"]  # of failures.csv


class RunFiles(FederatedCallback):
    """Writes ``partition.json``, ``metrics.csv``, ``global.safetensors`` and ``summary.json``.

    And ``config.yaml``: the settings that decide the result, read off the objects of the run; the
    command line writes its own. ``model.json`` says how raw inputs become the net's, and what its
    classes are called. Where clients fail, ``failures.csv`` says which and why. All rows travel in
    the checkpoint, so a resumed run's files are those of a run that was never stopped.

    Args:
        folder: where to; by default that of the Trainer's logger.
        config: the settings that decide the result, kept in the checkpoint so that a resume with
            other ones can be refused; by default those of the objects that are trained.
    """

    def __init__(self, folder: str | None = None, config: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self.config = config or {}
        self.is_described = config is None  # whether they are read off the objects
        self.rows: dict[int, Row] = {}
        self.failures: list[dict[str, Any]] = []
        self.trainings = 0  # of clients that were asked
        self.seconds = 0.0  # of earlier sessions
        self.started = time.perf_counter()

    @property
    def state_key(self) -> str:
        """Its key in a checkpoint, whatever this class is called."""
        return RECORD

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "rows": list(self.rows.values()),
            "failures": self.failures,
            "trainings": self.trainings,
            "seconds": self.elapsed(),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = {int(row["round"]): row for row in state_dict["rows"]}
        self.failures = state_dict["failures"]
        self.trainings = state_dict["trainings"]
        self.seconds = state_dict["seconds"]

    def elapsed(self) -> float:
        """Seconds of training, over all sessions of the run."""
        return self.seconds + time.perf_counter() - self.started

    @override
    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        for callback in trainer.checkpoint_callbacks:  # which set themselves up after this
            if self.folder and isinstance(callback, ModelCheckpoint) and not callback.dirpath:
                callback.dirpath = str(Path(self.folder) / CHECKPOINTS)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.started = time.perf_counter()
        for logger in trainer.loggers:
            taken = isinstance(logger, CSVLogger) and Path(logger.log_dir) == self._folder(trainer)
            text = "RunFiles and CSVLogger both write metrics.csv there: give RunFiles a folder"
            require(not taken, "callbacks", text, logger.log_dir)
        if self.is_described:
            settings = settings_of(trainer, pl_module)
            self.config = fixed_settings(settings)
            self._write(trainer, CONFIG, OF_PYTHON + as_yaml(settings))
        self._write_rows(trainer)
        summary = pl_module.datamodule.summary()
        if isinstance(trainer.logger, TensorBoardLogger):
            rows = [*self.rows.values()]  # of the run that this one goes on from
            if (self._folder(trainer) / PARTITION).exists():
                rows = rows[-1:]  # Lightning logs a part of them after the round is committed
            else:
                from fedgkd_pl.plots.figures import bubble_chart
                from fedgkd_pl.plots.style import opaque

                names = summary.get("class_names", ())
                chart = opaque(bubble_chart(summary["counts"], summary["dataset"], names))
                trainer.logger.experiment.add_figure("partition", chart)
            for row in rows:
                values = {name: value for name, value in row.items() if name != "round"}
                trainer.logger.log_metrics(values, int(row["round"]))
            trainer.logger.experiment.flush()
        self._write(trainer, PARTITION, json.dumps(summary) + "\n")
        for name, text in inputs_files(pl_module, pl_module.datamodule).items():
            self._write(trainer, name, text)

    @override
    def on_client_failed(
        self, trainer: Trainer, pl_module: Any, failure: ClientFailure, cohort_size: int
    ) -> None:
        values = (pl_module.round, failure.client, failure.reason, failure.traceback[-2000:])
        self.failures.append(dict(zip(COLUMNS, values, strict=True)))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, _: int
    ) -> None:
        """Starts the round's row with what the clients reported."""
        self.trainings += len(batch)
        number = pl_module.round
        self.rows[number] = {"round": number, **_no_classes(pl_module.report)}

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Adds the evaluation to the round's row, before a checkpoint may be written."""
        if pl_module.round in self.rows and not trainer.sanity_checking:
            self.rows[pl_module.round] |= _no_classes(pl_module.report)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Writes the rows, with what callbacks after this one logged."""
        self.rows[pl_module.round] |= _no_classes(pl_module.report)
        self._write_rows(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Writes TensorBoard's values of the round to disk before the round is committed."""
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.flush()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Writes who failed in the round that was not finished, and an unexpected error."""
        if isinstance(exception, StorageError | OSError):
            return
        if self.failures:
            self._write(trainer, FAILURES, csv_text(COLUMNS, self.failures))
        expected = isinstance(exception, RunFailed) and exception.__cause__ is None
        expected = expected or stop_behind(exception) is not None
        if isinstance(exception, Exception) and not expected:
            self._write(trainer, ERROR, "".join(format_exception(exception)))

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Writes the global model and the summary; also of a run that only lacked these."""
        commit(self._folder(trainer) / MODEL, [seal(pl_module.global_state())])
        rows = list(self.rows.values())
        accuracies = accuracy_summary(rows) | loss_summary(rows)
        average = average_summary(rows)
        reasons = Counter(row["reason"] for row in self.failures).most_common(20)
        name, title = type(pl_module).__name__, title_of_class(type(pl_module))
        summary = {
            "method": name,
            # of a user's class, which those who read the run need not import
            **({} if title == title_of(name) else {"title": title}),
            "dataset": pl_module.datamodule.name,
            "seed": pl_module.datamodule.seed,
            "client_optimizer": pl_module.client_optimizer,
            **({"scored": "each client's own model"} if pl_module.is_personal else {}),
            **accuracies,
            **({"average": average} if average else {}),
            "rounds_asked": trainer.max_epochs,
            "bytes_down": pl_module.bytes_down,
            "bytes_up": pl_module.bytes_up,
            "client_trainings": self.trainings,
            "failed_clients": len(self.failures),
            "failed_rounds": pl_module.failed_rounds,
            "failures": dict(reasons),
            "diverged_round": pl_module.diverged_round,
            "wall_seconds": round(self.elapsed(), 3),
            "versions": {
                "fedgkd_pl": fedgkd_pl.__version__,
                "python": platform.python_version(),
                **{package: version(package) for package in PACKAGES},
            },
        }
        scores = {f"hp/{k}": v for k, v in accuracies.items() if "_test_" in k and v is not None}
        if isinstance(trainer.logger, TensorBoardLogger) and scores:
            trainer.logger.log_hyperparams(self.config, scores)  # TensorBoard's HPARAMS page
            trainer.logger.experiment.flush()
        (self._folder(trainer) / ERROR).unlink(missing_ok=True)  # of an earlier session
        self._write(trainer, SUMMARY, json.dumps(summary, indent=2) + "\n")
        if reasons:
            log.warning(
                "%d of %d client trainings failed, most often: %s (%s has them all)",
                *(len(self.failures), self.trainings, reasons[0][0], FAILURES),
            )

    def _folder(self, trainer: Trainer) -> Path:
        return Path(self.folder or trainer.log_dir or trainer.default_root_dir)

    def _write(self, trainer: Trainer, name: str, text: str) -> None:
        write_text(self._folder(trainer) / name, text)

    def _write_rows(self, trainer: Trainer) -> None:
        columns = ["round", "val/acc", "val/loss", "test/acc", "test/loss"]
        columns += sorted({name for row in self.rows.values() for name in row} - set(columns))
        rows = [self.rows[number] for number in sorted(self.rows)]
        self._write(trainer, METRICS, csv_text(columns, rows))
        if self.failures or (self._folder(trainer) / FAILURES).exists():
            self._write(trainer, FAILURES, csv_text(COLUMNS, self.failures))


def _no_classes(values: Row) -> Row:
    """Without the values of single classes, which only TensorBoard gets."""
    return {name: value for name, value in values.items() if "/class" not in name}


def run_folder(trainer: Trainer) -> Path | None:
    """Where ``metrics.csv`` is; None for a run that has none."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RunFiles):
            return callback._folder(trainer)
    return None


def output_folder(trainer: Trainer) -> Path:
    """Where a callback puts its files: beside ``metrics.csv``, or where Lightning logs."""
    return run_folder(trainer) or Path(trainer.log_dir or trainer.default_root_dir)


def csv_text(columns: list[str], rows: list[Any]) -> str:
    """Rows as CSV, with the columns in this order; missing values are empty."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


Settings = dict[str, Any]


def settings_of(trainer: Trainer, server: Any) -> Settings:
    """The settings that decide the result of a ``fit``, nested as ``config.yaml`` has them."""
    data = server.datamodule
    algorithm, precision = trainer.gradient_clip_algorithm, str(trainer.precision)
    seed = os.environ.get("PL_GLOBAL_SEED")  # Lightning's, of seed_everything
    of_data = describe(data)
    of_data["init_args"]["seed"] = None if str(data.seed) == seed else data.seed
    if data.partition_seed == data.seed:
        of_data["init_args"]["partition_seed"] = None  # as where none is given
    return {
        "seed_everything": False if seed is None else int(seed),
        "trainer": {
            "precision": None if precision == "32-true" else precision,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": None if algorithm is None else str(algorithm.value),
        },
        "model": describe(server),
        "data": of_data,
        "rounds": trainer.max_epochs,
    }


def as_yaml(settings: Settings) -> str:
    """The text of ``config.yaml``."""
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def describe(value: Any) -> Any:
    """A value as plain data: the same for values that mean the same, another for others."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return describe(value.value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [describe(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): describe(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return describe(asdict(value))
    if isinstance(value, Recorded):
        return _call(type(value), given(value))
    if isinstance(value, partial) and not value.args and inspect.isclass(value.func):
        return _call(value.func, value.keywords, "params", "optimizer")
    if isinstance(value, Tensor | np.ndarray):
        with suppress(TypeError):  # torch has no strings
            tensor = torch.as_tensor(value)
            return f"{tensor.dtype} {tuple(tensor.shape)} {digest(tensor.reshape(-1))}"
    return {"class_path": get_import_path(type(value)), "not_known": uuid4().hex[:12]}


def _call(made: Callable[..., Any], known: Settings, *skip: str) -> Settings:
    """A class with the arguments that it was given, and its defaults but those to ``skip``."""
    arguments = _defaults_of(made, {*skip}) | {key: describe(each) for key, each in known.items()}
    return {"class_path": get_import_path(made)} | ({"init_args": arguments} if arguments else {})


def _defaults_of(made: Callable[..., Any], skip: set[str | int]) -> Settings:
    """The arguments that a config may give to a class, with their defaults."""
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_class_arguments(made, None, fail_untyped=False, sub_configs=True, skip=skip)
        text = parser.dump(parser.get_defaults(), skip_unset=False, skip_validation=True)
        return yaml.safe_load(text) or {}
    except Exception:  # of a user's class, which may be written in any way
        return {}
