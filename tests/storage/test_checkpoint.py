"""Checkpoints: what comes back, what is refused, and that nothing in them is ever run."""

import errno
import hashlib
import json
import os
import pickle
import random
import struct
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fedgkd_pl import FedAvg, FedGKD, LocalEngine, RunFiles, read_checkpoint
from fedgkd_pl.errors import SettingError, StorageError
from fedgkd_pl.runs.keep import BestRound
from fedgkd_pl.storage import files as storage
from fedgkd_pl.storage.checkpoint import CheckpointDamaged, encode
from fedgkd_pl.storage.checkpoint_io import SafeCheckpointIO
from fedgkd_pl.storage.files import previous
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch.optim import SGD

from tests.conftest import Table, fit, linear, quiet_trainer, same
from tests.support.runs import resealed

LOCAL: dict[str, Any] = {"optimizer": partial(SGD, lr=0.1), "engine": LocalEngine(1)}
CONTENT = {
    "state_dict": {"a.b": torch.randn(3, 4), "s": torch.tensor(7), "h": torch.randn(2).half()},
    "a": {"b": torch.arange(4).reshape(2, 2).t(), "empty": torch.zeros(0, 3)},
    "state_dict.a": {"b": torch.tensor([True, False])},
    "sha256": torch.ones(1),
    "counts": {3: {"x": torch.zeros(1)}, -1: None},
    "plain": [1, 2.5, float("inf"), None, True, 'text ‖ "\\', (1, ("x",), []), {}],
}


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    io = SafeCheckpointIO()
    io.save_checkpoint(CONTENT, tmp_path / "a.ckpt")
    found = io.load_checkpoint(tmp_path / "a.ckpt")

    def compare(one: Any, two: Any) -> None:
        assert type(one) is type(two)
        if isinstance(one, torch.Tensor):
            assert one.dtype == two.dtype and torch.equal(one, two)
        elif isinstance(one, dict):
            assert list(one) == list(two)
            for key in one:
                compare(one[key], two[key])
        elif isinstance(one, list | tuple):
            assert len(one) == len(two)
            for a, b in zip(one, two, strict=True):
                compare(a, b)
        else:
            assert one == two

    compare(CONTENT, found)
    assert torch.equal(load_file(tmp_path / "a.ckpt")["state_dict.s"], torch.tensor(7))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of a method with a buffer, and the one before it."""
    keep = ModelCheckpoint(tmp_path, save_last=True)
    fit(FedGKD(linear(), **LOCAL), Table(), 3, callbacks=[keep], enable_checkpointing=True)
    return tmp_path / "last.ckpt"


def test_every_cut_and_every_flipped_bit_is_noticed(saved: Path) -> None:
    """R3, on the file; the command line's answer is below."""
    content = saved.read_bytes()
    assert read_checkpoint(saved)["global_step"] == 3
    chance = random.Random(0)
    for length in [0, 1, 7, 8, 39, len(content) - 1, *chance.sample(range(len(content)), 200)]:
        saved.write_bytes(content[:length])
        with pytest.raises(CheckpointDamaged):
            read_checkpoint(saved)
    for place in chance.sample(range(8 * len(content)), 200):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        saved.write_bytes(flipped)
        with pytest.raises(CheckpointDamaged):
            read_checkpoint(saved)
        assert SafeCheckpointIO().load_checkpoint(saved)["global_step"] == 2  # the one before


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (lambda header: header.pop("__metadata__"), "is not a checkpoint"),
        (lambda header: header["__metadata__"].update(version="9"), "has format version 9"),
        (lambda header: header["__metadata__"].update(format="x"), "has format version"),
        (lambda header: header.pop("tree"), "is not a checkpoint"),
        (lambda header: header.update(state=header.pop("tree")), "is not a checkpoint"),
        (lambda header: header.pop("fedgkd_pl.buffer.0.bias"), "is not a checkpoint"),
    ],
)
def test_a_sound_file_of_something_else_is_refused(saved: Path, change: Any, answer: str) -> None:
    saved.write_bytes(resealed(saved.read_bytes(), change))
    with pytest.raises(CheckpointDamaged, match=answer):
        read_checkpoint(saved)


@pytest.mark.parametrize("tree", ["[" * 100_000, "5", '{"dict": []}', '{"run": 1}', "{", "[]"])
def test_a_tree_of_something_else_is_refused(tree: str, tmp_path: Path) -> None:
    body = tree.encode()
    entry = {"dtype": "U8", "shape": [len(body)], "data_offsets": [0, len(body)]}
    digest = {"dtype": "U8", "shape": [32], "data_offsets": [len(body), len(body) + 32]}
    metadata = {"format": "fedgkd_pl", "version": "1"}
    header = json.dumps({"__metadata__": metadata, "tree": entry, "sha256": digest}).encode()
    body = struct.pack("<Q", len(header)) + header + body
    (tmp_path / "a.ckpt").write_bytes(body + hashlib.sha256(body).digest())
    with pytest.raises(CheckpointDamaged, match="is not a checkpoint"):
        read_checkpoint(tmp_path / "a.ckpt")


def test_a_sparse_giant_is_not_read(saved: Path) -> None:
    with saved.open("r+b") as file:
        file.truncate(400 * 2**30)
    with pytest.raises(CheckpointDamaged, match="is cut off, or no checkpoint"):
        read_checkpoint(saved)


def test_a_checkpoint_cannot_have_files_outside_removed(saved: Path) -> None:
    content = read_checkpoint(saved)
    victim = saved.parent.parent / "victim"
    victim.write_text("precious")
    for state in content["callbacks"].values():
        state["best_k_models"] = {f"{saved.parent}/../victim": torch.tensor(0.0)}
    SafeCheckpointIO().save_checkpoint(content, saved)
    keep = ModelCheckpoint(saved.parent, save_last=True)
    trainer = quiet_trainer(max_epochs=5, callbacks=[keep], enable_checkpointing=True)
    with pytest.raises(CheckpointDamaged, match="names a file outside its folder"):
        trainer.fit(FedGKD(linear(), **LOCAL), Table(), ckpt_path=saved)
    best = BestRound(saved.parent, monitor="val/acc", mode="max")
    best.load_state_dict(content["callbacks"][next(iter(content["callbacks"]))])
    assert list(best.best_k_models) == [str(saved.parent / "victim")]
    assert victim.exists()


def test_a_damaged_file_never_replaces_the_one_before(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:-1])
    assert SafeCheckpointIO().load_checkpoint(saved)["global_step"] == 2
    SafeCheckpointIO().save_checkpoint({"global_step": 3}, saved)
    assert read_checkpoint(previous(saved))["global_step"] == 2


def test_constructor_arguments_are_not_saved(tmp_path: Path) -> None:
    class Mine(FedAvg):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.save_hyperparameters(ignore=["net"])

    keep = ModelCheckpoint(tmp_path, save_last=True)
    fit(Mine(linear(), **LOCAL), Table(), 1, callbacks=[keep], enable_checkpointing=True)
    assert "hyper_parameters" not in read_checkpoint(tmp_path / "last.ckpt")


class Run:
    """A pickle that runs a command."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def _hostile(kind: str, folder: Path, canary: Path) -> Path:
    file = folder / "bad.ckpt"
    whole = {"state_dict": {}, "callbacks": {}, "global_step": 1, "fedgkd_pl": {}}
    if kind == "torch pickle":
        torch.save({**whole, "x": Run(canary)}, file)
    elif kind == "old torch pickle":
        torch.save({**whole, "x": Run(canary)}, file, _use_new_zipfile_serialization=False)
    elif kind == "bare pickle":
        file.write_bytes(pickle.dumps({**whole, "x": Run(canary)}))
    elif kind == "instantiator":
        torch.save({**whole, "hyper_parameters": {"_instantiator": "os.system"}}, file)
    elif kind == "header of 2^63 bytes":
        file.write_bytes(struct.pack("<Q", 2**63) + b"{}" + bytes(100))
    elif kind == "header longer than the file":
        file.write_bytes(struct.pack("<Q", 10**6) + b"{}" + bytes(100))
    elif kind == "zip bomb":
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02}." + bytes(2**28))
            archive.writestr("archive/version", "3")
    elif kind == "zip that claims more":
        torch.save(whole, file)
        content = file.read_bytes()
        place = content.rfind(b"PK\x01\x02")
        file.write_bytes(content[: place + 24] + struct.pack("<I", 2**31) + content[place + 28 :])
    elif kind == "link":
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir()
        SafeCheckpointIO().save_checkpoint(whole, elsewhere / "a.ckpt")
        file.symlink_to(elsewhere / "a.ckpt")
    elif kind == "link to a device":
        file.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "tensor in a zip":
        torch.save(torch.ones(3), file)
    return file


HOSTILE = (
    *("torch pickle", "old torch pickle", "bare pickle", "instantiator", "header of 2^63 bytes"),
    *("header longer than the file", "zip bomb", "zip that claims more", "link"),
    *("link to a device", "pipe", "folder", "tensor in a zip"),
)


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_checkpoints_are_refused_and_nothing_in_them_runs(
    kind: str, tmp_path: Path, run: Any
) -> None:
    """R11."""
    canary = tmp_path / "canary"
    file = _hostile(kind, tmp_path, canary)
    if kind != "instantiator":  # plain text that nobody looks at
        with pytest.raises(CheckpointDamaged):
            read_checkpoint(file)
    with pytest.raises((CheckpointDamaged, KeyError, SettingError)):
        FedAvg.load_from_checkpoint(file, net=linear(), **LOCAL)
    before = sorted(tmp_path.rglob("*"))
    for command in ("fit", "test", "predict"):
        code, _, err = run(command, "--config", "smoke.yaml", "--ckpt_path", file)
        assert code == 2 and len(err.splitlines()) == 1
        assert err.startswith("error: ckpt_path: ")
    assert sorted(tmp_path.rglob("*")) == before
    assert not canary.exists()


def test_a_link_beside_its_file_is_lightnings_own(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, save_last="link")
    fit(FedAvg(linear(), **LOCAL), Table(), 2, callbacks=[keep], enable_checkpointing=True)
    assert (tmp_path / "last.ckpt").is_symlink()
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == 2


def test_lightnings_own_files_can_be_resumed_from(tmp_path: Path) -> None:
    """A Trainer with the user's own CheckpointIO keeps it; its files are read as plain data."""
    whole, first, second = (FedGKD(linear(), **LOCAL) for _ in range(3))
    fit(whole, Table(), 4)
    keep = ModelCheckpoint(tmp_path, save_last=True)
    plugins = {"plugins": [TorchCheckpointIO()], "enable_checkpointing": True}
    fit(first, Table(), 2, callbacks=[keep], **plugins)
    assert zipfile.is_zipfile(tmp_path / "last.ckpt")
    quiet_trainer(max_epochs=4).fit(second, Table(), ckpt_path=tmp_path / "last.ckpt")
    assert same(whole.net.state_dict(), second.net.state_dict())


def test_load_from_checkpoint(saved: Path) -> None:
    model = FedGKD.load_from_checkpoint(saved, net=linear(seed=5), **LOCAL)
    state = read_checkpoint(saved)["state_dict"]
    assert same(model.state_dict(), state) and len(model.buffer) == 3


def test_a_resume_on_other_data_is_refused(saved: Path) -> None:
    data = Table()
    data.y[0] = (data.y[0] + 1) % 3
    with pytest.raises(SettingError, match="data: the checkpoint was trained on other data"):
        quiet_trainer(max_epochs=4).fit(FedGKD(linear(), **LOCAL), data, ckpt_path=saved)
    quiet_trainer().test(FedGKD(linear(), **LOCAL), data, ckpt_path=saved, verbose=False)


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    class Strange(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"odd": {1, 2}}

    keep = ModelCheckpoint(tmp_path)
    with pytest.raises(StorageError, match=r"Strange\.odd: a checkpoint keeps plain"):
        fit(
            FedAvg(linear(), **LOCAL),
            *(Table(), 1),
            callbacks=[keep, Strange()],
            enable_checkpointing=True,
        )
    assert not list(tmp_path.iterdir())


def test_a_runs_record_has_a_name_of_its_own_and_older_files_are_read(tmp_path: Path) -> None:
    """Before 0.1.0 it was under the name of a callback's class."""
    record = {"rows": [{"round": 1}], "config": {"a": 1}}
    for name in ("RunFiles", "run"):
        SafeCheckpointIO().save_checkpoint({"callbacks": {name: record}}, tmp_path / "x.ckpt")
        assert read_checkpoint(tmp_path / "x.ckpt") == {"callbacks": {"run": record}}
    assert RunFiles(config={"a": 1}).state_key == "run"


@pytest.mark.parametrize("step", ["opened", "writing", "written", "synced", "rotated"])
def test_a_full_disk_leaves_what_was_there(
    saved: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(saved.parent.iterdir())

    def full(now: str, target: Path) -> None:
        if now == step:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage, "reached", full)
    with pytest.raises(StorageError, match=r"last\.ckpt: No space left on device"):
        SafeCheckpointIO().save_checkpoint({"global_step": 9}, saved)
    assert SafeCheckpointIO().load_checkpoint(saved)["global_step"] == 3
    after = sorted(saved.parent.iterdir())
    assert after == ([f for f in before if f != saved] if step == "rotated" else before)


def test_a_checkpoint_is_written_without_copies_of_its_tensors() -> None:
    tensor = torch.zeros(1000)
    chunks = list(encode({"a": tensor}))
    assert isinstance(chunks[1], memoryview)
    tensor += 1
    assert bytes(chunks[1]) == tensor.numpy().tobytes()


def test_removing_a_checkpoint_removes_the_one_before(saved: Path) -> None:
    SafeCheckpointIO().remove_checkpoint(saved)
    assert not saved.exists() and not previous(saved).exists()
