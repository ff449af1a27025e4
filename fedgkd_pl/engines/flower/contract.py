"""The settings of both sides, and the contract that is made from them."""

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fedgkd_pl
from fedgkd_pl.config.experiment import Experiment
from fedgkd_pl.config.request import Request, import_module_of_user, read_request
from fedgkd_pl.data.examples import digest
from fedgkd_pl.engines.flower.records import Contract
from fedgkd_pl.errors import require
from fedgkd_pl.runs.folder import CONFIG


def config_of(file: str) -> Path:
    """The config of an app, which lies beside its ``__file__``."""
    return Path(file).parent / CONFIG


def request_of(file: str, run_config: Mapping[str, Any], more: Sequence[str] = ()) -> Request:
    """The ``fit`` that an app stands for.

    Args:
        run_config: Flower's: ``import`` names modules of the user's in the app's folder, ``args``
            holds flags that go behind the config.
        more: flags behind these.
    """
    folder = Path(file).parent
    names = str(run_config.get("import", "")).split()
    modules = [import_module_of_user(name, folder) for name in names]
    args = shlex.split(str(run_config.get("args", "")))
    require(not any(word.startswith("--import") for word in args), "args", "say import = ... there")
    return read_request("fit", ["--config", str(config_of(file)), *args, *more], modules)


def contract_of(experiment: Experiment, own_data: bool = False) -> Contract:
    """The contract of settings and loaded data; ``own_data``: the node's, not the server's."""
    text = json.dumps(experiment.fixed, sort_keys=True, default=str)
    public = experiment.data.public
    return Contract(
        version=fedgkd_pl.__version__,
        method=type(experiment.model).__name__,
        settings=hashlib.sha256(text.encode()).hexdigest(),
        data="" if own_data else experiment.data.fingerprint(),
        fixed=text,
        public="" if public is None else digest(public),
    )
