"""The same settings on both sides, and what they come to."""

import hashlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fedgkd_pl
from fedgkd_pl.cli.commands import import_users
from fedgkd_pl.engines.flower.records import Contract
from fedgkd_pl.errors import require
from fedgkd_pl.runs.settings import fixed_settings
from fedgkd_pl.settings.build import FederatedCLI

CONFIG = "config.yaml"


class Prepared(FederatedCLI):
    """All that ``fit`` would use, and no fit."""

    def _run_subcommand(self, subcommand: str) -> None:
        self.check_run()

    def check_engine(self) -> None:
        """A node has no way to others, and needs none."""


def words_of(file: str, run_config: Mapping[str, Any]) -> list[str]:
    """The words of ``fedgkd-pl`` that an app stands for.

    Args:
        file: the app's ``__file__``.
        run_config: Flower's: ``import`` names modules of the user's in the app's folder, ``args``
            holds flags that go behind the config.
    """
    folder = Path(file).parent
    for module in str(run_config.get("import", "")).split():
        import_users(module, folder)
    args = shlex.split(str(run_config.get("args", "")))
    require(not any(word.startswith("--import") for word in args), "args", "say import = ... there")
    return ["fit", "--config", str(folder / CONFIG), *args]


def contract_of(cli: FederatedCLI, own_data: bool = False) -> Contract:
    """What settings and data come to.

    Args:
        cli: with everything instantiated and the data loaded.
        own_data: whether the data is this node's alone, and not the server's.
    """
    text = json.dumps(fixed_settings(cli._dump()), sort_keys=True, default=str)
    return Contract(
        version=fedgkd_pl.__version__,
        method=type(cli.model).__name__,
        settings=hashlib.sha256(text.encode()).hexdigest(),
        data="" if own_data else cli.datamodule.fingerprint(),
        fixed=text,
    )
