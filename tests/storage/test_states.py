"""What clients keep: in memory up to a limit, in files beyond it, and whole in every checkpoint."""

import copy
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fedgkd_pl import SCAFFOLD, LocalEngine, read_checkpoint
from fedgkd_pl.errors import SettingError, StorageError
from fedgkd_pl.storage import files as storage
from fedgkd_pl.storage import states
from fedgkd_pl.storage.checkpoint import CheckpointDamaged
from fedgkd_pl.storage.checkpoint_io import SafeCheckpointIO
from fedgkd_pl.storage.files import previous
from fedgkd_pl.storage.states import StateStore
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import SGD

from tests.conftest import Table, fit, linear, quiet_trainer, same

LOCAL: dict[str, Any] = {"optimizer": partial(SGD, lr=0.1), "engine": LocalEngine(1)}
State = dict[str, Tensor]


def state(value: float) -> State:
    """A thousand bytes and a count."""
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
    return {file.name for file in (folder / "states").iterdir()}


@pytest.mark.parametrize("memory", [0, 0.0025, 1])
def test_a_store_is_a_mapping_whatever_is_in_memory(memory: float) -> None:
    store = StateStore(memory)
    store.update({client: state(client) for client in (5, 1, 3)})
    store[1] = state(9)
    assert content(store) == {5: 5, 1: 9, 3: 3} and len(store) == 3 and 4 not in store
    assert store.get(4, {}) == {} and store[5]["n"].dtype == torch.int64
    del store[5]
    assert content(store) == {1: 9, 3: 3}
    assert len(store._memory) == {0: 0, 0.0025: 2, 1: 2}[memory]
    assert content(copy.deepcopy(store)) == {1: 9, 3: 3}


def test_the_states_used_longest_ago_leave_memory_first() -> None:
    store = StateStore(0.0021)  # room for two of 1,008 bytes
    store.update({0: state(0), 1: state(1)})
    store[0]
    store[2] = state(2)
    assert list(store._memory) == [0, 2]
    assert content(store) == {0: 0, 1: 1, 2: 2}


def test_what_a_caller_does_with_a_state_stays_his() -> None:
    store = StateStore()
    store[0] = state(1)
    store[0].pop("w")
    assert store[0].keys() == {"w", "n"}


def test_a_commit_writes_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(
        storage, "reached", lambda step, file: written.append(file.name) if step == "synced" else 0
    )
    store = StateStore(0)
    store.update({client: state(client) for client in range(20)})
    save(store, tmp_path / "last.ckpt")
    assert len(written) == len({*written}) == 21
    written.clear()
    store[7] = state(70)
    save(store, tmp_path / "last.ckpt", 2)
    assert len(written) == 2 and written[1] == "last.ckpt"
    written.clear()
    save(store, tmp_path / "best.ckpt", 2)
    assert written == ["best.ckpt"]
    digest = hashlib.sha256((tmp_path / "states" / sorted(names(tmp_path))[0]).read_bytes())
    assert f"{digest.hexdigest()}.safetensors" == sorted(names(tmp_path))[0]


def test_both_generations_are_whole_and_no_more_is_kept(tmp_path: Path) -> None:
    store, last = StateStore(), tmp_path / "last.ckpt"
    for step in range(1, 6):
        store.update({step % 3: state(step), 9: state(0)})
        save(store, last, step)
    assert content(load(last)) == {0: 3, 1: 4, 2: 5, 9: 0}
    assert content(load(previous(last))) == {0: 3, 1: 4, 2: 2, 9: 0}
    assert len(names(tmp_path)) == 5  # the four of now, and client 2's before
    best = tmp_path / "best.pt"  # whatever its ending
    save(store, best, 5)
    for step in (6, 7):
        store.update({client: state(10 * step + client) for client in range(3)})
        save(store, last, step)
    assert content(load(best)) == {0: 3, 1: 4, 2: 5, 9: 0}
    best.unlink()
    save(store, last, 8)
    assert len(names(tmp_path)) == 4


@pytest.mark.parametrize("fault", ["missing", "cut", "bit", "link", "folder"])
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
    if fault == "cut":
        new.write_bytes(whole[:-1])
    elif fault == "bit":
        new.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    elif fault == "link":
        (tmp_path / "elsewhere").write_bytes(whole)
        new.symlink_to(tmp_path / "elsewhere")
    elif fault == "folder":
        new.mkdir()
    with pytest.raises(CheckpointDamaged, match=r"what client 1 keeps, states/.*\.safetensors, "):
        read_checkpoint(last, states=True)
    assert content(load(last)) == {0: 0, 1: 1}
    found = read_checkpoint(last)["fedgkd_pl"]["client_states"]  # which looks at no state
    assert content({0: found[0]}) == {0: 0}
    with pytest.raises(StorageError, match=r"what client 1 keeps, states/.*\.safetensors, "):
        found[1]


def test_what_a_damaged_checkpoint_may_need_is_kept(tmp_path: Path) -> None:
    store = StateStore()
    store[0] = state(1)
    save(store, tmp_path / "best.ckpt")
    (tmp_path / "best.ckpt").write_bytes(b"\xff" * 100)
    for value in (2, 3, 4):
        store[0] = state(value)
        save(store, tmp_path / "last.ckpt")
    assert len(names(tmp_path)) == 4


@pytest.mark.parametrize("step", ["opened", "synced"])
@pytest.mark.parametrize("where", ["states", "last.ckpt"])
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, step: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, last = StateStore(), tmp_path / "last.ckpt"
    store.update({0: state(0), 1: state(1)})
    save(store, last, 1)

    def full(now: str, target: Path) -> None:
        if now == step and where in (target.name, target.parent.name):
            raise OSError(errno.ENOSPC, "No space left on device")

    store.update({0: state(5), 1: state(6)})
    monkeypatch.setattr(storage, "reached", full)
    with pytest.raises(StorageError, match="No space left on device"):
        save(store, last, 2)
    assert content(load(last)) == {0: 0, 1: 1}
    monkeypatch.undo()
    save(store, last, 3)
    assert content(load(last)) == {0: 5, 1: 6} and len(names(tmp_path)) == 4


def test_a_run_in_another_folder_takes_the_states_along(tmp_path: Path) -> None:
    store = StateStore(0)
    store.update({0: state(0), 1: state(1)})
    save(store, tmp_path / "a" / "last.ckpt")
    moved = load(tmp_path / "a" / "last.ckpt")
    moved[1] = state(2)
    save(moved, tmp_path / "b" / "last.ckpt", 2)
    for file in (tmp_path / "a" / "states").iterdir():
        file.unlink()
    assert content(load(tmp_path / "b" / "last.ckpt")) == {0: 0, 1: 2}
    with pytest.raises(CheckpointDamaged, match="is not beside the checkpoint"):
        read_checkpoint(tmp_path / "a" / "last.ckpt", states=True)


def spilled(folder: Path) -> list[str]:
    """What temporary folders hold."""
    return [file.name for file in folder.glob("fedgkd_pl-states-*/*")]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("every", [1, 5, 0])
def test_spilled_states_do_not_pile_up(tmp_path: Path, temporary: Path, every: int) -> None:
    """With a commit in every round, in every fifth, and without any."""
    store, last = StateStore(0.0021), tmp_path / "run" / "last.ckpt"
    for step in range(1, 21):
        store.update({client: state(10 * step + client) for client in range(4)})
        if every and step % every == 0:
            save(store, last, step)
            assert content(load(last)) == content(store)
            assert not list(temporary.iterdir())
        there = names(last.parent) if last.parent.exists() else set()
        assert len(spilled(temporary)) <= 4 and len(there) <= 12
    assert content(store) == {client: 200 + client for client in range(4)}
    assert bool(spilled(temporary)) == (not every)
    store.clear()
    assert not spilled(temporary)


def test_a_spilled_file_that_two_clients_have_is_kept_for_both(temporary: Path) -> None:
    store = StateStore(0)
    store.update({0: state(1), 1: state(1)})
    assert len(spilled(temporary)) == 1
    store[0] = state(2)
    assert content(store) == {0: 2, 1: 1}
    del store[1]
    assert len(spilled(temporary)) == 1


def test_what_an_older_checkpoint_refers_to_is_not_removed_as_spilled(tmp_path: Path) -> None:
    """A resumed run makes the states of the lost rounds again, to the bit."""
    store = StateStore(0)
    for step in (1, 2):
        store[0] = state(step)
        save(store, tmp_path / f"{step}.ckpt", step)
    resumed = load(tmp_path / "1.ckpt")
    resumed.limit = 0
    save(resumed, tmp_path / "again.ckpt", 1)
    for value in (2, 3):
        resumed[0] = state(value)
    assert content(load(tmp_path / "2.ckpt")) == {0: 2}


def test_a_run_that_goes_on_elsewhere_spills_nothing_into_the_first_folder(tmp_path: Path) -> None:
    store = StateStore(0)
    store[0] = state(0)
    save(store, tmp_path / "a" / "last.ckpt")
    before = names(tmp_path / "a")
    moved = load(tmp_path / "a" / "last.ckpt")
    moved.limit = 0
    moved[0] = state(1)
    save(moved, tmp_path / "b" / "last.ckpt", 2)
    moved[0] = state(2)
    assert names(tmp_path / "a") == before and len(names(tmp_path / "b")) == 2


def test_the_names_of_spilled_states_are_on_the_disk_before_a_checkpoint_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, last = StateStore(0), tmp_path / "last.ckpt"
    store[0] = state(0)
    save(store, last)
    store = load(last)
    store.limit = 0
    save(store, last)
    store[0] = state(1)  # straight to its place
    assert len(names(tmp_path)) == 2
    order: list[str] = []
    sync = states.sync_folder
    monkeypatch.setattr(
        states, "sync_folder", lambda folder: (order.append(folder.name), sync(folder))
    )
    monkeypatch.setattr(
        storage, "reached", lambda step, file: order.append(file.name) if step == "opened" else None
    )
    save(store, last, 2)
    assert order == ["states", "last.ckpt"]


SPILLS = """
import torch
from fedgkd_pl.storage.states import StateStore
store = StateStore(0)
store[0] = {"w": torch.zeros(9)}
"""


def test_a_process_that_ends_leaves_no_temporary_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SPILLS]
    subprocess.run(command, check=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert not list(tmp_path.glob("fedgkd_pl*"))


def test_a_linked_folder_of_states_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", tmp_path / "states")
    store = StateStore()
    store[0] = state(0)
    with pytest.raises(StorageError, match="is a link"):
        save(store, tmp_path / "last.ckpt")
    assert not list((tmp_path / "elsewhere").iterdir())


def trained(folder: Path, rounds: int, memory: float, **trainer: Any) -> SCAFFOLD:
    keep = ModelCheckpoint(folder, save_last=True)
    model = SCAFFOLD(linear(), state_memory=memory, **LOCAL)
    fit(model, Table(), rounds, callbacks=[keep], enable_checkpointing=True, **trainer)
    return model


def test_a_run_is_the_same_with_nothing_in_memory_and_goes_on(tmp_path: Path) -> None:
    whole, none = trained(tmp_path / "a", 4, 64), trained(tmp_path / "b", 4, 0)
    assert not none._client_states._memory
    trained(tmp_path / "c", 2, 0)
    resumed = SCAFFOLD(linear(), state_memory=0, **LOCAL)
    quiet_trainer(max_epochs=4).fit(resumed, Table(), ckpt_path=tmp_path / "c" / "last.ckpt")
    for other in (none, resumed):
        assert same(whole.net.state_dict(), other.net.state_dict())
        assert whole._client_states.keys() == other._client_states.keys()
        for client, kept in whole._client_states.items():
            assert same(kept, other._client_states[client])


def test_a_model_is_asked_for_without_its_clients_states(tmp_path: Path) -> None:
    """A checkpoint that was copied alone is the model; only a fit needs what clients keep."""
    whole = trained(tmp_path / "run", 3, 64)
    alone = tmp_path / "alone.ckpt"
    shutil.copy(tmp_path / "run" / "last.ckpt", alone)
    net = partial(SCAFFOLD, net=linear(), **LOCAL)
    tester = quiet_trainer(max_epochs=4)
    for stage in (tester.validate, tester.test, tester.predict):
        model = net()
        stage(model, Table(), ckpt_path=alone)
        assert same(whole.net.state_dict(), model.net.state_dict())
    model = SCAFFOLD.load_from_checkpoint(alone, net=linear(), **LOCAL)
    assert same(whole.net.state_dict(), model.net.state_dict())
    for trainer in (tester, quiet_trainer(max_epochs=4)):
        with pytest.raises(CheckpointDamaged, match=r"what client 0 keeps, .* is not beside"):
            trainer.fit(net(), Table(), ckpt_path=alone)


def test_another_writer_of_checkpoints_gets_plain_states(tmp_path: Path) -> None:
    trained(tmp_path, 2, 0, plugins=[TorchCheckpointIO()])
    assert not (tmp_path / "states").exists()
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["fedgkd_pl"]["client_states"]
    assert {type(kept) for kept in saved.values()} == {dict}
    resumed = SCAFFOLD(linear(), **LOCAL)
    quiet_trainer(max_epochs=4).fit(resumed, Table(), ckpt_path=tmp_path / "last.ckpt")
    whole = trained(tmp_path / "whole", 4, 64)
    assert same(whole.net.state_dict(), resumed.net.state_dict())


def test_memory_is_not_negative() -> None:
    with pytest.raises(SettingError, match="state_memory: must not be negative"):
        SCAFFOLD(linear(), state_memory=-1, **LOCAL)
