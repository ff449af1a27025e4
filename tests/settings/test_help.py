"""What is known without torch: help, the names of settings, and which one was meant."""

import inspect
from pathlib import Path
from typing import Any

import fedgkd_pl
import pytest
from docstring_parser import parse
from fedgkd_pl.settings import parser
from fedgkd_pl.settings.signatures import parameters
from fedgkd_pl.settings.suggest import FLAGS, TOP, did_you_mean

from tests.conftest import script
from tests.support.runs import QUICK, Run

NAMED = ("FederatedServer", "FederatedDataModule", "Partition", "Engine", "Cohorts", "LocalLoss")
CLASSES = [
    name
    for name in fedgkd_pl.__all__
    if inspect.isclass(cls := getattr(fedgkd_pl, name))
    and {base.__name__ for base in cls.__mro__} & {*NAMED}
]


def imported(cls: Any) -> dict[str, str]:
    """The same from the imported class, by its signature and docstring."""
    texts: dict[str, str] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base) or not base.__module__.startswith("fedgkd_pl"):
            continue
        documented = {p.arg_name: p.description for p in parse(base.__doc__ or "").params}
        for name, parameter in inspect.signature(base).parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD or name == "net":
                continue
            text = " ".join((documented.get(name) or "").replace("``", "").split()).rstrip(".")
            if isinstance(parameter.default, str | int | float) and "(default:" not in text:
                text += f" (default: {parameter.default})"
            texts.setdefault(name, text)
    return texts


def test_the_source_says_what_the_classes_say() -> None:
    assert len(CLASSES) > 50
    for name in CLASSES:
        cls = getattr(fedgkd_pl, name)
        assert parameters(f"{cls.__module__}.{cls.__name__}") == imported(cls), name


def test_help_has_the_common_flags_and_says_how_to_see_all(run: Run) -> None:
    code, out, _ = run("fit", "--help")
    lines = out.splitlines()
    assert code == 0 and len(lines) < 100
    assert lines[-1] == "all flags: fedgkd-pl fit --help all"
    assert "--resume" in out and "--export" not in out and "--trainer.max_time" not in out
    assert run("fit", *QUICK, "-h") == (0, out, "")
    assert ":`" not in out  # a role of reStructuredText
    partition = run("partition", "--help")[1]
    assert partition.startswith("fedgkd-pl partition --config FILE") and "--export" in partition
    assert run("test", "--help")[1].startswith("fedgkd-pl test RUN [--ckpt_path last|best|FILE]")


@pytest.mark.parametrize("words", [("--help", "all"), ("--help-all",)])
def test_all_flags(run: Run, words: tuple[str, ...]) -> None:
    code, out, _ = run("fit", *words)
    assert code == 0 and len(out.splitlines()) > 500
    for flag in ("--trainer.max_time", "--checkpoint.monitor", "--data.cohorts", "--model.weight"):
        assert f" {flag}" in out


LIGHT = """
import sys
from fedgkd_pl.cli.main import main

open("bad.yaml", "w").write("rounds: {")
open("unknown.yaml", "w").write("lr: 1")
for words, code in {
    ("fit", "--config", "nowhere.yaml"): 2,
    ("fit", "--config", "bad.yaml"): 2,
    ("fit", "--config", "unknown.yaml"): 2,
    ("fit", "--config", "smoke.yaml", "--import", "torch", "--config", "nowhere.yaml"): 2,
    ("fit", "quickstart.yaml"): 2,
    ("fit", "--lr", "0.1"): 2,
    ("fit", "--resume", "nowhere"): 2,
    ("fit", "--rounds"): 2,
    ("test", "nowhere"): 2,
    ("partition", "--config", "nowhere.yaml"): 2,
    ("compare", "nowhere.yaml"): 2,
    ("compare", "studies/digits.yaml", "--lr", "0.1"): 2,
    ("compare", "studies/digits.yaml", "--only", "method=Nobody"): 2,
    ("fitt",): 2,
    ("fit", "--help"): 0,
    ("predict", "--help"): 0,
    ("configs",): 0,
    ("completion", "bash"): 0,
}.items():
    assert main(words) == code, words
    assert "torch" not in sys.modules, words
"""


def test_what_is_wrong_is_said_before_torch_is_imported(tmp_path: Path) -> None:
    done = script(LIGHT, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 14 and all(line.startswith("error: ") for line in lines)
    assert "error: config: is a flag: --config quickstart.yaml (got quickstart.yaml)" in lines
    assert "error: command: no such command, did you mean fedgkd-pl fit? (got fitt)" in lines
    assert "error: rounds: needs a value" in lines


def test_the_names_are_those_of_the_parsers(run: Run) -> None:
    found: set[str] = set()
    for command in ("fit", "validate", "test", "predict"):
        run(command, *QUICK, "--print_config")
        actions = parser._parsers[command]._actions
        flags = [flag for action in actions for flag in action.option_strings]
        found |= {flag.lstrip("-").split(".")[0].rstrip("+") for flag in flags}
    others = {"h", "c", "help", "print_shtab"}  # print_shtab where that package is installed
    assert {name for name in found if " " not in name} - others == {*TOP, *FLAGS}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("gamma", "model.gamma"),
        ("workers", "model.engine.workers"),
        ("precision", "trainer.precision"),
        ("dataset", "data"),
        ("learning-rate", "model.optimizer.lr"),
        ("partition.alpha", "data.partition.alpha"),
        ("particpation", "data.participation"),
        ("output-dir", "output_dir"),
    ],
)
def test_which_setting_is_meant(typed: str, meant: str) -> None:
    assert did_you_mean(typed) == f", did you mean {meant}?"
    assert did_you_mean(typed, "--") == f", did you mean --{meant}?"


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    assert did_you_mean("xyzzy") == "" and did_you_mean("model.gamma") == ""
