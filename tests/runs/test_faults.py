"""Processes killed, stopped and cut short, and what a resume makes of what they left."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fedgkd_pl import read_checkpoint
from fedgkd_pl.storage.files import previous

from tests.conftest import REPO
from tests.support.faults import Launcher
from tests.support.runs import FEW_STEPS

METHODS = sorted(file.stem for file in (REPO / "configs" / "methods").glob("*.yaml"))
KILLS = int(os.environ.get("FEDGKD_TRIALS", "10"))  # of each method
ROUNDS = 8
SMALL = (
    *("--rounds", str(ROUNDS), "--data.participation", "0.1", "--model.local_steps", "2"),
    *("--model.engine.workers", "1", "--output_dir", ".", "--name", "run"),
)
RESUME = ("fit", "--resume", "run/version_0")


def words(method: str) -> tuple[str, ...]:
    return ("fit", "--config", f"digits/{method}.yaml", *SMALL, *FEW_STEPS.get(method, ()))


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run says of itself, but for times."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    summary = json.loads((folder / "summary.json").read_text())
    del summary["wall_seconds"]
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        "weights": (folder / "global.safetensors").read_bytes(),
        "metrics": (folder / "metrics.csv").read_text(),
        "partition": (folder / "partition.json").read_text(),
        "config": (folder / "config.yaml").read_text(),
        "summary": summary,
        # a state may be left behind that a last commit has replaced, killed before it cleaned up
        "files": sorted(
            f.name
            for f in folder.rglob("*")
            if "tfevents" not in f.name and f.parent.name != "states"
        ),
        "curves": {
            tag: {(event.step, event.value) for event in events.Scalars(tag)}
            for tag in events.Tags()["scalars"]
        },
    }


def go_on(folder: Path, method: str) -> tuple[str, ...]:
    """The command that goes on with a run, or begins it where it was killed before it began."""
    if (folder / "run" / "version_0" / "config.yaml").exists():
        return RESUME
    shutil.rmtree(folder / "run", ignore_errors=True)
    return words(method)


def resume(launcher: Launcher, folder: Path, method: str) -> None:
    code = launcher.run(folder, *go_on(folder, method))
    assert code == 0, (folder / "output.txt").read_text()


def kill(launcher: Launcher, pid: int, after: float, number: int = signal.SIGKILL) -> int:
    """Sends a signal after a while; the exit code."""
    time.sleep(after)
    os.kill(pid, number)
    return launcher.wait()


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    started = Launcher()
    yield started
    started.close()


class Whole:
    """Runs that nobody disturbs, one per method: (outcome, seconds)."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self.launcher = launcher
        self.folder = folder
        self.done: dict[str, tuple[dict[str, Any], float]] = {}

    def __call__(self, method: str) -> tuple[dict[str, Any], float]:
        if method not in self.done:
            start = time.monotonic()
            resume(self.launcher, self.folder / method, method)
            seconds = time.monotonic() - start
            self.done[method] = outcome(self.folder / method / "run" / "version_0"), seconds
        return self.done[method]


@pytest.fixture(scope="module")
def whole(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(launcher, tmp_path_factory.mktemp("whole"))


SHORT = ("fedgkd", "scaffold")  # nothing but the server's state, and the clients' own


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[] if m in SHORT else pytest.mark.nightly) for m in METHODS]
)
def test_a_killed_run_resumes_to_the_same_result(
    launcher: Launcher, whole: Whole, method: str, tmp_path: Path
) -> None:
    """``kill -9`` at random times, again and again, until the run is through all the same."""
    expected, seconds = whole(method)
    chance, left = random.Random(method), KILLS
    while left:
        run = tmp_path / str(left) / "run" / "version_0"
        while left and not (run / "summary.json").exists():
            pid = launcher.start(run.parents[1], *go_on(run.parents[1], method))
            kill(launcher, pid, chance.uniform(0, seconds))
            left -= 1
        if not (run / "summary.json").exists():
            resume(launcher, run.parents[1], method)
        assert outcome(run) == expected


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_stopped_run_says_so_and_resumes(
    launcher: Launcher, whole: Whole, name: str, tmp_path: Path
) -> None:
    expected, _ = whole("fedgkd")
    pid = launcher.start(tmp_path, *words("fedgkd"), "--model.engine.workers", "2")
    output = tmp_path / "output.txt"
    while not output.exists() or "round 3/" not in output.read_text():
        time.sleep(0.01)
    code = kill(launcher, pid, 0, getattr(signal, name))
    text = (tmp_path / "output.txt").read_text()
    assert code == 128 + getattr(signal, name) and "Traceback" not in text, text
    hint = f"stopped by {name}; go on with: fedgkd-pl fit --resume run/version_0"
    assert text.splitlines()[-1] == hint, text
    resume(launcher, tmp_path, "fedgkd")
    config = {"config": ""}  # it names the number of workers
    assert outcome(tmp_path / "run" / "version_0") | config == expected | config


@pytest.mark.parametrize(
    ("method", "step", "name", "times"),
    [
        *[("fedgkd", step, "last.ckpt", 5) for step in ("written", "rotated", "committed")],
        ("scaffold", "replaced", "states", 4),  # between two clients of a round
        ("scaffold", "replaced", "last.ckpt", 5),
        ("scaffold", "removed", "states", 1),
    ],
)
def test_a_commit_stopped_at_any_step_loses_at_most_a_round(
    launcher: Launcher, whole: Whole, method: str, step: str, name: str, times: int, tmp_path: Path
) -> None:
    """Every step of a commit is in tests/storage."""
    code = launcher.run(tmp_path, *words(method), stop_at=(step, name, times))
    assert code == -signal.SIGKILL
    resume(launcher, tmp_path, method)
    shown = re.findall(rf"round (\d+)/{ROUNDS}", (tmp_path / "output.txt").read_text())
    assert len(shown) - ROUNDS <= 1, "more than the round in the making was run again"
    assert outcome(tmp_path / "run" / "version_0") == whole(method)[0]


def test_two_processes_cannot_be_at_one_run(launcher: Launcher, tmp_path: Path) -> None:
    other = Launcher()
    pid = launcher.start(tmp_path, *words("fedavg"), "--rounds", "100000")
    run = tmp_path / "run" / "version_0"
    while not previous(run / "checkpoints" / "last.ckpt").exists():
        time.sleep(0.05)
    assert other.run(tmp_path, *RESUME, output="other.txt") == 2
    assert (tmp_path / "other.txt").read_text().startswith("error: resume: ")
    kill(launcher, pid, 0)
    pid = other.start(tmp_path, *RESUME)  # the dead hold no lock
    assert kill(other, pid, 1, signal.SIGTERM) == 143
    other.close()


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


@pytest.mark.parametrize(
    "free", [4, 2048, *(pytest.param(n, marks=pytest.mark.nightly) for n in (40, 150, 600))]
)
def test_a_full_disk_ends_a_run_and_loses_nothing(
    launcher: Launcher, small_disk: Path, free: int, tmp_path: Path
) -> None:
    """At the first files, at a checkpoint, in the middle (KB); then with room, it goes on."""
    filler = small_disk / "filler"
    filler.write_bytes(bytes(max(0, 2048 - free) * 1024))
    wide = (*words("scaffold"), "--model.net.hidden", "[512]", "--output_dir", str(small_disk))
    code = launcher.run(tmp_path, *wide, env={"TMPDIR": str(small_disk)})
    text = (tmp_path / "output.txt").read_text()
    assert code == 4 and "Traceback" not in text, text
    assert text.count("error: ") == 1 and "No space left on device" in text, text
    assert not list(small_disk.rglob("*.part")), "litter"
    run = small_disk / "run" / "version_0"
    for file in (run / "checkpoints").glob("*.ckpt"):
        read_checkpoint(file, states=True)
    assert (run / "checkpoints" / "last.ckpt").exists() == (free == 2048)
    if free == 2048:
        filler.unlink()
        subprocess.run(["mount", "-o", "remount,size=40m", str(small_disk)], check=True)
        assert launcher.run(tmp_path, "fit", "--resume", str(run)) == 0
        assert launcher.run(tmp_path, *wide, "--output_dir", ".") == 0
        config = {"config": ""}  # it names the folder
        assert outcome(run) | config == outcome(tmp_path / "run" / "version_0") | config


def test_a_damaged_checkpoint_is_reported_and_the_one_before_used(
    launcher: Launcher, whole: Whole, tmp_path: Path
) -> None:
    assert launcher.run(tmp_path, *words("scaffold"), stop_at=("committed", "last.ckpt", 7)) < 0
    last = tmp_path / "run" / "version_0" / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-1])
    sound = previous(last).read_bytes()
    previous(last).write_bytes(b"nothing")
    (tmp_path / "output.txt").unlink()
    assert launcher.run(tmp_path, *RESUME) == 4
    text = (tmp_path / "output.txt").read_text()
    assert text.startswith("error: ") and f"damaged: {RESUME[-1]}/checkpoints/last.ckpt" in text
    assert len(text.splitlines()) == 1
    previous(last).write_bytes(sound)
    resume(launcher, tmp_path, "scaffold")
    text = (tmp_path / "output.txt").read_text()
    assert ": going on from last.previous.ckpt, the one before" in text
    assert outcome(tmp_path / "run" / "version_0") == whole("scaffold")[0]
