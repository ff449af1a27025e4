"""Keeps the config of a run that is resumed or evaluated from naming places elsewhere.

The run may be a stranger's. Its ``config.yaml`` decides what is computed; a place outside of its
folder, another machine or a service counts only if the user names it, too.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from fedgkd_pl.errors import SettingError
from fedgkd_pl.settings import strict_yaml
from jsonargparse import Namespace

Given = set[tuple[str, str]]  # the last word of a key, and its value

# Arguments that are a place whatever they look like; any other text only if it looks like one.
PLACES = frozenset(
    "artifact_location default_root_dir dir dirpath exclude_batches_path folder log_dir root_dir "
    "save_dir tracking_uri".split()
)
SERVICES = ("CometLogger", "MLFlowLogger", "WandbLogger")
HERE = (None, "auto", "local")  # addresses of Ray on this machine
TWICE = "the run's own config.yaml may not name a place outside of its folder; name it in a flag"
SERVICE = "the run's own config.yaml may not name a service; name it in a flag"
ADDRESS = "is where code is sent to and pickles come from: give it as a flag, not in a file"


def given(argv: Sequence[str], run: Path | None = None) -> Given:
    """What the flags of a command say.

    Args:
        run: the folder of a run: configs among the flags count, unless they are its own. By
            default none do.
    """
    entries: Given = set()
    for index, word in enumerate(argv):
        key, equals, value = word.partition("=")
        if not key.startswith("-"):
            continue
        value = value if equals else next(iter(argv[index + 1 :]), "")
        if key == "--config":
            if run is not None and not is_within(value, run):
                entries |= set(_texts(strict_yaml.read(value)))
        else:
            name = key.rstrip("+").rpartition(".")[2].lstrip("-")
            entries |= {*_texts(_value(value), name), (name, value)}
    return entries


def is_within(path: str | Path, folder: Path) -> bool:
    """Whether a path, its links followed, leads into a folder."""
    return Path(os.path.realpath(path)).is_relative_to(folder.resolve())


def takes_config(argv: Sequence[str], run: Path) -> bool:
    """Whether a run's own config is among those that a command reads."""
    pairs = zip(argv, [*argv[1:], ""], strict=True)
    named = [value for word, value in pairs if word == "--config"]
    named += [word.partition("=")[2] for word in argv if word.startswith("--config=")]
    return any(is_within(name, run) for name in named)


def check_places(settings: Namespace, folder: Path, users: Given) -> None:
    """Refuses places outside of a run's folder that only its config names, not the user."""
    services = {value.rpartition(".")[2] for _, value in users}
    for group in ("trainer", "checkpoint"):
        for key, value in _leaves(settings[group], group):
            name = key.rpartition(".")[2]
            if name == "class_path":
                service = value.rpartition(".")[2]
                if service in SERVICES and service not in services:
                    raise SettingError(key.removesuffix(".class_path"), SERVICE, value)
            elif not _is_inside(value, folder, name in PLACES) and (name, value) not in users:
                raise SettingError(key.replace(".init_args", ""), TWICE, value)


def check_address(settings: Namespace, flags: Given) -> None:
    """Refuses a cluster that no flag names: results from there are pickles."""
    for key, value in _leaves(settings.model, "model"):
        if key.endswith(".ray_address") and value not in HERE and _entry(key, value) not in flags:
            raise SettingError(key.replace(".init_args", ""), ADDRESS, value)


def _is_inside(value: str, home: Path, is_place: bool) -> bool:
    """Whether a text leads nowhere else; relative ones are seen from the current folder."""
    path = Path(value.removeprefix("file:"))
    looks = "://" in value or value.startswith(("~", "file:")) or path.is_absolute()
    if not (is_place or looks or ".." in path.parts):
        return True
    if "://" in value or value.startswith("~") or "\0" in value:
        return False
    if not is_place and not path.is_absolute():  # a part of a path that climbs
        return False
    return is_within(path, home)


def _leaves(settings: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every text, by dotted key."""
    settings = vars(settings) if isinstance(settings, Namespace) else settings
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield from _leaves(value, f"{key}.{name}")
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from _leaves(value, key)
    elif isinstance(settings, str | Path):
        yield key, str(settings)


def _texts(settings: Any, name: str = "") -> Iterator[tuple[str, str]]:
    for key, value in _leaves(settings, name):
        yield _entry(key, value)


def _entry(key: str, value: str) -> tuple[str, str]:
    return key.rpartition(".")[2], value


def _value(text: str) -> Any:
    try:
        return strict_yaml.load(text)
    except (yaml.YAMLError, ValueError):
        return text
