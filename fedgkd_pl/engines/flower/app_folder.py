"""``fedgkd-pl flower``: a config as a Flower app, for ``flwr run``."""

import importlib.util
import re
import shutil
from pathlib import Path

from fedgkd_pl.cli.commands import imported
from fedgkd_pl.engines.flower.contract import CONFIG
from fedgkd_pl.engines.flower.engine import FlowerEngine
from fedgkd_pl.errors import require
from fedgkd_pl.settings.build import FederatedCLI
from fedgkd_pl.storage.files import write_text

APP = '''\
"""A federated run as a Flower app; config.yaml beside it says which.

Both halves come from fedgkd_pl, which is installed on the server and on every node.
"""

from fedgkd_pl.flower import client_app, server_app

server = server_app(__file__)
client = client_app(__file__)  # Flower's modifiers: client_app(__file__, mods=[...])
'''

PROJECT = """\
[project]
name = "{name}"
version = "1.0.0"
description = "{method} on {data}, written by fedgkd-pl flower"

[tool.flwr.app]
publisher = "fedgkd-pl"

[tool.flwr.app.components]
serverapp = "fedgkd_app:server"
clientapp = "fedgkd_app:client"

# A second SuperNode on one machine needs a port of its own: flower-supernode ... --port 9095
# flwr run ... --run-config 'args="--rounds 10" resume="/srv/runs/fedgkd/version_0"'
[tool.flwr.app.config]
args = ""
resume = ""
import = "{modules}"
"""


def over_flower(words: list[str]) -> list[str]:
    """The words of ``fit`` with Flower's engine, whose own flags may be among them.

    Args:
        words: the user's.
    """
    require("--resume" not in words, "resume", "goes to flwr run: --run-config 'resume=...'")
    own = [n for n, word in enumerate(words) if word.startswith("--model.engine.")]
    place = own[0] if own else len(words)
    return [*words[:place], "--model.engine", "FlowerEngine", *words[place:]]


def app_writer(folder: str) -> type[FederatedCLI]:
    """What makes an app of settings, once they are checked as far as that goes without data.

    Args:
        folder: a new one, whose name becomes the app's.
    """
    target = Path(folder)
    named = re.fullmatch(r"[a-zA-Z][a-zA-Z0-9_-]{,31}", target.name)
    text = "Flower takes names of at most 32 letters, digits and dashes"
    require(named is not None, "folder", text, target.name)
    require(not target.exists(), "folder", "there is one already", target)

    class Writer(FederatedCLI):
        def _run_subcommand(self, subcommand: str) -> None:
            engine = self.model.engine
            text = "must be Flower's: give its flags behind all configs"
            require(isinstance(engine, FlowerEngine), "engine", text, type(engine).__name__)
            engine.check_method(self.model)
            modules = sorted(imported)
            files = [_file(module) for module in modules]
            target.mkdir(parents=True)
            for file in files:
                shutil.copy(file, target)
            about = {
                "name": target.name.replace("_", "-").lower(),
                "method": type(self.model).__name__,
                "data": type(self.datamodule).__name__,
                "modules": " ".join(modules),
            }
            write_text(target / "pyproject.toml", PROJECT.format(**about))
            write_text(target / "fedgkd_app.py", APP)
            self.config.fit.output_dir = str(Path(self.config.fit.output_dir).absolute())
            settings = self._parser("fit").dump(self.config.fit, skip_unset=False)
            write_text(target / CONFIG, settings)
            print(f"wrote {target}")
            print(f"simulate:  flwr run {target} --stream      for nodes: docs/flower.md")

    return Writer


def _file(module: str) -> Path:
    found = importlib.util.find_spec(module)
    single = found is not None and found.origin is not None and not found.submodule_search_locations
    single = single and "." not in module and module != "fedgkd_app"
    require(single, "import", "an app takes modules of one file along; install others", module)
    assert found is not None and found.origin is not None
    return Path(found.origin)
