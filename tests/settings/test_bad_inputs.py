"""Bad input: exit code 2, one line that names the setting, nothing written or imported."""

import re
import subprocess
import sys
from collections.abc import Callable
from hashlib import md5
from json import dumps
from pathlib import Path

import pytest
import yaml

QUICK = ("--config", "smoke.yaml", "--model.engine.workers", "1")
CLASSES = {"model", "data", "optimizer", "net", "engine", "partition"}  # with init_args below
Run = Callable[..., tuple[int, str, str]]

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(9 * ['*' + a])}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
BATCH_NORM = (
    "--data.flat false --model.net fedgkd_pl.ResNet8 --model.net.norm batch "
    "--model.net.in_channels 1"
)
LINEAR = "--model.net torch.nn.Linear --model.net.in_features 64 --model.net.out_features"
FROM_FILE = "--data.partition FromFile --data.partition.path few.json"
DIRICHLET = "--data.partition Dirichlet --data.partition."

# A config file, and the answer.
FILES: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "config: is empty (got bad.yaml)"),
    "study": ("axes: {method: {a: {}}}\n", "config: is a study: fedgkd-pl compare runs it"),
    "comment": ("# nothing\n", "config: is empty (got bad.yaml)"),
    "latin1": ("name: Zürich\n".encode("latin1"), "config: is not UTF-8 (got bad.yaml)"),
    "utf16": ("rounds: 3\n".encode("utf16"), "config: is not UTF-8 (got bad.yaml)"),
    "tab": ("trainer:\n\tprecision: 32\n", "config: line 2: found character that cannot start any"),
    "quote": ('rounds: "3\n', "config: line 2: found unexpected end of stream (got bad.yaml)"),
    "list": ("- 1\n- 2\n", "config: must be a mapping, lines of key: value (got bad.yaml)"),
    "scalar": ("3\n", "config: must be a mapping, lines of key: value (got bad.yaml)"),
    "python": (
        "name: !!python/object/apply:os.system [touch canary]\n",
        "config: line 1: the tag !!python/object/apply:os.system is not allowed (got bad.yaml)",
    ),
    "tag": ("name: !mine x\n", "config: line 1: the tag !mine is not allowed (got bad.yaml)"),
    "bomb": (BOMB, "config: line 2: an alias (*) within an anchor (&) is not allowed"),
    "bomb in a text": (f"rounds: {dumps(BOMB)}\n", "config: line 2: an alias (*) within an anchor"),
    "long alias": (
        f"a: &a {9_000 * 'x'}\nb: [{1000 * '*a, '}]\n",
        "config: line 2: nested too deeply, or too many aliases (got bad.yaml)",
    ),
    "endless": ("name: &a [*a]\n", "config: line 1: an alias (*) within an anchor (&) is not"),
    "deep": (100_000 * "[", "config: line 1: nested too deeply, or too many aliases"),
    "deep text": (f"rounds: '{9_000 * '['}'\n", "config: line 1: nested too deeply"),
    "long": (f"model: {90_000 * 'a.b'}\n", "config: line 1: a value is longer than 10000 char"),
    "2 MB": (2_000_000 * "#", "config: is larger than 1 MB (got bad.yaml)"),
    "twice": ("rounds: 3\nname: a\nrounds: 4\n", "rounds: is given twice, again in line 3"),
    "twice within": ("model: {init_args: {gamma: 1, gamma: 2}}\n", "model.gamma: is given twice"),
    "two documents": ("rounds: 1\n---\nrounds: 2\n", "config: line 2: but found another document"),
    "NUL": ("name: \0\n", "config: unacceptable character #x0000"),
    "digits": (f"rounds: {5000 * '9'}\n", "config: Exceeds the limit (4300 digits)"),
    "number for a key": ("1: 2\n", "config: Key must be a string"),
    "itself": ("config: bad.yaml\n", "config: Config file loop detected"),
    "unknown": ("rouns: 3\n", "rouns: no such setting, did you mean rounds?"),
    "of no group": ("lr: 3\n", "lr: no such setting, did you mean model.optimizer.lr?"),
    "unknown within": (
        "trainer: {precison: 32}",
        "trainer.precison: no such setting, did you mean p",
    ),
    "unknown in a class": (
        "model: {class_path: FedGKD, init_args: {gama: 1}}\n",
        "model.gama: no such setting, did you mean gamma?",
    ),
    "null": ("name: null\n", "name: must be a text (got null)"),
    "unknown beside a class": (
        "model: {init_args: {gama: 1, optimizer: {class_path: torch.optim.Adam}}}\n",
        "model.gama: no such setting, did you mean gamma?",
    ),
    "outside": (
        "data: {class_path: Digits, init_args: {}, seed: 1}\n",
        "data.seed: belongs below i",
    ),
    "import": ("import: os\n", "import: no such setting"),
    "nothing in a group": ("trainer:\nrounds: 3\n", "trainer: expected settings below it"),
    "number for a class": (
        "model: {class_path: 3}\n",
        "model.class_path: expected the name of a cl",
    ),
}

# A setting, a value that it cannot have, and the answer: in a file, and as a flag.
VALUES: list[tuple[str, str, str]] = [
    ("rounds", "ten", "rounds: must be a whole number (got ten)"),
    ("rounds", "2.5", "rounds: must be a whole number (got 2.5)"),
    ("rounds", "true", "rounds: must be a whole number (got True)"),
    ("rounds", "0", "rounds: must be at least 1 (got 0)"),
    ("rounds", "-1", "rounds: must be at least 1 (got -1)"),
    ("rounds", "1e20", "rounds: must be a whole number (got 1e+20)"),
    ("rounds", "3000000000", "rounds: must be less than 2147483648 (got 3000000000)"),
    ("name", "../away", "name: must be a path below output_dir (got ../away)"),
    ("name", "/away", "name: must be a path below output_dir (got /away)"),
    ("checkpoint.filename", "/away", "checkpoint.filename: must be a path below output_dir"),
    ("seed_everything", "-1", "seed_everything: must be from 0 to 4294967295 (got -1)"),
    ("seed_everything", "4294967296", "seed_everything: must be from 0 to 4294967295"),
    ("model.optimizer.lr", "-0.1", "model.optimizer.lr: Invalid learning rate: -0.1"),
    ("model.optimizer.lr", ".nan", "model.optimizer.lr: must be a finite number (got nan)"),
    ("model.optimizer.lr", ".inf", "model.optimizer.lr: must be a finite number (got inf)"),
    ("model.optimizer.lr", "null", "model.optimizer.lr: must be a number (got null)"),
    ("model.optimizer.lr", "x", "model.optimizer.lr: must be a number (got x)"),
    ("model.gamma", "-0.1", "model.gamma: must not be negative (got -0.1)"),
    ("model.gamma", "null", "model.gamma: must be a number (got null)"),
    ("model.buffer_size", "0", "model.buffer_size: must be at least 1 (got 0)"),
    ("model.temperature", "0", "model.temperature: must be positive (got 0.0)"),
    ("model.distance", "js", "model.distance: must be one of 'kl', 'mse' (got js)"),
    ("model.local_epochs", "0", "model.local_epochs: must be at least 1"),
    ("model.local_epochs", "null", "model.local_epochs: must be a whole number (got null)"),
    ("model.compile", "null", "model.compile: must be true or false (got null)"),
    ("model.net.hidden", "[x]", "model.net.hidden: must be a whole number (got x)"),
    ("model.net.hidden", "[0]", "model.net.hidden: must be at least 1 (got [0])"),
    ("model.net.projection", "-1", "model.net.projection: must be at least 1 (got -1)"),
    ("model.net.num_classes", "7", "model.net.num_classes: digits has 10 classes"),
    ("model.net.in_features", "3", "model.net: does not take digits inputs"),
    ("model.engine.workers", "-1", "model.engine.workers: must be auto or ≥ 1 (got -1)"),
    (
        "model.engine.workers",
        "x",
        "model.engine.workers: must be a whole number or one of 'auto' (got x)",
    ),
    ("data.num_clients", "0", "data.num_clients: must be at least 1 (got 0)"),
    ("data.num_clients", "5000", "data.num_clients: there are only 1293 training samples"),
    ("data.participation", "1.5", "data.participation: must be in (0, 1] (got 1.5)"),
    ("data.participation", "0", "data.participation: must be in (0, 1] (got 0.0)"),
    ("data.participation", "0.1", "data.participation: leaves no client of 4 in a round"),
    ("data.batch_size", "0", "data.batch_size: must be at least 1"),
    ("data.batch_size", "100000000000000000000", "data.batch_size: is too large a number"),
    ("data.drop_last", "true", "data.drop_last: no such setting of Digits, which has batch_size"),
    ("data.partition_seed", "-1", "data.partition_seed: must not be negative (got -1)"),
    ("trainer.accelerator", "gpu", "trainer.accelerator: No supported gpu backend found!"),
    ("trainer.accelerator", "cuda", "trainer.accelerator: `CUDAAccelerator` can not run on your"),
    ("trainer.accelerator", "abacus", "trainer.accelerator: You selected an invalid accelerator"),
    ("trainer.devices", "4", "trainer.devices: the server takes one device"),
    ("trainer.max_epochs", "4", "trainer.max_epochs: is set by "),
    ("trainer.accumulate_grad_batches", "2", "trainer.accumulate_grad_batches: a round is one st"),
    ("trainer.check_val_every_n_epoch", "0", "trainer.check_val_every_n_epoch: must be at least 1"),
    # a scalar where a group belongs
    ("model", "3", "model: "),
    ("model", "null", "model: must be given"),
    ("model.init_args", "3", "model.init_args: expected settings below it, key: value"),
    ("model.optimizer", "3", "model.optimizer: "),
    ("model.optimizer", "null", "model.optimizer: must be an Optimizer (got null)"),
    ("model.net", "3", "model.net: "),
    ("model.net", "[1]", "model.net: must be a Module (got [1])"),
    ("model.engine", "3", "model.engine: "),
    ("data", "3", "data: "),
    ("data.partition", "7", "data.partition: "),
    ("trainer", "5", "trainer: expected settings below it, key: value (got 5)"),
    ("trainer", "[5]", "trainer: expected settings below it, key: value (got [5])"),
    ("trainer.callbacks", "3", "trainer.callbacks: "),
    ("checkpoint", "5", "checkpoint: expected settings below it, key: value (got 5)"),
    # names of classes
    ("model", "FedGDK", "model: no such class, did you mean FedGKD? (got FedGDK)"),
    ("model", "FedProxx", "model: no such class, did you mean FedProx? (got FedProxx)"),
    ("model", "torch.nn.Linear", "model: gives no FederatedServer (got torch.nn.Linear)"),
    ("model.optimizer", "torch.nn.Linear", "model.optimizer: gives no Optimizer (got torch.nn.L"),
    ("model.optimizer", "torch.optim.Sgd", "model.optimizer: no such class, did you mean SGD?"),
    ("model.engine", "Ray", "model.engine: no such class, did you mean ray? (got Ray)"),
    ("model.net", "fedgkd_pl.MPL", "model.net: no such class, did you mean MLP?"),
    ("data.partition", "Dirichet", "data.partition: no such class, did you mean Dirichlet?"),
]

# Those that `make test` gives as flags too: of each kind of value, and each kind of place, one.
AS_FLAGS = {
    ("rounds", "2.5"),
    ("rounds", "0"),
    ("name", "../away"),
    ("model.optimizer.lr", ".nan"),
    ("model.gamma", "null"),
    ("model.net.hidden", "[x]"),
    ("model.init_args", "3"),
    ("trainer", "5"),
    ("trainer.devices", "4"),
    ("data.drop_last", "true"),
    ("model", "FedGDK"),
    ("model.optimizer", "torch.nn.Linear"),
}

# Words after the command, and the answer.
FLAGS: dict[str, str] = {
    DIRICHLET + "alpha=-1": "data.partition.alpha: must be a positive number (got -1.0)",
    DIRICHLET + "alpha=0": "data.partition.alpha: must be a positive number (got 0.0)",
    DIRICHLET + "min_size 400": "data.partition.min_size: 4 clients cannot hold that many of 1293",
    "--data.partition Pathological --data.partition.classes_per_client 11": "data.partition.cl",
    "--data.partition ByKey": "data.partition: this dataset names no owners to cut by; one folder "
    "per client does: ClientFiles (docs/data.md)",
    FROM_FILE: "data.partition.path: few.json must name each of 1437 training samples once",
    f"--data ImageFolders --data.path fotos {FROM_FILE}": "data.path: fotos: No such file",
    "--data.unseen_clients 4": "data.unseen_clients: must leave some of 4 clients",
    "--data SST5 --data.download false": "data.data_dir: train.txt is missing",
    "--data AGNews --data.download false": "data.data_dir: train.csv is missing",
    "--data TinyImageNet --data.download false": "data.data_dir: tiny-imagenet-200 is not there",
    "--data CIFAR10 --data.download false": "data.data_dir: cifar-10-batches-py is not there",
    "--model.gama 1": "model.gama: no such setting, did you mean gamma?",
    "--model.optimizer.lrr 1": "model.optimizer.lrr: no such setting, did you mean lr?",
    "--model FedAvg --model.gamma 1": "model.gamma: no such setting of FedAvg, which has",
    "--model FedProx --model.buffer_size 1": "model.buffer_size: no such setting of FedProx",
    "--model MOON": "model.net.projection: MOON needs a projection head",
    "--model FedGKDPlus": "model.net.projection: FedGKD+ needs a projection head",
    "--model FedGKDVote --data.val_fraction 0": "data.val_fraction: FedGKD-Vote needs",
    f"--data.batch_size 1 {BATCH_NORM}": "data.batch_size: must be at least 2 for a net with Batch",
    "--model.min_clients 3": "model.min_clients: must be at most the 2 clients of a round (got 3)",
    "--import nowhere": "import: no such module in the current folder, nor installed (got nowhere)",
    "--import lacking": "import: line 2 of lacking.py: No module named 'nonexist' (got lacking)",
    "--import raising": "import: line 3 of raising.py: ZeroDivisionError: division by zero (got r",
    "--import": "import: which module?",
    "--import=.nowhere": "import: which module? (got .nowhere)",
    "--import broken": "import: SyntaxError: ",
    "--foo 1": "foo: no such setting",
    "--round 3": "round: no such setting, did you mean --rounds?",
    "--lr 0.1": "lr: no such setting, did you mean --model.optimizer.lr?",
    "--alpha 0.1": "alpha: no such setting, did you mean --data.partition.alpha?",
    "--batch-size 8": "batch-size: no such setting, did you mean --data.batch_size?",
    "--epochs 8": "epochs: no such setting, did you mean --model.local_epochs or --rounds?",
    "--clients 8": "clients: no such setting, did you mean --data.num_clients?",
    "--mu=0.1": "mu: no such setting, did you mean --model.mu?",
    "--optimizer.lr 1": "optimizer.lr: no such setting, did you mean --model.optimizer.lr?",
    "--model.lr 1": "model.lr: no such setting, did you mean model.optimizer.lr?",
    "--data HuggingFace --data.path x": "data.path: no such setting of HuggingFace, which has ",
    "--data.alpha 1": "data.alpha: no such setting, did you mean data.partition.alpha?",
    "--model.net torchvision.models.ResNet": "model.net.block: must be given",
    f"{LINEAR} 1000": "model.net: digits has 10 classes, the net gives 1000 logits",
    "--model.gamma": "model.gamma: needs a value",
    "--model.gamma --rounds 3": "model.gamma: needs a value",
    "extra": "config: a setting is a flag, --KEY VALUE, and this is none (got extra)",
    "--trainer.precision 8": "trainer.precision: must be one of 64, 32, 16, 'transformer-engine', ",
    "--resume": "resume: which run? give its folder",
    "--quiet 3": "quiet: must be true or false (got 3)",
    "--config nowhere.yaml": "config: no such file",
    "--config=nowhere.yaml": "config: no such file",
    "--config quickstrat.yaml": "config: no such file, did you mean quickstart.yaml?",
    "--config goood.yaml": "config: no such file, did you mean good.yaml?",
    "--config confg.yaml": "config: no such file (fedgkd-pl configs lists ours) (got confg.yaml)",
    "--config folder": "config: is a folder (got folder)",
    f"--config {300 * 'x'}": "config: no such file",
    "--config https://localhost/x.yaml": "config: no such file",
    "--config good.yaml --config twice.yaml": "rounds: is given twice, again in line 2",
    "--config=twice.yaml": "rounds: is given twice, again in line 2",
    "--model twice.yaml": "model: rounds: is given twice, again in line 2",
    "--ckpt_path nowhere.ckpt": "ckpt_path: no such file (got nowhere.ckpt)",
    "--ckpt_path good.yaml": "ckpt_path: cannot be read as a checkpoint",
}


def in_a_file(key: str, value: str) -> str:
    """A config that sets one value, whose classes are those that were chosen before."""
    *groups, last = key.split(".")
    if groups == ["model", "optimizer"]:
        value = f"{{class_path: torch.optim.SGD, init_args: {{{last}: {value}}}}}"
        groups, last = ["model"], "optimizer"
    text = f"{last}: {value}"
    for group in reversed(groups):
        inside = group in CLASSES and not text.startswith("init_args")
        text = f"{group}: {{{'init_args: {' * inside}{text}{'}' * inside}}}"
    return text + "\n"


CASES = [
    *(pytest.param(["--config", "bad.yaml"], *case, id=name) for name, case in FILES.items()),
    *(
        pytest.param(["--config", "bad.yaml"], in_a_file(key, value), answer, id=f"{key}: {value}")
        for key, value, answer in VALUES
    ),
    *(
        pytest.param(
            *([f"--{key}={value}"], "", answer),
            id=f"--{key}={value}",
            marks=[] if (key, value) in AS_FLAGS else pytest.mark.slow,
        )
        for key, value, answer in VALUES
    ),
    *(pytest.param(words.split(), "", answer, id=words[:80]) for words, answer in FLAGS.items()),
]


@pytest.mark.parametrize(("words", "config", "answer"), CASES)
def test_bad_input_is_answered_in_one_line(
    run: Run, tmp_path: Path, words: list[str], config: str | bytes, answer: str
) -> None:
    (tmp_path / "bad.yaml").write_bytes(config.encode() if isinstance(config, str) else config)
    (tmp_path / "good.yaml").write_text("rounds: 3\n")
    (tmp_path / "twice.yaml").write_text("rounds: 3\nrounds: 3\n")
    (tmp_path / "broken.py").write_text("def :\n")
    (tmp_path / "lacking.py").write_text("import os\nimport nonexist\n")
    (tmp_path / "raising.py").write_text("\n\n1 / 0\n")
    (tmp_path / "few.json").write_text("[[0], [1], [2], [3]]")
    (tmp_path / "folder").mkdir()
    before = tree(tmp_path)
    code, out, err = run("fit", *QUICK, *words)
    assert code == 2, err
    assert len(err.splitlines()) == 1, err
    assert err.startswith(f"error: {answer}"), err
    assert len(err) < 700 and not out
    assert tree(tmp_path) == before, "something was written"


def tree(folder: Path) -> dict[Path, bytes]:
    files = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {path: path.read_bytes() if path.is_file() else b"" for path in files}


VARIABLES = [
    ("ROUNDS", "ten", "rounds: must be a whole number (got ten)"),
    ("SEED_EVERYTHING", "-1", "seed_everything: must be from 0"),
    ("TRAINER", "5", "trainer: expected settings below it, key: value (got 5)"),
    ("TRAINER__DEVICES", "4", "trainer.devices: the server takes one device"),
    ("CHECKPOINT__MONITOR", "val_acc", "checkpoint.monitor: no such score, did you mean val/acc?"),
    ("CKPT_PATH", "x" * 300, "ckpt_path: no such file (got xxx"),
    ("CONFIG", "twice.yaml", "rounds: is given twice, again in line 2"),
    ("CONFIG", "{rounds: 1, rounds: 2}", "config: rounds: is given twice, again in line 1"),
    ("CONFIG", "nowhere.yaml", "config: File does not exist"),
    ("DATA", "os.system", "data: a config may name classes of fedgkd_pl, "),
]


@pytest.mark.parametrize(("name", "value", "answer"), VARIABLES)
def test_variables_are_read_as_strictly(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, answer: str
) -> None:
    (tmp_path / "twice.yaml").write_text("rounds: 3\nrounds: 3\n")
    monkeypatch.setenv(f"FEDGKD_FIT__{name}", value)
    words = ("--model", "FedAvg", "--model.net", "fedgkd_pl.MLP", "--data", "Digits")
    code, _, err = run("fit", *words)
    assert code == 2 and len(err.splitlines()) == 1 and err.startswith(f"error: {answer}"), err


CANARY = """\
open("canary", "w").close()
from torch import nn
class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 10)
def net() -> nn.Module:
    return Net()
"""
NOT_OURS = [
    *("canary.Net", "canary.net", "os.system", "torch.os.system", "torch.hub.load", "torch.load"),
    *("torch.fx.graph_module.reduce_graph_module", "torch.utils.cpp_extension.load"),
    *("torch.nn.functional.torch.load", "lightning.pytorch.cli.sys.exit", "builtins.eval"),
    *(
        "torch.ops.load_library",
        "jsonargparse.set_parsing_settings",
        "fedgkd_pl.settings.request.import_module",
    ),
]


KEYS = ["model", "model.optimizer", "model.engine", "trainer.callbacks", "data", "data.partition"]


@pytest.mark.parametrize(
    ("key", "path"),
    [("model.net", path) for path in NOT_OURS] + [(key, NOT_OURS[0]) for key in KEYS],
)
def test_a_config_imports_no_strangers(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, path: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "canary.py").write_text(CANARY)
    (tmp_path / "bad.yaml").write_text(in_a_file(key, path))
    for words in (("--config", "bad.yaml"), (f"--{key}", path)):
        code, _, err = run("fit", *QUICK, *words)
        assert code == 2 and len(err.splitlines()) == 1, err
        top = path.partition(".")[0]
        if top in ("canary", "jsonargparse"):
            assert err.startswith(f"error: {key}: add --import {top} if it is yours; alone, a conf")
        else:  # nobody's own
            assert err.startswith(f"error: {key}: a config may name classes of fedgkd_pl, torch.nn")
            assert "your own come in with --import" in err
    assert not (tmp_path / "canary").exists() and "canary" not in sys.modules


def test_text_is_never_made_into_a_module(run: Run, tmp_path: Path) -> None:
    """torch has a function for it, which returns a Module as a net must."""
    code = "open('canary', 'w').close()\ndef forward(self, x): return x\n"
    spec = {"import_block": "", "body": {"_code": code, "_graphmodule_cls_name": "Net"}}
    path = "torch.fx.graph_module.reduce_graph_module"
    net = dumps({"class_path": path, "init_args": spec})
    assert run("fit", *QUICK, "--model.net", net)[0] == 2
    assert not (tmp_path / "canary").exists()


def test_what_is_imported_may_be_named(run: Run, tmp_path: Path) -> None:
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text(CANARY)
    (tmp_path / "own.yaml").write_text("model: {init_args: {net: my_package.nets.Net}}\n")
    words = ("fit", *QUICK, "--rounds", "1", "--config", "own.yaml")
    assert run(*words)[0] == 2
    code, _, err = run(*words, "--import=my_package.nets")
    assert code == 0, err


SHAPES = """\
from torch import nn
class Wide(nn.Linear):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__(64, 10)
class ShapeCNN(nn.Linear):
    def __init__(self, width: int = 8) -> None:
        super().__init__(64, 10)
"""


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    """A package of the user's with two nets in a module, one of them offered by the package."""
    package = tmp_path / "shapes_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from fedgkd_pl import FedAvg\nfrom shapes_of_mine.net import ShapeCNN\n"
        "class ShapedNet(FedAvg):\n    pass\n"
    )
    (package / "net.py").write_text(SHAPES)
    return package


@pytest.mark.parametrize(
    ("key", "given", "answer"),
    [
        ("model.net", "ShapeNet", "did you mean shapes_of_mine.ShapeCNN?"),
        ("model.net", "nets.ShapeCNN", "did you mean shapes_of_mine.ShapeCNN?"),
        ("model.net", "Wide", "did you mean shapes_of_mine.net.Wide?"),
        ("model.net", "Net", "shapes_of_mine has ShapeCNN, net.Wide"),
        ("model.net", "net.Xyz", "shapes_of_mine.net has ShapeCNN, Wide"),
        ("model", "ShapeNet", "did you mean shapes_of_mine.ShapedNet?"),
        ("model.optimizer", "Net", "(got shapes_of_mine.Net)"),
    ],
)
def test_a_class_that_the_users_module_lacks(
    run: Run, shapes: Path, key: str, given: str, answer: str
) -> None:
    """A class that fits is suggested, never a module or a method in place of a net."""
    words = ("--import", shapes.name, f"--{key}", f"{shapes.name}.{given}")
    code, _, err = run("fit", *QUICK, *words)
    assert code == 2 and len(err.splitlines()) == 1, err
    got = "" if answer.startswith("(got") else f" (got {shapes.name}.{given})"
    assert re.sub("class[,:]", "class", err) == f"error: {key}: no such class {answer}{got}\n"


def test_a_later_class_drops_the_arguments_of_an_earlier_one(
    run: Run, shapes: Path, tmp_path: Path
) -> None:
    for name, init_args in (("net.Wide", "hidden: 5"), ("ShapeCNN", "width: 4")):
        net = f"{{class_path: {shapes.name}.{name}, init_args: {{{init_args}}}}}"
        file = tmp_path / f"{name.rpartition('.')[2]}.yaml"
        file.write_text(f"model: {{init_args: {{net: {net}}}}}\n")
    first = ("fit", *QUICK, "--import", shapes.name, "--config", "Wide.yaml")
    flags = ("--model.net", f"{shapes.name}.ShapeCNN", "--model.net.width", "4")
    for later in (("--config", "ShapeCNN.yaml"), flags):
        code, out, err = run(*first, *later, "--print_config")
        assert code == 0, err
        net = yaml.safe_load(out)["model"]["init_args"]["net"]
        assert net == {"class_path": f"{shapes.name}.ShapeCNN", "init_args": {"width": 4}}


def test_an_error_of_an_earlier_file_names_that_file(
    run: Run, shapes: Path, tmp_path: Path
) -> None:
    """Each file must stand on its own, so a later one does not help."""
    (tmp_path / "gone.yaml").write_text(f"model: {{init_args: {{net: {shapes.name}.Gone}}}}\n")
    later = ("--config", "gone.yaml", "--model.net", f"{shapes.name}.ShapeCNN")
    code, _, err = run("fit", *QUICK, "--import", shapes.name, *later)
    assert code == 2 and len(err.splitlines()) == 1, err
    assert err.startswith("error: model.net: no such class: ")
    assert err.endswith(f"(got {shapes.name}.Gone) (in gone.yaml)\n")


def test_a_process_says_one_line(tmp_path: Path) -> None:
    """Warnings too would go to stderr."""
    words = [sys.executable, "-m", "fedgkd_pl", "fit", *QUICK, "--data.num_clients", "0"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: data.num_clients: must be at least 1 (got 0)\n"


def test_yaml_means_what_it_meant() -> None:
    from fedgkd_pl.settings.strict_yaml import load

    text = "base: &base {a: 1e-3, b: on, c: 2024-01-01, d: ~}\nmore: {<<: *base, a: .5, e: 0x10}\n"
    base = {"a": 0.001, "b": True, "c": "2024-01-01", "d": None}
    assert load(text) == {"base": base, "more": base | {"a": 0.5, "e": 16}}


# -- data --------------------------------------------------------------------------------------

MINE = """
import torch
from fedgkd_pl import FederatedDataModule
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.transforms import Scale


class Words(torch.nn.Module):
    vocab_size, pad_id = 4, 0

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(4, 8), torch.nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.embed(x.long()).mean(1))


class Mine{number}(FederatedDataModule):
    name = "mine"
    num_classes = 10

    def load(self) -> Splits:
        x, y = torch.rand(200, 64), torch.arange(200) % 10
        test_x, test_y = x[:20].clone(), y[:20].clone()
        {change}
        return Splits(Examples(x, y, Scale(1)), Examples(test_x, test_y, Scale(1)))
"""
OWN = {
    "label out of range": ("y[7] = 10", "data: train label at 7 is outside 0..9"),
    "negative label": ("test_y[3] = -1", "data: test label at 3 is outside 0..9"),
    "labels not integers": ("y = y.float()", "data: train labels must be one int64 per sample"),
    "NaN pixels": ("x[5, 1] = float('nan')", "data: train input at 5 has NaN or Inf"),
    "different lengths": ("y = y[:-1]", "data: train has 200 inputs and 199 labels"),
    "no test samples": ("test_x, test_y = x[:0], y[:0]", "data: there are no test samples"),
    "wrong size": ("test_x = test_x[:, :60]", "data: test inputs must be like those of train"),
    "another size than the net's": ("x, test_x = x[:, :9], test_x[:, :9]", "model.net: does not"),
    "a token beyond the vocabulary": (
        "x = torch.randint(0, 4, (200, 5)); test_x = x[:20].clone(); test_x[0, 0] = 4",
        "model.net: does not take mine inputs of shape (2, 5): index out of range",
    ),
}


@pytest.mark.parametrize("case", OWN)
def test_bad_data_is_answered_in_one_line(run: Run, tmp_path: Path, case: str) -> None:
    change, answer = OWN[case]
    number = list(OWN).index(case)
    module = f"bad_data_{number}"
    (tmp_path / f"{module}.py").write_text(MINE.format(change=change, number=number))
    words = ["--import", module, "--data", f"{module}.Mine{number}"]
    if "token" in case:
        words += ["--model.net", f"{module}.Words"]
    before = tree(tmp_path)
    code, out, err = run("fit", *QUICK, *words)
    assert code == 2 and len(err.splitlines()) == 1 and not out, err
    assert err.startswith(f"error: {answer}"), err
    assert tree(tmp_path) == before


def _cifar(folder: Path, content: bytes) -> None:
    from torchvision.datasets import CIFAR10

    (folder / CIFAR10.base_folder).mkdir()
    for name, _ in (*CIFAR10.train_list, *CIFAR10.test_list):
        (folder / CIFAR10.base_folder / name).write_bytes(content)


FILES_OF_CIFAR = {
    "wrong hash": (
        lambda good: good,
        True,
        "cifar-10-batches-py/data_batch_1 is damaged or not the original",
    ),
    "truncated pickle": (lambda good: good[:-50], False, "data_batch_1 cannot be read"),
    "forbidden global": (
        lambda good: b"cos\nsystem\n(S'touch canary'\ntR.",
        *(False, "data_batch_1 cannot be read (it names os.system)"),
    ),
    "empty": (lambda good: b"", False, "data_batch_1 cannot be read"),
}


@pytest.mark.parametrize("case", FILES_OF_CIFAR)
def test_bad_data_files_are_answered_in_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    from torchvision.datasets import CIFAR10

    from tests.support.formats import pixels, python2_pickle

    change, is_checked, answer = FILES_OF_CIFAR[case]
    content = change(python2_pickle(pixels(), [1, 2]))
    _cifar(tmp_path, content)
    if not is_checked:  # what the parser itself says
        known = md5(content).hexdigest()
        for files in ("train_list", "test_list"):
            monkeypatch.setattr(CIFAR10, files, [[n, known] for n, _ in getattr(CIFAR10, files)])
    before = tree(tmp_path)
    words = ("--data", "CIFAR10", "--data.data_dir", ".", "--model.net", "ResNet8")
    code, out, err = run("fit", *QUICK, *words)
    assert code == 2 and len(err.splitlines()) == 1 and not out, err
    assert err.startswith(f"error: data.data_dir: {answer}"), err
    assert tree(tmp_path) == before
