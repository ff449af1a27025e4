"""``fedgkd-pl fit | validate | test | predict``: LightningCLI, with rounds for epochs."""

import json
import signal
import sys
from pathlib import Path
from shlex import quote
from typing import Any

import fedgkd_pl
import torch
import yaml
from fedgkd_pl.callbacks.dashboard import Dashboard
from fedgkd_pl.callbacks.profile import RoundProfile
from fedgkd_pl.callbacks.progress import RoundProgress
from fedgkd_pl.cli.partition import show_partition
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.errors import RunFailed, SettingError, StorageError, require
from fedgkd_pl.federation.checks import check_trainer
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.processes.signals import Stopped, stop_behind
from fedgkd_pl.runs.events import rewind
from fedgkd_pl.runs.files import RunFiles
from fedgkd_pl.runs.keep import BestRound, LastRound
from fedgkd_pl.runs.resume import (
    check_net,
    check_settings,
    compare_settings,
    drop_uncommitted,
    find_checkpoint,
    is_finished,
    last_checkpoint,
    load_checkpoint,
    new_version,
    rows_of,
    write_predictions,
)
from fedgkd_pl.runs.settings import fixed_settings, flatten
from fedgkd_pl.settings import strict_yaml
from fedgkd_pl.settings.allowed import check_names, only_these, short_engines
from fedgkd_pl.settings.checks import check_groups, check_meaning, check_monitors
from fedgkd_pl.settings.engines import engine_defaults, tell_dropped
from fedgkd_pl.settings.help import common_flags
from fedgkd_pl.settings.messages import cut, one_line, setting_error
from fedgkd_pl.settings.places import check_address, check_places, given, takes_config
from fedgkd_pl.storage.files import check_held, lock, write_text
from filelock import BaseFileLock
from jsonargparse import ActionYesNo
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

for _name in fedgkd_pl.__all__:
    getattr(fedgkd_pl, _name)  # imported, so that a config may name a class without its module
only_these()
short_engines()
engine_defaults()
strict_yaml.install()


class Parser(LightningArgumentParser):
    """A parser that answers bad input in one line and shows the flags people type."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Ends with exit code 2.

        Args:
            message: what is wrong, in as many lines as jsonargparse likes.
            ex: where it came from.
        """
        if not self.exit_on_error:  # the parser of a nested class: the outer one will tell
            super().error(message, ex)
        sys.stderr.write(f"error: {one_line(message)}\n")
        raise SystemExit(2)

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Reads a config, from a flag, a variable or another config.

        Args:
            path: the file.
            args: jsonargparse's.
            kwargs: jsonargparse's.
        """
        check_groups(strict_yaml.read(path))
        return super().parse_path(path, *args, **kwargs)

    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Checks the types, of null too, which jsonargparse takes for not given.

        Args:
            args: jsonargparse's.
            kwargs: jsonargparse's.
        """
        super().validate(*args, **kwargs | {"skip_unset": False})

    def format_help(self, *args: Any) -> str:
        """The common flags, then all of them.

        Args:
            args: argparse's.
        """
        return common_flags(self.prog.replace(" [options]", "")) + super().format_help(*args)


class FederatedCLI(LightningCLI):
    """LightningCLI for federated methods and data.

    Args:
        args: the words of the command line.
        only_partition: show what ``fit`` would train on, and stop.
        resume: the folder of an interrupted run to go on with.
        export: where to write who would own which sample.
    """

    def __init__(
        self,
        args: ArgsType,
        only_partition: bool = False,
        resume: Path | None = None,
        export: Path | None = None,
    ) -> None:
        self.words = [str(word) for word in args] if isinstance(args, list) else []
        self.may_download = True
        self.only_partition = only_partition
        self.export = export
        self.folder = resume
        self.lock: BaseFileLock | None = None
        self.checkpoint: dict[str, Any] = {}
        super().__init__(
            FederatedServer,
            FederatedDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            parser_class=Parser,
            parser_kwargs={
                "default_env": True,
                "env_prefix": "FEDGKD",
                "prog": "fedgkd-pl",
                "allow_abbrev": False,
                **{
                    name: {"usage": f"fedgkd-pl {name} [--config FILE ...] [--KEY VALUE ...]"}
                    for name in self.subcommands()
                },
            },
            trainer_defaults={
                "devices": 1,
                "log_every_n_steps": 1,
                "num_sanity_val_steps": 0,
            },
            save_config_callback=None,
            args=args,
            load_from_checkpoint_support=False,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses; Lightning's own would warn that the process has arguments as well.

        Args:
            parser: the parser.
            args: the words.
        """
        try:
            self.config = parser.parse_args(args)  # type: ignore[arg-type]
        except SettingError:
            raise
        except Exception as error:  # jsonargparse does not expect everything
            raise SettingError("config", f"{type(error).__name__}: {cut(error, 400)}") from error
        settings = self.config[self.config.subcommand]
        check_names(settings)
        check_meaning(settings)
        tell_dropped(args, settings.model.init_args.get("engine"))  # type: ignore[arg-type]

    def _parse_ckpt_path(self) -> None:
        """Lightning would let a checkpoint's hyper-parameters beat the flags; ours holds none."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds ours to Lightning's.

        Args:
            parser: of one subcommand.
        """
        parser.add_argument("--rounds", type=int, default=100, help="communication rounds")
        parser.add_argument("--name", type=str, default="fedgkd", help="name of the run")
        parser.add_argument("--output_dir", type=str, default="runs", help="where runs are kept")
        parser.add_argument(
            "--profile", action=ActionYesNo, nargs="?", default=False, help="time of a round"
        )
        parser.link_arguments("rounds", "trainer.max_epochs")
        parser.add_lightning_class_args(BestRound, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.monitor": "val/acc",
                "checkpoint.mode": "max",
                "checkpoint.filename": "best-round{step}",
                "checkpoint.auto_insert_metric_name": False,
                "checkpoint.save_on_train_epoch_end": True,
                "checkpoint.enable_version_counter": False,
            }
        )

    def before_instantiate_classes(self) -> None:
        """Looks at what the classes themselves cannot know."""
        config = self.config[self.subcommand]
        require(config.rounds >= 1, "rounds", "must be at least 1", config.rounds)
        if self.subcommand != "fit":
            require(config.ckpt_path is not None, "ckpt_path", "which model? give a checkpoint")
        if config.data.init_args.get("val_fraction") == 0:
            config.checkpoint.monitor = None  # nothing to choose a best round by
        check_address(config, given(self.words))
        file: Path | None = None
        if self.folder is not None:
            self._check_places(self.folder)
            self.lock = lock(self.folder)
            file = last_checkpoint(self.folder)
        if file is None and config.ckpt_path is not None:
            file = find_checkpoint(config.ckpt_path, Path(config.output_dir) / config.name)
            config.ckpt_path = str(file.absolute())
            if self.folder is None:
                parent = file.absolute().parent
                self._check_places(parent.parent if parent.name == "checkpoints" else parent)
        if file is not None:
            self.checkpoint, file = load_checkpoint(file, self.folder)
        self.checkpoint_file = file

    def _check_places(self, run: Path) -> None:
        """Lets a run's own config decide nothing outside of the run's folder."""
        if takes_config(self.words, run):
            users = given(self.words, run)
            check_places(self.config[self.subcommand], run, users)
            self.may_download = "download" in {name for name, _ in users}

    def instantiate_classes(self) -> None:
        """Instantiates; what a constructor refuses is told with its whole key."""
        try:
            super().instantiate_classes()
        except (OSError, RunFailed, StorageError):
            raise
        except Exception as error:  # a constructor may not expect what it is given
            raise setting_error(error, flatten(self._dump())) from error
        if not self.may_download:
            self.datamodule.download = False  # a run that was begun had its data
        devices = self.trainer.num_devices * self.trainer.num_nodes
        text = "the server takes one device; the engine spreads clients over all GPUs"
        require(devices == 1, "trainer.devices", text, devices)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        """Adds the callbacks that a run has unless it asks for others."""
        given = config["callbacks"] or []
        given = given if isinstance(given, list) else [given]
        self.own_logger = config["logger"] in (None, True)
        if self.own_logger:
            config["logger"] = False  # before_fit makes it, when nothing can go wrong any more
        self.keeps_files = self.subcommand == "fit" and not config["fast_dev_run"]
        if not self.keeps_files or config["enable_checkpointing"] is False:
            callbacks = []
        else:  # without a score there is no best round, only a last one
            callbacks = [c for c in callbacks if not isinstance(c, BestRound) or c.monitor]
            callbacks.append(LastRound())
        if self.keeps_files and self.own_logger:
            has_one = any(isinstance(callback, Dashboard) for callback in given)
            callbacks += [] if has_one else [Dashboard()]
        if self.keeps_files:
            self.fixed = fixed_settings(self._dump())
            self.files = RunFiles(config=self.fixed)
            callbacks.append(self.files)
        if self.subcommand == "fit" and self.config.fit.profile:
            self.profile = RoundProfile()
            callbacks.append(self.profile)
        has_bar = any(isinstance(callback, ProgressBar) for callback in given)
        if config["enable_progress_bar"] is not False and not has_bar:
            callbacks.append(RoundProgress())
        if self.folder is not None and config["default_root_dir"] is None:
            config["default_root_dir"] = str(self.folder)  # not the current folder
        plugins = config["plugins"] if isinstance(config["plugins"], list) else [config["plugins"]]
        text = "a CheckpointIO is for Python: the command line keeps its own, which runs nothing"
        theirs = any(isinstance(plugin, CheckpointIO) for plugin in plugins)
        require(not theirs, "trainer.plugins", text)
        try:
            return super()._instantiate_trainer(config, callbacks)
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise SettingError("trainer", str(error)) from error

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            if self.only_partition:
                folder = Path(self.config.fit.output_dir) / "partitions"
                show_partition(self.datamodule, folder, self.export)
                return
            if self.keeps_files and (self.folder or self.checkpoint):
                self._check_settings()
            self.check_run()
            if self.checkpoint_file is not None:
                if self.keeps_files:
                    self.model.check_data(self.datamodule, self.checkpoint["fedgkd_pl"])
                check_net(self.checkpoint, self.model)
                self.config_init[subcommand].ckpt_path = str(self.checkpoint_file)
            super()._run_subcommand(subcommand)
        except SettingError as error:
            raise setting_error(error, flatten(self._dump())) from error
        except (Stopped, SIGTERMException, SystemError) as error:
            stop = stop_behind(error)
            if isinstance(error, SIGTERMException):  # Lightning's, where a destructor dropped ours
                stop = Stopped(signal.SIGTERM)
            if stop is None:
                raise
            if self.folder is not None:
                stop.hint = f"go on with: fedgkd-pl fit --resume {quote(str(self.folder))}"
            raise stop from error
        except Exception:
            if self.folder is not None:
                check_held(self.folder)  # whatever went wrong, that is why
            raise
        finally:
            if self.lock is not None:
                self.lock.release()

    def check_run(self) -> None:
        """Refuses, before anything is written, what would only be found when it runs."""
        check_monitors(self.trainer.callbacks)  # type: ignore[attr-defined]
        self.datamodule.prepare_data()
        self.datamodule.setup()
        self.model.check(self.datamodule)
        if self.subcommand == "fit":
            check_trainer(self.trainer)
            self.datamodule.check_rounds(self.config.fit.rounds)
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if hasattr(callback, "check"):
                    callback.check(self.model, self.datamodule)
            self.model.check_device(self.trainer.strategy.root_device)
            self.model.check_precision(self.trainer.precision_plugin)
            self.check_engine()

    def check_engine(self) -> None:
        """Refuses an engine that is not to be had here."""
        self.model.engine.check(self.model)

    def before_fit(self) -> None:
        """Makes the folder of the run, now that nothing can be wrong any more."""
        if not self.keeps_files:
            return
        if self.folder is None:
            self.folder = new_version(Path(self.config.fit.output_dir) / self.config.fit.name)
            self.lock = lock(self.folder)
        else:
            drop_uncommitted(self.folder, self.checkpoint)
            rewind(self.folder, rows_of(self.checkpoint))
        folder = self.folder
        settings = self._parser("fit").dump(self.config.fit, skip_unset=False)
        write_text(folder / "config.yaml", settings)
        self.files.folder = str(folder)
        if self.config.fit.profile:
            self.profile.folder = str(folder)
        for callback in self.trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and not isinstance(callback, LastRound):
                callback.CHECKPOINT_NAME_LAST = "newest"  # last.ckpt is LastRound's
            if isinstance(callback, BestRound) and self.checkpoint_file is not None:
                callback.source = self.checkpoint_file.parent
            if isinstance(callback, BestRound | LastRound) and callback.dirpath is None:
                callback.dirpath = str(folder / "checkpoints")
        if self.own_logger:
            self.trainer.logger = _RunLogger(
                folder.parent.parent, folder.parent.name, folder.name, default_hp_metric=False
            )

    def after_fit(self) -> None:
        """Says how it went and where to look."""
        if not self.keeps_files:
            return
        folder = Path(str(self.files.folder))
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        best, final = summary["best_test_acc"], summary["final_test_acc"]
        if best is not None:
            last = "not tested" if final is None else f"{final:.4f}"
            print(f"test/acc best {best:.4f} (round {summary['best_round']}), final {last}")
        print(f"wrote {folder}")
        if self.own_logger:
            print(f"look:  tensorboard --logdir {folder.parent}")

    def predict(self, model: Any, datamodule: Any, ckpt_path: str, **kwargs: Any) -> None:
        """Writes ``predictions.csv`` into the run that the checkpoint belongs to.

        Args:
            model: the method.
            datamodule: the data.
            ckpt_path: the checkpoint.
            kwargs: Lightning's.
        """
        batches = self.trainer.predict(model, datamodule=datamodule, ckpt_path=ckpt_path)
        folder = Path(ckpt_path).parent
        file = (folder.parent if folder.name == "checkpoints" else folder) / "predictions.csv"
        write_predictions(file, torch.cat(batches), datamodule.test.targets)  # type: ignore[arg-type]
        print(f"wrote {file}")

    def _dump(self) -> Any:
        dump = self.parser.dump(self.config, skip_unset=False, format="yaml", skip_validation=True)
        return yaml.safe_load(dump)[self.subcommand]

    def _check_settings(self) -> None:
        """Refuses to go on with other settings than a checkpoint's, or where nothing is left."""
        if not self.checkpoint and self.folder is not None:  # killed before its first commit
            require(
                not (self.folder / "summary.json").exists(),
                "resume",
                "the run is finished and kept no checkpoint",
                self.folder,
            )
            begun = strict_yaml.read(str(self.folder / "config.yaml"))
            compare_settings(fixed_settings(begun), self.fixed)
            return
        check_settings(self.checkpoint, self.fixed)
        done, rounds = self.checkpoint["global_step"], self.config.fit.rounds
        finished = self.folder is None or is_finished(self.folder, done)
        stopped = self.folder is not None and self.checkpoint["fedgkd_pl"].get("stopped")
        require(
            not (stopped and finished), "resume", f"a callback ended this run after round {done}"
        )
        if stopped:
            self.trainer.callbacks.append(_OnlyFinish())  # type: ignore[attr-defined]
        require(
            done < rounds or (done == rounds and not finished),
            "rounds",
            f"the checkpoint has done {done}: ask for more",
            rounds,
        )


class _RunLogger(TensorBoardLogger):
    """Writes to its folder, not to whatever has taken its name."""

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        check_held(Path(self.log_dir))
        super().log_metrics(*args, **kwargs)

    def save(self) -> None:
        check_held(Path(self.log_dir))
        super().save()


class _OnlyFinish(Callback):
    """Ends a run that a callback had ended when it was killed; Lightning would train on."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.should_stop = True
