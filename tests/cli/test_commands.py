"""Every command once, on one short run; what a new user meets first."""

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fedgkd_pl import __version__
from fedgkd_pl.cli.main import COMMANDS, arguments, main

from tests.support.runs import QUICK, Run, version


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds whose clients keep test samples."""
    folder = tmp_path_factory.mktemp("smoke")
    with contextlib.chdir(folder):
        words = ("--rounds", "2", "--data.client_test_fraction", "0.2")
        assert main(["fit", *QUICK, *words, "--quiet"]) == 0
    return folder / "runs"


@pytest.fixture
def here(smoke: Path, run: Run, tmp_path: Path) -> Path:
    """A copy of the run in the current folder."""
    shutil.copytree(smoke, tmp_path / "runs")
    np.save(tmp_path / "digits.npy", np.zeros((3, 64), np.uint8))
    return version(tmp_path)


RUN = "runs/smoke/version_0"
ONCE: list[tuple[str, str, str]] = [  # words, what is printed, what is written
    (f"validate {RUN} --ckpt_path best", "val/acc", ""),
    (f"test {RUN}", "test/acc", ""),
    (f"test --config {RUN}/config.yaml --ckpt_path {RUN}", "test/acc", ""),
    (f"predict {RUN}", "predictions.csv", f"{RUN}/predictions.csv"),
    (f"predict {RUN} --input digits.npy --ckpt_path last", "wrote", "digits.npy.predictions.csv"),
    ("partition --export cut.json --config smoke.yaml", "of 10 per client", "cut.json"),
    ("configs", "quickstart.yaml", ""),
    ("report --format md runs --output to.md", "", "to.md"),
    ("report runs --over_seeds", "FedGKD", ""),
    ("figure --output to.svg partition runs", "", "to.svg"),
    (f"personalize {RUN} --epochs 1 --quiet", "personalized", f"{RUN}/person*.csv"),
    (f"export {RUN} --output net.safetensors", "wrote net.safetensors", "net.safetensors"),
    ("new mine", "cd mine", "mine/mine/net.py"),
    ("--help", "commands:", ""),
    ("--version", __version__, ""),
    *((f"{name} --help", "fedgkd-pl", "") for name in COMMANDS),
]


@pytest.mark.parametrize(("words", "printed", "written"), ONCE, ids=lambda value: value)
def test_every_command(run: Run, here: Path, words: str, printed: str, written: str) -> None:
    before = sorted(Path().rglob("*"))
    code, out, err = run(*words.split())
    assert code == 0, err
    assert printed in out
    assert list(Path().glob(written)) if written else len(before) == len(sorted(Path().rglob("*")))


BAD = {
    "": (2, ""),
    "fitt": (2, "command: no such command; did you mean fedgkd-pl fit?"),
    "fit quickstart.yaml": (2, "config: unexpected argument: settings are written --KEY VALUE"),
    "test nowhere": (2, "run: no run was begun there"),
    "test runs/smoke": (2, "run: no run was begun there: no config.yaml; did you mean"),
    f"test {RUN} --model.net.hidden [7]": (2, "ckpt_path: holds another net"),
    "test --config smoke.yaml": (2, "ckpt_path: missing"),
    "test --config smoke.yaml --ckpt_path nowhere.ckpt": (2, "ckpt_path: no such file"),
    f"predict {RUN} --output x.csv": (2, "output: needs --input"),
    f"predict {RUN} --input nowhere": (2, "input: there is no such file"),
    "partition --config smoke.yaml --export x.txt": (2, "export: must end in .json"),
    "compare nowhere.yaml": (2, "study: no such file"),
    "compare smoke.yaml": (2, "study: is a config"),
    "report nowhere": (2, "runs: "),
    "report runs --nope 1": (2, "nope: no such setting"),
    "report runs --format pdf": (2, "format: "),
    "figure pie runs": (2, "kind: must be one of"),
    f"export {RUN} --format pdf": (2, "format: "),
    f"export {RUN} --ckpt_path average": (2, "average: "),
    "new": (2, ""),
}


@pytest.mark.parametrize("words", BAD)
def test_a_bad_command_is_one_line(run: Run, here: Path, words: str) -> None:
    code, answer = BAD[words]
    before = sorted(Path().rglob("*"))
    done, _, err = run(*words.split())
    assert done == code and err.startswith(f"error: {answer}" * bool(words)), err
    assert len(err.splitlines()) == bool(words) and sorted(Path().rglob("*")) == before


def of_all_files() -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in Path().rglob("*") if file.is_file()}


def test_an_output_replaces_no_file_of_a_run_and_only_files(run: Run, here: Path) -> None:
    own = [file for file in Path(RUN).rglob("*") if file.is_file()]
    assert len(own) >= 10 and any(file.parent.name == "checkpoints" for file in own)
    Path("there").symlink_to(RUN)
    Path("link.safetensors").symlink_to("digits.npy")
    for suffix in ("safetensors", "csv", "svg", "json"):  # as /dev/null: a rename would replace it
        os.mkfifo(f"pipe.{suffix}")
    Path("folder.csv").mkdir()
    predict = f"predict {RUN} --input digits.npy --output"
    refused = [
        *(f"export {RUN} --output {file}" for file in own),
        f"export {RUN} --output there/average.safetensors",  # which it does not have
        f"export {RUN} --output link.safetensors",
        f"export {RUN} --output pipe.safetensors",
        *(f"{predict} {name}.csv" for name in ("pipe", "folder", "there/metrics")),
        f"report {RUN} --format md --output there/summary.json",
        f"report {RUN} --format html --output pipe.json",
        f"figure curves {RUN} --output pipe.svg",
        "partition --config smoke.yaml --export pipe.json",
        f"partition --config smoke.yaml --export {RUN}/partition.json",
    ]
    before = of_all_files()
    for words in refused:
        code, out, err = run(*words.split())
        key = "export" if words.startswith("partition") else "output"
        assert (code, out) == (2, "") and err.startswith(f"error: {key}: "), (words, err)
        assert err.count("\n") == 1 and of_all_files() == before
    os.link(own[0], "linked.safetensors")
    for _ in range(2):  # what a command has written may be written again
        for output in (f"{RUN}/net.safetensors", "linked.safetensors"):
            assert run("export", RUN, "--output", output)[0] == 0
    assert before.items() <= of_all_files().items()


def test_a_partition_is_not_exported_to_its_own_file(run: Run, tmp_path: Path) -> None:
    assert run(*"partition --config smoke.yaml --export cut.json".split())[0] == 0
    before = (tmp_path / "cut.json").read_bytes()
    words = "partition --config smoke.yaml --data.partition FromFile --data.partition.path cut.json"
    code, _, err = run(*words.split(), "--export", "cut.json")
    assert code == 2 and err.startswith("error: export: ") and err.count("\n") == 1
    assert (tmp_path / "cut.json").read_bytes() == before


def test_flags_that_are_not_the_commands_own_are_settings() -> None:
    words = "--dry_run study.yaml --jobs 2 --model.gamma 0.3 --only a=x --only=b=y --rounds=4"
    found = arguments("compare", [*words.split(), "-c", "c.yaml"])
    assert found["settings"] == ["--model.gamma=0.3", "--config=c.yaml"]
    assert (found["study"], found["jobs"], found["rounds"]) == ("study.yaml", 2, 4)
    assert (found["dry_run"], found["quiet"], found["only"]) == (True, False, ["a=x", "b=y"])
    found = arguments("report", ["a", "--format", "md", "b"])
    assert (found["runs"], found["format"]) == (["a", "b"], "md")


def test_what_a_run_prints(run: Run, tmp_path: Path) -> None:
    stop = ("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor", "val/acc")
    more = ("--trainer.callbacks.patience", "1", "--model.optimizer.lr", "0", "--rounds", "9")
    code, out, err = run("fit", *QUICK, *stop, *more, "--trainer.precision", "64-true")
    assert code == 0, err
    begins = "FedGKD on digits: 4 clients, 2 a round, 9 rounds, seed 0, precision 64-true"
    assert out.startswith(begins) and "ended after round 2 of 9: Monitored metric val/acc" in out
    code, out, err = run("fit", "--resume", RUN, "--rounds", "9")
    assert code == 2 and err.startswith("error: resume: the run is finished"), err
    code, out, err = run("fit", *QUICK, "--rounds", "1", "--quiet")
    score, wrote = out.splitlines()
    assert re.fullmatch(r"test/acc best 0\.\d{4} \(round 1\), final 0\.\d{4}", score)
    assert wrote == "wrote runs/smoke/version_1" and err == ""


def test_flags_variables_and_files(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGKD_FIT__OUTPUT_DIR", "from_environment")
    Path("fedavg.yaml").write_text("model: {class_path: FedAvg}\n")
    Path("loggers.yaml").write_text("trainer: {logger: {class_path: CSVLogger}}\n")
    words = ("--config", "cifar10_fedgkd.yaml", "--config", "fedavg.yaml", "--rounds", "7")
    flags = ("--model.optimizer.lr", "0.01", "--trainer.logger.save_dir", "x", "--print_config")
    code, out, err = run("fit", *words, "-c", "loggers.yaml", *flags)
    assert code == 0, err
    config = yaml.safe_load(out)
    model: dict[str, Any] = config["model"]["init_args"]
    assert (config["output_dir"], config["rounds"]) == ("from_environment", 7)
    assert config["model"]["class_path"] == "fedgkd_pl.FedAvg" and "gamma" not in model
    optimizer = model["optimizer"]["init_args"]
    assert (optimizer["lr"], optimizer["momentum"]) == (0.01, 0.9)
    assert model["local_epochs"] == 20


def test_a_misspelt_monitor_is_refused(run: Run) -> None:
    stop = ("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor", "val/accuracy")
    code, _, err = run("fit", *QUICK, *stop)
    assert code == 2 and "EarlyStopping.monitor: no such score: val/acc" in err, err
