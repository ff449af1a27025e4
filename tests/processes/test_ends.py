"""How runs end: with their parent, with one line, and never because nobody listens."""

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fedgkd_pl.errors import StorageError
from fedgkd_pl.storage.files import commit, lock, sync_folder

from tests.conftest import REPO
from tests.support.faults import Command, Launcher, warm_script

ENV = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
SPIN = "sum(range(10**11))"  # minutes in which no other thread of Python runs

# -- with their parent ---------------------------------------------------------------------------


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


def seconds_of_orphans(folder: Path, process: Any, most: float = 20) -> float:
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


PHASES = f"""
import multiprocessing, os, threading, time
from pathlib import Path
import torch
from fedgkd_pl import FedAvg
from fedgkd_pl.engines.pool import PoolSession
from fedgkd_pl.federation.client_trainer import Job
from fedgkd_pl.federation.message import Message
from tests.conftest import Table

class Net(torch.nn.Module):
    def __init__(self, phase):
        super().__init__()
        self.phase = phase
        self.layer = torch.nn.Linear(4, 3)
        self.much = torch.nn.Linear(2000, 1000)  # more than a pipe holds

    def at(self, phase):
        if phase == self.phase and multiprocessing.parent_process() is not None:
            Path("at-" + phase).touch()
            {SPIN}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.at("unpickling")

    def _apply(self, *args, **kwargs):
        self.at("building")
        return super()._apply(*args, **kwargs)

    def forward(self, x):
        self.at("training")
        if self.phase == "sending":
            Path("at-sending").touch()
        return self.layer(x)

def pool(phase):
    model = FedAvg(Net(phase))
    trainer = {{"max_epochs": 1, "max_steps": -1}}
    job = Job(model.client(), Table().client_data, torch.device("cpu"), trainer, {{}})
    made = PoolSession(job, 1, 1)
    if phase != "waiting":
        made._send(0, Message(1, {{"global": model.net.state_dict()}}).encode())
        made._assign(0, iter([0]))  # and nobody reads the answer
    return made

pools = [pool(name) for name in ("unpickling", "building", "training", "sending", "waiting")]

Path("ready").touch()
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_workers_end_with_their_parent_in_every_phase_of_their_life(tmp_path: Path) -> None:
    """Five at once, three of which let no thread of theirs run; one cannot send, one waits."""
    (tmp_path / "phases.py").write_text(PHASES)
    process = Command(tmp_path, "phases.py", script=True)
    phases = ("at-unpickling", "at-building", "at-training", "at-sending", "ready")
    wait_for(tmp_path, *phases, process=process)
    time.sleep(1)  # for the one that sends
    assert len(alive(tmp_path)) == 8  # five, their parent, the fork server, the resource tracker
    assert seconds_of_orphans(tmp_path, process) < 10


READING = f"""
import os, sys
from pathlib import Path
import torch
from fedgkd_pl import FedAvg, FederatedData, LocalEngine
from tests.conftest import fit, linear
from tests.support.lazy import Points

class Slow(Points):
    def __getitem__(self, row):
        if torch.utils.data.get_worker_info() is not None:
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
    assert seconds_of_orphans(tmp_path, process) < 10


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


STUDY = """
config: digits/fedavg.yaml
seeds: [0]
set: {rounds: 100000, model.engine.workers: 2, model.local_epochs: 1000}
axes:
  method: {FedAvg: {}}
"""


@pytest.mark.faults
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
    assert seconds_of_orphans(tmp_path, process) < 2


# -- with one line -------------------------------------------------------------------------------

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
SMALL = (
    *("fit", "--config", "digits/fedavg.yaml", "--rounds", "2", "--data.participation", "0.1"),
    *("--model.local_steps", "2", "--model.engine.workers", "1", "--output_dir", ".", "--name"),
    *("run", "--trainer.enable_model_summary", "false"),
)
RUN = Path("run") / "version_0"


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    started = Launcher()
    yield started
    started.close()


@pytest.fixture(scope="module")
def six_rounds(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("six")
    assert launcher.run(folder, *SMALL, "--rounds", "6") == 0
    return folder


def test_a_net_that_cannot_be_sent_ends_the_run(launcher: Launcher, tmp_path: Path) -> None:
    """It hung for ever: multiprocessing waited for workers that ignore SIGTERM."""
    (tmp_path / "held.py").write_text(HELD)
    users = ("--import", "held", "--model.net", "held.Net", "--model.engine.workers", "2")
    start = time.monotonic()
    assert launcher.run(tmp_path, *SMALL, *users) == 3
    assert time.monotonic() - start < 10
    text = (tmp_path / "output.txt").read_text()
    told = "error: PicklingError: the net, loss or data cannot be sent to another process"
    assert text.count("error: ") == 1 and text.splitlines()[-1].startswith(told), text
    assert "cannot pickle '_thread.lock'" in (tmp_path / RUN / "error.txt").read_text()
    assert alive(tmp_path) == []


SCRIPT = f"""
{HELD}
from fedgkd_pl import FedAvg
from fedgkd_pl.engines.pool import PoolSession
from fedgkd_pl.federation.client_trainer import Job
from tests.conftest import Table

def job(net):
    return Job(FedAvg(net).client(), Table().client_data, torch.device("cpu"), {{}}, {{}})

class Second(PoolSession):
    def _start(self, place):
        if place:  # the first works, and ignores SIGTERM
            self.job = job(Net())
        return super()._start(place)

forgotten = PoolSession(job(torch.nn.Linear(4, 3)), 1, 1)
Second(job(torch.nn.Linear(4, 3)), 2, 1)
"""


def test_a_script_whose_pool_fails_or_is_not_closed_ends(tmp_path: Path) -> None:
    done = warm_script(SCRIPT, tmp_path)
    assert done.returncode == 1 and "cannot be sent to another process" in done.stderr
    deadline = time.monotonic() + 2
    while alive(tmp_path) and time.monotonic() < deadline:  # the fork server, which sees our end
        time.sleep(0.02)
    assert alive(tmp_path) == []


# -- not because nobody listens ------------------------------------------------------------------


def whole(folder: Path) -> bool:
    return (folder / RUN / "summary.json").exists() and not (folder / RUN / "error.txt").exists()


@pytest.mark.parametrize(
    ("output", "workers"),
    [
        *(("closed", "1"), ("broken", "1"), ("/dev/full", "1")),
        pytest.param("broken", "2", marks=pytest.mark.faults),
    ],
)
def test_a_run_needs_no_output(
    launcher: Launcher, output: str, workers: str, tmp_path: Path
) -> None:
    code = launcher.run(tmp_path, *SMALL, "--model.engine.workers", workers, output=output)
    assert code == 0 and whole(tmp_path)
    kept = [file.read_bytes() for file in (tmp_path / RUN).rglob("*") if file.is_file()]
    assert not any(b"round 1/2" in content for content in kept), "printed into a file"


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


def test_a_reader_who_has_gone_is_no_error(tmp_path: Path) -> None:
    done = shell("FEDGKD configs | head -n 1; echo ${PIPESTATUS[0]}", tmp_path)
    assert done.stdout.splitlines()[-1] == "0" and done.stderr == ""
    assert len(done.stdout.splitlines()) == 2
    done = shell("FEDGKD --help | true; echo ${PIPESTATUS[0]}", tmp_path)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_output_that_is_lost_is_told_where_it_was_all(tmp_path: Path) -> None:
    done = shell("FEDGKD configs > /dev/full", tmp_path)
    assert done.returncode == 4
    assert done.stderr == "error: the output: No space left on device\n"
    assert shell("FEDGKD configs >&-", tmp_path).returncode == 0


@pytest.mark.faults
def test_a_run_through_a_real_pipe_and_as_a_real_daemon(tmp_path: Path) -> None:
    """In characters that it cannot show; with every descriptor closed."""
    words = " ".join(SMALL).replace("false", "true")
    done = shell(
        f"FEDGKD {words} 2>&1 | head -n 1; echo ${{PIPESTATUS[0]}}",
        tmp_path,
        PYTHONIOENCODING="ascii",
    )
    assert done.stdout.splitlines()[-1] == "0" and whole(tmp_path), done
    assert shell(f"FEDGKD {words} <&- >&- 2>&-", tmp_path).returncode == 0
    assert (tmp_path / "run" / "version_1" / "summary.json").exists()
    done = shell("FEDGKD report run --over_seeds", tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "FedAvg" in done.stdout and done.stdout.isascii(), done


def test_an_output_that_does_not_block_is_waited_for(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    text = "from fedgkd_pl.processes.output import kept_output\n"
    text += "with kept_output(): print('x' * 300_000)"
    command = [sys.executable, "-c", text]
    process = subprocess.Popen(command, stdout=writer, env=ENV)
    os.close(writer)
    time.sleep(0.5)  # a pipe holds 64 KB
    with open(reader, "rb") as file:
        assert len(file.read()) == 300_001
    assert process.wait() == 0


def test_a_closed_terminal_ends_a_run_in_order(launcher: Launcher, tmp_path: Path) -> None:
    pid = launcher.start(tmp_path, *SMALL, "--rounds", "100000")
    wait_for(tmp_path, "run/version_0/checkpoints/last.previous.ckpt")
    os.kill(pid, signal.SIGHUP)
    assert launcher.wait() == 128 + signal.SIGHUP
    told = (tmp_path / "output.txt").read_text().splitlines()[-1]
    assert told == "stopped by SIGHUP; go on with: fedgkd-pl fit --resume run/version_0"


@pytest.mark.faults
def test_nohup_lets_a_run_go_on(tmp_path: Path) -> None:
    text = f"nohup FEDGKD {' '.join(SMALL)} --rounds 20 & PID=$!; "
    text += "until [ -e run/version_0/metrics.csv ]; do sleep 0.1; done; kill -HUP $PID; wait $PID"
    assert shell(text, tmp_path).returncode == 0 and whole(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.faults)])
def test_warnings_as_errors(workers: str, tmp_path: Path) -> None:
    """jsonargparse warns of what Lightning calls; of our own code they are errors still."""
    words = " ".join([*SMALL, "--model.engine.workers", workers])
    done = shell(
        f"python -W error -m fedgkd_pl {words}".replace("python", sys.executable), tmp_path
    )
    assert done.returncode == 0 and whole(tmp_path), done
    text = "import warnings; from fedgkd_pl.processes.output import only_our_warnings; "
    text += "only_our_warnings(); warnings.warn('ours')"
    done = shell(f'{sys.executable} -W error -c "{text}"', tmp_path)
    assert done.returncode == 1 and "UserWarning: ours" in done.stderr


# -- files ---------------------------------------------------------------------------------------


def test_a_filesystem_that_cannotsync_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if Path("/proc/self").exists():
        sync_folder(Path("/proc"))  # EINVAL
    sync = os.fsync
    answer = [0]

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(answer[0], os.strerror(answer[0]))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    for answer[0] in (errno.EINVAL, errno.ENOTSUP):
        commit(tmp_path / "file", [b"whole"])
        assert (tmp_path / "file").read_bytes() == b"whole"
    for answer[0] in (errno.EIO, errno.ENOSPC, errno.EROFS):
        with pytest.raises(StorageError):
            commit(tmp_path / "file", [b"whole"])


@pytest.mark.parametrize("form", ["flag", "yaml"])
def test_lightnings_timer(launcher: Launcher, form: str, tmp_path: Path) -> None:
    """The default of one of its settings is no plain text: RepresenterError."""
    (tmp_path / "timer.yaml").write_text(
        "trainer: {callbacks: [{class_path: Timer, init_args: {duration: {minutes: 9}}}]}"
    )
    flags = ("--trainer.callbacks+=Timer", "--trainer.callbacks.duration=00:00:09:00")
    words = ("--config", "timer.yaml") if form == "yaml" else flags
    assert launcher.run(tmp_path, *SMALL, *words) == 0, (tmp_path / "output.txt").read_text()
    assert "interval: step" in (tmp_path / RUN / "config.yaml").read_text()
    assert launcher.run(tmp_path, "fit", "--resume", str(RUN), "--rounds", "3") == 0
    assert "round 3/3" in (tmp_path / "output.txt").read_text()


def test_a_timer_ends_a_run(launcher: Launcher, tmp_path: Path) -> None:
    flags = ("--trainer.callbacks+=Timer", "--trainer.callbacks.duration={'seconds': 1}")
    assert launcher.run(tmp_path, *SMALL, "--rounds", "100000", *flags) == 0
    assert whole(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ("figure", "partition", "--output", "to.svg", "run"),
        ("figure", "--output", "to.svg", "partition", "run"),
        ("figure", "partition", "run", "--output=to.svg"),
        ("report", "--format", "md", "run", "--output", "to.md", "run"),
        ("report", "run", "--output", "to.md", "run", "--format", "md"),
        pytest.param(
            ("compare", "--nope", "1", "--dry_run", "--jobs", "2", "studies/digits.yaml"),
            marks=pytest.mark.faults,
        ),
    ],
)
def test_words_in_any_order(
    words: tuple[str, ...], launcher: Launcher, six_rounds: Path, tmp_path: Path
) -> None:
    if words[0] != "compare":
        shutil.copytree(six_rounds / "run", tmp_path / "run")
    code = launcher.run(tmp_path, *words, output="told.txt")
    told = (tmp_path / "told.txt").read_text()
    if words[0] == "compare":  # the study was found, and the flag is that of its cells
        assert code == 2 and "FedAvg-seed0: nope: no such setting" in told
    else:
        assert code == 0 and len(list(tmp_path.glob("to.*"))) == 1, told


def test_a_file_that_cannot_be_used_is_one_line(
    launcher: Launcher, six_rounds: Path, tmp_path: Path
) -> None:
    (tmp_path / "to").mkdir()
    shutil.copytree(six_rounds / "run", tmp_path / "run")
    code = launcher.run(
        tmp_path, "report", "run", "--format", "md", "--output", "to", output="told"
    )
    told = (tmp_path / "told").read_text()
    assert code == 4 and told.count("\n") == 1 and told.startswith("error: "), told
    (tmp_path / RUN / "config.yaml").unlink()
    (tmp_path / RUN / "config.yaml").mkdir()
    code = launcher.run(tmp_path, "figure", "curves", "run", output="second")
    told = (tmp_path / "second").read_text()
    assert code in (2, 4) and told.count("\n") == 1 and told.startswith("error: "), told


MOVE = """
import os, shutil
from lightning.pytorch import Callback

class Move(Callback):
    def __init__(self, how: str) -> None: self.how = how
    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 3:
            if self.how == "removed":
                shutil.rmtree("run/version_0")
            else:
                os.rename("run/version_0", "elsewhere")
            if self.how == "replaced":
                os.mkdir("run/version_0")
            if self.how == "above":
                os.rename("run", "was")
"""


@pytest.mark.parametrize(
    "how", ["removed", "renamed", "replaced", pytest.param("above", marks=pytest.mark.faults)]
)
def test_a_folder_that_goes_while_its_run_trains(
    launcher: Launcher, how: str, six_rounds: Path, tmp_path: Path
) -> None:
    """Nothing is written to where it was; where it is, the run goes on."""
    (tmp_path / "move.py").write_text(MOVE)
    callback = ("--import", "move", "--trainer.callbacks+=move.Move", "--trainer.callbacks.how")
    code = launcher.run(tmp_path, *SMALL, "--rounds", "6", *callback, how)
    text = (tmp_path / "output.txt").read_text()
    assert code == 4, text
    assert text.count("error: ") == 1 and "Traceback" not in text, text
    assert "run/version_0: the folder was moved or removed during the run" in text
    place = tmp_path / RUN
    assert list(place.iterdir()) == [] if how == "replaced" else not place.exists()
    assert {path.name for path in tmp_path.iterdir()} <= {
        *("move.py", "output.txt", "run", "was", "elsewhere", "__pycache__")
    }
    if how != "removed":
        other = ("--trainer.callbacks", "[]")
        again = ("fit", "--resume", "elsewhere", "--import", "move", *other)
        code = launcher.run(tmp_path, *again)
        assert code == 0, (tmp_path / "output.txt").read_text()
        assert (tmp_path / "elsewhere" / "summary.json").exists()
        for name in ("metrics.csv", "global.safetensors"):
            whole_run = (six_rounds / RUN / name).read_bytes()
            assert (tmp_path / "elsewhere" / name).read_bytes() == whole_run


def test_a_folder_that_is_not_locked_any_more_may_go(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    holder = lock(folder)
    commit(folder / "new" / "file", [b"1"])
    folder.rename(tmp_path / "other")
    with pytest.raises(StorageError, match="moved or removed"):
        commit(folder / "file", [b"2"])
    assert not folder.exists()
    holder.release()
    commit(folder / "file", [b"2"])
    assert (folder / "file").read_bytes() == b"2"
