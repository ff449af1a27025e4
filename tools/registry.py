"""The results that the repository keeps in ``results/<study>/``, and how runs get there.

``runs.csv`` has an entry per run: where it comes from and what it took. ``rounds.csv`` has its
metrics by round, ``settings.yaml`` the settings that decided the result.
"""

import csv
import io
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml
from fedgkd_pl.config.request import available
from fedgkd_pl.errors import require
from fedgkd_pl.experiments.runs import Run, natural
from fedgkd_pl.experiments.study import Cell, read_study
from fedgkd_pl.methods import title_of
from fedgkd_pl.runs.folder import METRICS, RunFolder, accuracy_summary, fixed_settings
from fedgkd_pl.storage.files import read_json, write_text

Row = dict[str, str]
RUNS, ROUNDS, SETTINGS = "runs.csv", "rounds.csv", "settings.yaml"
GIVEN = ("commit", "machine", "command", "note")  # what the person who adds runs may say
FACTS = (  # the columns of runs.csv; the others are ``run`` and the axes of the study
    *("seed", "dataset", "rounds", "seconds", "bytes_down", "diverged", "precision"),
    *("date", *GIVEN),
)
ACCURACIES = r"(test|val|average)/(val_)?acc|task/(acc|forgetting|transfer)|nets/\w+_acc"
COLUMNS = rf"{ACCURACIES}|(test|val|average)/(val_)?loss|client/\w+_mean|local/acc_\w+|vote/\w+"
MEASURES = {
    "best": "best_test_acc",
    "final": "final_test_acc",
    "last10": "mean_last_10_test_acc",
    "at_best_val": "test_acc_at_best_val",
}


@dataclass(frozen=True)
class KeptRun:
    """A run of the registry.

    Attributes:
        entry: its row of ``runs.csv``.
        rows: its rows of ``rounds.csv``, without empty values.
    """

    entry: Row
    rows: list[dict[str, float]]

    @property
    def labels(self) -> Row:
        """The labels by axis."""
        return {key: text for key, text in self.entry.items() if key not in ("run", *FACTS)}

    def by_round(self, column: str) -> dict[int, float]:
        """A column in percent."""
        return {int(row["round"]): 100 * row[column] for row in self.rows if column in row}

    def measure(self, name: str) -> float | None:
        """A measure in percent; None where the run has none.

        Args:
            name: one of :data:`MEASURES` or ``round<N>``, with ``average_`` before it of the
                averaged model; or a column of ``rounds.csv``, in the last round.
        """
        if "/" in name:
            return self.by_round(name).get(len(self.rows))
        kind = name.removeprefix("average_")
        test, val = ("test/acc", "val/acc")
        if kind != name:
            test, val = ("average/acc", "average/val_acc")
        if re.fullmatch(r"round\d+", kind):
            return self.by_round(test).get(int(kind[5:]))
        known = ", ".join([*MEASURES, "round<N>", "average_…", "a column"])
        require(kind in MEASURES, "measure", f"must be one of {known}", name)
        found = accuracy_summary(self.rows, test, val)[MEASURES[kind]]
        return None if found is None else 100 * float(found)


def read_registry(folder: Path) -> list[KeptRun]:
    """The runs of ``results/<study>``; none where there is no such folder."""
    rounds: dict[str, list[dict[str, float]]] = {}
    for row in _read(folder / ROUNDS):
        run = row.pop("run")
        rounds.setdefault(run, []).append({k: float(text) for k, text in row.items() if text})
    return [KeptRun(entry, rounds[entry["run"]]) for entry in _read(folder / RUNS)]


def add(
    top: Path, folder: Path, given: Mapping[str, str], label: str = "", compact: bool = False
) -> list[str]:
    """Keeps the runs below a folder, finished or not, and returns their names.

    A run that was kept before under the same name is replaced. Nothing is written before all runs
    have been read and found to fit.

    Args:
        top: a study's folder as ``compare`` makes it, or any other with runs below it.
        folder: the study's folder in the registry.
        given: what the entries say, instead of what the runs' files and this machine do.
        label: put behind the methods' names, to keep runs beside others of the same cells.
        compact: whether to keep accuracies only, and no settings.
    """
    entries = {entry["run"]: entry for entry in _read(folder / RUNS)}
    rounds = _read(folder / ROUNDS)
    file = folder / SETTINGS
    settings = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else {}
    axes = [key for entry in entries.values() for key in entry if key not in ("run", *FACTS)]
    names: dict[str, Path] = {}
    for run, cell in _find(top, label):
        name = cell.name
        fits = not axes or set(axes) == cell.labels.keys()
        require(fits, "study", f"{folder} has runs by {', '.join(dict.fromkeys(axes))}", name)
        both = f"{names.get(name)} and {run.folder} are both {name}"
        require(name not in names, "folder", f"{both}; add them one by one, one with --label")
        names[name] = run.folder
        rounds = [row for row in rounds if row["run"] != name]
        for row in run.metrics():
            kept = [key for key in row if re.fullmatch(ACCURACIES if compact else COLUMNS, key)]
            values = {key: f"{row[key]:.6g}" for key in kept}
            rounds.append({"run": name, "round": str(int(row["round"])), **values})
        if not compact:
            known = fixed_settings(run.settings).items()
            settings[name] = {key: value for key, value in known if value is not None}
        entries[name] = {"run": name, **cell.labels, "seed": str(cell.seed), **_facts(run, top)}
        entries[name] |= {key: given[key] for key in GIVEN if given.get(key)}
        require(entries[name]["command"] != "", "command", "must say how these runs were made")
    require(len(names) > 0, "folder", f"has no run ({METRICS}) below it", top)
    columns = dict.fromkeys(["run", "round", *sorted({key for row in rounds for key in row})])
    write_text(folder / ROUNDS, _csv(list(columns), rounds))
    if settings:
        write_text(folder / SETTINGS, yaml.safe_dump(settings, sort_keys=False))
    first = [key for key in next(iter(entries.values())) if key not in FACTS]
    write_text(folder / RUNS, _csv([*first, *FACTS], entries.values()))  # last: it lists the runs
    return list(names)


def _find(top: Path, label: str) -> Iterator[tuple[Run, Cell]]:
    """The runs that have a round, in the order of the study; of several versions the last."""
    study = f"studies/{top.name}.yaml"
    cells = {cell.name: cell for cell in read_study(study).cells()} if study in available() else {}
    homes: dict[Path, Path] = {}
    for home in (file.parent for file in sorted(top.rglob(METRICS), key=natural)):
        homes[home.parent if home.name.startswith("version_") else home] = home
    places = {name: place for place, name in enumerate(cells)}
    for folder in sorted(homes, key=lambda folder: places.get(folder.name, len(places))):
        run = Run(homes[folder], {})
        if not run.metrics():
            continue
        summary = RunFolder(run.folder).summary
        title = read_json(summary).get("title") if summary.exists() else None
        method = title or title_of(str(run.settings["model"]["class_path"]).rpartition(".")[2])
        other = Cell({"method": method}, run.settings["seed_everything"], ())
        cell = cells.get(folder.name, other)
        labels = {"method": method} | cell.labels
        labels["method"] = f"{labels.pop('variant', labels['method'])} {label}".rstrip()
        yield run, Cell(labels, cell.seed, ())


def _facts(run: Run, top: Path) -> Row:
    """Where a run comes from and what it took, as far as its files and this machine say."""
    folder, rows = RunFolder(run.folder), run.metrics()
    last = (folder.path / METRICS).stat().st_mtime
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
