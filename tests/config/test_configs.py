"""Every configuration parses and runs two rounds, on tiny data where the real is not here."""

import json
import re
import sqlite3
from contextlib import closing
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import yaml
from fedgkd_pl.cli.main import main
from fedgkd_pl.config.build import build
from fedgkd_pl.config.request import expand, resolve
from fedgkd_pl.errors import SettingError

from tests.conftest import REPO
from tests.support.datasets import TINY, WORDS, write_ag_news, write_cifar, write_sst5, write_tiny
from tests.support.runs import FAMILIES, FEW_STEPS, Run

CONFIGS = REPO / "configs"
PROTOCOLS, METHODS = (
    sorted(file.stem for file in (CONFIGS / part).glob("*.yaml"))
    for part in ("protocols", "methods")
)
ALONE = ("quickstart.yaml", "smoke.yaml", "cifar10_best.yaml")  # no pairs
FILES = [
    *ALONE,
    *(f"digits/{method}.yaml" for method in METHODS),
    *(f"{each}_fedgkd.yaml" for each in PROTOCOLS if each != "digits"),
]
SHORT = {*ALONE, "cifar10_fedgkd.yaml", *(f"digits/{method}.yaml" for method in FAMILIES)}


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_lightnings_loggers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is installed logs, with the run; what is not is asked for in one line."""
    monkeypatch.chdir(tmp_path)
    short = ("--rounds", "2", "--model.local_epochs", "1", "--trainer.enable_progress_bar", "false")
    config = ("--config", "quickstart.yaml", "--config", f"loggers/{name}.yaml")
    code = main(["fit", *config, *short, "--name", "mine"])
    told = capfd.readouterr().err
    if find_spec(name) is None or (name == "mlflow" and find_spec("sqlalchemy") is None):
        assert code == 2, told
        assert not list(tmp_path.iterdir())
        return
    assert code == 0, told
    run = tmp_path / "runs" / "mine" / "version_0"
    assert (run / "summary.json").exists()
    if name == "mlflow":
        with closing(sqlite3.connect(tmp_path / "runs" / "mlflow.db")) as base:
            found = base.execute("select step from metrics where key = 'test/acc' order by step")
            assert found.fetchall() == [(1,), (2,)]


def tiny(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Writes a little data of the config's kind; returns the flags that go with it."""
    few = ["--data.num_clients", "5", "--model.engine.workers", "1"]
    if name.startswith(("cifar", "split_cifar")):
        write_cifar(folder / "data", monkeypatch, classes=100 if "100" in name else 10)
        return few
    if name.startswith("tiny_imagenet"):
        write_tiny(folder / "data", monkeypatch)
        net = ("--model.net", "fedgkd_pl.ResNet8")  # not ResNet50
        return [*few, *net, "--model.net.num_classes", "3"]
    if name.startswith(("ag_news", "sst5")):
        (folder / "vocab.txt").write_text("\n".join(WORDS))
        few += ["--data.tokenizer", "vocab.txt", "--model.net.encoder_config", json.dumps(TINY)]
    if name.startswith("ag_news"):
        write_ag_news(folder / "data" / "ag_news", monkeypatch)
        return [*few, "--data.train_samples", "40", "--data.val_samples", "10"]
    if name.startswith("sst5"):
        write_sst5(folder / "data" / "sst5", monkeypatch)
        return few
    return []


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name not in SHORT)) for name in FILES],
)
def test_two_rounds(name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = [each for each in METHODS if re.search(rf"\d?[_/]{each}\.yaml$", name)]
    words = ["--config", name]
    words += tiny(name, tmp_path, monkeypatch)
    words += ["--rounds", "2", "--model.local_epochs", "1", "--name", "x"]
    words += [word for method in methods for word in FEW_STEPS.get(method, ())]
    code, _, err = run("fit", *words)
    assert code == 0, err
    folder = tmp_path / "runs" / "x" / "version_0"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rounds"] == 2 and summary["final_test_acc"] is not None
    if name not in ALONE:
        (method,) = methods
        config = yaml.safe_load((CONFIGS / "methods" / f"{method}.yaml").read_text())
        assert summary["method"] == config["model"]["class_path"]


def test_a_pair_is_two_files_and_what_they_take_together() -> None:
    protocol, method = (
        str(CONFIGS / part) for part in ("protocols/tiny_imagenet.yaml", "methods/moon.yaml")
    )
    files = ["--config", protocol, "--config", method]
    tuned = ["--model.mu=1", "--model.net.norm=batch"]
    for name in ("tiny_imagenet_moon", "tiny_imagenet_moon.yaml"):
        named = ["--name", "tiny_imagenet_moon"]
        assert expand(["fit", "--config", name]) == ["fit", *files, *tuned, *named]
        assert expand(["fit", f"--config={name}"]) == ["fit", *files, *tuned, *named]
    assert expand(["-c", "tiny_imagenet/moon.yaml"])[-1] == "tiny_imagenet/moon"
    assert expand(["-c", "tiny_imagenet_moon", "--name", "x"]) == [*files, *tuned, "--name", "x"]
    apart = ["-c", "protocols/tiny_imagenet.yaml", "--rounds", "3", "-c", "methods/moon"]
    assert expand(apart) == [
        *(*files[:2], "--name", "tiny_imagenet", "--rounds", "3"),
        *(*files[2:], *tuned, *named),
    ]


def test_every_pair_has_its_names() -> None:
    assert len(PROTOCOLS) == 9 and len(METHODS) >= 9
    for protocol, method in product(PROTOCOLS, METHODS):
        files = [str(CONFIGS / "protocols" / f"{protocol}.yaml")]
        files += [str(CONFIGS / "methods" / f"{method}.yaml")]
        for between, ending in product("_/", ("", ".yaml")):
            name = f"{protocol}{between}{method}"
            if f"{name}{ending}".removesuffix(".yaml") != "cifar10_fedgkd":
                assert resolve(name + ending) == files
                assert expand(["--config", name + ending])[-2:] == ["--name", name]
    for name in ("cifar10_", "cifar10_fedgkd_", "fedgkd", "x/cifar10_fedgkd.yaml"):
        with pytest.raises(SettingError, match="config: no such file"):
            resolve(name)


def test_the_flagship_is_a_file_with_the_settings_of_its_pair() -> None:
    assert resolve("cifar10_fedgkd") == [str(CONFIGS / "cifar10_fedgkd.yaml")]
    file, pair = build("cifar10_fedgkd"), build("cifar10/fedgkd")
    assert file.settings["name"] == "cifar10_fedgkd" and pair.settings["name"] == "cifar10/fedgkd"
    assert file.settings | {"name": "", "config": None} == pair.settings | {
        "name": "",
        "config": None,
    }


def test_what_is_tuned_names_what_is_there() -> None:
    tuned = yaml.safe_load((CONFIGS / "tuned.yaml").read_text())
    assert set(tuned) <= set(METHODS)
    assert {protocol for of_method in tuned.values() for protocol in of_method} <= set(PROTOCOLS)
