"""Errors of jsonargparse, a tree of lines, as one line with the key and the fix."""

import inspect
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import fedgkd_pl
from fedgkd_pl.data.partition import Partition
from fedgkd_pl.errors import SettingError
from fedgkd_pl.federation.client import FederatedClient
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.runs.settings import short
from fedgkd_pl.settings.allowed import is_known, is_slip, why_not
from fedgkd_pl.settings.engines import SHORT
from fedgkd_pl.settings.suggest import did_you_mean
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import Optimizer

GROUPS = {"trainer": Trainer, "checkpoint": ModelCheckpoint}
HINTS = {  # where another package's error does not say what to do
    "UnsupportedModelRegistryStoreURIException": "needs the whole package: pip install mlflow",
}
WANTED = {"model": FederatedServer, "data": LightningDataModule}
PARTS = {"model.net": nn.Module, "model.optimizer": Optimizer, "data.partition": Partition}
MOST_OFFERED = 5  # classes of the user's, where none has a name like the one given
NO_GROUP = "expected settings below it, key: value"
NO_CLASS = "expected the name of a class"
PLAIN = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}


def one_line(message: str) -> str:
    """``key: reason (got value)`` of a parser's message."""
    key, text = _innermost(message)
    got = _first(r"(?:Got|Given) value: (.*?)(?:\. Got value: .*|$)", text) or ""
    got = _first(r"val='(.*)'\)$", got) or got
    text = " ".join(text.split())
    if unknown := _first(r"Option '([^']+)' is not accepted", text):
        near = _near(_join(key, unknown), message) if key else _near_top(unknown)
        return f"{_join(key, unknown)}: no such setting{near}"
    if unknown := _first(r"does not accept option '([^']+)'", text):
        unknown = _join(_first(r"Group '([^']+)' does not accept", text) or "", unknown)
        return f"{unknown}: no such setting{_near_top(unknown)}"
    if unknown := _first(r"unrecognized arguments?: (.*)", text):
        name = unknown.split()[0].lstrip("-").split("=")[0]
        if not unknown.startswith("-"):
            return (
                f"config: a setting is a flag, --KEY VALUE, and this is none (got {cut(unknown)})"
            )
        return f"{name}: no such setting{_near_top(name)} (got {cut(unknown)})"
    if linked := _first(r"argument rounds --> (\S+):", text):
        return f"{linked}: is set by --rounds"
    if missing := _first(r"arguments are required: (?:\w+\.(?=model|data))?([^\s,]+)", text):
        where = f", in a file (--config) or by --{missing}" if missing in ("model", "data") else ""
        return f"{_join(key, missing)}: must be given{where}"
    if flag := _first(r"argument --(\w+)\S*: invalid _boolean", text):
        value = _first(r"value: '(.*)'", text)
        return f"{flag}: must be true or false (got {value})"
    key = key or "config"
    if path := _first(r"Importing '([^']+)' is not allowed", text):
        reason = f"no such class{_near_class(path, key)}" if is_slip(path) else why_not(path)
        return f"{key}: {reason} (got {cut(path)})"
    if several := _first(r"Give the full class path to avoid ambiguity: ([\w., ]*\w)", text):
        return f"{key}: several classes have this name, give one of {several}"
    if "object has no attribute 'keys'" in text:
        return f"{key}.init_args: {NO_GROUP}"
    if re.search(r"unhashable type|is not iterable", text):
        return f"{key}.class_path: {NO_CLASS} (got {cut(got)})"
    if file := _first(r"Unable to load config \"(.*)\"", text):
        return f"{key}: {NO_GROUP} (got {cut(file)})"
    if base := _first(r"(?:a subclass of|that returns) (?:Union\[)?(?:<class ')?(\w+)", text):
        path = _first(r"(?:Import path |Expected ')([\w.]+)'? (?:does not|to be)", text) or got
        return f"{key}: gives no {base} (got {cut(path)})"
    if wrong := _first(
        r"(?:Not of type \w+: |(?=Invalid content))(.*?)(?: - | Given value|$)", text
    ):
        return f"{key}: {wrong}"
    path = _first(r"class_path '([^']*)': (?:No module|module|type object)", text)
    path = path or _first(r"class: (?:No module|module|type object).* Got value: (.*)", text)
    path = path or _first(r"import path (?:string|format):(.*?)(?: - | Given |$)", text)
    expected = _expected(text)
    if "None" in (got, (path or "").strip()):
        return f"{key}: must be {expected} (got null)" if expected else f"{key}: must be given"
    if path and not re.search(r"number|\b(true or false|one of)\b", expected):
        return f"{key}: no such class{_near_class(path.strip(), key)} (got {cut(path)})"
    if expected:
        return f"{key}: must be {expected} (got {cut(got)})"
    noise = (
        r"Does not validate .*? Errors:|Given value type: .*|Expected a <class 'NoneType'>|"
        r"Problem with given class_path '[^']*':|Expected a path but .* invalid"
    )
    return f"{key}: {cut(re.sub(noise, '', text).strip(' -'), 400)}"


def _innermost(message: str) -> tuple[str, str]:
    """The deepest key of the tree, dotted, and what is said of it."""
    lines = message.splitlines()
    path: list[tuple[int, str]] = []
    best: tuple[list[str], str] = ([], message)
    for number, line in enumerate(lines):
        match = re.search(r'Parser key "([^"]+)"(?: element \d+)?:(.*)', line)
        if not match:
            continue
        indent = len(line) - len(line.lstrip(" -"))
        while path and (path[-1][0] >= indent or path[-1][1] == match[1]):
            path.pop()
        path.append((indent, match[1]))
        if len(path) >= len(best[0]):
            below = []
            for other in lines[number + 1 :]:
                if other.strip() and len(other) - len(other.lstrip(" ")) <= indent:
                    break
                below.append(other)
            best = [name for _, name in path], "\n".join([match[2], *below])
    return short(".".join(best[0])), best[1].strip() or message


def setting_error(error: Exception, settings: dict[str, Any]) -> SettingError:
    """A constructor's refusal, with the whole key of the setting at fault."""
    causes = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)  # type: ignore[arg-type]
    cause = next((cause for cause in causes if isinstance(cause, SettingError)), None)
    for each in causes if cause is None else ():
        if hint := HINTS.get(type(each).__name__):
            return SettingError(_raised_in(each, settings), hint)
    if cause is None:
        line = next(iter(str(causes[-1]).splitlines()), "")
        text = f"{type(causes[-1]).__name__}: {cut(line, 400)}"
        return SettingError(_at_fault(_raised_in(causes[-1], settings), text, settings), text)
    key = _whole_key(cause, settings)
    if cause.has_value:
        return SettingError(key, cause.reason, cause.got)
    return SettingError(_at_fault(key, cause.reason, settings), cause.reason)


def _whole_key(error: SettingError, settings: dict[str, Any]) -> str:
    """The one setting of its name: that has the value at fault, or is of the class that raised."""
    found = [
        (short(key[: key.index(f".{error.key}") + len(error.key) + 1]), value == error.got)
        for key, value in settings.items()
        if f".{error.key}." in f"{key}."
    ]
    named, having = {key for key, _ in found}, {key for key, has_it in found if has_it}
    within = named & {f"{_raised_in(error, settings)}.{error.key}"}
    return next((keys.pop() for keys in (having, within, named) if len(keys) == 1), error.key)


def cut(value: Any, length: int = 100) -> str:
    """A value's beginning, in one line."""
    text = " ".join(str(value).split())
    return text if len(text) <= length else text[:length] + " ..."


def _raised_in(error: BaseException, settings: dict[str, Any]) -> str:
    """The group whose class raised an error that names no setting."""
    key, trace = "config", error.__traceback__
    while trace is not None:
        raising = trace.tb_frame.f_locals.get("self")
        groups = [group for group, class_ in GROUPS.items() if isinstance(raising, class_)]
        for setting, value in settings.items():
            name = str(value).rpartition(".")[2]
            if setting.endswith(".class_path") and name == type(raising).__name__:
                groups.append(short(setting.removesuffix(".class_path")))
        key = groups[0] if groups else key
        trace = trace.tb_next
    return key


def _at_fault(group: str, reason: str, settings: dict[str, Any]) -> str:
    """The one setting of a group that an explanation names, or whose value it shows."""
    below = {short(key): value for key, value in settings.items()}
    below = {key: value for key, value in below.items() if key.startswith(f"{group}.")}
    named = {key for key in below if _has_word(reason, key.rpartition(".")[2])}
    shown = {
        key
        for key, value in below.items()
        if (isinstance(value, str) and value and _has_word(reason, value))
        or reason.endswith(f": {value}")
    }
    return next((keys.pop() for keys in (named & shown, named, shown) if len(keys) == 1), group)


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(word)}(?!\.?\w)", text) is not None


def _expected(text: str) -> str:
    names, values = list[str](), list[str]()
    text = re.sub(r"Subtypes: \[.*?Errors:", "", text)
    factory = r"Type typing\.Callable\[\[.*?\], (?:typing\.Union\[)?[\w.]*\b(\w+)"
    class_, choices = r"Expected an? <class '[\w.]*?(\w+)'>", r"typing\.Literal\[(.*?)\]"
    patterns = f"{class_}|{choices}|Not a valid subclass of (\\w+)|{factory}"
    for plain, literals, base, product in re.findall(patterns, text):
        if literals:
            values.append(literals)
            continue
        name = PLAIN.get(plain, plain) or _a(base or product)
        if name not in ("NoneType", "a Tensor", *names):
            names.append(name)
    return " or ".join([*names, *([f"one of {', '.join(values)}"] if values else [])])


def _a(name: str) -> str:
    return f"an {name}" if name[0] in "AEIOU" else f"a {name}"


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1) if match else None


def _near(key: str, message: str) -> str:
    """A suggestion from the arguments of the class that has no such one, or of others."""
    name = key.rpartition(".")[2]
    flat = " ".join(message.split())
    path = _first(r"given class_path '([\w.]+)': Option", flat)
    path = path or _first(r"Option .*?class_path='([\w.]+)'", flat) or ""
    module, _, class_ = path.rpartition(".")
    names = _arguments(getattr(sys.modules.get(module), class_, None))
    if name in names:  # of a base class, to which it gives its own
        return f": {class_} sets it itself"
    has = f" of {class_}, which has {', '.join(sorted(names))}" if names else ""
    return _guess(name, names) or did_you_mean(key) or has


def _near_top(name: str) -> str:
    group, _, last = name.rpartition(".")
    return _guess(last, _arguments(GROUPS[group])) if group in GROUPS else did_you_mean(name)


def _near_class(path: str, key: str) -> str:
    module, _, name = path.rpartition(".")
    if module and is_known(module):
        names = dir(sys.modules[module]) if module in sys.modules else []
        return _guess(name, [known for known in names if f"{module}.{known}" not in sys.modules])
    if module:
        return _near_users(module, name, key)
    if key.endswith("engine") and (near := _guess(name, SHORT)):
        return near
    return _guess(name, [n for n in fedgkd_pl.__all__ if key.startswith("data") or not _is_data(n)])


def _near_users(module: str, name: str, key: str) -> str:
    """Of the user's classes the one that has nearly this name, or some that there are."""
    while module not in sys.modules and "." in module:
        module = module.rpartition(".")[0]
    homes = [home for home in sorted(sys.modules) if f"{home}.".startswith(f"{module}.")]
    found: dict[type, str] = {}  # each class by its shortest path, as packages come before modules
    for home in homes:
        for known, value in list(vars(sys.modules[home]).items()):
            theirs = inspect.isclass(value) and f"{value.__module__}.".startswith(f"{module}.")
            if theirs and _fits(value, key):
                found.setdefault(value, f"{home}.{known}")
    all_ = sorted(path.removeprefix(f"{module}.") for path in found.values())
    some = [*all_[:MOST_OFFERED], *["..."] * (len(all_) > MOST_OFFERED)]
    has = f": {module} has {', '.join(some)}" if some else ""
    return _guess(name, found.values()) or has


def _fits(class_: type, key: str) -> bool:
    """Whether a setting may want such a class; methods and data are wanted at one place each."""
    if key in WANTED:
        return issubclass(class_, WANTED[key])
    others = (FederatedServer, FederatedClient, LightningDataModule)
    return not issubclass(class_, others) and issubclass(class_, PARTS.get(key, object))


def _is_data(name: str) -> bool:
    class_ = getattr(fedgkd_pl, name)
    return inspect.isclass(class_) and issubclass(class_, LightningDataModule)


def _arguments(class_: Any) -> set[str]:
    """What a class or function takes, down to where it stops passing arguments on."""
    bases = getattr(class_, "__mro__", ())
    makers = [vars(base)["__init__"] for base in bases if "__init__" in vars(base)]
    names: set[str] = set()
    for maker in makers or [class_] * inspect.isfunction(class_):
        parameters = inspect.signature(maker).parameters.values()
        names |= {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return names - {"self", "params"}


def _guess(name: str, names: Iterable[str]) -> str:
    same = {known.rpartition(".")[2].lower(): known for known in names}
    near = get_close_matches(name.lower(), same, n=1)
    return f", did you mean {same[near[0]]}?" if near else ""
