"""``fedgkd-pl flower``: a config as a Flower app, for ``flwr run``."""

import importlib.util
import re
import shutil
from pathlib import Path

import yaml
from fedgkd_pl.config.build import build_request
from fedgkd_pl.config.request import read_request
from fedgkd_pl.engines.flower.engine import FlowerEngine
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.runs.folder import CONFIG
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
    named = re.fullmatch(r"[a-zA-Z][a-zA-Z0-9_-]{,31}", target.name) is not None
    require(named, "folder", "must have at most 32 letters, digits and dashes", target.name)
    require(not target.exists(), "folder", "exists already", target)
    resumes = any(word.startswith("--resume") for word in argv)
    require(not resumes, "resume", "goes to flwr run: --run-config 'resume=...'")
    experiment = build_request(read_request("fit", _over_flower(argv)))
    model, modules = experiment.model, sorted(experiment.modules)
    text = "must be FlowerEngine: its flags go behind all configs"
    require(isinstance(model.engine, FlowerEngine), "engine", text, type(model.engine).__name__)
    files = [_file(module) for module in modules]
    target.mkdir(parents=True)
    for file in files:
        shutil.copy(file, target)
    project = PROJECT.format(
        name=target.name.replace("_", "-").lower(),
        method=type(model).__name__,
        data=type(experiment.data).__name__,
        modules=" ".join(modules),
    )
    write_text(target / "pyproject.toml", project)
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
    text = "must be a module of one file, which the app takes along; install others"
    single = spec is not None and not spec.submodule_search_locations and "." not in module
    if spec is None or spec.origin is None or not single or module == "fedgkd_app":
        raise SettingError("import", text, module)
    return Path(spec.origin)
