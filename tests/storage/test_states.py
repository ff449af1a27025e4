"""What clients keep: a file each, whole in every checkpoint, whatever stops a commit."""

import copy
import errno
import gc
import hashlib
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fedgkd_pl import SCAFFOLD, LocalEngine, read_checkpoint
from fedgkd_pl.errors import StorageError
from fedgkd_pl.storage import files as storage
from fedgkd_pl.storage.checkpoint import CheckpointDamaged, SafeCheckpointIO, StateStore
from fedgkd_pl.storage.files import previous
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import SGD

from tests.conftest import Table, fit, linear, quiet_trainer, same

LOCAL: dict[str, Any] = {"optimizer": partial(SGD, lr=0.1), "engine": LocalEngine(1)}
STEPS = ("opened", "writing", "written", "synced", "rotated", "replaced", "committed")
State = dict[str, Tensor]


def state(value: float) -> State:
    return {"w": torch.full((250,), float(value)), "n": torch.tensor(int(value))}


def content(store: Mapping[int, State]) -> dict[int, float]:
    return {client: float(kept["w"][0]) for client, kept in store.items()}


def save(store: StateStore, path: Path, step: int = 1) -> None:
    ours = {"client_states": store}
    SafeCheckpointIO().save_checkpoint({"global_step": step, "fedgkd_pl": ours}, path)


def load(path: Path) -> StateStore:
    found: StateStore = SafeCheckpointIO().load_checkpoint(path)["fedgkd_pl"]["client_states"]
    return found


def names(folder: Path) -> set[str]:
    return {file.name for file in (folder / "states").glob("[!.]*")}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_store_is_a_mapping_and_its_temporary_files_go(temporary: Path) -> None:
    store = StateStore()
    store.update({client: state(client) for client in (5, 1, 3, 4)})
    store[1] = store[4] = state(9)  # one file
    assert content(store) == {5: 5, 1: 9, 3: 3, 4: 9} and len(store) == 4 and 7 not in store
    assert store.get(7, {}) == {} and store[5]["n"].dtype == torch.int64
    del store[5], store[4]
    store[3].pop("w")
    assert content(store) == {1: 9, 3: 3}
    assert len([*temporary.glob("*/*")]) == 2
    assert content(copy.deepcopy(store)) == {1: 9, 3: 3}
    del store
    gc.collect()
    assert not list(temporary.iterdir())


def test_a_commit_writes_what_changed(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all of it is forced to the disk: files, then their names, then the checkpoint."""
    store, last = StateStore(), tmp_path / "last.ckpt"
    store.update({client: state(client) for client in range(20)})
    save(store, last)
    assert not list(temporary.iterdir()) and len(names(tmp_path)) == 20
    synced: list[str] = []
    sync = os.fsync

    def named(descriptor: int) -> None:
        file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        name = "state" if ".safetensors." in file.name else file.name.split(f".{os.getpid()}")[0]
        synced.append(name)
        if file.is_dir():  # as on some network filesystems
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", named)
    store[7] = state(70)
    save(store, last, 2)
    assert synced == ["state", "states", ".last.ckpt", tmp_path.name]
    synced.clear()
    save(store, tmp_path / "best.ckpt", 2)
    assert synced == ["states", ".best.ckpt", tmp_path.name]
    for file in (tmp_path / "states").iterdir():
        assert hashlib.sha256(file.read_bytes()).hexdigest() == file.stem


def test_both_generations_are_whole_and_no_more_is_kept(tmp_path: Path) -> None:
    store, last = StateStore(), tmp_path / "last.ckpt"
    for step in range(1, 6):
        store.update({step % 3: state(step), 9: state(0)})
        save(store, last, step)
    assert content(load(last)) == {0: 3, 1: 4, 2: 5, 9: 0}
    assert content(load(previous(last))) == {0: 3, 1: 4, 2: 2, 9: 0}
    assert len(names(tmp_path)) == 5  # the four of now, and client 2's before
    best = tmp_path / "best.pt"  # whatever its ending
    (tmp_path / "notes.txt").write_text("of the user's")
    save(store, best, 5)
    for step in (6, 7):
        store.update({client: state(10 * step + client) for client in range(3)})
        save(store, last, step)
    assert content(load(best)) == {0: 3, 1: 4, 2: 5, 9: 0}
    best.unlink()
    save(store, last, 8)
    assert len(names(tmp_path)) == 4


@pytest.mark.parametrize("fault", ["missing", "cut", "bit"])
def test_a_damaged_state_is_noticed_and_the_one_before_used(tmp_path: Path, fault: str) -> None:
    store, last = StateStore(), tmp_path / "last.ckpt"
    store.update({0: state(0), 1: state(1)})
    save(store, last, 1)
    before = names(tmp_path)
    store[1] = state(2)
    save(store, last, 2)
    (new,) = (tmp_path / "states" / name for name in names(tmp_path) - before)
    whole = new.read_bytes()
    new.unlink()
    if fault != "missing":
        new.write_bytes(whole[:-1] if fault == "cut" else bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(CheckpointDamaged, match=f"damaged: {new}"):
        read_checkpoint(last, states=True)
    with pytest.raises(StorageError, match=f"{new}: "):  # what looks at no other state goes on
        read_checkpoint(last)["fedgkd_pl"]["client_states"][1]
    again = load(last)
    assert content(again) == {0: 0, 1: 1}
    again[1] = state(2)  # the round once more, to the bit
    save(again, last, 2)
    assert content(load(last)) == {0: 0, 1: 2} and new.read_bytes() == whole


def test_what_a_damaged_checkpoint_may_need_is_kept(tmp_path: Path) -> None:
    store = StateStore()
    store[0] = state(1)
    save(store, tmp_path / "best.ckpt")
    (tmp_path / "best.ckpt").write_bytes(b"\xff" * 100)
    for value in (2, 3, 4):
        store[0] = state(value)
        save(store, tmp_path / "last.ckpt")
    assert len(names(tmp_path)) == 4


@pytest.mark.parametrize("fault", ["kill", "full disk"])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("step", [*STEPS, "states opened", "states synced", "states removed"])
def test_a_commit_stopped_at_any_step_is_whole_or_absent(
    tmp_path: Path, step: str, keeps: bool, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, last = StateStore(), tmp_path / "last.ckpt"
    for value in (0, 1, 2):  # so that the third commit has a state to remove
        store.update({0: state(0), 1: state(value)} if keeps else {})
        save(store, last, value)
    where, point = ("last.ckpt", step) if step in STEPS else step.split()

    def reached(step: str, target: Path) -> None:
        if step == point and where in (target.name, target.parent.name):
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, "No space left on device")

    def commit() -> None:
        store.update({0: state(5), 1: state(6)} if keeps else {})
        save(store, last, 3)

    stops = keeps or where != "states"
    if fault == "kill":
        child = os.fork()
        if not child:
            storage.reached = reached
            commit()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == (-signal.SIGKILL if stops else 0)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(storage, "reached", reached)
            with pytest.raises((StorageError, OSError)) if stops else nullcontext():
                commit()
    done = not stops or step in ("replaced", "committed", "states removed")
    assert read_checkpoint(last if last.exists() else previous(last))["global_step"] == 2 + done
    store, new = load(last), {0: 5.0, 1: 6.0} if keeps else {}
    assert content(store) == (new if done or not keeps else {0: 0.0, 1: 2.0})
    commit()
    assert content(load(last)) == new
    assert len(names(tmp_path)) in ((2, 4) if keeps else (0,))  # of this one and the one before


def test_a_run_in_another_folder_takes_the_states_along(tmp_path: Path) -> None:
    store = StateStore()
    store.update({0: state(0), 1: state(1)})
    save(store, tmp_path / "a" / "last.ckpt")
    before = names(tmp_path / "a")
    moved = load(tmp_path / "a" / "last.ckpt")
    moved[1] = state(2)
    assert content(moved) == {0: 0, 1: 2} and names(tmp_path / "a") == before
    for folder in ("b", "c", "b"):  # two callbacks may each have a folder
        save(moved, tmp_path / folder / "last.ckpt", 2)
        moved[0] = state(len(folder))
    shutil.rmtree(tmp_path / "a" / "states")
    assert content(load(tmp_path / "c" / "last.ckpt")) == {0: 1, 1: 2}
    with pytest.raises(CheckpointDamaged):
        read_checkpoint(tmp_path / "a" / "last.ckpt", states=True)


def trained(folder: Path, rounds: int) -> SCAFFOLD:
    keep = ModelCheckpoint(folder, save_last=True)
    model = SCAFFOLD(linear(), **LOCAL)
    fit(model, Table(), rounds, callbacks=[keep], enable_checkpointing=True)
    return model


def test_a_resumed_run_is_the_same_and_only_a_fit_needs_what_clients_keep(tmp_path: Path) -> None:
    whole, half = trained(tmp_path / "whole", 4), trained(tmp_path / "half", 2)
    last, alone = tmp_path / "half" / "last.ckpt", tmp_path / "alone.ckpt"
    model, trainer = SCAFFOLD(linear(seed=1), **LOCAL), quiet_trainer(max_epochs=4)
    shutil.copy(last, alone)
    trainer.test(model, Table(), ckpt_path=alone, verbose=False)
    assert same(half.net.state_dict(), model.net.state_dict())
    with pytest.raises(CheckpointDamaged, match="states/"):
        trainer.fit(SCAFFOLD(linear(), **LOCAL), Table(), ckpt_path=alone)
    resumed = SCAFFOLD(linear(), **LOCAL)
    quiet_trainer(max_epochs=4).fit(resumed, Table(), ckpt_path=last)
    assert same(whole.net.state_dict(), resumed.net.state_dict())
    assert whole.client_states.keys() == resumed.client_states.keys()
    for client, kept in whole.client_states.items():
        assert same(kept, resumed.client_states[client])
