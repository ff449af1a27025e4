"""``fedgkd-pl compare``: runs the cells of a study, and makes its tables.

Every cell is a run folder like any other, trained by ``fedgkd-pl fit`` in a process of its own.
So a study that was killed goes on where it was: what is finished is not repeated, what was
interrupted is resumed.
"""

import io
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgkd_pl.errors import RunFailed, SettingError, StorageError, require
from fedgkd_pl.experiments.paper import check_table
from fedgkd_pl.experiments.runs import LARGEST, Run, read_run
from fedgkd_pl.experiments.study import Cell, Study, read_study
from fedgkd_pl.experiments.tables import every_run, make_tables
from fedgkd_pl.processes.signals import Stopped
from fedgkd_pl.processes.start import context, ending_with_parent, without_main
from fedgkd_pl.runs.settings import fixed_settings
from fedgkd_pl.storage.files import check_folder, lock, write_text
from fedgkd_pl.storage.reading import read_bytes

if TYPE_CHECKING:
    from rich.table import Table

PRELOAD = (
    "fedgkd_pl.cli.commands",
    "matplotlib.figure",
    "sklearn.datasets",
    "torch.utils.tensorboard",
)
OURS = ("--resume", "--ckpt_path", "--name", "--print_config", "--trainer.fast_dev_run")
ORPHAN = 20.0  # seconds for a cell to end whose study was killed
SHOWN = 12  # cells in the live table


@dataclass
class Task:
    """A cell, and how far it is.

    Attributes:
        cell: which.
        folder: of its run.
        rounds: how many it is to do.
        state: waiting, running, finished or failed.
        process: where it runs.
        began: when that started, by the clock.
        first: the rounds it had done by then.
        reason: why it failed.
        pace: seconds of a round; 0 where that is not known.
        said: bytes of its log before it was started.
    """

    cell: Cell
    folder: Path
    rounds: int
    state: str = "waiting"
    process: Any = None
    began: float = 0.0
    first: int = 0
    reason: str = ""
    pace: float = 0.0
    said: int = 0

    @property
    def log(self) -> Path:
        """What it prints."""
        return self.folder.parent / "log.txt"

    def progress(self) -> tuple[int, str]:
        """Rounds done, and the test accuracy of the last one."""
        try:
            header, *lines = read_bytes(self.folder / "metrics.csv", LARGEST).decode().splitlines()
            last = dict(zip(header.split(","), lines[-1].split(","), strict=False)) if lines else {}
            accuracy = last.get("test/acc", "")
            return len(lines), f"{100 * float(accuracy):.2f}" if accuracy else ""
        except (OSError, ValueError):
            return 0, ""


def compare(
    path: str,
    output_dir: str = "runs",
    jobs: int = 1,
    rounds: int | None = None,
    extra: Sequence[str] = (),
    only: Sequence[str] = (),
    dry_run: bool = False,
) -> int:
    """Runs what a study lacks and writes its tables; returns the exit code.

    Args:
        path: the study file.
        output_dir: the folder of the study's folder.
        jobs: how many cells run side by side.
        rounds: instead of the configs'; cells that have fewer go on.
        extra: flags of ``fedgkd-pl fit`` for all cells.
        only: a part of the study; see :meth:`Study.part`.
        dry_run: only show what would be run.
    """
    require(jobs >= 1, "jobs", "must be at least 1", jobs)
    require(rounds is None or rounds >= 1, "rounds", "must be at least 1", rounds)
    study = read_study(path)
    part = study.part(only)
    check_table(study.paper)
    for word in extra:
        flag = word.split("=")[0]
        require(flag not in OURS, flag.lstrip("-"), "is not for the cells of a study")
    if rounds is not None:
        extra = (*extra, "--rounds", str(rounds))
    top = Path(output_dir) / study.name
    for folder in (top, top.parent):
        require(not folder.is_file(), "output_dir", "is not a folder", folder)
    check_folder(top, "output_dir")  # maybe a stranger's, with links to elsewhere
    tasks = _plan(part, top, extra)
    _check_measures(study, tasks, top)
    if dry_run:
        for task in tasks:
            print(f"{task.state:<9} {task.cell.name}: {' '.join(task.cell.words)}")
        return 0
    try:
        top.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(top, error) from error
    with lock(top, "output_dir"):
        _mark_done(tasks)  # another process may have been at it until now
        _run(study, tasks, top, jobs)
        _write(study, top)
        return _tell(study, tasks, top)


# -- what is to do -------------------------------------------------------------------------------


def _plan(study: Study, top: Path, extra: Sequence[str]) -> list[Task]:
    """Checks every cell's settings before any is run, and finds which are done."""
    cells = study.cells(extra)
    folders = [top / cell.name / "version_0" for cell in cells]
    processes = context(*PRELOAD)
    ours, theirs = processes.Pipe()
    look = ending_with_parent(_look_at_all, theirs, cells, folders)
    process = processes.Process(**look, daemon=True)
    print(f"{study.name}: checking the settings of {len(cells)} cells", flush=True)
    _begin(process)
    theirs.close()
    try:
        answers: list[int] | str = ours.recv()
    except EOFError as error:
        raise RunFailed("the settings could not be checked: the process ended") from error
    except BaseException:
        process.kill()
        raise
    finally:
        process.join()
    if isinstance(answers, str):
        key, _, reason = answers.partition(": ")
        raise SettingError(key, reason)
    tasks = [Task(*each) for each in zip(cells, folders, answers, strict=True)]
    _mark_done(tasks)
    return tasks


def _check_measures(study: Study, tasks: list[Task], top: Path) -> None:
    """Says before anything is trained what so few rounds cannot tell; refuses if that is all."""
    done = {cell.name: run.summary["rounds"] for cell, run in _results(study, top)}
    rounds = done | {t.cell.name: max(t.rounds, done.get(t.cell.name, 0)) for t in tasks}
    longest, lengths = max(rounds.values()), rounds.values()
    short = {
        measure: sum(length < int(measure[5:]) for length in lengths)
        for measure in study.measures
        if measure.startswith("round")
    }
    lacking = [measure for measure, count in short.items() if count == len(rounds)]
    reason = f"the study measures only {', '.join(lacking)}, and no cell has so many rounds"
    require(len(lacking) < len(study.measures), "rounds", reason, longest)
    told = [f"{m}: {n} of {len(rounds)} cells have fewer rounds" for m, n in short.items() if n]
    if "last10" in study.measures and min(lengths) < 10:
        told.append("last10: the mean of all rounds where there are fewer than ten")
    for line in told:
        print(f"warning: {line}", file=sys.stderr)


def _begin(process: Any) -> None:
    """Starts a process that leaves Ctrl-C to this one, which ends it."""
    resource_tracker.ensure_running()  # which lets Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with without_main():
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _mark_done(tasks: list[Task]) -> None:
    for task in tasks:
        if _is_done(task.folder, task.rounds):
            task.state = "finished"


def _is_done(folder: Path, rounds: int) -> bool:
    """Whether a run has so many rounds, or was ended by a callback before."""
    run = _sound(folder)
    if run is None:
        return False
    done, asked = run.summary["rounds"], run.rounds_asked
    return bool(done >= rounds or done < asked)


def _sound(folder: Path) -> Run | None:
    """A finished run; None where there is none, or its summary is damaged: a resume mends it."""
    with suppress(SettingError):
        return read_run(folder)
    return None


def _look_at_all(connection: Any, cells: list[Cell], folders: list[Path]) -> None:
    """In a process of its own: the rounds of every cell, or what is wrong with one."""
    from fedgkd_pl.runs.resume import compare_settings

    known: dict[tuple[str, ...], tuple[int, dict[str, Any]]] = {}
    answers = []
    for cell, folder in zip(cells, folders, strict=True):
        if cell.words not in known:
            words = ["fit", *cell.words, "--seed_everything", str(cell.seed)]
            found = _look(words, trains=_sound(folder) is None)
            if isinstance(found, str):
                connection.send(f"{cell.name}: {found}")
                return
            known[cell.words] = found
        rounds, settings = known[cell.words]
        if (folder / "config.yaml").exists():
            try:
                begun = fixed_settings(Run(folder, {}).settings)
                compare_settings(begun, settings | {"seed_everything": cell.seed})
            except SettingError as error:
                connection.send(f"{cell.name}: {error}; give the study another name")
                return
        answers.append(rounds)
    connection.send(answers)


def _look(words: list[str], trains: bool) -> tuple[int, dict[str, Any]] | str:
    """Rounds and deciding settings of a command, or its error; data and net are tried, too."""
    from fedgkd_pl.cli.commands import run
    from fedgkd_pl.settings.build import FederatedCLI

    found: list[tuple[int, dict[str, Any]]] = []

    class Look(FederatedCLI):
        def _run_subcommand(self, subcommand: str) -> None:
            if trains:
                self.check_run()
            found.append((self.config.fit.rounds, fixed_settings(self._dump())))

    errors = io.StringIO()
    with redirect_stderr(errors), suppress(SystemExit):  # the parser's way to end
        run(words, Look)
    if found:
        return found[0]
    told = [line for line in errors.getvalue().splitlines() if line.startswith("error: ")]
    return told[-1].removeprefix("error: ") if told else "cannot be run"


# -- doing it ------------------------------------------------------------------------------------


def _run(study: Study, tasks: list[Task], top: Path, jobs: int) -> None:
    """Runs what waits, some side by side."""
    display = _Display(study.name, tasks, jobs)
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
                    _write(study, top)
                display.show()
    except Stopped as stop:
        stop.hint = "the same command goes on where this was"
        raise
    finally:
        for task in running:
            task.process.terminate()  # which ends a run in order
        for task in running:
            task.process.join()


def _start(study: Study, task: Task, top: Path, processes: Any, jobs: int) -> None:
    done = task.progress()[0]
    words = [*task.cell.words, "--seed_everything", str(task.cell.seed)]
    if (task.folder / "config.yaml").exists():
        words = ["fit", "--resume", str(task.folder), *_without_additions(words)]
        words += ["--rounds", str(max(task.rounds, done))]
    else:
        shutil.rmtree(task.folder, ignore_errors=True)  # killed before it had settings
        name = f"{study.name}/{task.cell.name}"
        words = ["fit", *words, "--name", name, "--output_dir", str(top.parent)]
    try:
        task.folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(task.folder.parent, error) from error
    run = ending_with_parent(_run_cell, words, task.folder, task.log, jobs)
    task.process = processes.Process(**run)
    task.state, task.began, task.first = "running", time.monotonic(), done
    task.said = task.log.stat().st_size if task.log.exists() else 0
    _begin(task.process)


def _without_additions(words: list[str]) -> list[str]:
    """Without ``--key+=value`` and ``--key+ value``: the run's own config has them already."""
    kept: list[str] = []
    waiting = iter(words)
    for word in waiting:
        if word.endswith("+") and word.startswith("--"):
            next(waiting, "")
        elif "+=" not in word.split("=")[0] + "=":
            kept.append(word)
    return kept


def _run_cell(words: list[str], folder: Path, log: Path, jobs: int) -> None:
    """In a process of its own, with its share of the cores for evaluation."""
    import torch
    from fedgkd_pl.cli.main import main

    with log.open("ab", buffering=0) as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    if folder.exists():
        lock(folder, seconds=ORPHAN).release()  # of a study that was killed a moment ago
    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _finish(task: Task) -> None:
    code = task.process.exitcode
    if code == 0 and _sound(task.folder):
        task.state = "finished"
        return
    task.state = "failed"
    text = task.log.read_bytes()[task.said :].decode(errors="replace")
    told = re.findall(r"^error: (.*)", text, re.MULTILINE)
    ended = f"ended with code {code}" if code else "wrote no summary.json"
    task.reason = told[-1] if told else f"{ended}, see {task.log}"


# -- telling -------------------------------------------------------------------------------------


def _results(study: Study, top: Path) -> list[tuple[Cell, Run]]:
    """What there is of the whole study, whatever part was run now."""
    found = ((cell, _sound(top / cell.name / "version_0")) for cell in study.cells())
    return [(cell, run) for cell, run in found if run is not None]


def _write(study: Study, top: Path) -> None:
    """Tables of what there is."""
    results = _results(study, top)
    tables = make_tables(study, results)
    write_text(top / "results.csv", every_run(study, results).to_csv())
    write_text(top / "table.md", "\n".join(table.to_markdown() for table in tables))
    write_text(top / "table.tex", "\n".join(table.to_latex() for table in tables))


def _tell(study: Study, tasks: list[Task], top: Path) -> int:
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=140)
    results = _results(study, top)
    for table in make_tables(study, results):
        console.print(table.to_rich())
        for note in table.notes:
            console.print(f"  {note}", highlight=False, markup=False)
    if results:
        from fedgkd_pl.experiments.page import write_page

        page = "".join(table.to_html() for table in make_tables(study, results))
        write_page([run for _, run in results], top / "report.html", study.title, page)
    failed = [task for task in tasks if task.state == "failed"]
    for task in failed:
        print(f"error: {task.cell.name}: {task.reason}", file=sys.stderr)
    files = "results.csv, table.md, table.tex" + (", report.html" if results else "")
    print(f"wrote {top}: {files}\nlook:  tensorboard --logdir {top}")
    return 3 if failed else 0


class _Display:
    """A live table on a terminal; a line for every cell that starts or ends elsewhere."""

    def __init__(self, name: str, tasks: list[Task], jobs: int) -> None:
        self.name = name
        self.tasks = tasks
        self.jobs = jobs
        self.live: Any = None

    def __enter__(self) -> "_Display":
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
        """Draws anew."""
        if self.live:
            self.live.update(self.table())

    def say(self, task: Task) -> None:
        """Tells where nothing is drawn.

        Args:
            task: it has started or ended.
        """
        if self.live:
            return
        count = sum(task.state in ("finished", "failed") for task in self.tasks)
        done, accuracy = task.progress()
        shown = f"round {done}/{task.rounds}" + (f", test/acc {accuracy}" if accuracy else "")
        left = f", {self.left()} left" if count else ""
        print(f"{count}/{len(self.tasks)} {task.state:<8} {task.cell.name}: {shown}{left}")
        sys.stdout.flush()

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
