"""From a config to a Trainer, a method and data: the one way in.

The command line, ``compare``, both halves of a Flower app and a notebook come here.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from fedgkd_pl.callbacks.dashboard import Dashboard
from fedgkd_pl.callbacks.profile import RoundProfile
from fedgkd_pl.callbacks.progress import RoundProgress
from fedgkd_pl.errors import RunFailed, SettingError, StorageError, require
from fedgkd_pl.runs.files import RunFiles
from fedgkd_pl.runs.folder import RunFolder
from fedgkd_pl.runs.keep import LastRound
from fedgkd_pl.runs.resume import find_checkpoint, load_checkpoint
from fedgkd_pl.runs.settings import fixed_settings, flatten
from fedgkd_pl.settings.experiment import Experiment, Start
from fedgkd_pl.settings.messages import setting_error
from fedgkd_pl.settings.parser import Parsed
from fedgkd_pl.settings.places import check_address, check_places, given, takes_config
from fedgkd_pl.settings.request import Request, read_request
from fedgkd_pl.settings.scope import our_rules
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar

Config = str | Path | Mapping[str, Any]


def build(
    config: Config | Sequence[Config] = (),
    *,
    resume: str | Path | None = None,
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
        imports: your modules, whose classes the config may name.
        overrides: settings that win over the config, by the names that flags have:
            ``rounds=5``, ``**{"model.gamma": 0.1}``.

    Raises:
        SettingError: a setting is invalid; the text names it.
    """
    configs = [config] if isinstance(config, str | Path | Mapping) else config
    argv = [] if resume is None else ["--resume", str(resume)]
    argv += [word for module in imports for word in ("--import", module)]
    for each in configs:
        argv += _flags(each) if isinstance(each, Mapping) else ["--config", str(each)]
    return build_request(read_request("fit", [*argv, *_flags(overrides)]))


def _flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as flags, which have the same names."""
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in settings.items()}
    return [word for key, text in texts.items() for word in (f"--{key}", text)]


def build_request(request: Request) -> Experiment:
    """Builds what a command asks for, checked as far as possible without data; writes nothing."""
    start = Start(request.resume)
    try:
        with our_rules(request.modules):
            return _Objects(request, start).experiment()
    except BaseException:
        start.release()
        raise


class _Objects(Parsed):
    """The objects that a request's settings describe."""

    def __init__(self, request: Request, start: Start) -> None:
        self.start = start
        self.may_download = True
        super().__init__(request)

    def before_instantiate_classes(self) -> None:
        """Checks what the classes themselves cannot, and finds where the run starts from."""
        config, argv = self.config, self.request.argv
        self.quiet, config.quiet = config.quiet, False  # it is about this command, not the run
        require(config.rounds >= 1, "rounds", "must be at least 1", config.rounds)
        if self.request.command != "fit":
            require(config.ckpt_path is not None, "ckpt_path", "which model? give a checkpoint")
        if config.data.init_args.get("val_fraction") == 0:
            config.checkpoint.monitor = None  # nothing to choose a best round by
        check_address(config, given(argv))
        file: Path | None = None
        if self.start.folder is not None:
            self._check_places(self.start.folder.path)
            self.start.lock = self.start.folder.lock()
            file = self.start.folder.last_checkpoint()
        if file is None and config.ckpt_path is not None:
            file = find_checkpoint(config.ckpt_path, Path(config.output_dir) / config.name)
            config.ckpt_path = str(file.absolute())
            if self.start.folder is None:
                self._check_places(RunFolder.of_checkpoint(file.absolute()).path)
        if file is not None:
            resumed, trains = self.start.folder is not None, self.request.command == "fit"
            self.start.checkpoint, self.start.file = load_checkpoint(file, resumed, trains)

    def _check_places(self, run: Path) -> None:
        """Lets a run's own config decide nothing outside of the run's folder."""
        if takes_config(self.request.argv, run):
            users = given(self.request.argv, run)
            check_places(self.config, run, users)
            self.may_download = "download" in {name for name, _ in users}

    def instantiate_classes(self) -> None:
        """Instantiates; the error of a constructor names the setting with its whole key."""
        self.settings = self.dump()
        try:
            super().instantiate_classes()
        except (OSError, RunFailed, StorageError):
            raise
        except Exception as error:  # a constructor may not expect what it is given
            raise setting_error(error, flatten(self.settings)) from error
        if not self.may_download:
            self.datamodule.download = False  # a run that was begun had its data
        devices = self.trainer.num_devices * self.trainer.num_nodes
        text = "the server takes one device; the engine spreads clients over all GPUs"
        require(devices == 1, "trainer.devices", text, devices)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """A Trainer with the callbacks that a run has unless it asks for others."""
        config = {**self.config_init["trainer"], **kwargs}
        callbacks = config["callbacks"] or []
        callbacks = [*callbacks] if isinstance(callbacks, list) else [callbacks]
        if self.quiet:
            config["enable_progress_bar"] = config["enable_model_summary"] = False
            callbacks = [each for each in callbacks if not isinstance(each, ProgressBar)]
        if config["enable_model_summary"] is None:
            config["enable_model_summary"] = False  # its FLOPs and modes are not the clients'
        self.own_logger = config["logger"] in (None, True)
        if self.own_logger:
            config["logger"] = False  # made after all checks
        self.keeps_files = self.request.command == "fit" and not config["fast_dev_run"]
        config["callbacks"] = [*callbacks, *self._own_callbacks(config, callbacks)]
        if self.start.folder is not None and config["default_root_dir"] is None:
            config["default_root_dir"] = str(self.start.folder.path)  # not the current folder
        plugins = config["plugins"] if isinstance(config["plugins"], list) else [config["plugins"]]
        text = "a CheckpointIO is for Python: the command line keeps its own, which runs nothing"
        theirs = any(isinstance(plugin, CheckpointIO) for plugin in plugins)
        require(not theirs, "trainer.plugins", text)
        try:
            return Trainer(**config)
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise SettingError("trainer", str(error)) from error

    def _own_callbacks(self, config: dict[str, Any], theirs: list[Callback]) -> list[Callback]:
        callbacks: list[Callback] = []
        best = self.config_init["checkpoint"]
        if self.keeps_files and config["enable_checkpointing"] is not False:
            # without a score there is no best round, only a last one
            callbacks += [best, LastRound()] if best.monitor else [LastRound()]
        if self.keeps_files:
            if self.own_logger and not any(isinstance(each, Dashboard) for each in theirs):
                callbacks.append(Dashboard())
            callbacks.append(RunFiles(config=fixed_settings(self.settings)))
        if self.request.command == "fit" and self.config.profile:
            callbacks.append(RoundProfile())
        if config["enable_progress_bar"] is not False:
            has_bar = any(isinstance(each, ProgressBar) for each in theirs)
            callbacks += [] if has_bar else [RoundProgress()]
        return callbacks

    def dump(self) -> dict[str, Any]:
        """All settings, nested."""
        text = self.parser.dump(self.config, skip_unset=False, format="yaml", skip_validation=True)
        settings: dict[str, Any] = yaml.safe_load(text)
        return settings

    def experiment(self) -> Experiment:
        """The experiment with the objects."""
        return Experiment(
            trainer=self.trainer,
            model=self.model,
            data=self.datamodule,
            settings=self.settings,
            text=self.parser.dump(self.config, skip_unset=False),
            modules=self.request.modules,
            start=self.start,
            own_logger=self.own_logger,
            keeps_files=self.keeps_files,
            quiet=self.quiet,
        )
