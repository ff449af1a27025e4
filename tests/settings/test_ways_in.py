"""What a stranger's run folder, config or study can do: nothing but be read, or refused.

Payloads are harmless: a pickle or module that makes a file (the canary, which must not appear), a
path to a file of the user's (the thesis, which must stay as it is).
"""

import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from fedgkd_pl import Digits, TextClassifier, read_checkpoint
from fedgkd_pl.cli.main import main
from fedgkd_pl.data.datasets.text import load_tokenizer
from fedgkd_pl.errors import SettingError
from fedgkd_pl.experiments.draw import KINDS as FIGURES
from fedgkd_pl.settings.allowed import _things
from fedgkd_pl.settings.places import PLACES
from fedgkd_pl.storage.checkpoint import CheckpointDamaged
from fedgkd_pl.storage.checkpoint_io import SafeCheckpointIO
from fedgkd_pl.storage.files import write_text

pytestmark = pytest.mark.long

FLAGS = ("--model.engine.workers", "1", "--trainer.enable_progress_bar", "false")
CALLBACKS = [
    "LocalModels",
    {"class_path": "FeatureMap", "init_args": {"every_n_rounds": 2, "max_samples": 40}},
    {
        "class_path": "ModelCheckpoint",
        "init_args": {"monitor": "test/loss", "filename": "mine", "save_top_k": 1},
    },
]
STUDY = """
# A study of one cell
name: study
config: smoke.yaml
set: {rounds: 2, model.engine.workers: 1}
measures: [best]
rows: []
axes: {method: {FedGKD: {}}}
""".lstrip()
Answer = tuple[int, str, str]
Call = Callable[..., Answer]


class Run:
    """A pickle that makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds with every file that a run may leave."""
    top = tmp_path_factory.mktemp("original")
    words = ["--output_dir", str(top), "--rounds", "2", "--profile", *FLAGS]
    words += ["--trainer.callbacks", json.dumps(CALLBACKS)]
    assert main(["fit", "--config", "smoke.yaml", *words]) == 0
    folder = top / "smoke" / "version_0"
    told = ["--config", str(folder / "config.yaml"), "--ckpt_path", str(folder)]
    assert main(["predict", *told]) == 0
    return folder


class World:
    """A user's folder: a thesis, a stranger's run, and the current folder."""

    def __init__(self, top: Path, original: Path, capfd: Any) -> None:
        self.top = top
        self.folder = top / "strangers" / "run"
        shutil.copytree(original, self.folder, symlinks=True)
        self.thesis = top / "thesis.txt"
        self.thesis.write_text("precious")
        self.canary = top / "canary"
        self.here = top / "here"
        self.here.mkdir()
        self.capfd = capfd

    def run(self, *words: object, seconds: int = 120) -> Answer:
        """A command: it must end, with at most one line of error, and change nothing elsewhere."""
        before = self.elsewhere()
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(seconds)
        try:
            code = main([str(word) for word in words])
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            signal.alarm(0)
        out, err = self.capfd.readouterr()
        assert "Traceback" not in err, err
        assert code in (0, 2, 3, 4), err
        assert err.count("error: ") == (1 if code else 0), err
        self.check()
        if code:
            assert self.elsewhere() == before
        return code, out, err

    def refused(self, *words: object) -> str:
        """A command that is bad input."""
        before = self.files()
        code, _, err = self.run(*words)
        assert code == 2 and len(err.splitlines()) == 1, err
        assert self.files() == before, "something was written"
        return err

    def check(self) -> None:
        assert not self.canary.exists(), "a stranger's code ran"
        assert self.thesis.read_text() == "precious"

    def elsewhere(self) -> set[Path]:
        """All that there is outside of the stranger's folder."""
        found = (path for path in self.top.rglob("*") if not path.is_relative_to(self.folder))
        return set(found)

    def files(self) -> dict[Path, tuple[int, int]]:
        found = (path for path in self.folder.rglob("*") if path.name != ".lock")
        return {
            p: (p.lstat().st_size, p.lstat().st_mtime_ns)
            for p in found
            if not p.is_dir() or p.is_symlink()
        }

    def config(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Changes the run's own config."""
        file = self.folder / "config.yaml"
        settings = yaml.safe_load(file.read_text())
        change(settings)
        file.write_text(yaml.safe_dump(settings))

    def checkpoint(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Changes the run's last checkpoint, and seals it again."""
        file = self.folder / "checkpoints" / "last.ckpt"
        content = read_checkpoint(file)
        change(content)
        file.unlink()
        SafeCheckpointIO().save_checkpoint(content, file)
        shutil.copy(file, file.with_name("last.previous.ckpt"))


def _too_long(*_: object) -> None:
    raise TimeoutError("a command hangs")


@pytest.fixture
def world(
    tmp_path: Path, original: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    found = World(tmp_path, original, capfd)
    monkeypatch.chdir(found.here)
    capfd.readouterr()
    yield found
    found.check()


# -- what a config may name ------------------------------------------------------------------------

IO = {"class_path": "lightning.pytorch.plugins.TorchCheckpointIO", "init_args": {}}
HOSTILE_NAMES: list[tuple[str, Any]] = [
    ("trainer.plugins", [IO]),
    ("trainer.plugins", "TorchCheckpointIO"),
    ("trainer.plugins", "lightning.fabric.plugins.io.torch_io.TorchCheckpointIO"),
    ("trainer.plugins", "lightning.pytorch.plugins.AsyncCheckpointIO"),
    ("trainer.strategy", {"class_path": "SingleDeviceStrategy", "init_args": {"device": "cpu"}}),
    ("trainer.strategy", "lightning.pytorch.strategies.DDPStrategy"),
    ("trainer.accelerator", "lightning.pytorch.accelerators.CPUAccelerator"),
    ("trainer.logger", "lightning.pytorch.loggers.LitLogger"),
    ("trainer.callbacks", ["lightning.pytorch.cli.SaveConfigCallback"]),
    ("model", "fedgkd_pl.FedAvg.load_from_checkpoint"),
    ("data", "fedgkd_pl.Digits.load_from_checkpoint"),
    ("model.net", "lightning.pytorch.LightningModule.load_from_checkpoint"),
    ("model.net", "torch.nn.Module.load_state_dict"),
    ("model.net", "torch.nn.parallel.DataParallel"),
    ("model.net", "torch.jit.load"),
    ("model.net", "torch.optim.swa_utils.AveragedModel"),
    ("model.net", "torchvision.datasets.utils.download_url"),
    ("model.net", "torchvision.models._api.load_state_dict_from_url"),
    ("model.net", "torchvision.io.read_file"),
    ("model.net", "torchmetrics.image.fid.FrechetInceptionDistance"),
    ("model.net", "transformers.AutoModel.from_pretrained"),
    ("model.net", "fedgkd_pl.read_checkpoint"),
    ("model.net", "fedgkd_pl.data.downloads.extract"),
    ("model.optimizer", "torch.optim.SGD.load_state_dict"),
    ("model.optimizer", "torch.optim.Optimizer.add_param_group"),
    (
        "trainer.callbacks",
        [
            {
                "class_path": "LambdaCallback",
                "init_args": {
                    "on_fit_start": "lightning.pytorch.callbacks.ModelCheckpoint._link_checkpoint"
                },
            }
        ],
    ),
]


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return dict(value)


@pytest.mark.parametrize(("key", "value"), HOSTILE_NAMES, ids=lambda value: str(value)[-60:])
def test_a_config_names_only_what_is_needed(world: World, key: str, value: Any) -> None:
    if key.startswith("model.") and isinstance(value, str):
        settings: dict[str, Any] = {"model": {"init_args": {key[6:]: value}}}
    else:
        settings = nested(key, value)
    (world.here / "bad.yaml").write_text(yaml.safe_dump(settings))
    err = world.refused("fit", "--config", "smoke.yaml", *FLAGS, "--config", "bad.yaml")
    assert err.startswith(f"error: {key}") and not (world.here / "runs").exists()
    told = ("a config may name", "gives no", "expected", "You selected an invalid")
    assert any(text in err for text in told), err


def _both(file: Path, canary: Path) -> None:
    """Makes a checkpoint a pickle, too.

    As opcodes, the size of its header, which comes first, pushes a text that ends within ``a``. A V
    there takes all up to the end of the line, which is the end of the header; the first tensor is
    what torch's reader then runs.
    """
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    payload = pickle.dumps(Run(canary))
    payload += b" " * (-len(payload) % 8)
    manifest = {"a": "V" * 300} | header.pop("__metadata__")
    for entry in header.values():
        entry["data_offsets"] = [end + len(payload) for end in entry["data_offsets"]]
    first = {"dtype": "U8", "shape": [len(payload)], "data_offsets": [0, len(payload)]}
    text = json.dumps({"__metadata__": manifest, "payload": first, **header}).encode()
    length = max(40, len(text) // 256 + 1)
    assert length < 256
    sizes = bytes([ord("U"), length, *bytes(6)])
    text = text.ljust(int.from_bytes(sizes, "little") - 1) + b"\n"
    whole = sizes + text + payload + content[8 + size : -32]
    file.write_bytes(whole + hashlib.sha256(whole).digest())


def test_a_strangers_folder_brings_no_checkpoint_plugin(world: World) -> None:
    """The run's config.yaml names torch's reader, which would run what last.ckpt holds."""
    file = world.folder / "checkpoints" / "last.ckpt"
    rounds = read_checkpoint(file)["global_step"]
    _both(file, world.canary)
    assert read_checkpoint(file)["global_step"] == rounds  # sound
    with pytest.raises(RuntimeError, match="Invalid magic number"):
        torch.load(file, weights_only=False)
    world.canary.unlink()  # so it does run

    def change(settings: dict[str, Any]) -> None:
        settings["trainer"]["plugins"] = [IO]
        settings["weights_only"] = False

    world.config(change)
    err = world.refused("fit", "--resume", world.folder, "--rounds", "3")
    assert err.startswith("error: trainer.plugins: a config may name classes of fedgkd_pl, "), err


def test_the_users_own_checkpoint_plugin_is_for_python(world: World) -> None:
    text = "from lightning.pytorch.plugins import TorchCheckpointIO\nclass Mine(TorchCheckpointIO):"
    (world.here / "my_io.py").write_text(f"{text}\n    def __init__(self): super().__init__()\n")
    words = ("--import", "my_io", "--trainer.plugins", "my_io.Mine")
    err = world.refused("fit", "--config", "smoke.yaml", *FLAGS, *words)
    assert err.startswith("error: trainer.plugins: a CheckpointIO is for Python"), err


GOOD = [
    ("trainer.callbacks", ["EarlyStopping"], {"monitor": "val/acc"}),
    ("trainer.callbacks", ["lightning.pytorch.callbacks.LearningRateMonitor"], {}),
    ("trainer.callbacks", ["lightning.pytorch.callbacks.EMAWeightAveraging"], {}),
    ("trainer.callbacks", ["fedgkd_pl.callbacks.drift.ClientDrift"], {}),
    ("trainer.logger", "lightning.pytorch.loggers.CSVLogger", {"save_dir": "logs"}),
    ("trainer.profiler", "SimpleProfiler", {"dirpath": "profiles", "filename": "x"}),
    ("model.scheduler", "torch.optim.lr_scheduler.StepLR", {"step_size": 3}),
    ("model.server_optimizer", "torch.optim.AdamW", {"lr": 0.1}),
    ("model.net", "torch.nn.Linear", {"in_features": 64, "out_features": 10}),
    ("model.net", "torchvision.models.resnet18", {"num_classes": 10}),
    ("model.net", "torchvision.models.ResNet", {"block": "x", "layers": [1, 1, 1, 1]}),
]


@pytest.mark.parametrize(("key", "name", "arguments"), GOOD, ids=lambda value: str(value)[-50:])
def test_what_is_needed_can_be_named(world: World, key: str, name: Any, arguments: Any) -> None:
    path = name[0] if isinstance(name, list) else name
    spec: Any = {"class_path": path, "init_args": arguments}
    words = (f"--{key}", json.dumps([spec] if isinstance(name, list) else spec), "--print_config")
    code, out, err = world.run("fit", "--config", "smoke.yaml", *words)
    if path.endswith("ResNet"):  # whose first argument is a class that may not be named
        assert code == 2 and "class" in err
        return
    assert code == 0, err
    assert path.rpartition(".")[2] in out


def test_every_argument_that_may_be_a_place_is_known() -> None:
    """A new version of Lightning may bring more of them."""
    harmless = {
        "data_dir",  # where data is read from; what is written there is the data's cache
        "train_file",
        "path",  # of a partition, of cohorts or of own data: read as data
        "test_path",
        "profiler_kwargs",
        "filename",  # refused if it climbs
        "sub_dir",
        "add_file_policy",  # a word
        "ray_address",  # see below
    }
    found = {
        name
        for thing in _things()
        if thing.__module__.startswith(("lightning.", "fedgkd_pl."))
        for name in signature(thing).parameters
        if any(word in name for word in "dir path file folder root uri url location addr".split())
    }
    assert {"dirpath", "save_dir", "tracking_uri", "folder", "data_dir"} <= found
    assert found - {"root_dir", "log_dir"} <= PLACES | harmless


def test_a_file_brings_no_address_of_a_cluster(world: World) -> None:
    """What Ray sends back is pickles: the user says from where."""
    pytest.importorskip("jsonargparse")
    engine = {"class_path": "RayEngine", "init_args": {"ray_address": "ray://evil:10001"}}
    (world.here / "ray.yaml").write_text(
        yaml.safe_dump({"model": {"init_args": {"engine": engine}}})
    )
    err = world.refused("fit", "--config", "smoke.yaml", "--config", "ray.yaml")
    assert err.startswith("error: model.engine.ray_address: is where code is sent to"), err


def test_a_text_in_a_config_is_no_pipe_to_wait_for(world: World) -> None:
    os.mkfifo(world.top / "pipe")
    for key in ("model", "data", "trainer.callbacks"):
        value: Any = str(world.top / "pipe")
        settings = nested(key, [value] if key.endswith("s") else value)
        (world.here / "bad.yaml").write_text(yaml.safe_dump(settings))
        words = ("fit", "--config", "smoke.yaml", "--config", "bad.yaml")
        assert world.run(*words, seconds=30)[0] == 2


# -- places outside of the folder ------------------------------------------------------------------


def _callback(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"callbacks": [{"class_path": name, "init_args": arguments}]}


def _logger(name: str, /, **arguments: Any) -> dict[str, Any]:
    path = f"lightning.pytorch.loggers.{name}"
    return {"logger": {"class_path": path, "init_args": arguments}}


def _profiler(**arguments: Any) -> dict[str, Any]:
    return {"profiler": {"class_path": "SimpleProfiler", "init_args": arguments}}


ELSEWHERE: list[tuple[dict[str, Any], str]] = [
    ({"default_root_dir": "{top}"}, "trainer.default_root_dir"),
    ({"default_root_dir": "../elsewhere"}, "trainer.default_root_dir"),
    (_logger("CSVLogger", save_dir="{top}"), "trainer.logger.save_dir"),
    (_logger("CSVLogger", save_dir="logs"), "trainer.logger.save_dir"),
    (_logger("CSVLogger", save_dir="{run}", name="../../.."), "trainer.logger.name"),
    (_logger("CSVLogger", save_dir="{run}", version="{top}"), "trainer.logger.version"),
    (_logger("TensorBoardLogger", save_dir="{run}", sub_dir="../.."), "trainer.logger.sub_dir"),
    (_logger("TensorBoardLogger", save_dir="s3://bucket"), "trainer.logger.save_dir"),
    (_logger("WandbLogger", save_dir="{run}"), "trainer.logger"),
    (_logger("MLFlowLogger", save_dir="{run}"), "trainer.logger"),
    (_callback("ModelCheckpoint", dirpath="{top}"), "trainer.callbacks.dirpath"),
    (_callback("ModelCheckpoint", filename="../../x"), "trainer.callbacks.filename"),
    (_callback("OnExceptionCheckpoint", dirpath="mine"), "trainer.callbacks.dirpath"),
    (_callback("RunFiles", folder="{top}"), "trainer.callbacks.folder"),
    (_callback("SpikeDetection", exclude_batches_path="{top}"), "trainer.callbacks.exclude"),
    (_profiler(dirpath="{top}"), "trainer.profiler.dirpath"),
    (_profiler(dirpath="{run}", filename="/x"), "trainer.profiler.filename"),
]


def _filled(value: Any, world: World) -> Any:
    text = json.dumps(value).replace("{top}", str(world.top)).replace("{run}", str(world.folder))
    return json.loads(text)


@pytest.mark.parametrize(("trainer", "key"), ELSEWHERE, ids=lambda value: str(value)[-60:])
def test_a_resumed_folder_names_no_place_elsewhere(
    world: World, trainer: dict[str, Any], key: str
) -> None:
    world.config(lambda settings: settings["trainer"].update(_filled(trainer, world)))
    err = world.refused("fit", "--resume", world.folder, "--rounds", "3")
    assert err.startswith(f"error: {key}") and "own config.yaml may not name" in err, err


def test_a_resumed_folder_names_no_place_for_its_best_round(world: World) -> None:
    world.config(lambda settings: settings["checkpoint"].update(dirpath=str(world.top)))
    err = world.refused("fit", "--resume", world.folder, "--rounds", "3")
    assert err.startswith("error: checkpoint.dirpath: the run's own config.yaml"), err


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_a_runs_own_config_names_no_place_for_other_commands(world: World, command: str) -> None:
    world.config(lambda s: s["trainer"].update(_logger("CSVLogger", save_dir=str(world.top))))
    words = ("--config", world.folder / "config.yaml", "--ckpt_path", world.folder)
    err = world.refused(command, *words)
    assert err.startswith("error: trainer.logger.save_dir: the run's own config.yaml"), err
    if command == "validate":
        code, _, err = world.run(command, *words, "--trainer.logger", "false")
        assert code == 0, err


def test_a_resumed_run_fetches_no_data(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had them when it began; where to they would be written, its config says."""
    data = {"class_path": "CIFAR10", "init_args": {"data_dir": str(world.top / "data")}}
    world.config(lambda settings: settings.update(data=data))
    fetched: list[object] = []
    monkeypatch.setattr("fedgkd_pl.data.datasets.cifar.fetch", lambda *words: fetched.append(words))
    code, _, err = world.run("fit", "--resume", world.folder, "--rounds", "3")
    assert code == 2 and not fetched and not (world.top / "data").exists(), err


def test_what_the_user_names_too_is_their_own(world: World) -> None:
    logger = _logger("CSVLogger", save_dir="logs", name="x")
    (world.here / "mine.yaml").write_text(yaml.safe_dump({"trainer": logger}))
    new = ("fit", "--config", "smoke.yaml", *FLAGS, "--rounds", "1")
    assert world.run(*new, "--config", "mine.yaml", "--name", "new")[0] == 0
    run = world.here / "runs" / "new" / "version_0"
    err = world.refused("fit", "--resume", run, "--rounds", "2")
    assert err.startswith("error: trainer.logger.save_dir: the run's own config.yaml"), err
    for words in (("--trainer.logger.save_dir", "logs"), ("--config", "mine.yaml")):
        rounds = 2 if words[0] != "--config" else 3
        code, _, err = world.run("fit", "--resume", run, "--rounds", rounds, *words)
        assert code == 0, err


# -- what a checkpoint says of files ---------------------------------------------------------------


def _names(world: World, how: str) -> str:
    """A name of the thesis, below the second ModelCheckpoint's folder where that is said."""
    checkpoints = world.folder / "checkpoints"
    if how == "absolute":
        return str(world.thesis)
    if how == "climbs":
        return f"{checkpoints}/../../../thesis.txt"
    (checkpoints / "inside").symlink_to(world.top)  # and a link within the folder
    return f"{checkpoints}/inside/thesis.txt"


@pytest.mark.parametrize("how", ["absolute", "climbs", "link"])
@pytest.mark.parametrize(
    "key",
    ["best_model_path", "best_k_models", "kth_best_model_path", "last_model_path", "a_file_path"],
)
def test_a_checkpoint_names_no_files_elsewhere(world: World, key: str, how: str) -> None:
    name = _names(world, how)

    def change(checkpoint: dict[str, Any]) -> None:
        states = checkpoint["callbacks"]
        mine = next(key for key in states if key.startswith("ModelCheckpoint"))
        states[mine]["dirpath"] = str(world.folder / "checkpoints")
        states[mine][key] = {name: torch.tensor(9.0)} if key == "best_k_models" else name

    world.checkpoint(change)
    before = world.files()
    with pytest.raises(CheckpointDamaged, match="names a file outside its folder"):
        SafeCheckpointIO().load_checkpoint(world.folder / "checkpoints" / "last.ckpt")
    if how != "absolute" or key == "best_k_models":
        code, _, err = world.run("fit", "--resume", world.folder, "--rounds", "4")
        assert code == (2 if how == "link" else 4), err  # a link is refused before all else
    if key == "best_k_models":
        code, _, err = world.run("fit", "--config", "smoke.yaml", "--ckpt_path", world.folder)
        assert code == 2 and "names a file outside its folder" in err, err
    assert world.files() == before


@pytest.mark.parametrize("how", ["climbs", "link"])
@pytest.mark.parametrize("monitor", ["test/loss", None])
def test_a_better_round_removes_no_file_elsewhere(
    world: World, monitor: str | None, how: str
) -> None:
    """States that hold together: Lightning removes the worst of the files that they name."""
    name = _names(world, how)

    def named(settings: dict[str, Any]) -> None:
        settings["trainer"]["callbacks"][-1]["init_args"]["monitor"] = monitor

    def change(checkpoint: dict[str, Any]) -> None:
        states = checkpoint["callbacks"]
        key = next(key for key in states if key.startswith("ModelCheckpoint"))
        state = states.pop(key)
        states[key.replace("'test/loss'", repr(monitor))] = state
        state["dirpath"] = str(world.folder / "checkpoints")
        state |= dict.fromkeys(("best_model_path", "kth_best_model_path"), name)
        if monitor is not None:  # otherwise the best is the newest
            worst = torch.tensor(1e9)
            state |= {"best_k_models": {name: worst}, "kth_value": worst, "best_model_score": worst}

    world.config(named)
    world.checkpoint(change)
    code, _, err = world.run("fit", "--resume", world.folder, "--rounds", "3")
    assert code == (2 if how == "link" else 4), err


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(global_step="3"),
        lambda c: c.update(global_step=10**30),
        lambda c: c.update(state_dict={"x": 1}),
        lambda c: c.update(fedgkd_pl=[]),
        lambda c: c.update(callbacks={"run": {"rows": [{"round": "1"}], "config": {}}}),
        lambda c: c.update(callbacks={"run": {"rows": [{"round": 1, "x": "y"}]}}),
        lambda c: c["callbacks"]["run"].update(config=3),
        lambda c: c.update(callbacks={"x": {"best_k_models": [1]}}),
        lambda c: c.update(callbacks={"x": {"best_model_path": 1}}),
    ],
)
def test_a_checkpoint_of_other_types_is_refused(world: World, change: Any) -> None:
    world.checkpoint(change)
    code, _, err = world.run("fit", "--resume", world.folder, "--rounds", "3")
    assert code in (2, 4) and "not a checkpoint" in err, err


def test_a_moved_folder_is_resumed_and_keeps_its_best_round(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a relative path; it was made elsewhere."""
    best = sorted(file.name for file in (world.folder / "checkpoints").glob("best-*.ckpt"))
    assert best
    monkeypatch.chdir(world.folder.parent)
    code, _, err = world.run("fit", "--resume", "run", "--rounds", "3")
    assert code == 0, err
    state = read_checkpoint(world.folder / "checkpoints" / "last.ckpt")["callbacks"]
    paths = [path for s in state.values() for path in s.get("best_k_models", {})]
    assert paths and all(Path(path).resolve().is_relative_to(world.folder) for path in paths)
    assert all(Path(path).is_file() for path in paths)


def test_best_rounds_are_taken_over_from_the_checkpoints_own_folder(world: World) -> None:
    """Not from where a checkpoint says that they are."""
    other = world.top / "others"
    shutil.copytree(world.folder / "checkpoints", other)
    best = next((world.folder / "checkpoints").glob("best-*.ckpt"))
    mark = other / best.name
    content = read_checkpoint(mark) | {"mark": 1}
    mark.unlink()
    SafeCheckpointIO().save_checkpoint(content, mark)

    def change(checkpoint: dict[str, Any]) -> None:
        for state in checkpoint["callbacks"].values():
            if best.name in str(state.get("best_model_path", "")):
                state.update(dirpath=str(other), best_model_path=str(mark))
                state["best_k_models"] = {str(mark): torch.tensor(1.0)}
                state["kth_best_model_path"] = str(mark)

    world.checkpoint(change)
    settings = ("--config", world.folder / "config.yaml", "--output_dir", "runs")
    code, _, err = world.run("fit", *settings, "--ckpt_path", world.folder, "--rounds", "3")
    assert code == 0, err
    taken = read_checkpoint(world.here / f"runs/smoke/version_0/checkpoints/{best.name}")
    assert "mark" not in taken and taken["global_step"] == content["global_step"]


# -- links -----------------------------------------------------------------------------------------


def test_links_out_of_a_folder_are_not_followed(world: World) -> None:
    names = [p.relative_to(world.folder) for p in world.folder.rglob("*") if p.is_file()]
    names += [Path("error.txt"), Path(".lock"), Path("failures.csv"), Path("hparams.yaml")]
    names += [Path(f".metrics.csv.{os.getpid()}.part"), Path("a/b/c")]
    for name in names:
        file, kept = world.folder / name, world.top / "kept"
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            file.rename(kept)
        file.symlink_to(world.thesis)
        err = world.refused("fit", "--resume", world.folder, "--rounds", "3")
        assert err.startswith("error: resume: has a link that leads out of the folder"), err
        file.unlink()
        if kept.exists():
            kept.rename(file)
    (world.folder / "checkpoints" / "newest.ckpt").symlink_to("last.ckpt")  # as Lightning does
    assert world.run("fit", "--resume", world.folder, "--rounds", "3")[0] == 0


def test_a_folder_that_is_a_link_to_elsewhere(world: World) -> None:
    checkpoints = world.folder / "checkpoints"
    mine = world.top / "mine"
    checkpoints.rename(mine)
    checkpoints.symlink_to(mine)
    before = {file: file.stat().st_mtime_ns for file in mine.iterdir()}
    world.refused("fit", "--resume", world.folder, "--rounds", "3")
    assert {file: file.stat().st_mtime_ns for file in mine.iterdir()} == before


def test_what_is_written_goes_through_no_link(world: World) -> None:
    for name in ("report.html", "summary.json"):
        (world.folder / f".{name}.{os.getpid()}.part").symlink_to(world.thesis)
        write_text(world.folder / name, "text")
        world.check()
        assert (world.folder / name).read_text() == "text"


def test_a_study_through_a_link_is_refused(world: World) -> None:
    (world.here / "study.yaml").write_text(STUDY)
    cell = world.here / "runs" / "study" / "FedGKD-seed0"
    cell.parent.mkdir(parents=True)
    mine = world.top / "mine"
    (mine / "version_0").mkdir(parents=True)
    (mine / "version_0" / "draft.txt").write_text("a draft")
    cell.symlink_to(mine)
    code, _, err = world.run("compare", "study.yaml")
    assert code == 2 and err.startswith("error: output_dir: has a link that leads out"), err
    cell.unlink()
    cell.mkdir()
    (cell / "log.txt").symlink_to(world.thesis)
    assert world.run("compare", "study.yaml")[0] == 2
    assert (mine / "version_0" / "draft.txt").read_text() == "a draft"


# -- studies ---------------------------------------------------------------------------------------

EVIL = ["import", "resume", "debug", "ckpt_path", "output_dir", "name", "print_config", "help"]
SMUGGLED: list[tuple[dict[str, Any], str]] = [
    *(({key: "evilmod"}, "is not a setting") for key in EVIL),
    ({"trainer.fast_dev_run": True}, "is not a setting"),
    ({"model.help": "x"}, "is not a setting"),
    ({"import=evilmod": 1}, "must be a setting's name"),
    ({"rounds 1 --import": "evilmod"}, "must be a setting's name"),
    ({"-import": "evilmod"}, "must be a setting's name"),
    ({"--import": "evilmod"}, "must be a setting's name"),
    ({"import\n": "evilmod"}, "must be a setting's name"),
    ({"": 1}, "must be a setting's name"),
    ({"model.mu": "--import=evilmod"}, "must not begin like a flag"),
    ({"model.mu": "-c"}, "must not begin like a flag"),
    ({"config": ["smoke.yaml", "--import=evilmod"]}, "must not begin like a flag"),
    ({"model.engine.ray_address": "ray://evil:1"}, "is not a setting"),
    ({"model.engine": {"init_args": {"ray_address": "ray://evil:1"}}}, "is not a setting"),
    ({"model.engine": '{"init_args": {"ray_address": "ray://evil:1"}}'}, "is not a setting"),
    ({"FEDGKD_FIT__IMPORT": "evilmod"}, "is not a setting"),
]


@pytest.mark.parametrize(("settings", "told"), SMUGGLED, ids=lambda value: str(value)[:50])
@pytest.mark.parametrize("place", ["set", "axes", "special"])
def test_a_study_imports_nothing(
    world: World,
    settings: dict[str, Any],
    told: str,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (world.here / "evilmod.py").write_text(f"open({str(world.canary)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(world.here)
    study: dict[str, Any] = yaml.safe_load(STUDY)
    if place == "set":
        study["set"] |= settings
    elif place == "axes":
        study["axes"]["method"]["FedGKD"] = settings
    else:
        study["special"] = [{"where": {"method": "FedGKD"}, "set": settings}]
    (world.here / "study.yaml").write_text(yaml.safe_dump(study))
    code, _, err = world.run("compare", "study.yaml", "--dry_run")
    assert code == 2 and told in err, err
    assert "evilmod" not in sys.modules and not (world.here / "runs").exists()


def test_a_study_is_of_a_size_that_can_be_run(world: World) -> None:
    study: dict[str, Any] = yaml.safe_load(STUDY)
    labels = {f"x{n}": {} for n in range(50)}
    study["axes"] |= {f"axis{n}": labels for n in range(8)}
    study["rows"] = [f"axis{n}" for n in range(8)]
    (world.here / "study.yaml").write_text(json.dumps(study))
    err = world.refused("compare", "study.yaml", "--dry_run")
    assert err.startswith("error: axes: a study has at most 10000 cells"), err
    study = yaml.safe_load(STUDY) | {"measures": ["round" + "9" * 5000]}
    (world.here / "study.yaml").write_text(json.dumps(study))
    assert world.refused("compare", "study.yaml").startswith("error: measures: best, final")


# -- hostile runs in reports and figures -----------------------------------------------------------


def _bomb(levels: int = 9) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for n in range(1, levels):
        lines.append(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]")
    return "\n".join(lines)


YAMLS = {
    "refers to itself": "model: &m {init_args: {x: *m}}\n",
    "alias bomb": _bomb(),
    "nested": "x: " + "[" * 20_000 + "]" * 20_000,
    "tag": "x: !!python/object/apply:os.system ['true']\n",
    "large": "x: " + "y" * 1_100_000,
}


@pytest.mark.parametrize("kind", YAMLS)
def test_a_hostile_config_is_no_report(world: World, kind: str) -> None:
    (world.folder / "config.yaml").write_text(YAMLS[kind])
    begun = time.monotonic()
    for words in (("report", "--format", "md"), ("report", "--over_seeds"), ("figure", "curves")):
        err = world.refused(*words, world.folder)
        assert err.startswith("error: runs: not a config.yaml of fedgkd-pl"), err
    assert time.monotonic() - begun < 5
    world.refused("fit", "--resume", world.folder)


NAMES = [r"$\frac$", "$x", "$a$ and $b$", r"\$x$", "a_{b}$^$", "100 $ or 5 $", "_hidden", "a<b>&c"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_no_formula(world: World, name: str) -> None:
    summary = json.loads((world.folder / "summary.json").read_text())
    for key in ("method", "dataset"):
        summary[key] = name
    (world.folder / "summary.json").write_text(json.dumps(summary))
    other = world.folder.parent / "other"
    shutil.copytree(world.folder, other)
    summary["method"] = f"{name} 2"
    (other / "summary.json").write_text(json.dumps(summary))
    world.config(lambda settings: settings["model"]["init_args"].update(lam=name))
    above = world.folder.parent
    if name == NAMES[0]:  # drawing takes a while
        page = ("--format", "html", "--output", world.folder / "r.html")
        assert world.run("report", above, *page)[0] == 0
    for kind in ("curves", "participation", "partition") if "$" in name[:1] else ("curves",):
        output = world.folder / f"{kind}.svg"
        code, _, err = world.run("figure", kind, above, "--output", output)
        assert code == 0, err
    from html import escape

    assert escape(name, quote=False) in (world.folder / "curves.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "content",
    [
        '{"counts": 3}',
        '{"counts": []}',
        '{"counts": [[]]}',
        '{"counts": [[0, 0]]}',
        '{"counts": [[1, 2], [3]]}',
        '{"counts": [[1, -2]]}',
        '{"counts": [[1, 2.5]]}',
        '{"counts": [[1, NaN]]}',
        '{"counts": [[1, "2"]]}',
        '{"counts": [[1, 1' + "0" * 4000 + "]]}",
        '{"counts": {"0": [1]}}',
        '{"counts": ' + "[" * 9000 + "]" * 9000 + "}",
        "[" * 100_000,
        "3",
        "[]",
    ],
    ids=lambda text: text[:40],
)
def test_a_damaged_partition_is_told(world: World, content: str) -> None:
    (world.folder / "partition.json").write_text(content)
    output = ("--output", world.here / "x.svg")
    err = world.refused("figure", "partition", world.folder, *output)
    assert err.startswith("error: runs: not a partition.json of fedgkd-pl"), err
    if content in ('{"counts": 3}', "[]"):  # drawing takes a while
        assert world.refused("report", world.folder, "--format", "html") == err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("method", 3),
        ("method", "a\x1b[2J"),
        ("method", "a\nb"),
        ("method", "\ud800"),
        ("method", "x" * 5000),
        ("dataset", ["x"]),
        ("rounds", 10**400),
        ("rounds", 1.5),
        ("rounds", True),
        ("rounds_asked", "x"),
        ("rounds_asked", float("nan")),
        ("seed", -1),
        ("bytes_down", 10**400),
        ("bytes_up", "x"),
        ("wall_seconds", float("inf")),
        ("best_test_acc", float("nan")),
        ("final_test_acc", 1e308),
        ("final_test_acc", [0.5]),
    ],
)
def test_a_summary_is_checked(world: World, key: str, value: Any) -> None:
    summary = json.loads((world.folder / "summary.json").read_text())
    (world.folder / "summary.json").write_text(json.dumps(summary | {key: value}))
    err = world.refused("report", world.folder)
    assert err.startswith("error: runs: not a summary.json of fedgkd-pl"), err


def test_values_that_are_no_numbers_are_gaps(world: World) -> None:
    lines = (world.folder / "metrics.csv").read_text().splitlines()
    columns = lines[0].split(",")
    for values in (("nan", "inf"), ("1e308", "-1e308"), ("1e308", "1")):
        rows = [",".join([str(n), *[v] * (len(columns) - 1)]) for n, v in enumerate(values, 1)]
        (world.folder / "metrics.csv").write_text("\n".join([lines[0], *rows]) + "\n")
        assert world.run("report", world.folder)[0] == 0
        output = ("--output", world.folder / "curves.png")
        assert world.run("figure", "curves", world.folder, *output)[0] == 0


@pytest.mark.parametrize(
    ("name", "kind", "rows"),
    [
        ("predictions.csv", "confusion", "label,prediction\n1,99999999999\n"),
        ("predictions.csv", "confusion", "label,prediction\n1,1999999\n"),
        ("predictions.csv", "confusion", "label,prediction\n-1,2\n"),
        ("predictions.csv", "confusion", "label,prediction\n1\n"),
        ("local_models.csv", "clients", "round,client,acc\n1,2,inf\n"),
        ("local_models.csv", "clients", "round,client,acc\n" + "9" * 400 + ",2,0.5\n"),
        ("clients.csv", "per_client", "round,client,global_acc,local_acc\n1,2,inf,\n"),
        ("clients.csv", "per_client", "round,client,global_acc,local_acc\n1,2,0.5,nan\n"),
        ("clients.csv", "per_client", "round,client\n1,2\n"),
        ("personalized.csv", "personalized", "client,acc_before,acc_after\n1,0.5,1.5\n"),
        ("personalized.csv", "personalized", "client,acc_before,acc_after\n-1,0.5,1\n"),
        ("metrics.csv", "curves", "round,test/acc\n" + "9" * 400 + ",0.5\n"),
        ("metrics.csv", "curves", "round,test/acc\n1,2,3\n"),
        ("metrics.csv", "curves", "round,test/acc\n" + "9" * 200_000 + ",1\n"),
    ],
)
def test_rows_are_checked(world: World, name: str, kind: str, rows: str) -> None:
    (world.folder / name).write_text(rows)
    err = world.refused("figure", kind, world.folder, "--output", world.here / "x.svg")
    assert err.startswith(f"error: runs: not a {name} of fedgkd-pl"), err


def _npz(**arrays: Any) -> bytes:
    points = np.zeros((2, 2))
    usual: dict[str, Any] = {"global_points": points, "local_points": points, "round": 1}
    usual |= {"labels": np.array([0, 1]), "global_acc": 0.5, "local_acc": 0.5, "client": 1}
    out = io.BytesIO()
    np.savez(out, **(usual | arrays))
    return out.getvalue()


def _npz_bomb() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("labels.npy", bytes(80_000_000))
    return out.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        _npz(labels=np.array([0, 10**9])),
        _npz(labels=np.array(["a", "b"])),
        _npz(global_points=np.array([["a", "b"]] * 2)),
        _npz(global_acc="x"),
        _npz(round=[1, 2]),
        _npz(labels=np.array([], dtype=int), global_points=np.zeros((0, 2))),
        _npz_bomb(),
        b"\x93NUMPY\x01\x00",
    ],
    ids=range(8),
)
def test_feature_maps_are_checked(world: World, content: bytes) -> None:
    file = next(world.folder.glob("features-round*.npz"))
    file.write_bytes(content)
    err = world.refused("figure", "features", world.folder, "--output", world.here / "x.svg")
    assert err.startswith(f"error: runs: not a {file.name} of fedgkd-pl"), err


# -- other readers ---------------------------------------------------------------------------------


def test_data_is_not_loaded_from_a_pickle(world: World) -> None:
    torch.save({"x": Run(world.canary)}, world.top / "bad.ckpt")
    with pytest.raises(CheckpointDamaged):
        Digits.load_from_checkpoint(world.top / "bad.ckpt")
    good = Digits.load_from_checkpoint(world.folder / "checkpoints" / "last.ckpt", num_clients=3)
    assert good.num_clients == 3


def test_an_encoder_brings_no_code(world: World) -> None:
    pytest.importorskip("transformers")
    folder = world.top / "encoder"
    folder.mkdir()
    code = f"open({str(world.canary)!r}, 'w').close()\n"
    (folder / "evil.py").write_text(code)
    names = {"AutoConfig": "evil.C", "AutoModel": "evil.M", "AutoTokenizer": ["evil.T", None]}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": names}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "T", "auto_map": names})
    )
    with pytest.raises(SettingError, match="encoder: not found"):
        TextClassifier(2, str(folder))
    with pytest.raises(SettingError, match="tokenizer: not found"):
        load_tokenizer(str(folder))
    tiny = {"model_type": "distilbert", "n_layers": 1, "dim": 8, "n_heads": 2, "hidden_dim": 8}
    (folder / "config.json").write_text(json.dumps(tiny))
    torch.save({"x": Run(world.canary)}, folder / "pytorch_model.bin")
    with pytest.raises((SettingError, pickle.UnpicklingError)):
        TextClassifier(2, str(folder))
    with pytest.raises(SettingError, match="encoder_config: would need code"):
        TextClassifier(2, encoder_config=tiny | {"attn_implementation": "evil/kernel"})
    assert TextClassifier(2, encoder_config=tiny).vocab_size > 0


# -- every file, every kind, every command ---------------------------------------------------------


def _fifo(file: Path, world: World) -> None:
    os.mkfifo(file)


def _torch_pickle(file: Path, world: World) -> None:
    content = io.BytesIO()  # torch takes not all names
    torch.save({"x": Run(world.canary)}, content)
    file.write_bytes(content.getvalue())


def _link(file: Path, world: World) -> None:
    file.symlink_to(world.thesis)


def _truncated(file: Path, world: World, content: bytes = b"") -> None:
    file.write_bytes(content[: len(content) // 2])


def _giant(file: Path, world: World) -> None:
    with file.open("wb") as out:
        out.truncate(400 * 2**30)


Make = Callable[[Path, World], Any]
KINDS: dict[str, Make] = {
    "empty": lambda file, _: file.write_bytes(b""),
    "binary": lambda file, _: file.write_bytes(bytes(range(256)) * 9),
    "truncated": _truncated,
    "folder": lambda file, _: file.mkdir(),
    "pipe": _fifo,
    "link": _link,
    "dangling": lambda file, world: file.symlink_to(world.top / "nowhere"),
    "device": lambda file, _: file.symlink_to("/dev/zero"),
    "pickle": lambda file, world: file.write_bytes(pickle.dumps(Run(world.canary))),
    "torch pickle": _torch_pickle,
    "alias bomb": lambda file, _: file.write_text(_bomb()),
    "self": lambda file, _: file.write_text(YAMLS["refers to itself"]),
    "nested": lambda file, _: file.write_text("[" * 50_000),
    "JSON": lambda file, _: file.write_text('{"rounds": [], "counts": {}, "round": null}'),
    "numbers": lambda file, _: file.write_text("round,a\n" + "9" * 5000 + ",1e999\n"),
    "NaN": lambda file, _: file.write_text('{"rounds": NaN, "seed": -Infinity}'),
    "control": lambda file, _: file.write_bytes(b"round,\x1b[2J\x00\r\n1,\x07\n"),
    "formula": lambda file, _: file.write_text("round,$\\frac$\n1,$x$\n"),
    "giant": _giant,
}


def replaced(world: World, name: Path, kind: str) -> None:
    """Puts something hostile in a file's place."""
    file = world.folder / name
    content = file.read_bytes()
    file.unlink()
    if kind == "truncated":
        file.write_bytes(content[: len(content) // 2])
    else:
        KINDS[kind](file, world)


def parts(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


READING = [
    ("report",),
    ("report", "--over_seeds"),
    ("report", "--format", "md"),
    ("report", "--format", "html"),
    *(("figure", kind, "--output", "x.svg") for kind in FIGURES if kind != "toy"),
]


def commands(world: World) -> list[tuple[Any, ...]]:
    config, folder = world.folder / "config.yaml", world.folder
    evaluate = ("--config", config, "--ckpt_path", folder)
    return [
        *((*words, folder) if words[0] == "report" else (*words[:2], folder, *words[2:])
          for words in READING),
        ("fit", "--resume", folder, "--rounds", "3"),
        ("fit", *evaluate, "--rounds", "3", "--output_dir", folder / "new"),
        *((command, *evaluate) for command in ("validate", "test", "predict")),
        ("personalize", folder),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_no_file_of_a_run_harms_who_reads_it(world: World, original: Path, kind: str) -> None:
    """A part of the product: every file and kind for one command, and one file for another."""
    names = parts(original)
    for name in names:
        replaced(world, name, kind)
        assert world.run("report", "--format", "md", world.folder, seconds=20)[0] in (0, 2)
        (world.folder / name).rmdir() if kind == "folder" else (world.folder / name).unlink()
        shutil.copy(original / name, world.folder / name)
    number = list(KINDS).index(kind)
    replaced(world, names[number % len(names)], kind)
    ways = commands(world)
    world.run(*ways[number % len(ways)], seconds=60)


@pytest.mark.parametrize("kind", KINDS)
def test_no_file_of_a_model_harms_who_uses_it(world: World, original: Path, kind: str) -> None:
    np.save(world.here / "x.npy", np.zeros((2, 64)))
    words = ("predict", world.folder, "--input", world.here / "x.npy")
    words += ("--output", world.here / "out.csv")
    for name in ("model.json", "global.safetensors"):
        replaced(world, Path(name), kind)
        code, _, err = world.run(*words, seconds=60)
        assert code in (0, 2), err
        assert code == 0 or err.count("\n") == 1
        (world.folder / name).rmdir() if kind == "folder" else (world.folder / name).unlink()
        shutil.copy(original / name, world.folder / name)
    assert world.run(*words)[0] == 0  # what was refused was the file


@pytest.mark.faults
@pytest.mark.parametrize("kind", KINDS)
def test_no_file_harms_any_command(world: World, original: Path, kind: str) -> None:
    """The whole product."""
    for name in parts(original):
        for number in range(len(commands(world))):
            shutil.rmtree(world.folder)
            shutil.copytree(original, world.folder, symlinks=True)
            replaced(world, name, kind)
            world.run(*commands(world)[number], seconds=60)


@pytest.mark.faults
@pytest.mark.parametrize("kind", KINDS)
def test_no_file_of_a_study_harms(world: World, original: Path, kind: str) -> None:
    """The study's file, and every file of its cell, which is a stranger's."""
    (world.here / "study.yaml").write_text(STUDY)
    assert world.run("compare", "study.yaml")[0] == 0
    study, cell = world.here / "runs" / "study", world.here / "runs/study/FedGKD-seed0/version_0"
    sound = world.top / "sound"
    shutil.copytree(study, sound, symlinks=True)
    for name in parts(study):
        shutil.rmtree(study)
        shutil.copytree(sound, study, symlinks=True)
        world.folder = study
        replaced(world, name, kind)
        for words in (("--dry_run",), ("--rounds", "3")):
            world.run("compare", "study.yaml", *words)
    assert cell.name == "version_0"
    shutil.rmtree(study)
    world.folder = world.here
    replaced(world, Path("study.yaml"), kind)
    world.run("compare", "study.yaml", "--dry_run")


def test_a_process_waits_for_no_pipe(world: World) -> None:
    """As a user types it, in a process of its own."""
    (world.folder / "metrics.csv").unlink()
    os.mkfifo(world.folder / "metrics.csv")
    words = [sys.executable, "-m", "fedgkd_pl", "report", str(world.folder), "--format", "html"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: runs: metrics.csv: is not a file"), done.stderr
