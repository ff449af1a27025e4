"""The results that the repository keeps, ``results/<study>/``, and how runs get there.

``runs.csv`` has an entry per run: where it comes from and what it took. ``rounds.csv`` has the
metrics by round, ``settings.yaml`` what decided the results. Tables and figures of the pages are
made of them: :mod:`fedgkd_pl.experiments.results`.
"""

import csv
import io
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from fedgkd_pl.errors import require
from fedgkd_pl.experiments.runs import Run, natural
from fedgkd_pl.experiments.scheduler import finished_run_or_none
from fedgkd_pl.experiments.study import Cell, read_study
from fedgkd_pl.methods import title_of
from fedgkd_pl.runs.accuracy import accuracy_summary
from fedgkd_pl.runs.folder import METRICS, RunFolder
from fedgkd_pl.runs.settings import fixed_settings
from fedgkd_pl.settings.files import available
from fedgkd_pl.storage.files import write_text
from fedgkd_pl.storage.reading import read_json

Row = dict[str, str]
RUNS, ROUNDS, SETTINGS = "runs.csv", "rounds.csv", "settings.yaml"
GIVEN = ("commit", "machine", "command", "note")  # what the person who adds runs may say
FACTS = (  # the columns of runs.csv; the others are ``run`` and the axes of the study
    *("seed", "dataset", "rounds", "seconds", "bytes_down", "diverged", "precision"),
    *("date", *GIVEN),
)
ACCURACIES = r"(test|val|average)/(val_)?acc|task/(acc|forgetting|transfer)|nets/\w+_acc"
COLUMNS = rf"{ACCURACIES}|(test|val|average)/(val_)?loss|client/\w+_mean|local/acc_\w+|vote/\w+"


@dataclass(frozen=True)
class KeptRun(Run):
    """A run of the registry; its folder is the study's."""

    entry: Row  # of runs.csv
    rows: list[Row]  # of rounds.csv
    known: dict[str, Any]  # of settings.yaml

    @property
    def labels(self) -> dict[str, str]:
        """By axis."""
        return {key: text for key, text in self.entry.items() if key not in ("run", *FACTS)}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Those that decided the result, by dotted key."""
        return self.known

    def table(self, name: str) -> list[Row]:
        """The metrics; no other table is kept."""
        return [dict(row) for row in self.rows] if name == METRICS else []


def read_registry(folder: Path) -> list[KeptRun]:
    """The runs of ``results/<study>``; none where there is no such folder."""
    rounds, settings, runs = _read(folder / ROUNDS), _read_settings(folder), []
    for entry in _read(folder / RUNS):
        rows = [
            {k: v for k, v in row.items() if k != "run"}
            for row in rounds
            if row["run"] == entry["run"]
        ]
        run = KeptRun(folder, {}, entry, rows, settings.get(entry["run"], {}))
        run.summary.update(
            method=run.labels["method"],
            dataset=entry["dataset"],
            seed=int(entry["seed"]),
            bytes_down=int(entry["bytes_down"] or 0),
            diverged_round=int(entry["diverged"] or 0) or None,
            wall_seconds=float(entry["seconds"] or 0),
            **accuracy_summary(run.metrics()),
        )
        runs.append(run)
    return runs


def add(
    top: Path, folder: Path, given: Mapping[str, str], label: str = "", compact: bool = False
) -> list[str]:
    """Keeps the runs below a folder, finished or not; returns their names.

    A run that was kept before under the same name is replaced. Nothing is written before all runs
    have been read and found to fit, and no fault leaves a file half written.

    Args:
        top: a study's folder as ``compare`` makes it, or any other with runs below it.
        folder: the study's folder in the registry.
        given: what the entries say, instead of what the runs' files and this machine do.
        label: put behind the methods' names, to keep runs beside others of the same cells.
        compact: whether to keep accuracies only, and no settings.
    """
    entries = {entry["run"]: entry for entry in _read(folder / RUNS)}
    rounds, settings = _read(folder / ROUNDS), _read_settings(folder)
    names: dict[str, Path] = {}
    for run, cell in _find(top, label):
        name = cell.name
        _check_fits(cell, entries, folder)
        both = f"{names.get(name)} and {run.folder} are both {name}"
        require(name not in names, "folder", f"{both}; add them one by one, one with --label")
        names[name] = run.folder
        rounds = [row for row in rounds if row["run"] != name]
        for row in run.metrics():
            kept = [key for key in row if re.fullmatch(ACCURACIES if compact else COLUMNS, key)]
            values = {key: f"{row[key]:.6g}" for key in kept}
            rounds.append({"run": name, "round": str(row["round"]), **values})
        if not compact:
            known = fixed_settings(run.settings).items()
            settings[name] = {key: value for key, value in known if value is not None}
        entries[name] = {"run": name, **cell.labels, "seed": str(cell.seed), **_facts(run, top)}
        entries[name] |= {key: given[key] for key in GIVEN if given.get(key)}
        require(entries[name]["command"] != "", "command", "say what made the runs of", top)
    require(len(names) > 0, "folder", f"no run ({METRICS}) below", top)
    axes = [key for key in next(iter(entries.values())) if key not in FACTS]
    columns = dict.fromkeys(["run", "round", *sorted({key for row in rounds for key in row})])
    texts = {ROUNDS: _csv(list(columns), rounds)}
    if settings:
        texts[SETTINGS] = yaml.safe_dump(settings, sort_keys=False)
    texts[RUNS] = _csv([*axes, *FACTS], entries.values())  # the last: it says what is there
    for name, text in texts.items():
        write_text(folder / name, text)
    return list(names)


def _check_fits(cell: Cell, entries: Mapping[str, Row], folder: Path) -> None:
    """Refuses a run with other axes than those of the registry, or with another run's name."""
    known = [
        {key: text for key, text in entry.items() if key not in ("run", *FACTS)}
        for entry in (entries.get(cell.name), *entries.values())
        if entry
    ]
    if not known:
        return
    axes, mine = ", ".join(sorted(known[0])), ", ".join(sorted(cell.labels))
    reason = f"{folder} has runs by {axes}, these are by {mine}: keep them in another --study"
    require(axes == mine, "study", reason, cell.name)
    if cell.name in entries:
        reason = f"{cell.name} is kept there as {', '.join(known[0].values())}: give a --label"
        require(known[0] == cell.labels, "folder", reason, ", ".join(cell.labels.values()))


def _find(top: Path, label: str) -> Iterable[tuple[Run, Cell]]:
    """The runs that have a round, in the order of the study; of several versions the last."""
    study = f"studies/{top.name}.yaml"
    cells = {cell.name: cell for cell in read_study(study).cells()} if study in available() else {}
    found: dict[Path, Run] = {}  # by whole paths: folders of different parents may have one name
    for home in (file.parent for file in sorted(top.rglob(METRICS), key=natural)):
        is_version = re.fullmatch(r"version_\d+", home.name) is not None
        found[home.parent if is_version else home] = Run(home, {})
    places = {name: place for place, name in enumerate(cells)}
    for folder in sorted(found, key=lambda folder: places.get(folder.name, len(places))):
        name, run = folder.name, found[folder]
        if not run.metrics():
            continue
        finished = finished_run_or_none(run.folder)
        method = title_of(str(run.settings["model"]["class_path"]).rpartition(".")[2])
        method = finished.title if finished else method
        cell = cells.get(name) or Cell({"method": method}, run.settings["seed_everything"], ())
        labels = {"method": method} | cell.labels
        if "variant" in labels:  # which names the method, too
            labels["method"] = labels.pop("variant")
        labels["method"] = f"{labels['method']} {label}".rstrip()
        yield run, Cell(labels, cell.seed, ())


def _facts(run: Run, top: Path) -> Row:
    """Where a run comes from and what it took, as far as its files and this machine say."""
    folder, rows = RunFolder(run.folder), run.metrics()
    last = folder.metrics.stat().st_mtime
    if folder.is_finished(len(rows)):
        summary = read_json(folder.summary)
    else:
        from fedgkd_pl.storage.checkpoint import read_checkpoint

        newest = folder.last_checkpoint()
        state = read_checkpoint(newest)["callbacks"]["run"] if newest else {"seconds": 0}
        summary = {"wall_seconds": state["seconds"]}
    info = Path("/proc/cpuinfo")
    cpus = re.findall(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    return {
        "dataset": str(run.partition.get("dataset", "")),
        "rounds": str(len(rows)),
        "seconds": f"{summary['wall_seconds']:.1f}",
        "bytes_down": f"{sum(row.get('comm/bytes_down', 0) for row in rows):.0f}",
        "diverged": str(summary.get("diverged_round") or ""),
        "precision": str(run.settings["trainer"].get("precision") or "32-true"),
        "date": datetime.fromtimestamp(last, UTC).date().isoformat(),
        "machine": f"{(cpus or ['unknown CPU'])[0]}, {os.cpu_count()} cores",
        **_origin(run.folder, top, last),
    }


def _origin(folder: Path, top: Path, last: float) -> Row:
    """Commits and command: from the log of ``benchmarks/long_runs.sh``, or this checkout's."""
    study = f"studies/{top.name}.yaml"
    command = f"fedgkd-pl compare {study}" if study in available() else ""
    log = top.absolute().parent.parent / "log.txt"
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    sessions = re.findall(r"^== (\S+) commit (\w+): (.*)$", text, re.MULTILINE)
    if not sessions:
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        done = subprocess.run(git, capture_output=True, text=True, check=False)
        return {"commit": done.stdout.strip(), "command": command}
    first = min(file.stat().st_mtime for file in folder.rglob("*"))
    starts = [datetime.fromisoformat(start).timestamp() for start, _, _ in sessions]
    times = zip(sessions, starts, [*starts[1:], last], strict=True)
    commits = [commit for (_, commit, _), a, b in times if a <= last and first <= b]
    return {"commit": " ".join(dict.fromkeys(commits)), "command": f"{command} {sessions[-1][2]}"}


def _read_settings(folder: Path) -> dict[str, dict[str, Any]]:
    file = folder / SETTINGS
    return yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else {}


def _read(file: Path) -> list[Row]:
    if not file.exists():
        return []
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def _csv(columns: Sequence[str], rows: Iterable[Row]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
