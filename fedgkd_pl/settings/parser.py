"""The parser of a command: LightningCLI's, with rounds for epochs and errors of one line."""

from typing import Any

from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.errors import ArgumentError, SettingError
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.runs.keep import BestRound
from fedgkd_pl.settings import strict_yaml
from fedgkd_pl.settings.allowed import check_names
from fedgkd_pl.settings.checks import check_groups, check_meaning
from fedgkd_pl.settings.engines import tell_dropped
from fedgkd_pl.settings.help import long_help
from fedgkd_pl.settings.messages import cut, one_line
from fedgkd_pl.settings.request import Request
from jsonargparse import ActionYesNo
from lightning.pytorch import Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

TRAINER_DEFAULTS = {"devices": 1, "log_every_n_steps": 1, "num_sanity_val_steps": 0}
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
    """A parser whose errors are one line, and whose help begins with the flags people type."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Raises an :class:`ArgumentError` with the key and the reason."""
        if not self.exit_on_error:  # the parser of a nested class: the outer one reports
            super().error(message, ex)
        key, _, reason = one_line(message).partition(": ")
        raise ArgumentError(key, reason)

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Reads and checks a config that a flag, a variable or another config names."""
        check_groups(strict_yaml.read(path))
        try:
            return super().parse_path(path, *args, **kwargs)
        except ArgumentError as error:  # in this file, whatever later ones and flags say
            raise ArgumentError(error.key, f"{error.reason} (in {cut(path)})") from error

    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Checks the types, of null too, which jsonargparse takes for not given."""
        super().validate(*args, **kwargs | {"skip_unset": False})

    def format_help(self, *args: Any) -> str:
        """The common flags, then all of them; of a class (``--model.help CLASS``) its own."""
        own: str = super().format_help(*args)
        command = self.prog.replace(" [options]", "").rpartition(" ")[2]
        return long_help(command) + own if self in _parsers.values() else own


class Parsed(LightningCLI):
    """The settings of a request and, in subclasses, the objects that they describe.

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

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Takes the command's parser, or makes it."""
        command = self.request.command
        if command not in _parsers:
            super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
            _parsers[command] = self.parser
        self.parser = _parsers[command]

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds ours, and those of the Trainer's method, to Lightning's."""
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

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses and checks; Lightning's own would warn that the process has arguments as well."""
        try:
            self.config = parser.parse_args(self.request.argv)
        except SettingError:
            raise
        except Exception as error:  # jsonargparse does not expect everything
            raise SettingError("config", f"{type(error).__name__}: {cut(error, 400)}") from error
        check_names(self.config, self.request.modules)
        check_meaning(self.config)
        tell_dropped(self.request.argv, self.config.model.init_args.get("engine"))
