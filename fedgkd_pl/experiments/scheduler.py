"""The cells of a study, run some side by side, each in a process of its own."""

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pandas as pd
from fedgkd_pl.errors import SettingError
from fedgkd_pl.experiments.runs import Run, read_run
from fedgkd_pl.experiments.study import Cell
from fedgkd_pl.processes.command import Interrupted, Stopped
from fedgkd_pl.processes.start import context, end_with_parent, without_main
from fedgkd_pl.runs.folder import LOG, SUMMARY, RunFolder

# imported once for the processes of all cells
PRELOAD = (
    *("fedgkd_pl.config.build", "matplotlib.figure"),
    *("sklearn.datasets", "torch.utils.tensorboard"),
)
ORPHAN = 20.0  # seconds for a cell to end whose study was killed


@dataclass
class Task:
    """A cell, and how far it is."""

    cell: Cell
    folder: Path
    rounds: int  # to do
    state: str = "waiting"  # or running, finished, failed
    process: Any = None
    reason: str = ""  # why it failed

    @property
    def log(self) -> Path:
        """What it prints."""
        return self.folder.parent / LOG

    @property
    def done(self) -> int:
        """How many rounds are done."""
        return len(self.frame)

    @property
    def frame(self) -> pd.DataFrame:
        """The metrics of the rounds done."""
        with suppress(SettingError):
            return Run(self.folder, {}).frame
        return pd.DataFrame()

    def say(self) -> None:
        """Prints how far it is."""
        known = self.frame.get("test/acc", pd.Series(dtype=float)).dropna()
        shown = f", test/acc {known.iloc[-1]:.4f}" if len(known) else ""
        line = f"{self.state:<8} {self.cell.name}: round {self.done}/{self.rounds}{shown}"
        print(line, flush=True)


def finished_run_or_none(folder: Path) -> Run | None:
    """A finished run; None where there is none, or its summary is damaged: a resume fixes it."""
    with suppress(SettingError):
        return read_run(folder)
    return None


def run_tasks(
    name: str, tasks: list[Task], jobs: int, write: Callable[[], None], quiet: bool = False
) -> None:
    """Runs what waits, some side by side; a cell that fails or is killed stops no other.

    Processes rather than a pool of them: a pool ends all its workers when one is killed.
    """
    from rich.progress import Progress

    waiting = [task for task in tasks if task.state == "waiting"]
    running: list[Task] = []
    bar = Progress(disable=quiet or not sys.stdout.isatty(), speed_estimate_period=3600)
    rounds = bar.add_task(name, total=sum(task.rounds for task in tasks))
    processes = context(*PRELOAD)
    done = {task.cell.name: task.done for task in tasks}
    try:
        with bar:
            while waiting or running:
                changed = waiting[: jobs - len(running)]
                del waiting[: len(changed)]
                for task in changed:
                    _start(task, jobs, processes)
                running += changed
                wait([task.process.sentinel for task in running], timeout=1.0)
                for task in [task for task in running if not task.process.is_alive()]:
                    running.remove(task)
                    _finish(task)
                    changed.append(task)
                    write()
                done |= {task.cell.name: task.done for task in [*running, *changed]}
                bar.update(rounds, completed=sum(done.values()))
                for task in changed if not quiet else ():
                    task.say()
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


def _start(task: Task, jobs: int, processes: Any) -> None:
    """Starts or resumes a run in a process of its own."""
    argv = task.cell.argv
    if RunFolder(task.folder).is_begun():
        rounds = max(task.rounds, task.done)
        argv = [f"--resume={task.folder}", *_without_additions(argv), f"--rounds={rounds}"]
    else:
        shutil.rmtree(task.folder, ignore_errors=True)  # killed before it had settings
        home = task.folder.parent.parent
        argv += [f"--name={home.name}/{task.cell.name}", f"--output_dir={home.parent}"]
    task.folder.parent.mkdir(parents=True, exist_ok=True)
    run = {"target": _run_cell, "args": (argv, task.folder, task.log, jobs)}
    task.process, task.state = processes.Process(**run), "running"
    with without_main():
        task.process.start()


def _without_additions(argv: Sequence[str]) -> list[str]:
    """Without ``--key+=value`` and ``--key+ value``: the run's own config has them already."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        key, equals, _ = word.partition("=")
        if not (key.startswith("--") and key.endswith("+")):
            kept.append(word)
        elif not equals:
            next(words, "")
    return kept


def _run_cell(argv: Sequence[str], folder: Path, log: Path, jobs: int) -> None:
    """Trains in a process of its own, with its share of the cores for evaluation."""
    import torch
    from fedgkd_pl.config.build import build_request
    from fedgkd_pl.config.request import read_request
    from fedgkd_pl.processes.command import quiet_libraries, run_command

    def fit() -> int:
        quiet_libraries()
        experiment = build_request(read_request("fit", argv))
        try:
            experiment.fit()
        finally:
            experiment.model.close_stores()  # this process cleans nothing up
        return 0

    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the study ends it
    with log.open("wb", buffering=0) as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    if folder.exists():
        RunFolder(folder).lock(seconds=ORPHAN).release()  # of a study killed a moment ago
    sys.exit(run_command(fit))


def _finish(task: Task) -> None:
    code = task.process.exitcode
    if code == 0 and finished_run_or_none(task.folder):
        task.state = "finished"
        return
    task.state = "failed"
    text = task.log.read_text(errors="replace") if task.log.exists() else ""
    errors = re.findall(r"^error: (.*)", text, re.MULTILINE)
    ended = f"ended with code {code}" if code else f"wrote no {SUMMARY}"
    task.reason = errors[-1] if errors else f"{ended}, see {task.log}"
