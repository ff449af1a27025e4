"""Checkpoints: what comes back, what is refused, and that nothing in them is ever run."""

import os
import pickle
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fedgkd_pl import FedAvg, FedGKD, LocalEngine, read_checkpoint
from fedgkd_pl.errors import SettingError, StorageError
from fedgkd_pl.runs.resume import BestRound
from fedgkd_pl.storage.checkpoint import CheckpointDamaged, SafeCheckpointIO
from fedgkd_pl.storage.files import previous, to_safetensors
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch.optim import SGD

from tests.conftest import Table, fit, linear, quiet_trainer, same

LOCAL: dict[str, Any] = {"optimizer": partial(SGD, lr=0.1), "engine": LocalEngine(1)}
SHARED = torch.arange(4.0)
TENSORS = {
    "state_dict": {"a.b": torch.randn(3, 4), "s": torch.tensor(7), "h": torch.randn(2).bfloat16()},
    "a": {"b": torch.arange(4).reshape(2, 2).t(), "empty": torch.zeros(0, 3), "e.f": SHARED},
    "state_dict.a": {"b": torch.tensor([True, False]), "shared": SHARED},
    "tree": torch.ones(1),
}
PLAIN = {
    "counts": {3: {"x": torch.zeros(1)}, -1: None, "3": 4},
    "plain": [1, 2.5, float("inf"), None, True, 'text ‖ "\\', (1, ("x",), []), {}],
}


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    io, file = SafeCheckpointIO(), tmp_path / "a.ckpt"
    io.save_checkpoint(TENSORS | PLAIN, file)
    found = io.load_checkpoint(file)
    assert repr({key: found.pop(key) for key in PLAIN}) == repr(PLAIN)  # types and order, too
    torch.testing.assert_close(found, TENSORS, rtol=0, atol=0)
    assert torch.equal(load_file(file)["state_dict.s"], torch.tensor(7))


@pytest.fixture(scope="module")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    keep = ModelCheckpoint(folder, save_last=True)
    fit(FedGKD(linear(), **LOCAL), Table(), 3, callbacks=[keep], enable_checkpointing=True)
    return folder


@pytest.fixture
def saved(_trained: Path, tmp_path: Path) -> Path:
    """A checkpoint of a method with a buffer, and the one before it."""
    for file in _trained.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path / "last.ckpt"


def test_every_cut_and_every_flipped_bit_is_noticed(saved: Path) -> None:
    content = saved.read_bytes()
    assert read_checkpoint(saved)["global_step"] == 3
    chance = random.Random(0)
    cuts = [0, 1, 7, 8, 39, len(content) - 1, *chance.sample(range(len(content)), 100)]
    damaged = [content[:length] for length in cuts]
    for place in chance.sample(range(8 * len(content)), 200):
        byte, bit = content[place // 8], 1 << place % 8
        damaged.append(content[: place // 8] + bytes([byte ^ bit]) + content[place // 8 + 1 :])
    for bad in damaged:
        saved.write_bytes(bad)
        with pytest.raises(CheckpointDamaged):
            read_checkpoint(saved)
    assert SafeCheckpointIO().load_checkpoint(saved)["global_step"] == 2  # the one before


def test_an_older_format_is_named(tmp_path: Path) -> None:
    old = {"format": "fedgkd_pl", "version": "1"}
    (tmp_path / "a.ckpt").write_bytes(to_safetensors({"a": torch.ones(1)}, old))
    with pytest.raises(CheckpointDamaged, match="has format fedgkd_pl, this is fedgkd_pl 2"):
        read_checkpoint(tmp_path / "a.ckpt")


class Run:
    """A pickle that runs a command."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


@pytest.mark.parametrize("kind", ["pickle", "old torch", "torch", "weights", "folder"])
def test_hostile_checkpoints_are_refused_and_nothing_in_them_runs(
    kind: str, tmp_path: Path, run: Any
) -> None:
    canary, file = tmp_path / "canary", tmp_path / "bad.ckpt"
    content = {"state_dict": {}, "callbacks": {}, "global_step": 1, "x": Run(canary)}
    if kind == "pickle":
        file.write_bytes(pickle.dumps(content))
    elif kind == "weights":  # of another program
        file.write_bytes(to_safetensors({"tree": torch.ones(3)}))
    elif kind == "folder":
        file.mkdir()
    else:
        torch.save(content, file, _use_new_zipfile_serialization=kind == "torch")
    with pytest.raises(CheckpointDamaged):
        FedAvg.load_from_checkpoint(file, net=linear(), **LOCAL)
    if kind == "torch":
        before = sorted(tmp_path.rglob("*"))
        for command in ("fit", "test"):
            code, _, err = run(command, "--config", "smoke.yaml", "--ckpt_path", file)
            assert (code, err) == (2, f"error: ckpt_path: damaged: {file}\n")
        assert sorted(tmp_path.rglob("*")) == before
    assert not canary.exists()


@pytest.mark.parametrize("key", ["best_k_models", "best_model_path"])
def test_a_checkpoint_cannot_have_files_outside_removed(saved: Path, key: str) -> None:
    content = read_checkpoint(saved)
    victim = saved.parent.parent / "victim"
    victim.write_text("precious")
    (state,) = content["callbacks"].values()
    name = f"{saved.parent}/../victim"
    state |= {key: {name: torch.tensor(0.0)} if key == "best_k_models" else name}
    state["dirpath"] = str(saved.parent)
    SafeCheckpointIO().save_checkpoint(content, saved)
    keep = ModelCheckpoint(saved.parent, save_last=True)
    trainer = quiet_trainer(max_epochs=5, callbacks=[keep], enable_checkpointing=True)
    with pytest.raises(CheckpointDamaged, match="names a file outside its folder"):
        trainer.fit(FedGKD(linear(), **LOCAL), Table(), ckpt_path=saved)
    best = BestRound(saved.parent, monitor="val/acc", mode="max")
    best.load_state_dict(state)
    assert not set(best.best_k_models) & {name, str(victim)} and victim.exists()


def test_a_damaged_file_never_replaces_the_one_before(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:-1])
    SafeCheckpointIO().save_checkpoint({"global_step": 3}, saved)
    assert read_checkpoint(previous(saved))["global_step"] == 2
    SafeCheckpointIO().remove_checkpoint(saved)
    assert not saved.exists() and not previous(saved).exists()


def test_constructor_arguments_are_not_saved(tmp_path: Path) -> None:
    class Mine(FedGKD):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.save_hyperparameters(ignore=["net"])

    keep, file = ModelCheckpoint(tmp_path, save_last="link"), tmp_path / "last.ckpt"
    fit(Mine(linear(), **LOCAL), Table(), 1, callbacks=[keep], enable_checkpointing=True)
    assert file.is_symlink() and "hyper_parameters" not in read_checkpoint(file)
    model = Mine.load_from_checkpoint(file, net=linear(seed=5), **LOCAL)
    assert same(model.state_dict(), read_checkpoint(file)["state_dict"]) and len(model.buffer) == 1


def test_another_writer_of_checkpoints_is_refused() -> None:
    """Its files would hold no states, and might be pickles."""
    with pytest.raises(SettingError, match=r"^plugins: must not have a CheckpointIO"):
        fit(FedAvg(linear(), **LOCAL), Table(), 1, plugins=[TorchCheckpointIO()])


def test_a_resume_on_other_data_is_refused(saved: Path) -> None:
    data = Table()
    data.y[0] = (data.y[0] + 1) % 3
    with pytest.raises(SettingError, match=r"^data: "):
        quiet_trainer(max_epochs=4).fit(FedGKD(linear(), **LOCAL), data, ckpt_path=saved)
    quiet_trainer().test(FedGKD(linear(), **LOCAL), data, ckpt_path=saved, verbose=False)


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    class Strange(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"odd": {1, 2}}

    callbacks = [ModelCheckpoint(tmp_path), Strange()]
    with pytest.raises(StorageError, match=r"Strange\.odd: "):
        fit(FedAvg(linear(), **LOCAL), Table(), 1, callbacks=callbacks, enable_checkpointing=True)
    assert not list(tmp_path.iterdir())
