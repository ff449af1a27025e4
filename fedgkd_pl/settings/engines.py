"""Another engine starts from its own defaults: jsonargparse would keep what both have.

A config's ``workers: 1`` is about the engine that it names; a cluster would train on one worker.
"""

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from fedgkd_pl.engines.base import Engine
from jsonargparse import Namespace, _typehints
from jsonargparse._util import import_object

ENGINE = "--model.engine"
SHORT = {"local": "LocalEngine", "ray": "RayEngine", "flower": "FlowerEngine"}
log = logging.getLogger("fedgkd_pl")
_NOTHING = object()


def short_engines(usual: Any) -> Any:
    """Wraps ``resolve_class_path_by_name``: a config may say ``engine: ray``."""

    def resolve(cls: Any, name: str) -> str:
        engine = isinstance(cls, type) and issubclass(cls, Engine)
        path: str = usual(cls, SHORT.get(name, name) if engine else name)
        return path

    return resolve


def engine_defaults(usual: Any) -> Any:
    """Wraps ``discard_init_args_on_class_path_change``: another engine drops all arguments."""

    def discard(parser: Any, before: Any, after: Any) -> None:
        old, new = _engine(before), _engine(after)
        if old and new and old is not new and "init_args" in before:
            before["init_args"] = type(before)()
        usual(parser, before, after)

    return discard


def _engine(value: Any) -> type[Engine] | None:
    """The engine that settings name; None if that is something else."""
    path = value.get("class_path") if isinstance(value, dict | Namespace) else None
    try:
        cls = import_object(_typehints.resolve_class_path_by_name(Engine, str(path)))
    except Exception:  # no such class, which the parser reports
        return None
    return cls if isinstance(cls, type) and issubclass(cls, Engine) else None


def tell_dropped(argv: Sequence[str], engine: Any) -> None:
    """Warns of flags of an engine that naming another one after them has reset."""
    given: dict[str, str] = {}
    for word, value in pairwise([*argv, ""]):
        flag, equals, rest = word.replace(".init_args.", ".").partition("=")
        if flag.startswith(f"{ENGINE}.") and flag != f"{ENGINE}.class_path":
            given[flag] = rest if equals else value
    arguments = engine.get("init_args", {}) if isinstance(engine, Namespace) else {}
    for flag, value in given.items():
        if not _means(arguments.get(flag.removeprefix(f"{ENGINE}."), _NOTHING), value):
            text = "%s %s has no effect: the engine named after it starts from its own defaults"
            log.warning(text, flag, value)


def _means(value: Any, text: str) -> bool:
    """Whether a setting is what was typed for it."""
    if str(value) == text or (value is None and text == "null"):
        return True
    try:
        return float(value) == float(text)
    except (TypeError, ValueError):
        return False
