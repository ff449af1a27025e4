"""What a new user meets: what a run says of itself, --quiet, TAB, installing."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from fedgkd_pl.errors import installs
from fedgkd_pl.experiments.study import Study

from tests.conftest import REPO
from tests.support.runs import QUICK, Run, version


def test_a_run_says_what_begins(run: Run) -> None:
    code, out, err = run("fit", *QUICK, "--rounds", "1", "--trainer.precision", "64-true")
    assert code == 0, err
    begins, *_ = out.splitlines()
    assert begins == ("FedGKD on digits: 4 clients, 2 a round, 1 round, seed 0, precision 64-true")
    assert "FLOPs" not in out


def test_quiet_prints_the_result_alone(run: Run, tmp_path: Path) -> None:
    code, out, err = run("fit", *QUICK, "--rounds", "2", "--quiet")
    assert (code, err) == (0, "")
    score, wrote = out.splitlines()
    assert re.fullmatch(r"test/acc best 0\.\d{4} \(round \d\), final 0\.\d{4}", score)
    assert wrote == "wrote runs/smoke/version_0"
    config = yaml.safe_load((version(tmp_path) / "config.yaml").read_text())
    assert config["quiet"] is False  # a resume shows its progress again
    bar = "--trainer.callbacks+=RichProgressBar"
    assert run("fit", *QUICK, "--rounds", "1", "--quiet", bar)[0] == 0


STUDY_FILE = """\
# Two rounds of one method
config: smoke.yaml
set: {rounds: 2, model.engine.workers: 1}
measures: [best]
axes: {method: {FedAvg: {model: FedAvg}}}
"""


@pytest.mark.long
def test_a_quiet_study_prints_its_table_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(STUDY_FILE)
    code, out, err = run("compare", "study.yaml", "--quiet")
    assert (code, err) == (0, "")
    assert "FedAvg" in out and out.endswith("table.md, table.tex, report.html\n")
    for word in ("checking", "finished", "running", "look:"):
        assert word not in out


def test_a_run_says_who_ended_it(run: Run) -> None:
    stop = {"monitor": "val/acc", "mode": "max", "patience": 2}
    words = ("--trainer.callbacks+=EarlyStopping", "--model.optimizer.lr", "0", "--rounds", "9")
    more = [word for key, v in stop.items() for word in (f"--trainer.callbacks.{key}", str(v))]
    code, out, err = run("fit", *QUICK, *words[:1], *more, *words[1:])
    assert code == 0, err
    line = next(line for line in out.splitlines() if line.startswith("ended"))
    told = "ended after round 3 of 9: EarlyStopping: val/acc did not improve for 2 rounds (best 0."
    assert line.startswith(told)
    code, _, err = run("fit", "--resume", "runs/smoke/version_0")
    told = "error: resume: the run is finished: a callback ended it after round 3; for more rounds"
    told += ", begin a new run without that callback, or with more patience\n"
    assert (code, err) == (2, told)


ENDS = {
    "--trainer.callbacks+=Enough --import enough": "a callback set trainer.should_stop (Enough)",
    "--trainer.max_steps 2": "trainer.max_steps is 2",
    "--trainer.max_time 00:00:00:00": "Timer: the time is over",
}


@pytest.mark.parametrize("flags", ENDS)
def test_others_that_end_a_run(run: Run, tmp_path: Path, flags: str) -> None:
    (tmp_path / "enough.py").write_text(
        "from lightning.pytorch import Callback\n\n\nclass Enough(Callback):\n"
        "    def on_train_epoch_end(self, trainer, pl_module):\n"
        "        trainer.should_stop = trainer.current_epoch == 1\n"
    )
    code, out, err = run("fit", *QUICK, "--rounds", "5", *flags.split())
    assert code == 0, err
    line = next(line for line in out.splitlines() if line.startswith("ended"))
    assert re.fullmatch(rf"ended after round [012] of 5: {re.escape(ENDS[flags])}", line)


def test_a_whole_run_does_not_say_that_it_was_ended(run: Run) -> None:
    assert "ended" not in run("fit", *QUICK, "--rounds", "1")[1]


NETS = """\
from torch import nn
class MLP(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 10)
"""


def test_of_nets_of_one_name_ours_is_meant(run: Run, tmp_path: Path) -> None:
    """torchvision has an MLP, too, once it is imported."""
    import torchvision.ops  # noqa: F401

    code, out, err = run("fit", *QUICK, "--model.net", "MLP", "--print_config")
    assert code == 0, err
    assert yaml.safe_load(out)["model"]["init_args"]["net"]["class_path"] == "fedgkd_pl.MLP"
    (tmp_path / "my_own_nets.py").write_text(NETS)
    code, _, err = run("fit", *QUICK, "--import", "my_own_nets", "--model.net", "MLP")
    told = "error: model.net: several classes have this name, give one of "
    assert code == 2 and err.startswith(told) and "my_own_nets.MLP" in err


def test_a_net_with_imagenets_classes_is_refused(run: Run, tmp_path: Path) -> None:
    from PIL import Image

    for kind in "abcdefghij":
        folder = tmp_path / "images" / kind
        folder.mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (32, 32), (80 * number, 10, ord(kind))).save(folder / f"{number}.png")
    data = "--data ImageFolders --data.path images --data.num_clients 2 --data.val_fraction 0"
    net = "--data.partition IID --data.participation 1 --model.net torchvision.models.resnet18"
    code, _, err = run("fit", *QUICK, *data.split(), *net.split())
    told = "error: model.net.num_classes: images has 10 classes, the net gives 1000 logits\n"
    assert (code, err) == (2, told)
    assert not (tmp_path / "runs").exists()


STUDY = Study("x", {"variant": {"FedAvg": {}, "FedAvg, prior": {}, "a,b": {}, "b": {}}})


@pytest.mark.parametrize(
    ("only", "labels"),
    [
        ("FedAvg, prior", ["FedAvg, prior"]),
        ("FedAvg", ["FedAvg"]),
        ("FedAvg,b", ["FedAvg", "b"]),
        ("FedAvg, prior,FedAvg", ["FedAvg", "FedAvg, prior"]),
        ("b,a,b", ["a,b", "b"]),
        ("FedAvg, b", ["FedAvg", "b"]),
    ],
)
def test_only_takes_labels_with_commas(only: str, labels: list[str]) -> None:
    assert list(STUDY.part([f"variant={only}"]).axes["variant"]) == labels


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train", "command: no such command, did you mean fedgkd-pl fit? (got train)"),
        ("compair", "command: no such command, did you mean fedgkd-pl compare? (got compair)"),
        ("xyzzy", "command: no such command, fedgkd-pl --help lists them (got xyzzy)"),
        ("--config x", "command: comes first: fedgkd-pl fit, or another (got --config)"),
        ("completion tcsh", "argument shell: invalid choice: 'tcsh'"),
    ],
)
def test_wrong_commands(run: Run, words: str, told: str) -> None:
    code, out, err = run(*words.split())
    assert (code, out) == (2, "") and err.startswith(f"error: {told}")
    assert len(err.splitlines()) == 1


def test_a_command_alone_says_what_it_needs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run("fit")
    told = "error: config: which? --config quickstart.yaml, or another of fedgkd-pl configs\n"
    assert (code, err) == (2, told)
    code, _, err = run("test")
    told = "error: run: which? give the folder of a run, such as runs/quickstart/version_0\n"
    assert (code, err) == (2, told)
    code, _, err = run("fit", "--rounds", "3")
    told = ": must be given, in a file (--config) or by --"
    assert code == 2 and told in err
    code, _, err = run("compare", "quickstart.yaml")
    told = "error: study: is a config: fedgkd-pl fit --config runs it (got quickstart.yaml)\n"
    assert (code, err) == (2, told)
    monkeypatch.setenv("FEDGKD_FIT__CONFIG", str(REPO / "configs" / "smoke.yaml"))
    monkeypatch.setenv("FEDGKD_FIT__ROUNDS", "0")
    assert run("fit")[2] == "error: rounds: must be at least 1 (got 0)\n"


def test_a_run_may_be_named_after_flags_and_is_suggested(run: Run, done: Path) -> None:
    code, out, err = run("test", "--quiet", "--ckpt_path", "best", "runs/smoke/version_0")
    assert code == 0 and "test/acc" in out, err
    hint = "no config.yaml; did you mean runs/smoke/version_0? (got runs/smoke)\n"
    for words, key in ((("test",), "run"), (("fit", "--resume"), "resume")):
        told = f"error: {key}: no run was begun there: {hint}"
        assert run(*words, "runs/smoke")[::2] == (2, told)


TRY = """
source completion.bash
COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
_fedgkd_pl
printf '%s\\n' "${COMPREPLY[@]}"
complete -p fedgkd-pl
"""
COMPLETED = {
    ("f",): ["fit", "figure", "flower"],
    ("fit", "--config", "quick"): ["quickstart.yaml"],
    ("fit", "--config", "=", "quick"): ["quickstart.yaml"],  # as bash cuts --config=quick
    ("fit", "--config", "cifar10_fedgkd"): [
        *("cifar10_fedgkd.yaml", "cifar10_fedgkd_plus.yaml", "cifar10_fedgkd_vote.yaml"),
    ],
    ("fit", "--config", "my "): ["my own.yaml"],
    ("fit", "--model.optimizer.l"): ["--model.optimizer.lr"],
    ("fit", "--model", "FedGKDV"): ["FedGKDVote"],
    ("partition", "--exp"): ["--export"],
    ("compare", "studies/dig"): ["studies/digits.yaml"],
    ("compare", "studies/digits.yaml", "--on"): ["--only"],
    ("report", "runs", "--format", ""): ["table", "md", "html"],
    ("export", "runs", "--format", "torch"): ["torchscript", "torch_export"],
    ("figure", "cu"): ["curves"],
    ("fit", "--resume", "ru"): [""],  # bash's own: file names
}


def test_tab_in_bash(run: Run, tmp_path: Path) -> None:
    code, text, _ = run("completion", "bash")
    assert code == 0
    (tmp_path / "completion.bash").write_text(text)
    (tmp_path / "my own.yaml").touch()
    for words, found in COMPLETED.items():
        bash = ["bash", "-c", TRY, "bash", "fedgkd-pl", *words]
        done = subprocess.run(bash, cwd=tmp_path, capture_output=True, text=True, check=True)
        *lines, how = done.stdout.splitlines()
        assert (lines, done.stderr) == (found, ""), words
        assert how == "complete -o default -F _fedgkd_pl fedgkd-pl"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_every_command_and_config(run: Run, shell: str) -> None:
    code, text, _ = run("completion", shell)
    assert code == 0
    for word in ("personalize", "cifar10_moon.yaml", "model.optimizer.lr", "torch_export"):
        assert word in text


def test_make_says_how_to_find_the_command() -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    for target in ("setup", "demo"):  # not as a part of make test, which says where it is
        done = subprocess.run(
            ["make", "-n", target], cwd=REPO, env=plain, capture_output=True, text=True, check=True
        )
        assert "source .venv/bin/activate" in done.stdout.splitlines()[-1]
    assert "`source .venv/bin/activate`" in (REPO / "README.md").read_text(encoding="utf-8")


def test_nothing_is_installed_from_an_index_that_does_not_have_it() -> None:
    files = [REPO / "README.md", *(REPO / "docs").glob("*.md"), *REPO.glob("fedgkd_pl/**/*.py")]
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"pip install [^\n`]*fedgkd-pl", text), file


def test_an_extra_is_installed_by_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(_: str) -> list[str]:
        return ["torch>=2", "a>=1; extra == 'x'", 'b[y]<3,>=2 ; extra == "x"', "c; extra == 'xx'"]

    monkeypatch.setattr("importlib.metadata.requires", requires)
    assert installs("x") == "pip install 'a>=1' 'b[y]<3,>=2'"
    assert installs("z") == "pip install '.[z]' in a clone of fedgkd_pl"


def test_help_of_a_class_is_of_that_class_alone(run: Run) -> None:
    code, out, _ = run("fit", "--data.help", "ImageFolders")
    assert code == 0 and "--data.path" in out
    assert "--model.gamma" not in out and "--ckpt_path" not in out
