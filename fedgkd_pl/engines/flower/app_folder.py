"""``fedgkd-pl flower``: a config as a Flower app, for ``flwr run``."""

import importlib.util
import re
import shutil
from pathlib import Path

import yaml
from fedgkd_pl.engines.flower.engine import FlowerEngine
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.runs.folder import CONFIG
from fedgkd_pl.settings.build import build_request
from fedgkd_pl.settings.request import read_request
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


def write_app(folder: str, argv: list[str]) -> None:
    """Writes an app to a new folder; ``argv`` are flags of ``fit``, checked as far as possible."""
    target = Path(folder)
    named = re.fullmatch(r"[a-zA-Z][a-zA-Z0-9_-]{,31}", target.name)
    text = "Flower takes names of at most 32 letters, digits and dashes"
    require(named is not None, "folder", text, target.name)
    require(not target.exists(), "folder", "there is one already", target)
    require(
        not any(word.startswith("--resume") for word in argv),
        "resume",
        "goes to flwr run: --run-config 'resume=...'",
    )
    experiment = build_request(read_request("fit", _over_flower(argv)))
    engine = experiment.model.engine
    text = "must be Flower's: give its flags behind all configs"
    if not isinstance(engine, FlowerEngine):
        raise SettingError("engine", text, type(engine).__name__)
    modules = sorted(experiment.modules)
    files = [_file(module) for module in modules]
    target.mkdir(parents=True)
    for file in files:
        shutil.copy(file, target)
    about = {
        "name": target.name.replace("_", "-").lower(),
        "method": type(experiment.model).__name__,
        "data": type(experiment.data).__name__,
        "modules": " ".join(modules),
    }
    write_text(target / "pyproject.toml", PROJECT.format(**about))
    write_text(target / "fedgkd_app.py", APP)
    where = str(Path(experiment.settings["output_dir"]).absolute())  # flwr runs it elsewhere
    settings = experiment.settings | {"output_dir": where}
    write_text(target / CONFIG, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    print(f"wrote {target}")
    print(f"simulate:  flwr run {target} --stream      for nodes: docs/flower.md")


def _over_flower(argv: list[str]) -> list[str]:
    """The flags of ``fit`` with Flower's engine, whose own flags may be among them."""
    own = [n for n, word in enumerate(argv) if word.startswith("--model.engine.")]
    index = own[0] if own else len(argv)
    return [*argv[:index], "--model.engine", "FlowerEngine", *argv[index:]]


def _file(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    single = spec is not None and spec.origin is not None and not spec.submodule_search_locations
    single = single and "." not in module and module != "fedgkd_app"
    require(single, "import", "an app takes modules of one file along; install others", module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin)
