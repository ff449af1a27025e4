"""``fedgkd-pl fit | validate | test | predict``: LightningCLI, with rounds for epochs."""

import csv
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
from fedgkd_pl.callbacks.progress import RoundProgress
from fedgkd_pl.callbacks.run_files import RunFiles
from fedgkd_pl.cli_help import common_flags
from fedgkd_pl.cli_messages import one_line, setting_error, short
from fedgkd_pl.config_files import resolve
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.show import show_partition
from fedgkd_pl.engines.pool import ClientFailed
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.federation.server import FederatedServer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

# What may differ when a run is resumed: where it runs and what is recorded, not what is computed.
FREE = ("model.init_args.engine", "data.init_args.data_dir", "data.init_args.download")
FIXED = ("seed_everything", "model", "data", "trainer.precision", "trainer.gradient_clip_val")


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
                "callbacks": [RoundProgress()],
            },
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
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.monitor": "val/acc",
                "checkpoint.mode": "max",
                "checkpoint.save_last": True,
                "checkpoint.filename": "best-round{step}",
                "checkpoint.auto_insert_metric_name": False,
                "checkpoint.save_on_train_epoch_end": True,
            }
        )

    def before_instantiate_classes(self) -> None:
        """Decides where the run is written."""
        config = self.config[self.subcommand]
        require(config.rounds >= 1, "rounds", "must be at least 1", config.rounds)
        if self.subcommand != "fit":
            require(config.ckpt_path is not None, "ckpt_path", "which model? give a checkpoint")
            config.trainer.logger = False
        elif config.trainer.logger in (None, True):
            config.trainer.logger = {
                "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
                "init_args": {
                    "save_dir": config.output_dir,
                    "name": config.name,
                    "default_hp_metric": False,
                },
            }
        if (
            config.data.init_args.get("val_fraction") == 0
            and config.checkpoint.monitor == "val/acc"
        ):
            config.checkpoint.monitor = None

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Adds the files of a run to what it leaves."""
        if self.subcommand == "fit":
            self.fixed = self._fixed_settings()
            self.trainer_defaults["callbacks"].append(RunFiles(self.fixed))
        else:
            self.save_config_callback = None
        try:
            return super().instantiate_trainer(**kwargs)
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise SettingError("trainer", str(error)) from error

    def instantiate_classes(self) -> None:
        """Instantiates; what a constructor refuses is told with its whole key."""
        try:
            super().instantiate_classes()
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise setting_error(error, flatten(self._dump())) from error

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            if self.only_partition:
                show_partition(self.datamodule, Path(self.config.fit.output_dir) / "partitions")
            else:
                super()._run_subcommand(subcommand)
        except SettingError as error:
            raise setting_error(error, flatten(self._dump())) from error

    def before_fit(self) -> None:
        """Finds what cannot work before anything is written."""
        self.datamodule.prepare_data()
        self.datamodule.setup("fit")
        self.model.check(self.datamodule)
        path = self.config.fit.ckpt_path
        if path is not None:
            self._check_resume(path)

    def after_fit(self) -> None:
        """Says how it went and where to look."""
        folder = Path(self.trainer.log_dir or self.trainer.default_root_dir)
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
        probabilities = torch.cat(batches)  # type: ignore[arg-type]
        folder = Path(ckpt_path).parent
        file = (folder.parent if folder.name == "checkpoints" else folder) / "predictions.csv"
        confidence, classes = probabilities.max(dim=1)
        with file.open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["index", "label", "prediction", "probability"])
            rows = zip(datamodule.test.targets, classes, confidence, strict=True)
            for index, row in enumerate(rows):
                writer.writerow([index, *(value.item() for value in row)])
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

    def _check_resume(self, path: str) -> None:
        """Refuses to go on with other settings than the checkpoint's."""
        require(Path(path).is_file(), "ckpt_path", "no such file", path)
        try:
            checkpoint = torch.load(path, weights_only=True, map_location="cpu")
            saved = checkpoint["callbacks"]["RunFiles"]["config"]
        except Exception as error:
            raise SettingError("ckpt_path", "not a checkpoint of fedgkd-pl fit", path) from error
        changed = [
            key
            for key in sorted(saved.keys() | self.fixed.keys())
            if saved.get(key) != self.fixed.get(key)
        ]
        if changed:
            key = changed[0]
            more = f"; {', '.join(map(short, changed[1:]))} differ too" if changed[1:] else ""
            raise SettingError(
                short(key),
                f"a run is resumed with the settings it began with, here {saved.get(key)}{more}",
                self.fixed.get(key),
            )
        done, wanted = checkpoint["global_step"], self.config.fit.rounds
        require(done < wanted, "rounds", f"the checkpoint has done {done}: ask for more", wanted)


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A nested mapping as dotted keys; lists stay whole.

    Args:
        tree: mappings of mappings.
        prefix: the key of ``tree``.
    """
    if not isinstance(tree, dict):
        return {prefix: tree}
    dot = f"{prefix}." if prefix else ""
    return {k: v for key, value in tree.items() for k, v in flatten(value, dot + str(key)).items()}


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
    while "--import" in words:
        place = words.index("--import")
        _, module = words[place : place + 2] if place + 1 < len(words) else ("", "")
        del words[place : place + 2]
        import_users(module)
    for place, word in enumerate(words):
        if word in ("-c", "--config") and place + 1 < len(words):
            words[place + 1] = resolve(words[place + 1])
        elif word.startswith("--config="):
            words[place] = "--config=" + resolve(word.removeprefix("--config="))
    # Lightning speaks of epochs, of a cloud service and of its own deprecations.
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in (
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
        "Be aware that when using `ckpt_path`, callbacks",
        "The dirpath has changed",
    ):
        warnings.filterwarnings("ignore", text)
    only_partition = words[0] == "partition"
    if only_partition:
        words[0] = "fit"  # the same settings
    try:
        FederatedCLI(words, only_partition)
    except (SettingError, MisconfigurationException, ClientFailed) as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 3 if isinstance(error, ClientFailed) else 2
    return 0


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
