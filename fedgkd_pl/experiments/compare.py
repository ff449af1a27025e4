"""``fedgkd-pl compare``: runs the cells of a study, and makes its tables.

Every cell is a run folder like any other, trained by ``fedgkd-pl fit`` in a process of its own.
So the same command goes on with a study that was killed: it skips what is finished and resumes what
was interrupted.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgkd_pl.errors import RunFailed, SettingError, StorageError, require
from fedgkd_pl.experiments.paper import check_table
from fedgkd_pl.experiments.scheduler import PRELOAD, Task, finished_run_or_none, run_tasks
from fedgkd_pl.experiments.study import Cell, Study, make_study, read_study
from fedgkd_pl.experiments.study_result import StudyResult
from fedgkd_pl.processes.start import context, end_with_parent, without_main
from fedgkd_pl.runs.folder import RunFolder
from fedgkd_pl.storage.files import lock

if TYPE_CHECKING:
    from fedgkd_pl.config.build import Experiment

OURS = ("--resume", "--ckpt_path", "--name", "--print_config", "--trainer.fast_dev_run")


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
    check_table(whole.paper)
    for word in extra:
        flag = word.partition("=")[0]
        reason = "is not for the cells of a study; its own name: names their folder"
        require(flag not in OURS, flag.lstrip("-"), reason)
    own = [] if rounds is None else [f"--rounds={rounds}"]
    cells = whole.part(only).cells([*extra, *own])
    top = Path(output_dir) / whole.name
    require(not top.parent.is_file(), "output_dir", "is not a folder", top.parent)
    if not quiet:
        print(f"{whole.name}: checking the settings of {len(cells)} cells", flush=True)
    tasks = _plan(cells, top)
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
    if isinstance(answers, str):
        key, _, reason = answers.partition(": ")
        raise SettingError(key, reason)
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


def _look_at_all(cells: list[Cell], folders: list[Path]) -> list[int] | str:
    """In a process of its own: the rounds of every cell, or what is wrong with one."""
    from fedgkd_pl.config.build import build_request
    from fedgkd_pl.config.request import read_request
    from fedgkd_pl.processes.command import quiet_libraries
    from fedgkd_pl.runs.folder import fixed_settings
    from fedgkd_pl.runs.resume import compare_settings
    from fedgkd_pl.storage.reading import read_yaml

    quiet_libraries()
    looked: dict[tuple[str, ...], tuple[int, dict[str, Any]]] = {}
    same_data: set[str] = set()  # settings of data that is still what a finished cell had
    rounds = []
    for cell, folder in zip(cells, folders, strict=True):
        begun, run = RunFolder(folder), finished_run_or_none(folder)
        try:
            experiment = None  # one at a time: it may hold its data
            if cell.words not in looked:
                experiment = build_request(read_request("fit", cell.argv))
                if run is None:
                    experiment.check()
                looked[cell.words] = experiment.settings["rounds"], experiment.fixed
            asked, settings = looked[cell.words]
            rounds.append(asked)
            if begun.is_begun():
                saved = fixed_settings(read_yaml(str(begun.config)))
                compare_settings(saved, settings | {"seed_everything": cell.seed})
            of_data = repr([item for item in settings.items() if item[0].startswith("data.")])
            if experiment and run and of_data not in same_data:
                _compare_data(experiment, begun)
                same_data.add(of_data)
        except Exception as error:  # a user's class may fail in any way
            ours = isinstance(error, SettingError | RunFailed | StorageError)
            text = " ".join(str(error if ours else f"{type(error).__name__}: {error}").split())
            hint = "; or give the study another name" if begun.is_begun() else ""
            return f"{cell.name}: {text}{hint}"
    return rounds


def _compare_data(experiment: "Experiment", finished: RunFolder) -> None:
    """Refuses to skip a run whose data has changed since; where the data is gone, tables remain."""
    from fedgkd_pl.storage.checkpoint import read_checkpoint

    file = finished.last_checkpoint()
    saved = now = None
    with suppress(Exception):  # a user's class may fail in any way
        experiment.data.__dict__["download"] = False  # not for a run that is finished
        experiment.data.prepare_data()
        experiment.data.setup()
        now = experiment.data.fingerprint()
        saved = read_checkpoint(file)["fedgkd_pl"]["data"] if file else now
    reason = f"samples, labels or partition are not those that {finished.path} was trained on"
    require(saved is None or saved == now, "data", reason)
