"""``fedgkd-pl fit | validate | test | predict``: LightningCLI, with rounds for epochs."""

import json
import logging
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import fedgkd_pl
import torch
import yaml
from fedgkd_pl.callbacks.checkpoints import BestRound, LastRound
from fedgkd_pl.callbacks.progress import RoundProgress
from fedgkd_pl.callbacks.run_files import RunFiles
from fedgkd_pl.cli_help import common_flags
from fedgkd_pl.cli_messages import one_line, setting_error
from fedgkd_pl.cli_runs import (
    check_net,
    check_settings,
    flatten,
    load_checkpoint,
    new_version,
    write_predictions,
)
from fedgkd_pl.config_files import resolve
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.show import show_partition
from fedgkd_pl.engines.base import ClientFailed
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.federation.server import FederatedServer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger

# What may differ when a run is resumed: where it runs and what is recorded, not what is computed.
FIXED = ("seed_everything", "model", "data", "trainer.precision", "trainer.gradient_clip")
FREE = (
    "model.init_args.engine.class_path",
    "model.init_args.engine.init_args.workers",
    "data.init_args.data_dir",
    "data.init_args.download",
    "data.init_args.eval_batch_size",
)


for _name in fedgkd_pl.__all__:
    getattr(fedgkd_pl, _name)  # imported, so that a config may name a class without its module


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
    """

    def __init__(self, args: ArgsType, only_partition: bool = False) -> None:
        self.only_partition = only_partition
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
        self.config = parser.parse_args(args)  # type: ignore[arg-type]

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
        parser.link_arguments("rounds", "trainer.max_epochs")
        parser.add_lightning_class_args(BestRound, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.monitor": "val/acc",
                "checkpoint.mode": "max",
                "checkpoint.filename": "best-round{step}",
                "checkpoint.auto_insert_metric_name": False,
                "checkpoint.save_on_train_epoch_end": True,
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
        if config.ckpt_path is not None:
            self.checkpoint = load_checkpoint(config.ckpt_path)

    def instantiate_classes(self) -> None:
        """Instantiates; what a constructor refuses is told with its whole key."""
        try:
            super().instantiate_classes()
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise setting_error(error, flatten(self._dump())) from error

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        """Adds the callbacks that a run has unless it asks for others."""
        self.own_logger = config["logger"] in (None, True)
        if self.own_logger:
            config["logger"] = False  # before_fit makes it, when nothing can go wrong any more
        self.keeps_files = self.subcommand == "fit" and not config["fast_dev_run"]
        if not self.keeps_files or config["enable_checkpointing"] is False:
            callbacks = []
        else:  # without a score there is no best round, only a last one
            callbacks = [c for c in callbacks if not isinstance(c, BestRound) or c.monitor]
            callbacks.append(LastRound())
        if self.keeps_files:
            self.fixed = self._fixed_settings()
            text = self._parser("fit").dump(self.config.fit, skip_none=False)
            self.files = RunFiles(config=self.fixed, config_text=text)
            callbacks.append(self.files)
        given = config["callbacks"] or []
        given = given if isinstance(given, list) else [given]
        has_bar = any(isinstance(callback, ProgressBar) for callback in given)
        if config["enable_progress_bar"] is not False and not has_bar:
            callbacks.append(RoundProgress())
        try:
            return super()._instantiate_trainer(config, callbacks)
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise SettingError("trainer", str(error)) from error

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            if self.only_partition:
                show_partition(self.datamodule, Path(self.config.fit.output_dir) / "partitions")
                return
            self.datamodule.prepare_data()
            self.datamodule.setup()
            self.model.check(self.datamodule)
            if self.config[subcommand].ckpt_path is not None:
                self._check_checkpoint()
            super()._run_subcommand(subcommand)
        except SettingError as error:
            raise setting_error(error, flatten(self._dump())) from error

    def before_fit(self) -> None:
        """Makes the folder of the run, now that nothing can be wrong any more."""
        if not self.keeps_files:
            return
        folder = new_version(Path(self.config.fit.output_dir) / self.config.fit.name)
        self.files.folder = str(folder)
        for callback in self.trainer.checkpoint_callbacks:
            if isinstance(callback, BestRound | LastRound) and callback.dirpath is None:
                callback.dirpath = str(folder / "checkpoints")
        if self.own_logger:
            self.trainer.logger = TensorBoardLogger(
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
            print(f"test/acc best {best:.4f} (round {summary['best_round']}), final {final:.4f}")
        print(f"wrote {folder}\nlook:  tensorboard --logdir {folder.parent}")

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

    def _fixed_settings(self) -> dict[str, Any]:
        return {
            key: value
            for key, value in flatten(self._dump()).items()
            if key.startswith(FIXED) and not key.startswith(FREE)
        }

    def _dump(self) -> Any:
        dump = self.parser.dump(self.config, skip_none=False, format="yaml", skip_validation=True)
        return yaml.safe_load(dump)[self.subcommand]

    def _check_checkpoint(self) -> None:
        """Refuses a checkpoint of another net and, to go on from, of other settings."""
        if self.subcommand == "fit" and self.keeps_files:
            check_settings(self.checkpoint, self.fixed, self.config.fit.rounds)
        check_net(self.checkpoint, self.model)


def run(words: list[str]) -> int:
    """Runs a command of the Trainer.

    Args:
        words: the command and its arguments. ``--debug`` among them lets errors through whole;
            ``--import MODULE`` imports the user's own classes, from the current folder too.

    Returns:
        The exit code.
    """
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    # Lightning speaks of epochs, of a cloud service and of its own deprecations.
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in (
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
        "Be aware that when using `ckpt_path`, callbacks",
    ):
        warnings.filterwarnings("ignore", text)
    try:
        words = prepare(words)
        only_partition = words[0] == "partition"
        if only_partition:
            words[0] = "fit"  # the same settings
        FederatedCLI(words, only_partition)
    except (SettingError, MisconfigurationException, ClientFailed) as error:
        if debug:
            print(getattr(error, "details", ""), file=sys.stderr)
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 3 if isinstance(error, ClientFailed) else 2
    return 0


def prepare(words: list[str]) -> list[str]:
    """Imports what ``--import`` names, and finds the files that ``--config`` names.

    Args:
        words: the command and its arguments.

    Returns:
        The words for the parser.
    """
    rest: list[str] = []
    waiting = iter(words)
    for word in waiting:
        if word == "--import":
            import_users(next(waiting, ""))
        elif word in ("-c", "--config"):
            rest += ["--config", *(resolve(name) for name in [next(waiting, "")] if name)]
        elif word.startswith("--config="):
            rest.append("--config=" + resolve(word.removeprefix("--config=")))
        else:
            rest.append(word)
    return rest


def import_users(module: str) -> None:
    """Imports the user's module, so that a config may name its classes.

    Args:
        module: a name that Python can import, from the current folder too.
    """
    sys.path.insert(0, str(Path.cwd()))
    try:
        import_module(module)
    except ImportError as error:
        raise SettingError("import", str(error), module) from error
    except ValueError as error:
        raise SettingError("import", "which module?") from error
