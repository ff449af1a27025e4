"""``fedgkd-pl compare``: runs the cells of a study, and makes its tables.

Every cell is a run folder like any other, trained by ``fedgkd-pl fit`` in a process of its own.
So the same command goes on with a study that was killed: it skips what is finished and resumes what
was interrupted.
"""

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from fedgkd_pl.errors import RunFailed, SettingError, StorageError, require
from fedgkd_pl.experiments.paper import paper_rows
from fedgkd_pl.experiments.report import write_page
from fedgkd_pl.experiments.runs import Run, read_run, round_of
from fedgkd_pl.experiments.study import Cell, Study, make_study, read_study
from fedgkd_pl.experiments.tables import Results, Table, every_run, make_tables
from fedgkd_pl.processes.command import Interrupted, Stopped, quiet_libraries, run_command
from fedgkd_pl.processes.start import context, end_with_parent, without_main
from fedgkd_pl.runs.folder import LAST, LOG, METRICS, RunFolder, fixed_settings, how_to_look
from fedgkd_pl.storage.files import lock, read_yaml, write_text

if TYPE_CHECKING:
    from fedgkd_pl.config.build import Experiment

OURS = ("--resume", "--ckpt_path", "--name", "--print_config", "--trainer.fast_dev_run")
# imported once for the processes of all cells
PRELOAD = (
    *("fedgkd_pl.config.build", "matplotlib.figure"),
    *("sklearn.datasets", "torch.utils.tensorboard"),
)
ORPHAN = 20.0  # seconds for a cell to end whose study was killed


@dataclass(frozen=True, repr=False)
class StudyResult:
    """The finished runs of a study, those of earlier sessions too, and its tables.

    Attributes:
        failed: why, by the name of the cell.
    """

    study: Study
    folder: Path
    results: Results
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> list[Run]:
        """The finished ones."""
        return [run for _, run in self.results]

    @property
    def frame(self) -> pd.DataFrame:
        """A row for every run: its labels, seed and measures, accuracies in percent."""
        return every_run(self.study, self.results)

    @property
    def tables(self) -> list[Table]:
        """One, or one for each measure."""
        return make_tables(self.study, self.results, self.failed)

    def __repr__(self) -> str:
        """The tables, and what failed."""
        runs = f"{self.folder}, {len(self.results)} runs"
        return "\n\n".join([runs, *map(repr, self.tables), *self._failures()])

    def _repr_html_(self) -> str:
        """For a notebook."""
        lines = "\n".join([*self._failures(), str(self.folder)])
        return "".join(table.to_html() for table in self.tables) + f"<pre>{escape(lines)}</pre>"

    def _failures(self) -> list[str]:
        return [f"failed: {name}: {reason}" for name, reason in self.failed.items()]

    def write(self, page: bool = False) -> None:
        """Writes the tables beside the cells; and ``report.html`` where a run is finished."""
        tables = self.tables
        for name, text in (
            ("results.csv", self.frame.to_csv(index=False, float_format="%.4f")),
            ("table.md", "\n".join(table.to_markdown() for table in tables)),
            ("table.tex", "\n".join(table.to_latex() for table in tables)),
        ):
            write_text(self.folder / name, text)
        if page and self.runs:
            above = "".join(table.to_html() for table in tables)
            write_page(self.runs, self.folder / "report.html", self.study.title, above)

    def show(self, quiet: bool = False) -> int:
        """Prints the tables and, unless ``quiet``, where to look; gives back the exit code."""
        print("\n\n".join(map(repr, self.tables)))
        for name, reason in self.failed.items():
            print(f"error: {name}: {reason}", file=sys.stderr)
        files = "results.csv, table.md, table.tex" + (", report.html" if self.runs else "")
        print(f"wrote {self.folder}: {files}")
        if not quiet:
            print(how_to_look(self.folder))
        return 3 if self.failed else 0


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
        file = self.folder / METRICS
        return len(file.read_text().splitlines()) - 1 if file.exists() else 0


def compare(
    study: str | Path | Mapping[str, Any],
    output_dir: str | Path = "runs",
    jobs: int = 1,
    rounds: int | None = None,
    extra: Sequence[str] = (),
    only: Sequence[str] = (),
    dry_run: bool = False,
    quiet: bool = False,
) -> StudyResult:
    """Runs what a study lacks and writes its tables.

    Args:
        study: its file, the name of one of ours, or its content with a ``name``.
        output_dir: the folder of the study's folder.
        jobs: how many cells run side by side.
        rounds: instead of the configs'; cells that have fewer go on.
        extra: flags of ``fedgkd-pl fit`` for all cells.
        only: a part of the study; see :meth:`Study.part`.
        dry_run: only check and list the cells.
        quiet: show no progress.

    Returns:
        Runs and tables, which a notebook shows; cells that failed do not raise.
    """
    require(jobs >= 1, "jobs", "must be at least 1", jobs)
    require(rounds is None or rounds >= 1, "rounds", "must be at least 1", rounds)
    whole = make_study(study) if isinstance(study, Mapping) else read_study(str(study))
    papers = dict.fromkeys(row["table"] for row in paper_rows())
    fits = not whole.paper or whole.paper in papers
    require(fits, "paper", f"one of {', '.join(papers)}", whole.paper)
    for flag in (word.partition("=")[0] for word in extra):
        require(flag not in OURS, flag.lstrip("-"), "is not for the cells of a study")
    own = [f"--rounds={rounds}"] if rounds else []
    cells = whole.part(only).cells([*extra, *own])
    top = Path(output_dir) / whole.name
    require(not top.parent.is_file(), "output_dir", "is not a folder", top.parent)
    if not quiet:
        print(f"{whole.name}: checking the settings of {len(cells)} cells", flush=True)
    tasks = _plan(cells, top)
    longest = max(task.rounds for task in tasks)
    least = min(round_of(name) or 0 for name in whole.measures)
    text = f"must be at least {least} for {', '.join(whole.measures)}; for fewer, copy the study "
    require(least <= longest, "rounds", text + "and set measures: [best, final]", longest)
    if dry_run:
        for task in tasks:
            print(f"{task.state:<9} {task.cell.name}: {' '.join(task.cell.words)}")
        return _result(whole, top)
    top.mkdir(parents=True, exist_ok=True)
    holder = lock(top, "output_dir")
    try:
        _mark_done(tasks)  # another process may have been at it until now
        if not quiet:
            done = sum(task.state == "finished" for task in tasks)
            print(f"{whole.name}: {len(tasks)} cells, {done} finished before", flush=True)
        run_tasks(whole.name, tasks, jobs, lambda: _result(whole, top, tasks).write(), quiet)
        result = _result(whole, top, tasks)
        result.write(page=True)
        return result
    finally:
        holder.release()


def _result(study: Study, top: Path, tasks: Sequence[Task] = ()) -> StudyResult:
    """The finished cells of the whole study, whatever part was run now."""
    runs = ((cell, finished_run_or_none(top / cell.name / "version_0")) for cell in study.cells())
    failed = {task.cell.name: task.reason for task in tasks if task.state == "failed"}
    return StudyResult(study, top, [(cell, run) for cell, run in runs if run], failed)


def _plan(cells: list[Cell], top: Path) -> list[Task]:
    """Checks every cell's settings before any is run, and finds which are done."""
    folders = [top / cell.name / "version_0" for cell in cells]
    try:
        with ProcessPoolExecutor(1, context(*PRELOAD), end_with_parent) as pool, without_main():
            answers = pool.submit(_look_at_all, cells, folders).result()
    except BrokenProcessPool as error:
        raise RunFailed("the settings could not be checked: the process ended") from error
    if isinstance(answers, tuple):
        raise SettingError(*answers)
    tasks = [Task(*each) for each in zip(cells, folders, answers, strict=True)]
    _mark_done(tasks)
    return tasks


def _mark_done(tasks: list[Task]) -> None:
    """Marks cells that have all rounds, or were ended by a callback before."""
    for task in tasks:
        if run := finished_run_or_none(task.folder):
            done = run.summary["rounds"]
            if done >= task.rounds or done < run.rounds_asked:
                task.state = "finished"


def _look_at_all(cells: list[Cell], folders: list[Path]) -> list[int] | tuple[str, str]:
    """In a process of its own: the rounds of every cell, or what is wrong with one."""
    from fedgkd_pl.config.build import build_command
    from fedgkd_pl.runs.resume import compare_settings

    quiet_libraries()
    looked: dict[tuple[str, ...], tuple[int, dict[str, Any]]] = {}
    rounds = []
    for cell, folder in zip(cells, folders, strict=True):
        begun = RunFolder(folder)
        try:
            experiment = None  # one at a time: it may hold its data
            if cell.words not in looked:
                experiment = build_command("fit", cell.argv)
                looked[cell.words] = experiment.settings["rounds"], experiment.fixed
            asked, settings = looked[cell.words]
            rounds.append(asked)
            if begun.is_begun():
                saved = fixed_settings(read_yaml(str(begun.config)))
                compare_settings(saved, settings | {"seed_everything": cell.seed})
            if experiment and finished_run_or_none(folder):
                _check_data(experiment, begun)
            elif experiment:
                experiment.check()
        except Exception as error:  # a user's class may fail in any way
            ours = isinstance(error, SettingError | RunFailed | StorageError)
            text = " ".join(str(error if ours else f"{type(error).__name__}: {error}").split())
            hint = "; or give the study another name" if begun.is_begun() else ""
            return cell.name, text + hint
    return rounds


def _check_data(experiment: "Experiment", finished: RunFolder) -> None:
    """Refuses to skip a run whose data has changed since; where the data is gone, tables remain."""
    from fedgkd_pl.federation.checks import check_resumed
    from fedgkd_pl.storage.checkpoint import read_checkpoint

    experiment.data.__dict__["download"] = False  # not for a run that is finished
    try:
        experiment.data.prepare_data()
        experiment.data.setup()
        saved = read_checkpoint(finished.checkpoints / LAST)["fedgkd_pl"]
    except Exception:  # a user's class may fail in any way
        return
    check_resumed(experiment.model, experiment.data, saved)


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

    def say(task: Task) -> None:
        if not quiet:
            done = f"round {task.done}/{task.rounds}"
            print(f"{task.state:<8} {task.cell.name}: {done}", flush=True)

    try:
        with bar:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(waiting.pop(0))
                    _start(running[-1], jobs, processes)
                    say(running[-1])
                wait([task.process.sentinel for task in running], timeout=1.0)
                for task in [task for task in running if not task.process.is_alive()]:
                    running.remove(task)
                    _finish(task)
                    write()
                    say(task)
                bar.update(rounds, completed=sum(task.done for task in tasks))
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
    task.process = processes.Process(target=_run_cell, args=(argv, task.folder, task.log, jobs))
    task.state = "running"
    with without_main():
        task.process.start()


def _without_additions(argv: Sequence[str]) -> list[str]:
    """Without ``--key+=value`` and ``--key+ value``: the run's own config has them already."""
    kept = []
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
    from fedgkd_pl.config.build import build_command

    def fit() -> int:
        quiet_libraries()
        experiment = build_command("fit", argv)
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
    task.reason = errors[-1] if errors else f"ended with code {code}, see {task.log}"
