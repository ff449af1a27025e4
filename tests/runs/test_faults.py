"""Processes killed, stopped and cut short, and what a resume makes of what they left."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from fedgkd_pl import read_checkpoint
from fedgkd_pl.storage.checkpoint import referred_states
from fedgkd_pl.storage.files import previous

from tests.conftest import REPO
from tests.support.faults import Launcher
from tests.support.runs import FEW_STEPS, of_families

METHODS = sorted(file.stem for file in (REPO / "configs" / "methods").glob("*.yaml"))
TRIALS = int(os.environ.get("FEDGKD_TRIALS", "2"))  # 50 by `make test-faults`
ROUNDS = 8 if TRIALS == 2 else 20
SMALL = (
    *("--rounds", str(ROUNDS), "--data.participation", "0.1", "--model.local_steps", "2"),
    *("--model.engine.workers", "1", "--output_dir", ".", "--name", "run"),
)
STEPS = ("opened", "writing", "written", "synced", "rotated", "replaced", "committed")


def words(method: str) -> tuple[str, ...]:
    extra = ("--model.buffer_size", "5") if method in ("fedgkd", "fedgkd_vote") else ()
    few = FEW_STEPS.get(method, ())
    return ("fit", "--config", f"digits/{method}.yaml", *SMALL, *extra, *few)


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run says of itself, but for times."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    summary = json.loads((folder / "summary.json").read_text())
    del summary["wall_seconds"]
    events = EventAccumulator(str(folder), purge_orphaned_data=False)
    events.Reload()
    return {
        "weights": (folder / "global.safetensors").read_bytes(),
        "metrics": (folder / "metrics.csv").read_text(),
        "partition": (folder / "partition.json").read_text(),
        "config": (folder / "config.yaml").read_text(),
        "summary": summary,
        "files": sorted(f.name for f in folder.rglob("*") if "tfevents" not in f.name),
        "curves": {
            tag: sorted((event.step, event.value) for event in events.Scalars(tag))
            for tag in events.Tags()["scalars"]
        },
    }


def resume(launcher: Launcher, folder: Path, method: str) -> None:
    """Goes on with a run, or begins it where it was killed before it began."""
    begun = (folder / "run" / "version_0" / "config.yaml").exists()
    again = ("fit", "--resume", "run/version_0") if begun else words(method)
    if not begun:
        shutil.rmtree(folder / "run", ignore_errors=True)
    assert launcher.run(folder, *again) == 0, (folder / "output.txt").read_text()


@pytest.fixture(scope="module")
def launchers() -> Iterator[list[Launcher]]:
    """One per core."""
    started = [Launcher(), Launcher()]
    yield started
    for launcher in started:
        launcher.close()


@pytest.fixture(scope="module")
def launcher(launchers: list[Launcher]) -> Launcher:
    return launchers[0]


def in_parallel(
    launchers: list[Launcher], trial: Callable[[Launcher, int], object], trials: int = TRIALS
) -> list[Any]:
    """The results of all trials, two at a time."""
    free: SimpleQueue[Launcher] = SimpleQueue()
    for launcher in launchers:
        free.put(launcher)

    def run(number: int) -> object:
        launcher = free.get()
        try:
            return trial(launcher, number)
        finally:
            free.put(launcher)

    with ThreadPoolExecutor(len(launchers)) as pool:
        return list(pool.map(run, range(trials)))


class Whole:
    """Runs that nobody disturbs, one per method: (outcome, seconds)."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self.launcher = launcher
        self.folder = folder
        self.done: dict[str, tuple[dict[str, Any], float]] = {}

    def __call__(self, method: str) -> tuple[dict[str, Any], float]:
        if method not in self.done:
            start = time.monotonic()
            assert self.launcher.run(self.folder / method, *words(method)) == 0, (
                self.folder / method / "output.txt"
            ).read_text()
            seconds = time.monotonic() - start
            self.done[method] = outcome(self.folder / method / "run" / "version_0"), seconds
        return self.done[method]


@pytest.fixture(scope="module")
def whole(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(launcher, tmp_path_factory.mktemp("whole"))


def test_the_same_run_in_fresh_processes_has_one_hash(
    launcher: Launcher, whole: Whole, tmp_path: Path
) -> None:
    """R10."""
    expected = whole("fedgkd")[0]
    for number in range(2):
        assert launcher.run(tmp_path / str(number), *words("fedgkd")) == 0
        assert outcome(tmp_path / str(number) / "run" / "version_0") == expected


@pytest.mark.parametrize("method", of_families(METHODS))
def test_a_killed_run_resumes_to_the_same_result(
    launchers: list[Launcher], whole: Whole, method: str, tmp_path: Path
) -> None:
    """R1: ``kill -9`` at random times, sometimes twice; a single trial is always killed twice."""
    expected, seconds = whole(method)
    trials = 1 if TRIALS == 2 else TRIALS

    def trial(launcher: Launcher, number: int) -> None:
        chance = random.Random(f"{method} {number}")
        folder = tmp_path / str(number)
        run = folder / "run" / "version_0"
        earliest = seconds / 4 if trials == 1 else 0  # it has begun
        kill(launcher, launcher.start(folder, *words(method)), chance.uniform(earliest, seconds))
        if (trials == 1 or chance.random() < 0.3) and (run / "config.yaml").exists():
            pid = launcher.start(folder, "fit", "--resume", "run/version_0")
            kill(launcher, pid, chance.uniform(0, seconds))
        if not (run / "summary.json").exists():
            resume(launcher, folder, method)
        assert outcome(run) == expected, f"trial {number}"
        shutil.rmtree(folder)

    in_parallel(launchers, trial, trials)


def kill(launcher: Launcher, pid: int, after: float, number: int = signal.SIGKILL) -> int:
    """Sends a signal after a while; the exit code."""
    time.sleep(after)
    os.kill(pid, number)
    return launcher.wait()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_stopped_run_says_so_and_resumes(
    launchers: list[Launcher], whole: Whole, name: str, tmp_path: Path
) -> None:
    """R8, every fifth time with a pool of workers."""
    expected, seconds = whole("fedgkd")

    def trial(launcher: Launcher, number: int) -> bool:
        chance = random.Random(f"{name} {number}")
        folder = tmp_path / str(number)
        pooled = number % 5 == min(4, TRIALS - 1)
        workers = ("--model.engine.workers", "2" if pooled else "1")
        pid = launcher.start(folder, *words("fedgkd"), *workers)
        time.sleep(chance.uniform(0, 2 * seconds if pooled else seconds))
        start = time.monotonic()
        code = kill(launcher, pid, 0, getattr(signal, name))
        assert time.monotonic() - start < 10
        text = (folder / "output.txt").read_text()
        if code:  # else it was done before the signal came
            assert code == 128 + getattr(signal, name), text
            assert text.splitlines()[-1].startswith(f"stopped by {name}"), text
            assert "Traceback" not in text
            if not (folder / "run" / "version_0" / "summary.json").exists():  # else it was late
                resume(launcher, folder, "fedgkd")
        config = {"config": ""}  # it names the number of workers
        assert outcome(folder / "run" / "version_0") | config == expected | config, f"{number}"
        shutil.rmtree(folder)
        return code != 0

    assert sum(in_parallel(launchers, trial)) >= TRIALS / 2


IN_A_DESTRUCTOR = """
import os, signal
from lightning.pytorch import Callback

class Sender:
    def __init__(self, name): self.name = name
    def __del__(self):
        os.kill(os.getpid(), getattr(signal, self.name))
        for _ in range(1000): pass

class Send(Callback):
    def __init__(self, name: str) -> None: self.name = name
    def on_train_batch_end(self, trainer, *_):
        if trainer.current_epoch == 2:
            Sender(self.name)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_that_comes_in_a_destructor_is_not_lost(
    launcher: Launcher, name: str, tmp_path: Path
) -> None:
    """Python drops what a destructor raises; Lightning then ended the run with exit code 0."""
    (tmp_path / "send.py").write_text(IN_A_DESTRUCTOR)
    callback = ("--import", "send", "--trainer.callbacks+=send.Send", "--trainer.callbacks.name")
    code = launcher.run(tmp_path, *words("fedgkd"), *callback, name)
    text = (tmp_path / "output.txt").read_text()
    assert code == 128 + getattr(signal, name), text
    assert text.splitlines()[-1].startswith(f"stopped by {name}; go on with: "), text
    assert len(re.findall(rf"round (\d+)/{ROUNDS}", text)) < ROUNDS


@pytest.mark.parametrize("name", ["last.ckpt"])
@pytest.mark.parametrize("step", STEPS)
def test_a_commit_stopped_at_any_step_loses_at_most_a_round(
    launcher: Launcher, whole: Whole, step: str, name: str, tmp_path: Path
) -> None:
    """R2."""
    expected = whole("fedgkd_vote")[0]
    times = 12 if step == "writing" else 5
    code = launcher.run(tmp_path, *words("fedgkd_vote"), stop_at=(step, name, times))
    assert code == -signal.SIGKILL
    resume(launcher, tmp_path, "fedgkd_vote")
    shown = re.findall(rf"round (\d+)/{ROUNDS}", (tmp_path / "output.txt").read_text())
    assert len(shown) - ROUNDS <= 1, "more than the round in the making was run again"
    assert outcome(tmp_path / "run" / "version_0") == expected


@pytest.mark.parametrize(
    "step",
    [
        *("written", "removed"),
        *(pytest.param(s, marks=pytest.mark.long) for s in ("opened", "synced", "replaced")),
    ],
)
def test_a_run_stopped_between_its_clients_states_goes_on(
    launcher: Launcher, whole: Whole, step: str, tmp_path: Path
) -> None:
    """R2: some states of a round are written, or removed, and the checkpoint is not there yet."""
    expected = whole("moon")[0]
    assert any(len(name) == 64 + len(".safetensors") for name in expected["files"])
    code = launcher.run(
        tmp_path, *words("moon"), stop_at=(step, "states", 1 if step == "removed" else 4)
    )
    assert code == -signal.SIGKILL
    resume(launcher, tmp_path, "moon")
    shown = re.findall(rf"round (\d+)/{ROUNDS}", (tmp_path / "output.txt").read_text())
    assert len(shown) - ROUNDS <= 1, "more than the round in the making was run again"
    assert outcome(tmp_path / "run" / "version_0") == expected


def test_a_run_killed_while_it_spills_states_goes_on(
    launcher: Launcher, whole: Whole, tmp_path: Path
) -> None:
    """R2, with no memory for what clients keep: killed between two clients of a round, twice.

    What the first of them keeps is beside the checkpoints by then, and its round never ends.
    """
    expected = whole("moon")[0] | {"config": ""}  # it names state_memory
    none = (*words("moon"), "--model.state_memory", "0")
    run, temporary = tmp_path / "run" / "version_0", {"TMPDIR": str(tmp_path)}
    code = launcher.run(tmp_path, *none, stop_at=("replaced", "states", 3), env=temporary)
    assert code == -signal.SIGKILL
    last = run / "checkpoints" / "last.ckpt"
    there = {bytes.fromhex(file.stem) for file in (last.parent / "states").iterdir()}
    assert len(there - (referred_states(last) or set())) == 1  # more than any checkpoint lists
    again = ("fit", "--resume", "run/version_0")
    code = launcher.run(tmp_path, *again, stop_at=("replaced", "states", 4), env=temporary)
    assert code == -signal.SIGKILL
    assert launcher.run(tmp_path, *again, env=temporary) == 0, (tmp_path / "output.txt").read_text()
    assert outcome(run) | {"config": ""} == expected


def test_two_processes_cannot_be_at_one_run(launchers: list[Launcher], tmp_path: Path) -> None:
    launcher, other = launchers
    pid = launcher.start(tmp_path, *words("fedavg"), "--rounds", "100000")
    run = tmp_path / "run" / "version_0"
    while not previous(run / "checkpoints" / "last.ckpt").exists():
        time.sleep(0.05)
    assert other.run(tmp_path, "fit", "--resume", "run/version_0") == 2
    assert (
        "error: resume: another process is at this run (got run/version_0)"
        in (tmp_path / "output.txt").read_text()
    )
    os.kill(pid, signal.SIGKILL)
    launcher.wait()
    pid = other.start(tmp_path, "fit", "--resume", "run/version_0")  # the dead hold no lock
    time.sleep(1)
    os.kill(pid, signal.SIGTERM)
    assert other.wait() == 143


def test_workers_end_with_their_parent(launcher: Launcher, tmp_path: Path) -> None:
    """In the middle of a client, too."""

    def processes() -> list[str]:
        """Those that run in the folder, zombies excepted."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (process / "cwd").readlink() == tmp_path:
                    found.append(process.name)
        return found

    endless = ("--model.local_epochs", "100000", "--model.engine.workers", "2")
    long = [word for word in words("fedavg") if word not in ("--model.local_steps", "2")]
    pid = launcher.start(tmp_path, *long, *endless)
    deadline = time.monotonic() + 60
    while len(processes()) < 5 and time.monotonic() < deadline:  # run, tracker, server, 2 workers
        time.sleep(0.1)
    time.sleep(3)
    assert len(processes()) >= 5
    assert kill(launcher, pid, 0) == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small filesystem here: {error}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


FULL = [(free, tmpdir) for free in (4, 40, 150, 600, 2048) for tmpdir in ("same", "other")]
FAST = [(4, "same"), (2048, "other")]


@pytest.mark.parametrize(
    ("free", "tmpdir"),  # free in KB
    [pytest.param(*case, marks=[] if case in FAST else pytest.mark.faults) for case in FULL],
)
def test_a_full_disk_ends_a_run_and_loses_nothing(
    launcher: Launcher, small_disk: Path, free: int, tmpdir: str, tmp_path: Path
) -> None:
    """R4: at the first files, at a checkpoint, in the middle; then with room, it goes on."""
    filler = small_disk / "filler"
    filler.write_bytes(bytes(max(0, 2048 - free) * 1024))
    wide = (*words("fedgkd"), "--model.net.hidden", "[512]", "--output_dir", str(small_disk))
    temporary = str(small_disk if tmpdir == "same" else tmp_path)
    code = launcher.run(tmp_path, *wide, env={"TMPDIR": temporary})
    text = (tmp_path / "output.txt").read_text()
    assert code == 4, text
    assert text.count("error: ") == 1 and "No space left on device" in text, text
    assert "Traceback" not in text
    assert not [f for f in small_disk.rglob("*") if ".part" in f.name], "litter"
    run = small_disk / "run" / "version_0"
    for file in (run / "checkpoints").glob("*.ckpt"):
        read_checkpoint(file)
    if free == 2048:  # several rounds fit
        done = read_checkpoint(run / "checkpoints" / "last.ckpt")["global_step"]
        assert 1 <= done < ROUNDS
    if (run / "config.yaml").exists():
        filler.unlink()
        subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
        assert launcher.run(tmp_path, "fit", "--resume", str(run)) == 0
        elsewhere = (*wide, "--output_dir", ".")
        assert launcher.run(tmp_path, *elsewhere) == 0
        config = {"config": ""}  # it names the folder
        assert outcome(run) | config == outcome(tmp_path / "run" / "version_0") | config


def test_a_target_that_cannot_be_written(
    launcher: Launcher, small_disk: Path, tmp_path: Path
) -> None:
    """R4: read-only."""
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert launcher.run(tmp_path, *words("fedgkd"), "--output_dir", str(small_disk)) == 4
    text = (tmp_path / "output.txt").read_text()
    assert text == f"error: {small_disk}/run/version_0: Read-only file system\n"


@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_used(
    launcher: Launcher, whole: Whole, damage: str, tmp_path: Path
) -> None:
    """R3."""
    expected = whole("moon")[0]
    assert launcher.run(tmp_path, *words("moon"), stop_at=("committed", "last.ckpt", 7)) < 0
    run = tmp_path / "run" / "version_0"
    last = run / "checkpoints" / "last.ckpt"
    content = bytearray(last.read_bytes())
    if damage == "gone":
        last.unlink()
    else:
        content[len(content) // 2] ^= 4
        last.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    resume(launcher, tmp_path, "moon")
    text = (tmp_path / "output.txt").read_text()
    assert ": going on from last.previous.ckpt, the one before" in text
    assert outcome(run) == expected


def test_no_sound_checkpoint_is_a_storage_error(launcher: Launcher, tmp_path: Path) -> None:
    """R3."""
    assert launcher.run(tmp_path, *words("fedavg"), stop_at=("committed", "last.ckpt", 3)) < 0
    run = tmp_path / "run" / "version_0"
    for name in ("last.ckpt", "last.previous.ckpt"):
        (run / "checkpoints" / name).write_bytes(b"nothing")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    (tmp_path / "output.txt").unlink()
    assert launcher.run(tmp_path, "fit", "--resume", "run/version_0") == 4
    text = (tmp_path / "output.txt").read_text()
    assert text.startswith("error: run/version_0/checkpoints/last.ckpt: cannot be read")
    assert len(text.splitlines()) == 1
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


@pytest.mark.faults
def test_thousands_of_clients_leave_no_memory_and_no_files_open() -> None:
    """R16: 2,000 client updates, in this process."""
    import gc

    from fedgkd_pl import FedGKD, LocalEngine
    from lightning.pytorch import Callback

    from tests.conftest import Table, fit, linear

    seen: list[tuple[float, int]] = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            seen.append(
                (pages * os.sysconf("SC_PAGESIZE") / 2**20, len(os.listdir("/proc/self/fd")))
            )

    model = FedGKD(linear(64, 3), buffer_size=3, engine=LocalEngine(1))
    fit(model, Table(sizes=(8,) * 20, features=64), 110, callbacks=[Watch()])
    (before, open_before), (after, open_after) = seen[9], seen[-1]  # 2,000 updates apart
    assert after - before < 50, f"grew by {after - before:.1f} MB"
    assert open_after <= open_before
