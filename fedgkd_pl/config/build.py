"""From a config to a Trainer, a method and data: the one way in.

The command line, ``compare``, both halves of a Flower app and a notebook come here.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from fedgkd_pl.callbacks.dashboard import Dashboard
from fedgkd_pl.callbacks.progress import RoundProgress
from fedgkd_pl.config.experiment import Experiment, Start
from fedgkd_pl.config.messages import setting_error
from fedgkd_pl.config.parser import Parsed
from fedgkd_pl.config.request import Request, read_request
from fedgkd_pl.config.safety import our_rules
from fedgkd_pl.errors import RunFailed, SettingError, StorageError, require
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.runs.files import RunFiles
from fedgkd_pl.runs.resume import LastRound, find_checkpoint, load_checkpoint
from fedgkd_pl.runs.settings import fixed_settings, flatten
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar
from torch.random import fork_rng
from typing_extensions import override

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
        argv += _flags(each) if isinstance(each, Mapping) else ["--config", str(each)]
    return build_request(read_request("fit", [*argv, *_flags(overrides)]))


def _flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as flags, which have the same names."""
    return [f"--{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in settings.items()]


def build_request(request: Request) -> Experiment:
    """Builds what a command asks for, checked as far as possible without data; writes nothing."""
    start = Start(request.run if request.resumes else None)
    try:
        with our_rules(request.modules):
            return _Objects(request, start).experiment()
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


class _Instantiated(Parsed):
    """Settings whose objects are made, with whole keys in the errors of constructors."""

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


class _Model(_Instantiated):
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


class _Objects(_Instantiated):
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
        flags = {word.partition("=")[2] or word for word in self.request.argv}
        is_known = address in (None, "auto", "local", *flags)
        require(is_known, "model.engine.ray_address", ADDRESS, address)
        if start.folder is not None:
            start.lock = start.folder.lock()
            start.file = start.folder.last_checkpoint()
        if start.file is None and config.ckpt_path is not None:
            start.file = find_checkpoint(config.ckpt_path, Path(config.output_dir) / config.name)
            config.ckpt_path = str(start.file.absolute())
        require(fits or start.file is not None, "ckpt_path", "missing: a run or a checkpoint")
        if start.file is not None:
            resumed = start.folder is not None
            start.checkpoint, start.file = load_checkpoint(start.file, resumed, states=fits)

    @override
    def make(self) -> None:
        super().make()
        asked = any(word.startswith("--data.download") for word in self.request.argv)
        if self.request.run is not None and not asked:
            self.datamodule.download = False  # a run that was begun had its data
        devices = self.trainer.num_devices * self.trainer.num_nodes
        text = "must be 1: the server takes one, the engine spreads clients over all GPUs"
        require(devices == 1, "trainer.devices", text, devices)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = {**self.config_init["trainer"], **kwargs}
        callbacks, plugins = (_as_list(config[name]) for name in ("callbacks", "plugins"))
        text = "must not have a CheckpointIO: the command line keeps its own, which runs nothing"
        theirs = any(isinstance(plugin, CheckpointIO) for plugin in plugins)
        require(not theirs, "trainer.plugins", text)
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
        try:
            return Trainer(**config)
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise SettingError("trainer", str(error)) from error

    def _own_callbacks(self, config: dict[str, Any], theirs: list[Callback]) -> list[Callback]:
        def has(kind: type[Callback]) -> bool:
            return any(isinstance(each, kind) for each in theirs)

        callbacks: list[Callback] = []
        best = self.config_init["checkpoint"]
        if self.keeps_files and config["enable_checkpointing"] is not False:
            # without a score there is no best round, only a last one
            callbacks += [best, LastRound()] if best.monitor else [LastRound()]
        if self.keeps_files and self.own_logger and not has(Dashboard):
            callbacks.append(Dashboard())
        if self.keeps_files:
            callbacks.append(RunFiles(config=self.fixed))
        if self.request.command == "fit" and self.config.profile:
            from fedgkd_pl.callbacks.profile import RoundProfile

            callbacks.append(RoundProfile())
        if config["enable_progress_bar"] is not False and not has(ProgressBar):
            callbacks.append(RoundProgress())
        return callbacks

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


def _as_list(value: Any) -> list[Any]:
    """The callbacks or plugins of a Trainer, of which one may stand alone."""
    return [*value] if isinstance(value, list) else [value] * (value is not None)
