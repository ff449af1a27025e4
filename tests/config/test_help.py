"""Help: the short one is quick and true, the long one has everything."""

import re
from functools import reduce
from typing import Any

import pytest
from fedgkd_pl.config.messages import TEXT, short_help

from tests.conftest import script
from tests.support.runs import Run

USUAL = ("--model", "FedGKD", "--data", "CIFAR10", "--data.partition", "Dirichlet")
OURS = {"config", "print_config", "resume", "trust", "ckpt_path", "import", "debug"}


def test_the_short_help_names_what_there_is_and_its_defaults(run: Run) -> None:
    from fedgkd_pl.config.build import build

    settings = build("cifar10_fedgkd").settings
    plain = build(
        [],
        rounds=100,
        model="FedGKD",
        data="CIFAR10",
        **{"data.partition": "Dirichlet", "model.net": "ResNet8", "model.optimizer": "SGD"},
    ).settings
    for flag, text in re.findall(r"^  --([\w.]+)(.*(?:\n {30}.*)*)", TEXT, re.MULTILINE):
        if flag in OURS:
            continue
        try:
            value = reduce(_inner, flag.split("."), plain)
        except KeyError as error:
            raise AssertionError(f"there is no --{flag}") from error
        if default := re.search(r"\(default: (\S+)\)", text):
            shown = default[1].removesuffix(")")
            assert str(value) == shown or shown in str(value), (flag, value)
    assert settings["rounds"] == 100


def _inner(settings: Any, name: str) -> Any:
    return settings.get("init_args", settings)[name]


def test_help_of_a_command_without_the_flags_of_others(run: Run) -> None:
    code, out, _ = run("fit", "--help")
    assert (code, out) == (0, short_help("fit") + "\n") and len(out.splitlines()) < 100
    assert "--resume" in out and "--resume" not in run("test", "-h")[1]


@pytest.mark.parametrize("words", [("--help", "all"), ("--help=all",)])
def test_all_flags(run: Run, words: tuple[str, ...]) -> None:
    code, out, _ = run("fit", *words)
    assert code == 0 and len(out.splitlines()) > 300
    for flag in ("--trainer.max_time", "--checkpoint.monitor", "--rounds", "--model CONFIG"):
        assert f" {flag}" in out


def test_help_of_a_class_is_of_that_class_alone(run: Run) -> None:
    code, out, _ = run("fit", "--model.help", "FedProx")
    assert code == 0 and "--model.mu" in out and "--rounds" not in out


LIGHT = """
import sys
from fedgkd_pl.cli.main import main

words = {("--help",): 0, ("--version",): 0, ("fit", "--help"): 0, ("test", "-h"): 0, ("fitt",): 2}
words |= {("configs",): 0}
for each, code in words.items():
    assert main(each) == code, each
    assert "torch" not in sys.modules, each
"""


def test_what_needs_no_torch_does_not_import_it(tmp_path: Any) -> None:
    done = script(LIGHT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "did you mean fedgkd-pl fit?" in done.stderr
