"""Bad settings: exit code 2, one line that begins with the key, nothing written or imported."""

from json import dumps
from pathlib import Path

import pytest
from fedgkd_pl.config.build import build
from fedgkd_pl.config.safety import load_yaml

from tests.support.runs import QUICK, Run

WEIGHTS = "--model.net torchvision.models.resnet18 --model.net.weights IMAGENET1K_V1"
# Words after the command, and how the answer begins.
FLAGS: dict[str, str] = {
    # types
    "--rounds ten": "rounds: ",
    "--model.optimizer SGD --model.optimizer.lr x": "model.optimizer.lr: ",
    "--model.gamma null": "model.gamma: ",
    "--model.distance js": "model.distance: ",
    "--model.net.hidden [x]": "model.net.hidden: ",
    "--trainer.precision 8": "trainer.precision: ",
    "--model 3": "model: ",
    "--trainer 5": "trainer: ",
    "--trainer.callbacks 3": "trainer.callbacks: ",
    # values
    "--rounds 0": "rounds: must be from 1",
    "--name ../away": "name: must be a path below output_dir",
    "--checkpoint.filename /away": "checkpoint.filename: must be a path below",
    "--seed_everything -1": "seed_everything: must be from 0",
    "--model.optimizer SGD --model.optimizer.lr .nan": "model.optimizer.lr: must be finite",
    "--model.optimizer.lr -0.1": "model.optimizer: ",
    "--model.gamma -0.1": "model.gamma: must not be negative (got -0.1)",
    "--model.net.num_classes 7": "model.net: ",
    "--model.net torch.nn.LazyLinear --model.net.out_features 10": "model.net: has lazy layers",
    "--data.num_clients 5000": "data.num_clients: ",
    "--data.partition Dirichlet --data.partition.alpha -1": "data.partition.alpha: ",
    "--data.partition ByKey": "data.partition: ",
    "--trainer.devices 4": "trainer.devices: must be 1",
    "--trainer.accelerator abacus": "trainer",
    "--checkpoint.monitor val/ac": "checkpoint.monitor: ",
    # what a constructor of a library says
    f"{WEIGHTS} --model.net.num_classes 5": "model.net: ValueError: The parameter 'num_classes'",
    "--trainer.callbacks+ EarlyStopping --trainer.callbacks.monitor x --trainer.callbacks.mode y": (
        "trainer.callbacks: MisconfigurationException: `mode` can be"
    ),
    "--checkpoint.mode top": "checkpoint: MisconfigurationException: `mode` can be",
    # names
    "--lr 0.1": "lr: no such setting, did you mean model.optimizer.lr?",
    "--round 3": "round: no such setting, did you mean rounds?",
    "--batch-size 8": "batch-size: no such setting, did you mean data.batch_size?",
    "--model.gama 1": "model.gama: no such setting, did you mean gamma?",
    "--model.optimizer SGD --model.optimizer.lrr 1": "model.optimizer.lrr: no such setting, did",
    "--trainer.precison 3": "trainer.precison: no such setting, did you mean trainer.precision?",
    "--model FedGDK": "model: ",
    "--model.net MLP": "model.net: ",  # torchvision has one, too
    "--model.optimizer null --model.optimizer.lr 1": "model.optimizer: needs a class before",
    "--model.scheduler.gamma 1": "model.scheduler: needs a class before its settings",
    "--model.optimizer torch.nn.Linear": "model.optimizer: ",
    "--model.engine ray": "model.engine: ",
    # words
    "extra": "config: ",
    "--rounds": "rounds: ",
    "--config": "config: ",
    "--config nowhere.yaml": "config: no such file",
    "--config quickstrat.yaml": "config: no such file, did you mean quickstart.yaml?",
    "--import nowhere": "import: ",
    "--import raising": "import: ZeroDivisionError: division by zero",
    "--resume nowhere": "resume: no run was begun there",
    "--trainer.max_epochs 4": "config: argument rounds",
}

# A config file, and how the answer begins.
BOMB = "a: &a [x, x]\nb: [*a, *a]\n"
FILES: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "config: must be a mapping"),
    "tab": ("trainer:\n\tprecision: 32\n", "config: line 2: "),
    "tag": ("name: !mine x\n", "config: line 1: aliases and tags"),
    "bomb": (BOMB, "config: line 2: aliases and tags"),
    "bomb in a text": (f"rounds: {dumps(BOMB)}\n", "rounds: "),
    "deep": (100_000 * "[", "config: maximum recursion depth"),
    "twice": ("rounds: 3\nname: a\nrounds: 4\n", "config: line 3: rounds is given twice"),
    "digits": (f"rounds: {5000 * '9'}\n", "config: "),
    "itself": ("config: bad.yaml\n", "config: "),
    "unknown": ("rouns: 3\n", "rouns: no such setting, did you mean rounds?"),
    "outside": ("data: {class_path: Digits, init_args: {}, seed: 1}\n", "data: "),
    "nothing in a group": ("trainer:\nrounds: 3\n", "trainer: must have settings below it"),
    "epochs": ("trainer: {max_epochs: 5}\n", "trainer.max_epochs: is set by rounds"),
    "number for a class": ("model: {class_path: 3}\n", "model: "),
    "null": ("name: null\n", "name: "),
    "study": ("axes: {method: {a: {}}}\n", "config: is a study"),
}


@pytest.mark.parametrize("words", FLAGS)
def test_a_bad_flag_is_one_line(run: Run, tmp_path: Path, words: str) -> None:
    (tmp_path / "raising.py").write_text("1 / 0\n")
    code, out, err = run("fit", *QUICK, *words.split())
    assert code == 2 and len(err.splitlines()) == 1 and not out, err
    assert err.startswith(f"error: {FLAGS[words]}"), err
    assert {path.name for path in tmp_path.iterdir()} <= {"raising.py", "__pycache__"}


@pytest.mark.parametrize("kind", FILES)
def test_a_bad_file_is_one_line(run: Run, tmp_path: Path, kind: str) -> None:
    content, answer = FILES[kind]
    file = tmp_path / "bad.yaml"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    code, out, err = run("fit", *QUICK, "--config", "bad.yaml")
    assert code == 2 and len(err.splitlines()) == 1 and not out, err
    assert err.startswith(f"error: {answer}"), err
    assert list(tmp_path.iterdir()) == [file]


def test_yaml_means_what_jsonargparse_means() -> None:
    text = "{a: 1e-3, b: on, c: 2024-01-01, d: ~, e: 0x10, f: .5, g: 'x', h: ! y}"
    value = {"a": 0.001, "b": True, "c": "2024-01-01", "d": None, "e": 16, "f": 0.5}
    assert load_yaml(text) == value | {"g": "x", "h": "y"}


def test_an_error_of_an_earlier_file_names_that_file(run: Run, tmp_path: Path) -> None:
    """Each file must stand on its own, so a later one does not help."""
    (tmp_path / "bad.yaml").write_text("model: {class_path: FedGKD, init_args: {gamma: x}}\n")
    code, _, err = run("fit", "--config", "bad.yaml", *QUICK)
    assert code == 2 and err.startswith("error: model.gamma: ") and "(in bad.yaml)" in err, err


@pytest.mark.parametrize("words", ["fit --config", "fit --model", "compare"])
def test_a_key_given_twice_names_its_file(run: Run, tmp_path: Path, words: str) -> None:
    (tmp_path / "bad.yaml").write_text("class_path: FedAvg\nclass_path: FedGKD\n")
    code, _, err = run(*words.split(), "bad.yaml")
    assert code == 2 and err.count("\n") == 1, err
    assert "class_path is given twice" in err and "bad.yaml" in err and "line 2" in err


MINE = """
import torch
from fedgkd_pl import FederatedDataModule
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.examples import Scale

class Mine(FederatedDataModule):
    name = "mine"
    num_classes = 10

    def __init__(self, bad: bool = False, **kwargs) -> None:
        super().__init__(**kwargs)
        self.bad = bad

    def load(self) -> Splits:
        x, y = torch.rand(200, 64), torch.arange(200) % 10
        y[7] += 10 * self.bad
        return Splits(Examples(x, y, Scale(1)), Examples(x[:20], y[:20], Scale(1)))
"""


def test_a_class_of_the_users_comes_in_by_import_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "my_data.py").write_text(MINE)
    words = ("fit", *QUICK, "--rounds", "1", "--data", "my_data.Mine")
    code, _, err = run(*words)
    assert code == 2 and err.startswith("error: data: a config may not name it"), err
    code, _, err = run(*words, "--import", "my_data", "--data.bad", "true")
    assert code == 2 and err.startswith("error: data: train label at 7 must be in"), err
    code, _, err = run(*words, "--import=my_data")
    assert code == 0, err
    assert build("smoke", imports=["my_data"], data="my_data.Mine").data.name == "mine"
