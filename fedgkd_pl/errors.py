"""The error of a wrong setting, told in one line by the command line."""

from typing import Any

_NOTHING = object()


class SettingError(ValueError):
    """A setting that cannot work, with the key to change.

    Args:
        key: the argument's name, as in the constructor and the YAML.
        reason: what is wrong and how to mend it.
        got: the value, if showing it helps.
    """

    def __init__(self, key: str, reason: str, got: Any = _NOTHING) -> None:
        self.key = key
        self.reason = reason
        self.got = got
        super().__init__(f"{key}: {reason}" + ("" if got is _NOTHING else f" (got {got})"))

    @property
    def has_value(self) -> bool:
        """Whether the value at fault is known."""
        return self.got is not _NOTHING


def require(condition: bool, key: str, reason: str, got: Any = _NOTHING) -> None:
    """Raises :class:`SettingError` unless ``condition`` holds.

    Args:
        condition: what must hold.
        key: the argument's name.
        reason: what it must be.
        got: its value.
    """
    if not condition:
        raise SettingError(key, reason, got)
