"""What a user reads: the short help, and errors as one line with the key and a reason.

jsonargparse's errors are a tree of lines, of which the innermost says what is wrong.
"""

import re
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from pydoc import locate
from traceback import walk_tb
from typing import Any

from fedgkd_pl.errors import ArgumentError, SettingError
from fedgkd_pl.runs.folder import short
from fedgkd_pl.storage.files import printable

TEXT = (Path(__file__).parent / "help.txt").read_text(encoding="utf-8")
COMMON = tuple(re.findall(r"^  --([\w.]+)", TEXT, re.MULTILINE))
# Lines of the tree that say where the parser was, not what is wrong.
NOISE = (
    *("Subtypes:", "Errors:", "Does not validate", "Expected a path but", "Problem with given"),
    *("Expected a <class 'NoneType'>", "Parser key", "Given value type"),
)


def argument_error(message: str, settings: Collection[str] = ()) -> ArgumentError:
    """The error of a parser's message; ``settings`` are the keys that the parser knows."""
    key, lines = _innermost(message)
    if message.startswith("argument --"):
        key, _, lines[0] = message.removeprefix("argument --").partition(": ")
        key = key.partition("/")[0]
    reason = "; ".join(line for line in lines if line and not line.startswith(NOISE)) or message
    guesses = "class_path='torch.optim.Optimizer'", "class_path='typing.Union'"  # jsonargparse's
    if any(guess in message for guess in guesses):
        return ArgumentError(key, f"needs a class before its settings: --{key} CLASS")
    unknown = re.search(r"(?:ption '|unrecognized arguments?: --)([^'=\s]+)", reason)
    if unknown:
        group = re.search(r"Group '([^']+)'", reason)
        name = ".".join(filter(None, [key, group and group[1], unknown[1]]))
        paths = re.findall(r"class_path(?:=| )'([\w.]+)'", message)
        if paths:
            from jsonargparse import ArgumentParser

            kind: Any = locate(paths[-1])
            settings = [*settings, *ArgumentParser().add_class_arguments(kind, fail_untyped=False)]
        return ArgumentError(short(name), f"no such setting{near(name, settings)}")
    named = re.search(r"import path string: ([\w.]+)|mporting '([\w.]+)' is not allowed", reason)
    if named:
        from fedgkd_pl.config.safety import NOT_ALLOWED, allowed

        hint = near(named[1] or named[2], sorted(allowed(), key=len, reverse=True))
        reason = (f"{NOT_ALLOWED} ({named[2]})" if named[2] else reason) + hint
    return ArgumentError(key or "config", printable(reason, 400))


def _innermost(message: str) -> tuple[str, list[str]]:
    """The deepest key of the tree, dotted, and the lines below it."""
    path: list[tuple[int, str]] = []
    lines = message.splitlines()
    best, below = "", lines
    for number, line in enumerate(lines):
        found = re.search(r'Parser key "([^"]+)"[^:]*:(.*)', line)
        if found is None:
            continue
        depth = len(line) - len(line.lstrip(" -"))
        while path and (path[-1][0] >= depth or path[-1][1] == found[1]):
            path.pop()
        path.append((depth, found[1]))
        key = ".".join(name for _, name in path)
        if key.count(".") >= best.count("."):
            best, below = key, [found[2]]
            for inner in lines[number + 1 :]:
                if inner and not inner.startswith(" " * (depth + 1)):
                    break
                below.append(inner)
    return short(best), [line.strip(" -") for line in below]


def near(name: str, names: Collection[str]) -> str:
    """``, did you mean model.optimizer.lr?`` of ``lr``; empty where no name is near."""
    leaves = {each.rpartition(".")[2].lower(): each for each in names}
    leaf = name.replace("-", "_").rpartition(".")[2].lower()
    found = get_close_matches(leaf, leaves, n=1, cutoff=0.75)
    return f", did you mean {leaves[found[0]]}?" if found and leaves[found[0]] != name else ""


def setting_error(ours: BaseException, settings: dict[str, Any]) -> SettingError:
    """A constructor's refusal, with the whole key of the setting at fault.

    Any other error has the key of the object that was being made, which only the local variables
    of jsonargparse's calls say.

    Args:
        ours: what it raised; or what was raised from that.
        settings: all of them, by dotted key.
    """
    made: list[str] = []
    while not isinstance(ours, SettingError):
        for frame, _ in walk_tb(ours.__traceback__):
            made.append(getattr(frame.f_locals.get("component"), "dest", ""))
        cause = ours.__cause__ or ours.__context__
        if cause is None:
            key = ".".join(filter(None, made)) or "config"
            return SettingError(key, f"{type(ours).__name__}: {printable(ours, 400)}")
        ours = cause
    found: dict[str, bool] = {}  # whole keys, and whether they have the value at fault
    for name, value in settings.items():
        before, dot, _ = f".{name}.".partition(f".{ours.key}.")
        if dot:
            key = short(f"{before}.{ours.key}".strip("."))
            found[key] = found.get(key, False) or value == ours.got
    keys = [key for key in found if found[key]] or [*found]
    return SettingError(keys[0] if len(keys) == 1 else ours.key, ours.reason, ours.got)


def short_help(command: str) -> str:
    """The flags that most runs need."""
    usage, text = "--config FILE [--KEY VALUE ...]", TEXT
    if command != "fit":
        usage = "RUN [--ckpt_path last|best|FILE] [--KEY VALUE ...]"
        text = re.sub(r"  --\w+ .*  fit: .*\n", "", text)
    return text.replace("  fit: ", "  ").format(command=command, usage=usage).rstrip()
