"""``fedgkd-pl compare``: runs the cells of a study, and makes its tables.

Every cell is a run folder like any other, trained by ``fedgkd-pl fit`` in a process of its own.
So the same command goes on with a study that was killed: it skips what is finished and resumes what
was interrupted.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgkd_pl.errors import RunFailed, SettingError, StorageError, require
from fedgkd_pl.experiments.paper import check_table
from fedgkd_pl.experiments.runs import Run, round_of
from fedgkd_pl.experiments.scheduler import PRELOAD, Task, begin, run_tasks, sound_run
from fedgkd_pl.experiments.study import Cell, Study, make_study, read_study
from fedgkd_pl.experiments.study_result import StudyResult
from fedgkd_pl.experiments.tables import every_run, make_tables
from fedgkd_pl.processes.start import context, ending_with_parent
from fedgkd_pl.runs.folder import RunFolder
from fedgkd_pl.runs.settings import fixed_settings
from fedgkd_pl.storage.files import check_folder, lock, write_text

if TYPE_CHECKING:
    from fedgkd_pl.settings.experiment import Experiment

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
    part = whole.part(only)
    check_table(whole.paper)
    its_name = "name: in the study" if isinstance(study, Mapping) else f"name: in {study}"
    for word in extra:
        flag = word.split("=")[0]
        where = f"; change {its_name}" if flag == "--name" else ""
        require(flag not in OURS, flag.lstrip("-"), f"is not for the cells of a study{where}")
    if rounds is not None:
        extra = (*extra, "--rounds", str(rounds))
    top = Path(output_dir) / whole.name
    for folder in (top, top.parent):
        require(not folder.is_file(), "output_dir", "is not a folder", folder)
    check_folder(top, "output_dir")  # maybe a stranger's, with links to elsewhere
    if not quiet:
        print(f"{whole.name}: checking the settings of {len(part.cells())} cells", flush=True)
    tasks = _plan(part, top, extra, f"give the study another name ({its_name})")
    _check_measures(whole, tasks, top)
    if dry_run:
        for task in tasks:
            print(f"{task.state:<9} {task.cell.name}: {' '.join(task.cell.words)}")
        return StudyResult(whole, top, _results(whole, top))
    try:
        top.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(top, error) from error
    holder = lock(top, "output_dir")
    try:
        _mark_done(tasks)  # another process may have been at it until now
        run_tasks(whole, tasks, top, jobs, lambda: _write(whole, top, _failed(tasks)), quiet)
        _write(whole, top, _failed(tasks))
        result = StudyResult(whole, top, _results(whole, top), _failed(tasks))
        result.write_page()
        return result
    finally:
        holder.release()


def _plan(study: Study, top: Path, extra: Sequence[str], hint: str) -> list[Task]:
    """Checks every cell's settings before any is run, and finds which are done.

    ``hint``: what to do where a cell was begun with other settings.
    """
    cells = study.cells(extra)
    folders = [top / cell.name / "version_0" for cell in cells]
    processes = context(*PRELOAD)
    ours, theirs = processes.Pipe()
    look = ending_with_parent(_look_at_all, theirs, cells, folders, hint)
    process = processes.Process(**look, daemon=True)
    begin(process)
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
    """Warns of measures that need more rounds than the cells have; refuses if all of them do."""
    done = {cell.name: run.summary["rounds"] for cell, run in _results(study, top)}
    rounds = done | {t.cell.name: max(t.rounds, done.get(t.cell.name, 0)) for t in tasks}
    longest, lengths = max(rounds.values()), rounds.values()
    short = {
        measure: sum(length < number for length in lengths)
        for measure in study.measures
        if (number := round_of(measure)) is not None
    }
    lacking = [measure for measure, count in short.items() if count == len(rounds)]
    reason = f"the study measures only {', '.join(lacking)}, and no cell has so many rounds"
    require(len(lacking) < len(study.measures), "rounds", reason, longest)
    warnings = [f"{m}: {n} of {len(rounds)} cells have fewer rounds" for m, n in short.items() if n]
    if any(m.endswith("last10") for m in study.measures) and min(lengths) < 10:
        warnings.append("last10: the mean of all rounds where there are fewer than ten")
    for line in warnings:
        print(f"warning: {line}", file=sys.stderr)


def _mark_done(tasks: list[Task]) -> None:
    for task in tasks:
        if _is_done(task.folder, task.rounds):
            task.state = "finished"


def _is_done(folder: Path, rounds: int) -> bool:
    """Whether a run has so many rounds, or was ended by a callback before."""
    run = sound_run(folder)
    if run is None:
        return False
    done, asked = run.summary["rounds"], run.rounds_asked
    return bool(done >= rounds or done < asked)


def _look_at_all(connection: Any, cells: list[Cell], folders: list[Path], hint: str) -> None:
    """In a process of its own: the rounds of every cell, or what is wrong with one."""
    from fedgkd_pl.processes.command import quiet_libraries
    from fedgkd_pl.runs.resume import compare_settings
    from fedgkd_pl.settings import strict_yaml

    quiet_libraries()
    known: dict[tuple[str, ...], tuple[int, dict[str, Any]]] = {}
    same_data: set[str] = set()  # settings of data that is still what a finished cell had
    answers = []
    for cell, folder in zip(cells, folders, strict=True):
        experiment = None  # one at a time: it may hold its data
        if cell.words not in known:
            argv = [*cell.words, "--seed_everything", str(cell.seed)]
            checked = _look(argv, trains=sound_run(folder) is None)
            if isinstance(checked, str):
                connection.send(f"{cell.name}: {checked}")
                return
            experiment, checked = checked, ""
            known[cell.words] = experiment.settings["rounds"], experiment.fixed
        rounds, settings = known[cell.words]
        begun = RunFolder(folder)
        if begun.is_begun():
            try:
                saved = fixed_settings(strict_yaml.read(str(begun.config)))
                compare_settings(saved, settings | {"seed_everything": cell.seed})
                of_data = repr([item for item in settings.items() if item[0].startswith("data.")])
                if experiment and of_data not in same_data and sound_run(folder) is not None:
                    _compare_data(experiment, begun)
                    same_data.add(of_data)
            except SettingError as error:
                connection.send(f"{cell.name}: {error}; {hint}")
                return
        answers.append(rounds)
    connection.send(answers)


def _compare_data(experiment: "Experiment", finished: RunFolder) -> None:
    """Refuses to skip a run whose data has changed since; where the data is gone, tables remain."""
    from fedgkd_pl.storage.checkpoint import CheckpointDamaged, read_checkpoint

    data, file = experiment.data, finished.last_checkpoint()
    if file is None:
        return
    data.__dict__["download"] = False  # not for a run that is finished
    try:
        data.prepare_data()
        data.setup()
    except Exception:  # a user's class may fail in any way
        return
    try:
        saved = read_checkpoint(file)["fedgkd_pl"]["data"]
    except (CheckpointDamaged, LookupError):
        return
    reason = f"samples, labels or partition are not those that {finished.path} was trained on"
    require(saved == data.fingerprint(), "data", reason)


def _look(argv: Sequence[str], trains: bool) -> "Experiment | str":
    """What a ``fit`` would train, or its error; data and net are tried, too."""
    from fedgkd_pl.settings.build import build_request
    from fedgkd_pl.settings.request import read_request

    try:
        experiment = build_request(read_request("fit", argv))
        if trains:
            experiment.check()
    except (SettingError, RunFailed, StorageError) as error:
        return " ".join(str(error).split())
    except Exception as error:  # a user's class may fail in any way
        return f"{type(error).__name__}: {error}"
    return experiment


def _results(study: Study, top: Path) -> list[tuple[Cell, Run]]:
    """The finished cells of the whole study, whatever part was run now."""
    runs = ((cell, sound_run(top / cell.name / "version_0")) for cell in study.cells())
    return [(cell, run) for cell, run in runs if run is not None]


def _failed(tasks: Sequence[Task]) -> dict[str, str]:
    """Why, by the name of the cell."""
    return {task.cell.name: task.reason for task in tasks if task.state == "failed"}


def _write(study: Study, top: Path, failed: Collection[str]) -> None:
    """Writes the tables of the finished cells, and of those that failed now."""
    results = _results(study, top)
    tables = make_tables(study, results, failed)
    write_text(top / "results.csv", every_run(study, results).to_csv())
    write_text(top / "table.md", "\n".join(table.to_markdown() for table in tables))
    write_text(top / "table.tex", "\n".join(table.to_latex() for table in tables))
