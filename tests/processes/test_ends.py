"""How runs end: with their parent, with one line, and never because nobody listens."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPO
from tests.support.faults import Command, Launcher

ENV = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
SMALL = (
    *("fit", "--config", "digits/fedavg.yaml", "--rounds", "2", "--data.participation", "0.1"),
    *("--model.local_steps", "2", "--model.engine.workers", "1", "--output_dir", ".", "--name"),
    *("run", "--trainer.enable_model_summary", "false"),
)
RUN = Path("run") / "version_0"
SPIN = "sum(range(10**11))"  # minutes in which no other thread of Python runs


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    started = Launcher()
    yield started
    started.close()


def alive(folder: Path) -> list[int]:
    """The processes that run in a folder, zombies excepted."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder:
                found.append(int(process.name))
        except OSError:
            continue
    return found


def seconds_of_orphans(folder: Path, process: Any, most: float = 60) -> float:
    """Kills a process; how long any other in its folder stays."""
    process.kill()
    start = time.monotonic()
    while alive(folder) and time.monotonic() - start < most:
        time.sleep(0.02)
    left = time.monotonic() - start
    for pid in alive(folder):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    return left


def wait_for(folder: Path, *names: str, process: Any = None) -> None:
    """Until the files are there."""
    deadline = time.monotonic() + 120
    while not all(list(folder.glob(name)) for name in names):
        assert time.monotonic() < deadline, f"{names} but {list(folder.iterdir())}"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)


SPINNING = f"""
import multiprocessing, torch
from pathlib import Path

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)

    def forward(self, x):
        if multiprocessing.parent_process() is not None:
            Path("at-training").touch()
            {SPIN}
        return super().forward(x)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_workers_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    """Though no thread of theirs runs."""
    (tmp_path / "spinning.py").write_text(SPINNING)
    words = [*SMALL, "--import", "spinning", "--model.net", "spinning.Net"]
    command = [sys.executable, "-m", "fedgkd_pl", *words, "--model.engine.workers", "2"]
    process = subprocess.Popen(command, cwd=tmp_path, env=ENV, stdout=subprocess.DEVNULL)
    wait_for(tmp_path, "at-training", process=process)
    assert len(alive(tmp_path)) >= 4  # it, the fork server, two workers
    assert seconds_of_orphans(tmp_path, process) < 60


READING = f"""
import os, sys
from pathlib import Path
from fedgkd_pl import FedAvg, FederatedData, LocalEngine
from fedgkd_pl.data.sources import dataset as lazy
from tests.conftest import fit, linear
from tests.support.lazy import Points

class Slow(Points):
    def __getitem__(self, row):
        if lazy._readers:  # a process that reads
            Path(f"at-{{os.getpid()}}").touch()
            {SPIN}
        return super().__getitem__(row)

data = FederatedData.from_dataset(Slow(), num_clients=4, batch_size=8, loader_workers=2)
fit(FedAvg(linear(4, 2), engine=LocalEngine(workers=WORKERS)), data, 1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize("workers", [1, 2])
def test_processes_that_read_samples_end_with_those_they_read_for(
    workers: int, tmp_path: Path
) -> None:
    (tmp_path / "reading.py").write_text(READING.replace("WORKERS", str(workers)))
    process = Command(tmp_path, "reading.py", script=True)

    def readers() -> list[int]:
        return [int(file.name[3:]) for file in tmp_path.glob("at-*")]

    deadline = time.monotonic() + 120
    while len(readers()) < 2 * workers:
        assert time.monotonic() < deadline and process.poll() is None, readers()
        time.sleep(0.02)
    if workers == 2:  # those of a pool's worker that is killed
        of_one = [pid for pid in readers() if parent(pid) == parent(readers()[0])]
        assert len(of_one) == 2
        os.kill(parent(of_one[0]), signal.SIGKILL)
        start = time.monotonic()
        while set(of_one) & set(alive(tmp_path)):
            assert time.monotonic() - start < 2
            time.sleep(0.02)
    assert set(alive(tmp_path)) & set(readers())
    assert seconds_of_orphans(tmp_path, process) < 60


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


STUDY = """
config: digits/fedavg.yaml
seeds: [0]
set: {rounds: 100000, model.engine.workers: 2, model.local_epochs: 1000}
axes:
  method: {FedAvg: {}}
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize("begun", ["checking", "running"])
def test_cells_end_with_their_study(begun: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedgkd_pl", "compare", "study.yaml"]
    (tmp_path / "study.yaml").write_text(STUDY)
    process = subprocess.Popen(command, cwd=tmp_path, env=ENV, stdout=subprocess.PIPE)
    if begun == "running":
        wait_for(tmp_path, "runs/**/partition.json", process=process)
    deadline = time.monotonic() + 60
    while len(alive(tmp_path)) < (6 if begun == "running" else 4):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert seconds_of_orphans(tmp_path, process) < 60


HELD = """
import threading
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        lock = threading.Lock()
        self.held = lambda x: (lock, x)[1]  # copied as it is, but not to be pickled

    def forward(self, x):
        return self.layer(x)
"""


def test_a_net_that_cannot_be_sent_ends_the_run(launcher: Launcher, tmp_path: Path) -> None:
    """It hung for ever: multiprocessing waited for workers that ignore SIGTERM."""
    (tmp_path / "held.py").write_text(HELD)
    users = ("--import", "held", "--model.net", "held.Net", "--model.engine.workers", "2")
    start = time.monotonic()
    assert launcher.run(tmp_path, *SMALL, *users) == 3
    assert time.monotonic() - start < 10
    text = (tmp_path / "output.txt").read_text()
    assert text.count("error: ") == 1, text
    assert "_thread.lock" in (tmp_path / RUN / "error.txt").read_text()
    assert alive(tmp_path) == []


def whole(folder: Path) -> bool:
    return (folder / RUN / "summary.json").exists() and not (folder / RUN / "error.txt").exists()


def shell(text: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a line of bash; FEDGKD stands for the command."""
    line = text.replace("FEDGKD", f"{sys.executable} -m fedgkd_pl")
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env={**ENV, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_reader_who_has_gone_ends_no_run(launcher: Launcher, tmp_path: Path) -> None:
    assert launcher.run(tmp_path, *SMALL, output="broken") == 0 and whole(tmp_path)
    done = shell("FEDGKD configs | head -n 1; echo ${PIPESTATUS[0]}", tmp_path)
    assert done.stdout.splitlines()[-1] == "0" and done.stderr == "", done


def test_an_ascii_terminal_shows_what_it_can(tmp_path: Path) -> None:
    done = shell("FEDGKD configs", tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout.isascii() and "\\u03b1=0.1" in done.stdout


def test_output_that_is_lost_is_told(tmp_path: Path) -> None:
    done = shell("FEDGKD configs > /dev/full", tmp_path)
    assert done.returncode != 0 and "No space left on device" in done.stderr


SLOW_END = """
import sys, time
from pathlib import Path
from fedgkd_pl.processes.command import run_command

def slow():
    try:
        Path("begun").touch()
        time.sleep(60)
    finally:
        Path("ending").touch()
        time.sleep(60)

sys.exit(run_command(slow))
"""


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    listens = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # nohup ignores it
    words = [sys.executable, "-c", SLOW_END]
    process = subprocess.Popen(words, cwd=tmp_path, env=ENV, preexec_fn=listens)
    for name in ("begun", "ending"):
        wait_for(tmp_path, name, process=process)
        process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130


@pytest.mark.nightly
def test_nohup_lets_a_run_go_on(tmp_path: Path) -> None:
    text = f"nohup FEDGKD {' '.join(SMALL)} --rounds 20 & PID=$!; "
    text += "until [ -e run/version_0/metrics.csv ]; do sleep 0.1; done; kill -HUP $PID; wait $PID"
    assert shell(text, tmp_path).returncode == 0 and whole(tmp_path)


def test_lightnings_timer(launcher: Launcher, tmp_path: Path) -> None:
    """The default of one of its settings is no plain text: RepresenterError."""
    words = ("--trainer.callbacks+=Timer", "--trainer.callbacks.duration=00:00:09:00")
    assert launcher.run(tmp_path, *SMALL, *words) == 0, (tmp_path / "output.txt").read_text()
    assert "interval: step" in (tmp_path / RUN / "config.yaml").read_text()
    assert launcher.run(tmp_path, "fit", "--resume", str(RUN), "--rounds", "3") == 0
    assert "round 3/3" in (tmp_path / "output.txt").read_text()
