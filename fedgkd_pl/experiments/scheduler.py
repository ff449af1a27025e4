"""The cells of a study, run some side by side, each in a process of its own."""

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgkd_pl.errors import SettingError, StorageError
from fedgkd_pl.experiments.runs import LARGEST, Run, read_run
from fedgkd_pl.experiments.study import Cell, Study
from fedgkd_pl.processes.signals import Interrupted, Stopped
from fedgkd_pl.processes.start import context, ending_with_parent, without_main
from fedgkd_pl.runs.folder import LOG, SUMMARY, RunFolder
from fedgkd_pl.storage.reading import read_bytes

if TYPE_CHECKING:
    from rich.table import Table

# imported once for the processes of all cells
PRELOAD = (
    *("fedgkd_pl.settings.build", "matplotlib.figure"),
    *("sklearn.datasets", "torch.utils.tensorboard"),
)
ORPHAN = 20.0  # seconds for a cell to end whose study was killed
SHOWN = 12  # cells in the live table
PAUSE = 300.0  # seconds between lines on the cells that run, where there is no table


@dataclass
class Task:
    """A cell, and how far it is."""

    cell: Cell
    folder: Path
    rounds: int  # to do
    state: str = "waiting"  # or running, finished, failed
    process: Any = None
    began: float = 0.0  # when the process started, by the clock
    first: int = 0  # the rounds done by then
    reason: str = ""  # why it failed
    pace: float = 0.0  # seconds of a round; 0 where that is not known
    said: int = 0  # bytes of its log before the process started

    @property
    def log(self) -> Path:
        """What it prints."""
        return self.folder.parent / LOG

    def progress(self) -> tuple[int, str]:
        """Rounds done, and the test accuracy of the last one."""
        try:
            header, *lines = (
                read_bytes(RunFolder(self.folder).metrics, LARGEST).decode().splitlines()
            )
            last = dict(zip(header.split(","), lines[-1].split(","), strict=False)) if lines else {}
            accuracy = last.get("test/acc", "")
            return len(lines), f"{100 * float(accuracy):.2f}" if accuracy else ""
        except (OSError, ValueError):
            return 0, ""


def sound_run(folder: Path) -> Run | None:
    """A finished run; None where there is none, or its summary is damaged: a resume fixes it."""
    with suppress(SettingError):
        return read_run(folder)
    return None


def begin(process: Any) -> None:
    """Starts a process that ignores Ctrl-C; this one ends it."""
    resource_tracker.ensure_running()  # starting it unblocks Ctrl-C
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with without_main():
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_tasks(
    study: Study,
    tasks: list[Task],
    top: Path,
    jobs: int,
    write: Callable[[], None],
    quiet: bool = False,
) -> None:
    """Runs what waits, some side by side."""
    display = _Display(study.name, tasks, jobs, quiet)
    waiting = [task for task in tasks if task.state == "waiting"]
    running: list[Task] = []
    processes = context(*PRELOAD)
    try:
        with display:
            while waiting or running:
                while waiting and len(running) < jobs:
                    task = waiting.pop(0)
                    _start(study, task, top, processes, jobs)
                    running.append(task)
                    display.say(task)
                wait([task.process.sentinel for task in running], timeout=1.0)
                for task in running:
                    if rounds := task.progress()[0] - task.first:
                        task.pace = (time.monotonic() - task.began) / rounds
                for task in [task for task in running if not task.process.is_alive()]:
                    running.remove(task)
                    _finish(task)
                    display.say(task)
                    write()
                display.show()
    except Stopped as stop:
        stop.hint = "the same command goes on where this was"
        raise
    except KeyboardInterrupt:  # in the user's own program
        raise Interrupted("interrupted; the same call goes on where this was") from None
    finally:
        for task in running:
            task.process.terminate()  # a run then ends in order
        for task in running:
            task.process.join()


def _start(study: Study, task: Task, top: Path, processes: Any, jobs: int) -> None:
    done = task.progress()[0]
    argv = [*task.cell.words, "--seed_everything", str(task.cell.seed)]
    if RunFolder(task.folder).is_begun():
        argv = ["--resume", str(task.folder), *_without_additions(argv)]
        argv += ["--rounds", str(max(task.rounds, done))]
    else:
        shutil.rmtree(task.folder, ignore_errors=True)  # killed before it had settings
        name = f"{study.name}/{task.cell.name}"
        argv += ["--name", name, "--output_dir", str(top.parent)]
    try:
        task.folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(task.folder.parent, error) from error
    run = ending_with_parent(_run_cell, argv, task.folder, task.log, jobs)
    task.process = processes.Process(**run)
    task.state, task.began, task.first = "running", time.monotonic(), done
    task.said = task.log.stat().st_size if task.log.exists() else 0
    begin(task.process)


def _without_additions(argv: list[str]) -> list[str]:
    """Without ``--key+=value`` and ``--key+ value``: the run's own config has them already."""
    kept: list[str] = []
    waiting = iter(argv)
    for word in waiting:
        if word.endswith("+") and word.startswith("--"):
            next(waiting, "")
        elif "+=" not in word.split("=")[0] + "=":
            kept.append(word)
    return kept


def _run_cell(argv: Sequence[str], folder: Path, log: Path, jobs: int) -> None:
    """In a process of its own, with its share of the cores for evaluation."""
    import torch
    from fedgkd_pl.processes.command import quiet_libraries, run_command
    from fedgkd_pl.settings.build import build_request
    from fedgkd_pl.settings.request import read_request

    def fit() -> int:
        quiet_libraries()
        experiment = build_request(read_request("fit", argv))
        try:
            experiment.fit()
        finally:
            experiment.model.close_stores()  # os._exit cleans nothing up
        return 0

    with log.open("ab", buffering=0) as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    if folder.exists():
        RunFolder(folder).lock(seconds=ORPHAN).release()  # of a study killed a moment ago
    code = run_command(fit)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _finish(task: Task) -> None:
    code = task.process.exitcode
    if code == 0 and sound_run(task.folder):
        task.state = "finished"
        return
    task.state = "failed"
    text = task.log.read_bytes()[task.said :].decode(errors="replace")
    errors = re.findall(r"^error: (.*)", text, re.MULTILINE)
    ended = f"ended with code {code}" if code else f"wrote no {SUMMARY}"
    task.reason = errors[-1] if errors else f"{ended}, see {task.log}"


class _Display:
    """A live table on a terminal; elsewhere a line for a cell that starts or ends, or goes on."""

    def __init__(self, name: str, tasks: list[Task], jobs: int, quiet: bool) -> None:
        self.name = name
        self.tasks = tasks
        self.jobs = jobs
        self.quiet = quiet
        self.live: Any = None
        self.told = time.monotonic()  # when the last line was printed

    def __enter__(self) -> "_Display":
        if self.quiet:
            return self
        done = sum(task.state == "finished" for task in self.tasks)
        print(f"{self.name}: {len(self.tasks)} cells, {done} finished before", flush=True)
        if sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(self.table(), refresh_per_second=2)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def show(self) -> None:
        """Draws anew, or now and then says how far the cells are."""
        if self.live:
            self.live.update(self.table())
        elif time.monotonic() - self.told >= PAUSE:
            for task in self.tasks:
                if task.state == "running":
                    self.say(task)

    def say(self, task: Task) -> None:
        """Prints a line on a task, where nothing is drawn."""
        if self.live or self.quiet:
            return
        count = sum(task.state in ("finished", "failed") for task in self.tasks)
        done, accuracy = task.progress()
        shown = f"round {done}/{task.rounds}" + (f", test/acc {accuracy}" if accuracy else "")
        left = f", {self.left()} left" if any(task.pace for task in self.tasks) else ""
        print(f"{count}/{len(self.tasks)} {task.state:<8} {task.cell.name}: {shown}{left}")
        sys.stdout.flush()
        self.told = time.monotonic()

    def left(self) -> timedelta:
        """The time that the rest will take at the pace so far."""
        known = [task.pace for task in self.tasks if task.pace]
        usual = sum(known) / len(known) if known else 0.0
        rest = sum(
            (task.rounds - task.progress()[0]) * (task.pace or usual)
            for task in self.tasks
            if task.state in ("waiting", "running")
        )
        return timedelta(seconds=round(rest / self.jobs))

    def table(self) -> "Table":
        """The cells that run, those that ended last and those that come next."""
        from rich.table import Table

        counts = {s: sum(t.state == s for t in self.tasks) for s in ("finished", "failed")}
        title = f"{self.name}: {counts['finished']} of {len(self.tasks)} finished"
        title += f", {counts['failed']} failed" if counts["failed"] else ""
        table = Table(title=f"{title}, {self.left()} left")
        for name in ("cell", "state", "round", "test/acc"):
            table.add_column(name, justify="left" if name in ("cell", "state") else "right")
        ended = [task for task in self.tasks if task.state in ("finished", "failed")]
        running = [task for task in self.tasks if task.state == "running"]
        coming = [task for task in self.tasks if task.state == "waiting"]
        for task in [*ended[-SHOWN // 2 :], *running, *coming[: SHOWN // 2]]:
            done, accuracy = task.progress()
            style = {"running": "bold", "failed": "red", "waiting": "dim"}.get(task.state, "")
            row = (task.cell.name, task.state, f"{done}/{task.rounds}", accuracy)
            table.add_row(*row, style=style)
        return table
