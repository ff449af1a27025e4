"""jsonargparse explains an error in a tree of lines; people want one, with the key and the fix."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import fedgkd_pl
from fedgkd_pl.errors import SettingError

TOP = ("rounds", "name", "output_dir", "seed_everything", "model", "data", "trainer", "checkpoint")


def one_line(message: str) -> str:
    """``key: reason (got value)`` of a parser's message.

    Args:
        message: the parser's, in as many lines as it likes.
    """
    flat = " ".join(message.split())
    key = ".".join(re.findall(r'Parser key "([^"]+)"', message)).replace(".init_args", "")
    got = _first(r"val='([^']*)'", flat) or _first(r"Got value: (\S+)", flat)
    got = got or _first(r"Given value: (\S+)", flat) or ""
    if unknown := _first(r"Option '([^']+)' is not accepted", flat):
        return f"{_join(key, unknown)}: no such setting{_near(unknown, flat)}"
    if unknown := _first(r"does not accept option '([^']+)'", flat):
        return f"{unknown}: no such setting{_guess(unknown, TOP)}"
    if unknown := _first(r"unrecognized arguments?: (.*)", flat):
        name = unknown.split()[0].lstrip("-").split("=")[0]
        return f"{name}: no such setting{_guess(name, TOP)} (got {unknown})"
    if linked := _first(r"argument rounds --> (\S+):", flat):
        return f"{linked}: is set by --rounds"
    if missing := _first(r"arguments are required: (\S+)", flat):
        return f"{_join(key, missing)}: must be given"
    if several := _first(r"(Give the full class path to avoid ambiguity: [\w., ]*\w)", flat):
        return f"{key}: {several}"
    if expected := _expected(flat):
        return f"{key}: expected {expected} (got {got})"
    if "Expected a dot import path string" in flat:
        return f"{key}: no such class{_guess(got, fedgkd_pl.__all__)} (got {got})"
    text = re.sub(r'Parser key "[^"]+":? ?', "", flat)
    return f"{key or 'config'}: {text}"


def setting_error(error: Exception, settings: dict[str, Any]) -> SettingError:
    """A constructor's refusal, with the whole key of the setting at fault.

    Args:
        error: the refusal, as jsonargparse passes it on.
        settings: all settings by dotted key.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, SettingError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return SettingError("config", " ".join(str(error).split()))
    found = {
        key[: key.index(f".{cause.key}") + len(cause.key) + 1]
        for key, value in settings.items()
        if f".{cause.key}." in f"{key}." and (not cause.has_value or value == cause.got)
    }
    key = short(found.pop()) if len(found) == 1 else cause.key
    return SettingError(key, cause.reason, *([cause.got] if cause.has_value else []))


def short(key: str) -> str:
    """A key as it is typed, without ``init_args``.

    Args:
        key: a dotted key.
    """
    return key.replace(".init_args", "")


def _expected(text: str) -> str:
    names = []
    for kind in re.findall(r"Expected an? (<class '[^']+'>|typing\.Literal\[[^\]]*\])", text):
        name = kind.removeprefix("typing.Literal").strip("[]<>").removeprefix("class ").strip("'")
        name = "one of " + kind[15:-1] if kind.startswith("typing") else name.split(".")[-1]
        if name != "NoneType" and name not in names:
            names.append(name)
    return " or ".join(names)


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match.group(1) if match else None


def _near(name: str, text: str) -> str:
    """A suggestion from the arguments of the innermost class of the message."""
    from fedgkd_pl.cli_help import parameters

    paths = re.findall(r"class_path ?[=']+ ?'?([\w.]+)'", text)
    module, _, class_ = (paths[-1] if paths else "").rpartition(".")
    if not module:
        return ""
    names = [*parameters(getattr(import_module(module), class_)), "net"]
    return _guess(name, names) or f" of {class_}, which has {', '.join(sorted(names))}"


def _guess(name: str, names: Iterable[str]) -> str:
    near = get_close_matches(name, list(names), n=1)
    return f", did you mean {near[0]}?" if near else ""
