"""Checks of settings beyond their types, and of what jsonargparse would ignore."""

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any

from fedgkd_pl.callbacks.averaged import AveragedModel
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.federation.checks import FLAGS, SCORES
from fedgkd_pl.runs.settings import short
from fedgkd_pl.settings.messages import GROUPS, NO_CLASS, NO_GROUP, cut
from fedgkd_pl.settings.suggest import check_file
from jsonargparse import Namespace


def check_groups(settings: dict[str, Any]) -> None:
    """Refuses, in a config file, a scalar where a group belongs, and the like."""
    check_file(settings)
    for key, value in _walk(settings):
        name = key.rpartition(".")[2]
        is_group = isinstance(value, dict) or (key in GROUPS and isinstance(value, str))
        if (name == "init_args" or key in GROUPS) and not is_group:
            raise SettingError(key, NO_GROUP, cut(value))
        if name == "class_path" and not isinstance(value, str):
            raise SettingError(key, NO_CLASS, cut(value))
        if isinstance(value, dict) and {"class_path", "init_args"} <= value.keys():
            for other in value.keys() - {"class_path", "init_args", "dict_kwargs"}:
                raise SettingError(f"{key}.{other}", "belongs below init_args")
    if "max_epochs" in settings.get("trainer", ()):
        raise SettingError("trainer.max_epochs", "is set by rounds")


def check_meaning(settings: Namespace) -> None:
    """Refuses what Lightning would find out after the run's folder was made, or never."""
    for key, value in _walk(settings):
        if isinstance(value, float):
            require(isfinite(value), short(key), "must be a finite number", value)
        if isinstance(value, int):
            require(abs(value) < 2**63, short(key), "is too large a number", value)
    seed, rounds = settings.seed_everything, settings.rounds
    require(0 <= seed < 2**32, "seed_everything", "must be from 0 to 4294967295", seed)
    require(rounds < 2**31, "rounds", "must be less than 2147483648", rounds)
    files = {"name": settings.name, "checkpoint.filename": settings.checkpoint.filename}
    for key, value in files.items():
        path = Path("x" if value is None else value)
        inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
        require(inside, key, "must be a path below output_dir", value)
    for name, (is_right, instead) in FLAGS.items():
        value = settings.trainer[name]
        optional = value is None and name != "check_val_every_n_epoch"
        require(optional or is_right(value), f"trainer.{name}", instead, value)


def check_monitors(callbacks: list[Any], scores: Mapping[str, Collection[str]]) -> None:
    """Refuses a callback's ``monitor`` that looks like a misspelled score of ours, by split."""
    names = [f"{split}/{score}" for split, known in scores.items() for score in sorted(known)]
    if any(isinstance(callback, AveragedModel) for callback in callbacks):
        both = [score for score in ("acc", "loss") if score in scores["test"]]
        names += [f"average/{part}{score}" for part in ("", "val_") for score in both]
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and monitor not in names and "/class_acc/" not in monitor:
            slip = get_close_matches(monitor, names, n=1)
            ours = monitor.startswith(SCORES)
            hint = f", did you mean {slip[0]}?" if slip else f": {', '.join(names)}"
            require(not slip and not ours, "monitor", f"no such score{hint}", monitor)


def _walk(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a tree of settings, by dotted key."""
    yield key, value
    value = vars(value) if isinstance(value, Namespace) else value
    items = value.items() if isinstance(value, dict) else ()
    for name, item in items:
        yield from _walk(item, f"{key}.{name}" if key else str(name))
    for item in value if isinstance(value, list | tuple) else ():
        yield from _walk(item, key)
