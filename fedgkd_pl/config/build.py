"""From a config to a Trainer, a method and data, which are checked, trained and evaluated: one way.

The command line, ``compare``, both halves of a Flower app and a notebook come here.
"""

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from fedgkd_pl.callbacks.client_evaluation import ClientEvaluation
from fedgkd_pl.callbacks.dashboard import Dashboard
from fedgkd_pl.callbacks.progress import RoundProgress
from fedgkd_pl.config.messages import setting_error
from fedgkd_pl.config.parser import Parsed
from fedgkd_pl.config.request import Request, flags, read_request
from fedgkd_pl.config.safety import our_rules
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.errors import RunFailed, SettingError, require
from fedgkd_pl.federation.callback import FederatedCallback
from fedgkd_pl.federation.checks import check_alone, check_resumed
from fedgkd_pl.federation.own_module import is_own_module
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.methods import title_of_class
from fedgkd_pl.processes.command import Interrupted, Stopped, stop_behind
from fedgkd_pl.runs.files import RunFiles, as_yaml
from fedgkd_pl.runs.folder import PREDICTIONS, RunFolder, fixed_settings, flatten, how_to_look
from fedgkd_pl.runs.resume import (
    BestRound,
    LastRound,
    check_net,
    check_settings,
    compare_settings,
    find_checkpoint,
    load_checkpoint,
)
from fedgkd_pl.storage.files import home_of, read_yaml, write_text
from filelock import BaseFileLock
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.random import fork_rng
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
            check_alone(self.trainer)
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
            scores += [name for each in self.callbacks for name in getattr(each, "logs", ())]
            text = f"no such score: {', '.join(scores)}"
            for callback in self.callbacks:
                monitor = str(getattr(callback, "monitor", None))
                ours = monitor.startswith(("val", "test", "average")) and "/class" not in monitor
                own = f"trainer.callbacks.{type(callback).__name__}.monitor"
                key = "checkpoint.monitor" if isinstance(callback, BestRound) else own
                require(monitor in scores or not ours, key, text, monitor)
            if trains:
                self.data.check_rounds(self.settings["rounds"])
                self.model.check_run(self.data, self.trainer, reaches_clients)

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
        if not self.keeps_files or start.folder is None:
            return None
        done, rounds = self.trainer.current_epoch, self.settings["rounds"]
        if done < rounds:
            stops = [each for each in self.callbacks if isinstance(each, EarlyStopping)]
            reasons = [each.stopping_reason_message for each in stops]
            why = next(filter(None, reasons), "a callback or trainer.max_steps ended it")
            print(f"ended after round {done} of {rounds}: {why}")
        self._tell(start.folder)
        return start.folder

    def validate(self) -> list[Any]:
        """Evaluates the checkpoint on the server's validation set."""
        return self._evaluate(self.trainer.validate, verbose=self.settings["verbose"])

    def test(self) -> list[Any]:
        """Evaluates the checkpoint on the test set."""
        return self._evaluate(self.trainer.test, verbose=self.settings["verbose"])

    def predict(self) -> Path:
        """Writes the checkpoint's predictions on the test set beside it."""
        import pandas as pd

        confidence, classes = torch.cat(self._evaluate(self.trainer.predict)).max(dim=1)
        columns = {"label": self.data.test.targets, "prediction": classes}
        table = pd.DataFrame(columns | {"probability": confidence.tolist()})
        assert self.start.file is not None
        file = home_of(self.start.file) / PREDICTIONS
        write_text(file, table.to_csv(index_label="index"))
        print(f"wrote {file}")
        return file

    def _evaluate(self, how: Any, **arguments: Any) -> list[Any]:
        with self._ending():
            self.check(trains=False)
            check_net(self.start.checkpoint, self.model)
            arguments |= {"ckpt_path": str(self.start.file), "datamodule": self.data}
            return list(how(self.model, weights_only=self.settings["weights_only"], **arguments))

    def _check_start(self) -> None:
        """Refuses to go on with other settings than a checkpoint's, or where nothing is left."""
        folder, checkpoint = self.start.folder, self.start.checkpoint
        if not checkpoint and folder is not None:  # killed before its first commit
            text = "the run is finished and kept no checkpoint"
            require(not folder.summary.exists(), "resume", text, folder.path)
            compare_settings(fixed_settings(read_yaml(str(folder.config))), self.fixed)
            return
        check_settings(checkpoint, self.fixed)
        for callback in self.callbacks:
            saved = checkpoint["callbacks"].get(callback.state_key)
            if isinstance(callback, FederatedCallback) and saved is not None:
                callback.load_state_dict(saved)  # an AveragedModel refuses another average's
        done, rounds = checkpoint["global_step"], self.settings["rounds"]
        finished = folder is None or folder.is_finished(done)
        if folder is not None and checkpoint["fedgkd_pl"].get("stopped"):
            text = f"the run is finished: a callback ended it after round {done}; for more rounds, "
            text += "begin a new run without that callback, or with more patience"
            require(not finished, "resume", text)
            self.callbacks.append(_OnlyFinish())
        more = done < rounds or (done == rounds and not finished)
        text = f"the run is finished: to go on, --rounds N with more than {done}"
        require(more, "rounds", text, rounds)

    def _make_folder(self) -> None:
        """Makes the run's folder, after all checks."""
        start = self.start
        if start.folder is None:
            start.folder = RunFolder.new(Path(self.settings["output_dir"]) / self.settings["name"])
            start.lock = start.folder.lock()
        else:
            start.folder.drop_uncommitted(start.checkpoint.get("global_step", 0))
        folder = start.folder
        write_text(folder.config, as_yaml(self.settings))
        for callback in self.callbacks:
            if isinstance(callback, FederatedCallback) and hasattr(callback, "folder"):
                callback.folder = callback.folder or str(folder.path)
            if isinstance(callback, BestRound | LastRound):
                callback.dirpath = callback.dirpath or str(folder.checkpoints)
            if isinstance(callback, ModelCheckpoint) and not isinstance(callback, LastRound):
                callback.CHECKPOINT_NAME_LAST = "newest"  # last.ckpt is LastRound's
            if isinstance(callback, BestRound) and start.file is not None:
                callback.source = start.file.parent
        path = folder.path
        if self.own_logger:
            self.trainer.logger = TensorBoardLogger(
                path.parent.parent,
                path.parent.name,
                path.name,
                default_hp_metric=False,
                purge_step=start.checkpoint.get("global_step", 0) + 1,  # hides rounds not committed
            )

    def _title(self) -> str:
        """``FedGKD on digits: 20 clients, 4 a round, 30 rounds, seed 0``."""
        data, precision = self.data, self.trainer.precision
        parts = [f"{data.num_clients} clients", f"{data.cohort_size} a round"]
        parts += [f"{self.settings['rounds']} rounds", f"seed {data.seed}"]
        parts += [f"precision {precision}"] if precision != "32-true" else []
        if self.model.is_personal:
            parts += ["scored: each client's own model on its own samples"]
        if optimizer := self.model.client_optimizer:
            parts += [f"clients' {optimizer}"]
        return f"{title_of_class(type(self.model))} on {data.name}: {', '.join(parts)}"

    @property
    def _imports(self) -> str:
        """The flags that bring the user's modules in again."""
        return "".join(f" --import {module}" for module in self.modules)

    def _tell(self, folder: RunFolder) -> None:
        """Prints how it went and where to look."""
        summary = json.loads(folder.summary.read_text(encoding="utf-8"))
        score = summary.get("score", "acc")
        scores = {f"test/{score}": summary, "average/acc": summary.get("average", {})}
        for name, found in scores.items():
            best, final = (found.get(f"{which}_test_{score}") for which in ("best", "final"))
            if best is not None:
                last = "not tested" if final is None else f"{final:.4f}"
                print(f"{name} best {best:.4f} (round {found['best_round']}), final {last}")
        print(f"wrote {folder.path}")
        if self.own_logger and not self.quiet:
            print(how_to_look(folder.path.parent))
        if score == "acc" and not self.quiet:
            path, whose = quote(str(folder.path)), " --client 0" * self.model.is_personal
            print(f"use:   fedgkd-pl predict {path} --input FILE{whose}{self._imports}")

    def __repr__(self) -> str:
        """What it would train."""
        method, rounds = type(self.model).__name__, self.settings["rounds"]
        return f"Experiment({method} on {self.data.name}, {rounds} rounds)"

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
        except (Stopped, SIGTERMException, SystemError) as error:
            stop = stop_behind(error)
            if isinstance(error, SIGTERMException):  # Lightning's, where a destructor dropped ours
                stop = Stopped(signal.SIGTERM)
            if stop is None:
                raise
            if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
                self._interrupt(f"stopped by {stop.name}")  # in the user's own program
            if folder := self.start.folder:
                path = quote(str(folder.path))
                stop.hint = f"go on with: fedgkd-pl fit --resume {path}{self._imports}"
            raise stop from error
        except SystemExit as error:
            if isinstance(error.__context__, KeyboardInterrupt):  # Lightning's answer to one
                self._interrupt("interrupted")
            raise RunFailed(f"the net or the data called sys.exit({error.code})") from error
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


Config = str | Path | Mapping[str, Any]
ADDRESS = "must be a flag of its own, not in a file: code is sent there, and pickles come back"


def build(
    config: Config | Sequence[Config] = (),
    *,
    resume: str | Path | None = None,
    trust: bool = False,
    imports: Sequence[str] = (),
    **overrides: Any,
) -> Experiment:
    """Builds the Trainer, the method and the data that a config describes.

    ``build("quickstart", rounds=5).fit()`` does what ``fedgkd-pl fit --config quickstart.yaml
    --rounds 5`` does, with the same run folder and the same bits.

    Args:
        config: a file, the name of one that comes with the package, or settings; or several of
            these, of which later ones win.
        resume: the folder of an interrupted run to go on with, with its own settings.
        trust: resume a folder that belongs to another user.
        imports: your modules, whose classes the config may name.
        overrides: settings that win over the config, by the names that flags have:
            ``rounds=5``, ``**{"model.gamma": 0.1}``.

    Raises:
        SettingError: a setting is invalid; the text names it.
    """
    configs = [config] if isinstance(config, str | Path | Mapping) else config
    argv = [] if resume is None else ["--resume", str(resume)]
    argv += ["--trust"] * trust
    argv += [word for module in imports for word in ("--import", module)]
    for each in configs:
        argv += flags(each) if isinstance(each, Mapping) else ["--config", str(each)]
    return build_command("fit", [*argv, *flags(overrides)])


def build_command(command: str, argv: Sequence[str]) -> Experiment:
    """Builds what a command asks for with these flags."""
    return build_request(read_request(command, argv))


def build_request(request: Request) -> Experiment:
    """Builds what a command asks for, checked as far as possible without data; writes nothing."""
    start = Start(request.run if request.resumes else None)
    try:
        with our_rules(request.modules):
            made = _Objects(request, start)
            return Experiment(
                trainer=made.trainer,
                model=made.model,
                data=made.datamodule,
                settings=made.settings,
                modules=request.modules,
                start=start,
                own_logger=made.own_logger,
                keeps_files=made.keeps_files,
                quiet=made.quiet,
            )
    except BaseException:
        start.release()
        raise


def build_model(argv: Sequence[str], encoder: dict[str, Any] | None = None) -> "_Model":
    """Builds the method of a config alone, as ``model``, and its deciding settings as ``fixed``.

    Its data and its Trainer may not fit here. The generators stay as they were.

    Args:
        argv: flags of ``fedgkd-pl fit``.
        encoder: the settings of a text net's encoder, so that no pretrained weights are fetched
            where they will be replaced.
    """
    request = read_request("fit", argv)
    with our_rules(request.modules), fork_rng([]):
        return _Model(request, encoder)


class _Model(Parsed):
    """Of all objects that settings describe, only the method."""

    def __init__(self, request: Request, encoder: dict[str, Any] | None) -> None:
        self.encoder = encoder
        super().__init__(request)

    @override
    def _set_seed(self) -> None:
        """Draws nothing that is kept."""

    @override
    def make(self) -> None:
        config = self.config.clone()
        for group in ("data", "trainer", "checkpoint"):
            del config[group]
        config.model.init_args.pop("engine", None)  # of another machine
        net = config.model.init_args.get("net")
        if self.encoder is not None and net and net.class_path.endswith(".TextClassifier"):
            net.init_args.encoder_config = self.encoder
        self.model: FederatedServer = self.parser.instantiate(config).model


class _Objects(Parsed):
    """The objects that a request's settings describe."""

    def __init__(self, request: Request, start: Start) -> None:
        self.start = start
        super().__init__(request)

    @override
    def before_instantiate_classes(self) -> None:
        config, start, fits = self.config, self.start, self.request.command == "fit"
        self.quiet, config.quiet = config.quiet, False  # it is about this command, not the run
        if config.data.init_args.get("val_fraction") == 0:
            config.checkpoint.monitor = None  # nothing to choose a best round by
        address = config.get("model.init_args.engine.init_args.ray_address")
        given = {word.partition("=")[2] or word for word in self.request.argv}
        is_known = address in (None, "auto", "local", *given)
        require(is_known, "model.engine.ray_address", ADDRESS, address)
        if start.folder is not None:
            start.lock = start.folder.lock()
            start.file = start.folder.last_checkpoint()
        if start.file is None and config.ckpt_path is not None:
            start.file = find_checkpoint(config.ckpt_path)
            config.ckpt_path = str(start.file.absolute())
        require(fits or start.file is not None, "ckpt_path", "missing: a run or a checkpoint")
        if start.file is not None:
            resumed = start.folder is not None
            start.checkpoint, start.file = load_checkpoint(start.file, resumed, fits)

    @override
    def make(self) -> None:
        super().make()
        asked = any(word.startswith("--data.download") for word in self.request.argv)
        if self.request.run is not None and not asked:
            self.datamodule.download = False  # a run that was begun had its data

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = {**self.config_init["trainer"], **kwargs}
        given = config["callbacks"]
        callbacks = given if isinstance(given, list) else [given] * (given is not None)
        if self.quiet:
            config["enable_progress_bar"] = config["enable_model_summary"] = False
            callbacks = [each for each in callbacks if not isinstance(each, ProgressBar)]
        self.own_logger = config["logger"] in (None, True)
        if self.own_logger:
            config["logger"] = False  # made after all checks
        self.keeps_files = self.request.command == "fit" and not config["fast_dev_run"]
        config["callbacks"] = [*callbacks, *self._own_callbacks(config, callbacks)]
        if self.start.folder is not None and config["default_root_dir"] is None:
            config["default_root_dir"] = str(self.start.folder.path)  # not the current folder
        try:
            return Trainer(**config)
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise SettingError("trainer", str(error)) from error

    def _own_callbacks(self, config: dict[str, Any], theirs: list[Callback]) -> list[Callback]:
        def has(kind: type[Callback]) -> bool:
            return any(isinstance(each, kind) for each in theirs)

        callbacks: list[Callback] = []
        if self.keeps_files:
            if config["enable_checkpointing"] is not False:
                best = self.config_init["checkpoint"]
                # without a score there is no best round, only a last one
                callbacks += [best, LastRound()] if best.monitor else [LastRound()]
            if self.own_logger and not has(Dashboard):
                callbacks.append(Dashboard())
            model = self.config_init["model"]
            if model.is_personal and not model.engine.states_stay and not has(ClientEvaluation):
                callbacks.append(ClientEvaluation())
            callbacks.append(RunFiles(config=self.fixed))
        if self.request.command == "fit" and self.config.profile:
            from fedgkd_pl.callbacks.profile import RoundProfile

            callbacks.append(RoundProfile())
        if config["enable_progress_bar"] is not False and not has(ProgressBar):
            callbacks.append(RoundProgress())
        return callbacks
