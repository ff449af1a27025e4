"""What a stranger's run folder, config or study can do: nothing but be read, or refused.

Payloads are harmless: a pickle that makes a file (the canary, which must not appear), a path to a
file of the user's (the thesis, which must stay as it is).
"""

import contextlib
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import fedgkd_pl
import numpy as np
import pytest
import torch
import yaml
from fedgkd_pl import read_checkpoint
from fedgkd_pl.cli.main import main
from fedgkd_pl.config.safety import PLACES, _theirs, confined, parts
from fedgkd_pl.storage.checkpoint import SafeCheckpointIO

from tests.support.runs import QUICK

CALLBACKS = [
    {"class_path": "FeatureMap", "init_args": {"every_n_rounds": 2, "max_samples": 40}},
    {"class_path": "ModelCheckpoint", "init_args": {"monitor": "test/loss", "filename": "mine"}},
]


class Canary:
    """A pickle that makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds with the files that a stranger may have changed."""
    folder = tmp_path_factory.mktemp("original")
    with contextlib.chdir(folder):
        words = ("--rounds", "2", "--trainer.callbacks", json.dumps(CALLBACKS), "--quiet")
        assert main(["fit", *QUICK, *words]) == 0
    return folder / "runs" / "smoke" / "version_0"


class World:
    """A user's folder: a thesis, a stranger's run, and the current folder."""

    def __init__(self, top: Path, original: Path, capfd: Any) -> None:
        self.top, self.capfd = top, capfd
        self.folder, self.here = top / "strangers" / "run", top / "here"
        shutil.copytree(original, self.folder)
        self.here.mkdir()
        self.thesis, self.canary = top / "thesis.txt", top / "canary"
        self.thesis.write_text("precious")

    def run(self, *words: object) -> tuple[int, str]:
        """A command: one line of error at most, and nothing changes outside of the folder."""
        before = self.elsewhere()
        try:
            code = main([str(word) for word in words])
        except SystemExit as stop:
            code = int(stop.code or 0)
        _, err = self.capfd.readouterr()
        assert code in (0, 2, 3, 4) and "Traceback" not in err, err
        assert err.count("error: ") == (1 if code else 0), err
        assert not self.canary.exists(), "a stranger's code ran"
        assert self.thesis.read_text() == "precious"
        assert not code or self.elsewhere() == before
        return code, err

    def elsewhere(self) -> set[Path]:
        return {p for p in self.top.rglob("*") if not p.is_relative_to(self.folder)}

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


@pytest.fixture
def world(
    tmp_path: Path, original: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    found = World(tmp_path, original, capfd)
    monkeypatch.chdir(found.here)
    capfd.readouterr()
    yield found


# -- what a config may name ------------------------------------------------------------------------

IO = {"class_path": "lightning.pytorch.plugins.TorchCheckpointIO", "init_args": {}}
LINK = "lightning.pytorch.callbacks.ModelCheckpoint._link_checkpoint"
LAMBDA = {"class_path": "LambdaCallback", "init_args": {"on_fit_start": LINK}}
NAMES: list[tuple[str, Any]] = [
    ("trainer.plugins", [IO]),
    ("trainer", {"strategy": "lightning.pytorch.strategies.DDPStrategy"}),
    ("trainer.logger", "lightning.pytorch.loggers.LitLogger"),
    ("trainer.callbacks", ["lightning.pytorch.cli.SaveConfigCallback"]),
    ("trainer.callbacks", [LAMBDA]),
    ("data", "fedgkd_pl.Digits.load_from_checkpoint"),
    ("model.net", "os.system"),
    ("model.net", "torch.fx.graph_module.reduce_graph_module"),  # a net of Python code
    ("model.net", "torch.jit.load"),
    ("model.net", "torchmetrics.image.fid.FrechetInceptionDistance"),
    ("model.net", "transformers.AutoModel.from_pretrained"),
    ("model.net", "fedgkd_pl.read_checkpoint"),
    ("model.net", "canary_module.Net"),
    ("model.optimizer", "torch.optim.SGD.load_state_dict"),
]


@pytest.mark.parametrize(("key", "value"), NAMES, ids=lambda value: str(value)[-60:])
def test_a_config_names_only_what_is_needed(world: World, key: str, value: Any) -> None:
    (world.here / "canary_module.py").write_text(f"open({str(world.canary)!r}, 'w')\n")
    for name in reversed(key.replace("model.", "model.init_args.").split(".")):
        value = {name: value}
    (world.here / "bad.yaml").write_text(yaml.safe_dump(value))
    code, err = world.run("fit", *QUICK, "--config", "bad.yaml")
    assert code == 2 and err.startswith(f"error: {key}"), err


GOOD = [
    ("trainer.callbacks", [{"class_path": "EarlyStopping", "init_args": {"monitor": "val/acc"}}]),
    ("trainer.profiler", {"class_path": "SimpleProfiler", "init_args": {"filename": "x"}}),
    ("model.scheduler", {"class_path": "torch.optim.lr_scheduler.StepLR"}),
    ("model.net", {"class_path": "torchvision.models.resnet18", "init_args": {"num_classes": 10}}),
]


@pytest.mark.parametrize(("key", "value"), GOOD, ids=lambda value: str(value)[-50:])
def test_what_is_needed_can_be_named(world: World, key: str, value: Any) -> None:
    more = ("--model.scheduler.step_size", "3") if "StepLR" in str(value) else ()
    words = (f"--{key}", json.dumps(value), *more, "--print_config")
    assert world.run("fit", *QUICK, *words) == (0, "")


def test_a_checkpoint_plugin_is_for_python(world: World) -> None:
    text = "from lightning.pytorch.plugins import TorchCheckpointIO\nclass Mine(TorchCheckpointIO):"
    (world.here / "my_io.py").write_text(f"{text}\n    def __init__(self): super().__init__()\n")
    code, err = world.run("fit", *QUICK, "--import", "my_io", "--trainer.plugins", "my_io.Mine")
    assert code == 2 and err.startswith("error: trainer.plugins: must not have a CheckpointIO")


def test_a_file_brings_no_address_of_a_cluster(world: World) -> None:
    """What Ray sends back is pickles: the user says from where."""
    engine = {"class_path": "RayEngine", "init_args": {"ray_address": "ray://evil:10001"}}
    (world.here / "engine.yaml").write_text(yaml.safe_dump(engine))
    for value in (engine, str(world.here / "engine.yaml")):
        settings = {"model": {"init_args": {"engine": value}}}
        (world.here / "ray.yaml").write_text(yaml.safe_dump(settings))
        code, err = world.run("fit", "--config", "smoke.yaml", "--config", "ray.yaml")
        assert code == 2 and err.startswith("error: model.engine.ray_address: must be a flag"), err


# -- a stranger's run ------------------------------------------------------------------------------


def _both(file: Path, canary: Path) -> None:
    """Makes a checkpoint a pickle, too.

    As opcodes, the size of its header, which comes first, pushes a text that ends within ``a``. A V
    there takes all up to the end of the line, which is the end of the header; the first tensor is
    what torch's reader then runs.
    """
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    payload = pickle.dumps(Canary(canary))
    payload += b" " * (-len(payload) % 8)
    manifest = {"a": "V" * 300} | header.pop("__metadata__")
    for entry in header.values():
        entry["data_offsets"] = [end + len(payload) for end in entry["data_offsets"]]
    first = {"dtype": "U8", "shape": [len(payload)], "data_offsets": [0, len(payload)]}
    text = json.dumps({"__metadata__": manifest, "payload": first, **header}).encode()
    length = max(40, len(text) // 256 + 1)
    sizes = bytes([ord("U"), length, *bytes(6)])
    text = text.ljust(int.from_bytes(sizes, "little") - 1) + b"\n"
    whole = sizes + text + payload + content[8 + size : -32]
    file.write_bytes(whole + hashlib.sha256(whole).digest())


def test_a_checkpoint_that_is_a_pickle_runs_nothing(world: World) -> None:
    """The run's config.yaml names torch's reader, which would run what last.ckpt holds."""
    file = world.folder / "checkpoints" / "last.ckpt"
    _both(file, world.canary)
    with pytest.raises(Exception, match=r"magic number|Unsupported|invalid"):
        torch.load(file, weights_only=False)
    assert world.canary.exists()
    world.canary.unlink()  # so it does run
    world.run("test", world.folder)
    world.config(lambda s: s["trainer"].update(plugins=[IO]) or s.update(weights_only=False))
    assert world.run("fit", "--resume", world.folder, "--rounds", "3")[0] == 2


@pytest.mark.parametrize("command", ["fit", "test", "personalize", "export", "report", "figure"])
def test_pickles_in_place_of_a_runs_files_run_nothing(world: World, command: str) -> None:
    content = pickle.dumps(Canary(world.canary))
    names = ["global.safetensors", "metrics.csv", "model.json", "summary.json", "partition.json"]
    names += ["checkpoints/last.ckpt", "checkpoints/last.previous.ckpt"]
    for name in names:
        (world.folder / name).write_bytes(content)
    np.save(world.canary.with_name("x.npy"), np.array([Canary(world.canary)]), allow_pickle=True)
    (features,) = world.folder.glob("features-round*.npz")
    shutil.move(world.canary.with_name("x.npy"), features)
    words = {"fit": ("--resume", world.folder), "figure": ("features", world.folder)}
    assert world.run(command, *words.get(command, (world.folder,)))[0] in (2, 4)


ELSEWHERE: list[tuple[str, Any, Any]] = [
    ("trainer.default_root_dir", "{top}", "{run}"),
    ("trainer.logger.save_dir", "s3://bucket", "{run}"),
    ("trainer.logger.name", "../../..", None),
    ("trainer.logger", {"class_path": "x.WandbLogger"}, None),
    ("trainer.callbacks", [{"class_path": "x.MLFlowLogger"}, "y"], ["y"]),
    ("trainer.callbacks.dirpath", "mine", "{run}"),
    ("trainer.callbacks.filename", "a/../../x", None),
    ("trainer.callbacks.monitor", "val/acc", "val/acc"),
    ("checkpoint.dirpath", "~/x", "{run}"),
]


@pytest.mark.parametrize(("key", "value", "after"), ELSEWHERE)
def test_places_outside_of_a_folder(tmp_path: Path, key: str, value: Any, after: Any) -> None:
    run = tmp_path / "run"

    def filled(value: Any) -> Any:
        return json.loads(
            json.dumps(value).replace("{top}", str(tmp_path)).replace("{run}", str(run))
        )

    assert confined(filled(value), run, key) == filled(after)


@pytest.mark.parametrize("how", ["config", "nested", "file"])
def test_a_resumed_run_writes_nowhere_else(
    world: World, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger"}
    logger["init_args"] = {"save_dir": str(world.top / "away"), "name": "x"}
    trainer = {"logger": logger, "default_root_dir": str(world.top / "away")}
    other = world.folder.parent / "other.yaml"
    other.write_text(yaml.safe_dump(logger if how == "nested" else {"trainer": trainer}))
    if how == "file":
        world.config(lambda s: s.update(config=str(other), trainer={"gradient_clip_val": 10}))
    else:
        trainer["logger"] = str(other) if how == "nested" else logger
        world.config(lambda settings: settings["trainer"].update(trainer))
    code, err = world.run("fit", "--resume", world.folder, "--rounds", "3")
    assert code == 0, err
    assert how == "file" or "is not used; give it as a flag" in caplog.text
    assert how != "config" or (world.folder / "x" / "version_0" / "metrics.csv").is_file()
    assert not (world.top / "away").exists()
    words = ("--trainer.logger.save_dir", "mine", "--rounds", "4")  # the user may say so
    assert how != "config" or world.run("fit", "--resume", world.folder, *words)[0] == 0
    assert (world.here / "mine").exists() is (how == "config")


def test_a_resumed_run_fetches_no_data(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"class_path": "CIFAR10", "init_args": {"data_dir": str(world.top / "data")}}
    world.config(lambda settings: settings.update(data=data))
    code, err = world.run("fit", "--resume", world.folder, "--rounds", "3")
    assert code == 2 and not (world.top / "data").exists(), err


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_folder_of_another_user_needs_trust(world: World) -> None:
    os.chown(world.folder, 12345, -1)
    words = ("fit", "--resume", world.folder, "--rounds", "3")
    code, err = world.run(*words)
    assert code == 2 and err.startswith("error: resume: belongs to another user"), err
    assert world.run(*words, "--trust")[0] == 0


@pytest.mark.parametrize("how", ["absolute", "climbs", "link"])
def test_a_better_round_removes_no_file_elsewhere(world: World, how: str) -> None:
    """Lightning removes the worst of the files that a ModelCheckpoint's state names."""
    checkpoints = world.folder / "checkpoints"
    (checkpoints / "inside").symlink_to(world.top)
    names = {"absolute": world.thesis, "climbs": f"{checkpoints}/../../../thesis.txt"}
    name = str(names.get(how, f"{checkpoints}/inside/thesis.txt"))

    def change(checkpoint: dict[str, Any]) -> None:
        states, worst = checkpoint["callbacks"], torch.tensor(1e9)
        state = states[next(key for key in states if key.startswith("ModelCheckpoint"))]
        state |= {"dirpath": str(checkpoints), "best_model_path": name, "kth_value": worst}
        state |= {"kth_best_model_path": name, "best_k_models": {name: worst}}
        state["best_model_score"] = worst

    world.checkpoint(change)
    world.run("fit", "--resume", world.folder, "--rounds", "3")


def test_every_argument_that_may_be_a_place_is_known() -> None:
    """A new version of Lightning may bring more of them."""
    harmless = {
        "data_dir",  # where data is read from; what is written there is the data's cache
        "path",  # of a partition, of cohorts or of own data: read as data
        "test_path",
        "profiler_kwargs",
        "filename",  # left out if it climbs
        "sub_dir",
        "add_file_policy",  # a word
        "ray_address",  # a flag only
    }
    found = {
        name
        for thing in [*_theirs(), *(getattr(fedgkd_pl, part) for part in parts())]
        if thing.__module__.startswith(("lightning.", "fedgkd_pl."))
        for name in signature(thing).parameters
        if any(word in name for word in "dir path file folder root uri url location addr".split())
    }
    assert {"dirpath", "save_dir", "tracking_uri", "folder", "data_dir"} <= found
    assert found - {"root_dir", "log_dir"} <= PLACES | harmless


SMUGGLED = [
    {"config": "canary.yaml"},
    {"import": "canary_module"},
    {"model": "canary_module.Net"},
    {"resume": "x"},
    {"model.engine.ray_address": "ray://evil:1"},
]


@pytest.mark.parametrize("settings", SMUGGLED, ids=str)
def test_a_study_imports_nothing(world: World, settings: dict[str, Any]) -> None:
    (world.here / "canary_module.py").write_text(f"open({str(world.canary)!r}, 'w')\n")
    study = {"name": "s", "config": "smoke.yaml", "axes": {"method": {"A": settings}}}
    (world.here / "study.yaml").write_text(yaml.safe_dump(study))
    code, err = world.run("compare", "study.yaml", "--dry_run", "--quiet")
    assert code == 2, err
