"""The objects of a config: checks them, trains them and evaluates what was trained."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from fedgkd_pl.callbacks.averaged import AveragedModel
from fedgkd_pl.config import strict_yaml
from fedgkd_pl.config.messages import setting_error
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.federation.checks import SCORES, check_resumed
from fedgkd_pl.federation.own_module import is_own_module
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.methods import title_of_class
from fedgkd_pl.processes.signals import Interrupted, Stopped, stop_behind
from fedgkd_pl.runs.files import RunFiles
from fedgkd_pl.runs.folder import PREDICTIONS, RunFolder, how_to_look
from fedgkd_pl.runs.keep import BestRound, LastRound
from fedgkd_pl.runs.resume import check_net, check_settings, compare_settings
from fedgkd_pl.runs.settings import fixed_settings, flatten
from fedgkd_pl.storage.files import write_text
from filelock import BaseFileLock
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

SPLITS = ("val", "test")


@dataclass
class Start:
    """Where a run starts from."""

    folder: RunFolder | None = None  # None for a new run
    file: Path | None = None  # the checkpoint
    checkpoint: dict[str, Any] = field(default_factory=dict)  # its content
    lock: BaseFileLock | None = None

    def release(self) -> None:
        """Unlocks the folder."""
        if self.lock is not None:
            self.lock.release()


@dataclass
class Experiment:
    """A Trainer, a method and data that belong together, and the settings they came from.

    They are the ordinary objects: ``experiment.trainer.fit(experiment.model, experiment.data)``
    trains, too. :meth:`fit` also makes the run folder, as the command line does.

    Attributes:
        settings: all of them, nested, as ``config.yaml`` has them.
        modules: the user's, whose classes the settings may name.
        own_logger: whether the run's logger is the package's TensorBoard one.
        keeps_files: whether :meth:`fit` makes a run folder.
        quiet: whether :meth:`fit` prints its result alone.
    """

    trainer: Trainer
    model: FederatedServer
    data: FederatedDataModule
    settings: dict[str, Any]
    text: str = ""
    modules: tuple[str, ...] = ()
    start: Start = field(default_factory=Start)
    own_logger: bool = False
    keeps_files: bool = False
    quiet: bool = False

    @cached_property
    def fixed(self) -> dict[str, Any]:
        """The settings that decide the result, by dotted key."""
        return fixed_settings(self.settings)

    @property
    def callbacks(self) -> list[Callback]:
        """The Trainer's."""
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return callbacks

    def check(self, trains: bool = True, reaches_clients: bool = True) -> None:
        """Refuses, before anything is written, what would fail in training or evaluation.

        ``reaches_clients``: whether the engine must be able to reach its clients from here.
        """
        with self.whole_keys():
            self.data.prepare_data()
            self.data.setup()
            if is_own_module(self.model.net):
                self.model.net.trainer = self.trainer  # which its steps may ask for
            self.model.check_run(self.data)
            names = {split: self.model.new_scores(self.data, split).names for split in SPLITS}
            for callback in self.callbacks:
                if isinstance(callback, BestRound):
                    callback.take_score(names["val"])
            scores = [f"{split}/{name}" for split in SPLITS for name in sorted(names[split])]
            self._check_monitors(scores)
            if not trains:
                return
            self.data.check_rounds(self.settings["rounds"])
            self.model.check_run(self.data, self.trainer, reaches_clients)

    def _check_monitors(self, scores: list[str]) -> None:
        """Rejects a callback's ``monitor`` that is none of our scores."""
        if any(isinstance(callback, AveragedModel) for callback in self.callbacks):
            scores = [*scores, "average/acc", "average/loss", "average/val_acc", "average/val_loss"]
        for callback in self.callbacks:
            monitor = getattr(callback, "monitor", None)
            key = "checkpoint.monitor" if isinstance(callback, BestRound) else "trainer.callbacks"
            ours = isinstance(monitor, str) and monitor.startswith(SCORES)
            unknown = ours and monitor not in scores and "/class_acc/" not in str(monitor)
            require(not unknown, key, f"no such score: {', '.join(scores)}", monitor)

    def fit(self) -> RunFolder | None:
        """Trains every round; gives back the run's folder, None where it keeps none.

        A run that is interrupted goes on with ``build(resume=folder).fit()``, in the same process
        or another; Ctrl-C raises an ``Interrupted``, a ``KeyboardInterrupt`` that says so.
        """
        start = self.start
        with self._ending():
            if self.keeps_files and (start.folder or start.checkpoint):
                self._check_start()
            self.check()
            if start.file is not None:
                if self.keeps_files:
                    check_resumed(self.model, self.data, start.checkpoint["fedgkd_pl"])
                check_net(start.checkpoint, self.model)
            if self.keeps_files:
                self._make_folder()
            if not self.quiet:
                print(self._title(), flush=True)
            self.trainer.fit(
                self.model,
                datamodule=self.data,
                ckpt_path=start.file and str(start.file),
                weights_only=self.settings["weights_only"],
            )
        done, rounds = self.trainer.current_epoch, self.settings["rounds"]
        if done < rounds and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            print(f"ended after round {done} of {rounds}: {self._reason()}")
        if start.folder is not None and self.keeps_files:
            self._tell(start.folder)
            return start.folder
        return None

    def validate(self) -> list[Any]:
        """Evaluates the checkpoint on the server's validation set."""
        return list(self._evaluate(self.trainer.validate, verbose=self.settings["verbose"]))

    def test(self) -> list[Any]:
        """Evaluates the checkpoint on the test set."""
        return list(self._evaluate(self.trainer.test, verbose=self.settings["verbose"]))

    def predict(self) -> Path:
        """Writes the checkpoint's predictions on the test set beside it."""
        batches = self._evaluate(self.trainer.predict)
        assert self.start.file is not None
        file = RunFolder.of_checkpoint(self.start.file).path / PREDICTIONS
        _write_predictions(file, torch.cat(batches), self.data.test.targets)
        print(f"wrote {file}")
        return file

    def _evaluate(self, how: Any, **arguments: Any) -> Any:
        with self._ending():
            self.check(trains=False)
            check_net(self.start.checkpoint, self.model)
            file, weights_only = str(self.start.file), self.settings["weights_only"]
            arguments |= {"ckpt_path": file, "weights_only": weights_only}
            return how(self.model, datamodule=self.data, **arguments)

    def _check_start(self) -> None:
        """Refuses to go on with other settings than a checkpoint's, or where nothing is left."""
        folder, checkpoint = self.start.folder, self.start.checkpoint
        if not checkpoint and folder is not None:  # killed before its first commit
            text = "the run is finished and kept no checkpoint"
            require(not folder.summary.exists(), "resume", text, folder.path)
            compare_settings(fixed_settings(strict_yaml.read(str(folder.config))), self.fixed)
            return
        check_settings(checkpoint, self.fixed)
        for callback in self.callbacks:
            saved = checkpoint["callbacks"].get(callback.state_key)
            if isinstance(callback, AveragedModel) and saved is not None:
                callback.load_state_dict(saved)  # refuses that of another average
        done, rounds = checkpoint["global_step"], self.settings["rounds"]
        finished = folder is None or folder.is_finished(done)
        stopped = folder is not None and checkpoint["fedgkd_pl"].get("stopped")
        text = f"the run is finished: a callback ended it after round {done}; for more rounds, "
        text += "begin a new run without that callback, or with more patience"
        require(not (stopped and finished), "resume", text)
        if stopped:
            self.callbacks.append(_OnlyFinish())
        more = done < rounds or (done == rounds and not finished)
        text = f"the run is finished: to go on, --rounds N with more than {done}"
        require(more, "rounds", text, rounds)

    def _make_folder(self) -> None:
        """Makes the run's folder, after all checks."""
        start = self.start
        if start.folder is None:
            parent = Path(self.settings["output_dir"]) / self.settings["name"]
            start.folder = RunFolder.new(parent)
            start.lock = start.folder.lock()
        else:
            start.folder.drop_uncommitted(start.checkpoint.get("global_step", 0))
        folder = start.folder
        write_text(folder.config, self.text)
        for callback in self.callbacks:
            if isinstance(callback, RunFiles) and callback.folder is None:
                callback.folder = str(folder.path)
            if isinstance(callback, ModelCheckpoint) and not isinstance(callback, LastRound):
                callback.CHECKPOINT_NAME_LAST = "newest"  # last.ckpt is LastRound's
            if isinstance(callback, BestRound) and start.file is not None:
                callback.source = start.file.parent
            if isinstance(callback, BestRound | LastRound) and callback.dirpath is None:
                callback.dirpath = str(folder.checkpoints)
        path = folder.path
        if self.own_logger:
            self.trainer.logger = TensorBoardLogger(
                path.parent.parent,
                path.parent.name,
                path.name,
                default_hp_metric=False,
                purge_step=start.checkpoint.get("global_step", 0) + 1,  # hides rounds not committed
            )
        given = self.settings["trainer"]["logger"]
        given = given if isinstance(given, list) else [given]
        for place, logger in enumerate(self.trainer.loggers):
            if type(logger) is CSVLogger and not logger.name:  # into the run's folder
                arguments = given[place]["init_args"] | {"save_dir": path, "name": "csv"}
                self.trainer.loggers[place] = CSVLogger(**arguments)

    def _title(self) -> str:
        """``FedGKD on digits: 20 clients, 4 a round, 30 rounds, seed 0``."""
        data, precision = self.data, self.trainer.precision
        parts = [f"{data.num_clients} clients", f"{data.cohort_size} a round"]
        parts += [f"{self.settings['rounds']} rounds", f"seed {data.seed}"]
        parts += [f"precision {precision}"] if precision != "32-true" else []
        return f"{title_of_class(type(self.model))} on {data.name}: {', '.join(parts)}"

    def _reason(self) -> str:
        """Who ended the run before its last round."""
        if 0 < self.trainer.max_steps <= self.trainer.global_step:
            return f"trainer.max_steps is {self.trainer.max_steps}"
        for callback in self.callbacks:
            if isinstance(callback, EarlyStopping) and callback.stopping_reason_message:
                return f"{type(callback).__name__}: {callback.stopping_reason_message}"
            left = callback.time_remaining() if isinstance(callback, Timer) else None
            if left is not None and left <= 0:
                return f"{type(callback).__name__}: the time is over"
        return "a callback set trainer.should_stop"

    @property
    def _imports(self) -> str:
        """The flags that bring the user's modules in again."""
        return "".join(f" --import {module}" for module in self.modules)

    def _tell(self, folder: RunFolder) -> None:
        """Prints how it went and where to look."""
        summary = json.loads(folder.summary.read_text(encoding="utf-8"))
        score = summary.get("score", "acc")
        averaged = ("average/acc", summary.get("average", {}))
        for name, found in ((f"test/{score}", summary), averaged):
            best, final = (found.get(f"{which}_test_{score}") for which in ("best", "final"))
            if best is not None:
                last = "not tested" if final is None else f"{final:.4f}"
                print(f"{name} best {best:.4f} (round {found['best_round']}), final {last}")
        print(f"wrote {folder.path}")
        if self.own_logger and not self.quiet:
            print(how_to_look(folder.path.parent))
        if score == "acc" and not self.quiet:
            path = quote(str(folder.path))
            print(f"use:   fedgkd-pl predict {path} --input FILE{self._imports}")

    def __repr__(self) -> str:
        """What it would train."""
        method, data = type(self.model).__name__, self.data.name
        name = f"{self.settings['output_dir']}/{self.settings['name']}"
        where = self.start.folder.path if self.start.folder else name
        return f"Experiment({method} on {data}, {self.settings['rounds']} rounds, {where})"

    @contextmanager
    def whole_keys(self) -> Iterator[None]:
        """Adds the whole key to the error of a setting."""
        try:
            yield
        except SettingError as error:
            raise setting_error(error, flatten(self.settings)) from error

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Adds to a stop how to go on; unlocks the folder however the run ends."""
        try:
            with self.whole_keys():
                yield
        except SettingError:
            raise
        except (Stopped, SIGTERMException, SystemError) as error:
            stop = stop_behind(error)
            if isinstance(error, SIGTERMException):  # Lightning's, where a destructor dropped ours
                stop = Stopped(signal.SIGTERM)
            if stop is None:
                raise
            if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
                self._interrupt(f"stopped by {stop.name}")  # in the user's own program
            if self.start.folder is not None:
                path = quote(str(self.start.folder.path))
                stop.hint = f"go on with: fedgkd-pl fit --resume {path}{self._imports}"
            raise stop from error
        except SystemExit as error:
            if isinstance(error.__context__, KeyboardInterrupt):  # Lightning's answer to one
                self._interrupt("interrupted")
            raise
        finally:
            self.start.release()

    def _interrupt(self, what: str) -> None:
        """Raises what says how to go on in Python."""
        folder = self.start.folder
        hint = f"; go on with: build(resume={str(folder.path)!r}).fit()" if folder else ""
        raise Interrupted(what + hint) from None


class _OnlyFinish(Callback):
    """Ends a run that a callback had ended when it was killed; Lightning would train on."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.should_stop = True


def _write_predictions(file: Path, probabilities: torch.Tensor, labels: torch.Tensor) -> None:
    """A row per sample: the truth, the guess and its probability (samples × classes)."""
    confidence, classes = probabilities.max(dim=1)
    lines = ["index,label,prediction,probability"]
    for index, row in enumerate(zip(labels, classes, confidence, strict=True)):
        lines.append(",".join(str(value) for value in (index, *(v.item() for v in row))))
    write_text(file, "\n".join(lines) + "\n")
