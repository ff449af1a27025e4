"""The errors that the command line reports in one line, each class with its own exit code."""

from pathlib import Path
from typing import Any

CALMER = "try --trainer.gradient_clip_val 10 or a smaller learning rate"  # when clients diverge
_NOTHING = object()


class SettingError(ValueError):
    """A setting that cannot work, with the key to change.

    Args:
        key: the argument's name, as in the constructor and the YAML.
        reason: what is wrong and how to fix it.
        got: the value, if showing it helps.
    """

    def __init__(self, key: str, reason: str, got: Any = _NOTHING) -> None:
        self.key = key
        self.reason = reason
        self.got = got
        text = "" if got is _NOTHING else f" (got {got})"
        text = text if len(text) <= 300 else f"{text[:290]} ...)"
        super().__init__(f"{key}: {reason}{text}")


class ArgumentError(SettingError):
    """A setting that the parser does not understand."""


class RunFailed(RuntimeError):
    """A run that cannot go on, though its settings are right: exit code 3."""


class StorageError(RuntimeError):
    """A file that cannot be written, or nothing sound left to read: exit code 4."""

    def __init__(self, path: str | Path, reason: object) -> None:
        text = getattr(reason, "strerror", None) or reason
        super().__init__(f"{path}: {text}")


def require(condition: bool, key: str, reason: str, got: Any = _NOTHING) -> None:
    """Raises :class:`SettingError` unless ``condition`` holds."""
    if not condition:
        raise SettingError(key, reason, got)


def positive(**values: float) -> None:
    """Requires finite numbers above 0, given by their keys."""
    for key, value in values.items():
        require(0 < value < float("inf"), key, "must be positive", value)


def not_negative(**values: float) -> None:
    """Requires finite numbers of at least 0, given by their keys."""
    for key, value in values.items():
        require(0 <= value < float("inf"), key, "must not be negative", value)


def at_least(least: int, **values: int) -> None:
    """Requires numbers of at least ``least``, given by their keys."""
    for key, value in values.items():
        require(value >= least, key, f"must be at least {least}", value)


def installs(extra: str) -> str:
    """The command that installs one of our extras."""
    return f"pip install '.[{extra}]' in a clone of fedgkd_pl"
