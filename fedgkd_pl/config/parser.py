"""The parser of a command: LightningCLI's, with rounds for epochs and errors of one line."""

from math import isfinite
from pathlib import Path
from typing import Any

import yaml
from fedgkd_pl.config.messages import COMMON, argument_error, setting_error
from fedgkd_pl.config.request import Request
from fedgkd_pl.config.safety import check_names, confined, import_parts, parts
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.errors import ArgumentError, RunFailed, SettingError, StorageError, require
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.runs.folder import RunFolder, fixed_settings, flatten, short
from fedgkd_pl.runs.resume import BestRound
from fedgkd_pl.storage.files import read_yaml
from jsonargparse import ActionYesNo, Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from typing_extensions import override

TRAINER_DEFAULTS = {
    "devices": 1,
    "enable_model_summary": False,  # its FLOPs and modes are not the clients'
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
}
CHECKPOINT_DEFAULTS = {
    "checkpoint.monitor": "val/acc",
    "checkpoint.mode": "max",
    "checkpoint.filename": "best-round{step}",
    "checkpoint.auto_insert_metric_name": False,
    "checkpoint.save_on_train_epoch_end": True,
    "checkpoint.enable_version_counter": False,
}
_parsers: dict[str, LightningArgumentParser] = {}  # by command


class Parser(LightningArgumentParser):
    """A parser whose errors are one line with the key."""

    run: RunFolder | None = None  # whose own config is confined to its folder

    @override
    def error(self, message: str, ex: Exception | None = None) -> Any:
        if not self.exit_on_error:  # the parser of a nested class: the outer one reports
            super().error(message, ex)
        raise argument_error(message, [*COMMON, *(action.dest for action in self._actions)])

    @override
    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        given = read_yaml(str(path))  # of which jsonargparse would ignore some
        require("axes" not in given, "config", "is a study: fedgkd-pl compare runs it")
        for group in ("trainer", "checkpoint"):
            value = given.get(group, {})
            require(isinstance(value, dict | str), group, "must have settings below it", value)
        text = "is set by rounds"
        require("max_epochs" not in given.get("trainer", ()), "trainer.max_epochs", text)
        try:
            settings = super().parse_path(path, *args, **kwargs)
        except ArgumentError as error:  # in this file, whatever later ones and flags say
            raise ArgumentError(error.key, f"{error.reason} (in {path})", error.got) from error
        if self.run is not None and Path(path).resolve().parent == self.run.path.resolve():
            for group in ("trainer", "checkpoint"):
                if group in settings:
                    settings[group] = confined(settings[group], self.run.path.absolute(), group)
        return settings

    @override
    def validate(self, *args: Any, **kwargs: Any) -> None:
        # null too, which jsonargparse takes for not given
        super().validate(*args, **kwargs | {"skip_unset": False})


def _check_values(settings: Namespace) -> None:
    """Rejects values that fit their types and would fail late, or never."""
    for key, value in flatten(settings.as_dict()).items():
        is_finite = not isinstance(value, float) or isfinite(value)
        require(is_finite, short(key), "must be finite", value)
    for key, least, most in (("seed_everything", 0, 2**32 - 1), ("rounds", 1, 2**31 - 1)):
        text = f"must be from {least} to {most}"
        require(least <= settings[key] <= most, key, text, settings[key])
    for key in ("name", "checkpoint.filename"):
        parts = Path(settings[key] or "x").parts
        is_below = parts != () and not {"/", ".."} & {*parts}
        require(is_below, key, "must be a path below output_dir", settings[key])


class Parsed(LightningCLI):
    """The settings of a request and the objects that they describe.

    Errors of constructors have whole keys.

    Building the parser takes about a second, and it is the same for every request of a command:
    the first one is kept.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
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
                "env_prefix": f"FEDGKD_{request.command.upper()}_",
                "prog": f"fedgkd-pl {request.command}",
                "usage": f"fedgkd-pl {request.command} [--config FILE ...] [--KEY VALUE ...]",
                "allow_abbrev": False,
            },
            trainer_defaults=TRAINER_DEFAULTS,
            save_config_callback=None,
            args=request.argv,
            run=False,
            load_from_checkpoint_support=False,
        )

    @override
    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        command = self.request.command
        if command not in _parsers:
            super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
            _parsers[command] = self.parser
        self.parser = _parsers[command]

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, default=100, help="communication rounds")
        parser.add_argument("--name", type=str, default="fedgkd", help="name of the run")
        parser.add_argument("--output_dir", type=str, default="runs", help="where runs are kept")
        parser.add_argument(
            "--profile", action=ActionYesNo, nargs="?", default=False, help="time of a round"
        )
        parser.add_argument(
            "--quiet", action=ActionYesNo, nargs="?", default=False, help="show no progress"
        )
        parser.link_arguments("rounds", "trainer.max_epochs")
        parser.add_class_arguments(BestRound, "checkpoint", fail_untyped=False, sub_configs=True)
        parser.set_defaults(CHECKPOINT_DEFAULTS)
        command = self.request.command
        parser.add_method_arguments(Trainer, command, skip={*self.subcommands()[command]})

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        parser.run = self.request.run  # type: ignore[attr-defined]
        words = " ".join(self.request.argv)
        import_parts(words if "help" not in words else " ".join(parts()))
        try:  # Lightning's own would warn that the process has arguments as well
            self.config = parser.parse_args(self.request.argv)
        except SettingError:
            raise
        except Exception as error:  # jsonargparse does not expect everything
            raise setting_error(error, {}) from error
        check_names(self.config, self.request.modules)
        _check_values(self.config)

    @override
    def instantiate_classes(self) -> None:
        text = self.parser.dump(self.config, skip_unset=False, format="yaml", skip_validation=True)
        self.settings: dict[str, Any] = yaml.safe_load(text)
        self.fixed = fixed_settings(self.settings)  # those that decide the result, by dotted key
        try:
            self.make()
        except (OSError, RunFailed, StorageError):
            raise
        except Exception as error:  # a constructor may not expect what it is given
            raise setting_error(error, flatten(self.settings)) from error

    def make(self) -> None:
        """Makes the objects."""
        super().instantiate_classes()
