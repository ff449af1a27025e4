"""Fuzzing of configs, checkpoints and data files: ``python -m tests.support.fuzz --minutes 20``.

Every mutated input must give an answer within a minute: success, or one line and exit code 2 to 4.
What does not is kept in the folder ``fuzz-found``.
"""

import argparse
import contextlib
import io
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import REPO
from tests.support.fuzzing import mutations

FOUND = REPO / "fuzz-found"
QUICK = ("--rounds", "1", "--model.engine.workers", "1", "--trainer.fast_dev_run", "true")
NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2.5, 1e20, -0.0, float("nan"), float("inf"), "", "x", "auto"),
    *([], {}, [1, [2]], {"class_path": "os.system"}, {"init_args": 3}, "FedGKD", "torch.nn.Linear"),
    *("é\u202e\n", "1e-3", "!!python/name:os.system", "${HOME}", "a.yaml", "null", 10**30, "../.."),
    *({"class_path": "fedgkd_pl.MLP", "init_args": {"hidden": [1]}}, "lightning.pytorch.Trainer"),
)
LARGE = re.compile(r"\d{3,}|e\d\d?")  # a sound setting may cost hours: too many clients or layers


class Late(BaseException):
    """An input that took longer than a minute."""


def configs() -> list[str]:
    """The sound ones to start from: those that need no file."""
    folder = REPO / "configs"
    texts = [(folder / "quickstart.yaml").read_text(encoding="utf-8")]
    for method in sorted((folder / "methods").glob("*.yaml")):
        tree = yaml.safe_load((folder / "protocols" / "digits.yaml").read_text(encoding="utf-8"))
        own = yaml.safe_load(method.read_text(encoding="utf-8"))["model"]
        settings = own.get("init_args", {})
        tree["model"]["class_path"] = own["class_path"]
        net = tree["model"]["init_args"]["net"]
        net["init_args"] |= settings.pop("net", {}).get("init_args", {})
        tree["model"]["init_args"] |= settings
        texts.append(yaml.safe_dump(tree))
    return texts


def damaged_config(chance: random.Random) -> bytes:
    """A config with values replaced, moved, dropped or added, or with damaged bytes."""
    text = chance.choice(configs())
    if chance.random() < 0.3:
        return next(islice(mutations(text.encode(), chance.getrandbits(32)), 1))
    tree = yaml.safe_load(text)
    for _ in range(chance.choice((1, 1, 2, 3))):
        places = list(_places(tree))
        group, key = chance.choice(places)
        match chance.randrange(5):
            case 0 | 1:
                group[key] = chance.choice(NASTY)
            case 2:
                other, name = chance.choice(places)
                group[key] = yaml.safe_load(yaml.safe_dump(other[name]))
            case 3:
                del group[key]
            case 4:
                group[f"{key}{chance.choice(('s', '.x', '+', ' ', 'é'))}"] = chance.choice(NASTY)
    return yaml.safe_dump(tree, allow_unicode=True, sort_keys=False).encode()


def _places(tree: Any) -> Any:
    """Every (mapping, key) of a tree."""
    for key, value in list(tree.items()) if isinstance(tree, dict) else ():
        yield tree, key
        yield from _places(value)


def answer(words: list[str], seconds: float = 60) -> tuple[int, str]:
    """Runs a command in this process, in the current folder: (exit code, stderr).

    Raises:
        Late: it took too long.
    """
    from fedgkd_pl.cli.main import main

    def late(*_: Any) -> None:
        raise Late

    said = io.StringIO()
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return code, said.getvalue()


def wrong(code: int, said: str, before: set[Path]) -> str:
    """What is wrong with an answer; empty if nothing is."""
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if "Traceback" in said:
        return "a traceback"
    if code not in (0, 2, 3, 4):
        return f"exit code {code}"
    if (code == 0) is bool(errors) or len(errors) > 1:
        return f"exit code {code} with {len(errors)} errors"
    if code == 2 and set(Path().rglob("*")) != before:
        return "something was written"
    return ""


def try_config(content: bytes) -> str:
    """Tries one config: what is wrong with the answer."""
    Path("bad.yaml").write_bytes(content)
    code, said = answer(["fit", "--config", "bad.yaml", *QUICK])
    return wrong(code, said, {Path("bad.yaml")})


def try_checkpoint(content: bytes) -> str:
    """Tries one checkpoint."""
    Path("bad.ckpt").write_bytes(content)
    code, said = answer(["test", "--config", "smoke.yaml", "--ckpt_path", "bad.ckpt"])
    return wrong(code, said, {Path("bad.ckpt")})


def try_data(name: str, content: bytes, folder: Path) -> str:
    """Tries one data file, in a parser that has no checksum to rely on."""
    from fedgkd_pl.errors import SettingError

    from tests.support.formats import FORMATS

    try:
        FORMATS[name][1](content, folder)
    except SettingError:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> int:
    """Fuzzes for as long as told; the exit code says whether something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    chance = random.Random(arguments.seed)
    import fedgkd_pl.config.build  # noqa: F401

    from tests.support.formats import FORMATS, small_texts

    folder = small_texts(Path(tempfile.mkdtemp()), pytest.MonkeyPatch())
    with contextlib.chdir(tempfile.mkdtemp()):
        here = Path.cwd()
        answer(["fit", "--config", "smoke.yaml", "--model.engine.workers", "1", "--name", "a"])
        checkpoint = next(here.rglob("last.ckpt")).read_bytes()
        tried: Counter[str] = Counter()
        found = 0
        while time.monotonic() < end:
            for file in here.iterdir():
                shutil.rmtree(file) if file.is_dir() else file.unlink()
            kind = chance.choice(("config", "config", "config", "checkpoint", *FORMATS))
            if kind == "config":
                content = damaged_config(chance)
                if LARGE.search(content.decode(errors="ignore")):
                    continue
            else:
                sound = checkpoint if kind == "checkpoint" else FORMATS[kind][0]()
                content = next(mutations(sound, chance.getrandbits(32)))
            tried[kind] += 1
            start = time.monotonic()
            try:
                if kind == "config":
                    reason = try_config(content)
                elif kind == "checkpoint":
                    reason = try_checkpoint(content)
                else:
                    reason = try_data(kind, content, folder)
            except (Late, Exception) as error:
                reason = f"{type(error).__name__} after {time.monotonic() - start:.0f} s"
            if reason:
                found += 1
                FOUND.mkdir(exist_ok=True)
                (FOUND / f"{kind.replace(' ', '-')}-{found}").write_bytes(content)
                print(f"FOUND {kind}-{found}: {reason}", file=sys.__stdout__, flush=True)
            if tried.total() % 500 == 0:
                left = (end - time.monotonic()) / 60
                print(f"{tried.total()} inputs, {found} found, {left:.1f} min left", flush=True)
        print(f"{tried.total()} inputs {dict(tried)}, {found} found")
        os.chdir("/")
    shutil.rmtree(here)
    shutil.rmtree(folder)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
