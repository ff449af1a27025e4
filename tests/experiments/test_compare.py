"""Studies: their files, their tables against numbers worked out here, and kills in their middle."""

import contextlib
import csv
import io
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

import pytest
from fedgkd_pl.cli.main import main
from fedgkd_pl.errors import SettingError
from fedgkd_pl.experiments.groups import make_groups
from fedgkd_pl.experiments.overview import overview
from fedgkd_pl.experiments.paper import numbers, paper_row
from fedgkd_pl.experiments.runs import Run, find_runs
from fedgkd_pl.experiments.scheduler import PAUSE, Task, _Display
from fedgkd_pl.experiments.significance import lead
from fedgkd_pl.experiments.study import Cell, read_study
from fedgkd_pl.experiments.tables import every_run, make_tables
from fedgkd_pl.settings.files import available
from rich.console import Console

from tests.support.faults import Command
from tests.support.studies import fake, grouped, results, study

MINI = """
# A small study
seeds: [0]
config: digits/fedavg.yaml
set: {rounds: 4, model.local_steps: 2, data.participation: 0.1}
measures: [best, round2]
rows: [alpha]
axes:
  alpha:
    0.1: {data.partition.alpha: 0.1}
    1: {data.partition.alpha: 1}
  method:
    FedAvg: {model: FedAvg}
    FedGKD: {model: FedGKD, model.gamma: 0.2}
""".lstrip()


PAIR = MINI.replace("    1: {data.partition.alpha: 1}\n", "")

# -- study files ---------------------------------------------------------------------------------


def test_cells_and_their_words(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(
        "# Title\nconfig: [a.yaml, b.yaml]\nseeds: [3, 4]\nset: {rounds: 7}\n"
        "rows: [dataset]\naxes:\n"
        "  dataset: {AG News: {config: c.yaml}, digits: {data.flat: true}}\n"
        "  method: {FedAvg: {}, FedProx: {model: FedProx, model.mu: 0.1, x.y: [1, 2]}}\n"
        "special:\n  - {where: {method: FedProx, dataset: digits}, set: {model.mu: 2}}\n"
    )
    study = read_study(str(file))
    assert (study.name, study.title) == ("study", "Title")
    cells = study.cells(["--data.data_dir", "d"])
    assert [cell.name for cell in cells] == [
        "AG_News-FedAvg-seed3",
        "AG_News-FedProx-seed3",
        "digits-FedAvg-seed3",
        "digits-FedProx-seed3",
        "AG_News-FedAvg-seed4",
        "AG_News-FedProx-seed4",
        "digits-FedAvg-seed4",
        "digits-FedProx-seed4",
    ]
    base = ("--config", "a.yaml", "--config", "b.yaml")
    prox = ("--model", "FedProx", "--model.mu", "0.1", "--x.y", "[1, 2]")
    end = ("--data.data_dir", "d")
    assert cells[0].words == (*base, "--config", "c.yaml", "--rounds", "7", *end)
    assert cells[1].words == (*base, "--config", "c.yaml", "--rounds", "7", *prox, *end)
    special = ("--model.mu", "2")
    assert cells[7].words == (*base, "--rounds", "7", "--data.flat", "true", *prox, *special, *end)


def test_labels_that_are_numbers_say_of_what() -> None:
    cell = Cell({"alpha": "0.1", "method": "FedGKD+", "M": "5"}, 2, ())
    assert cell.name == "alpha0.1-FedGKD+-M5-seed2"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("sedes: [0]", "sedes: a study has no such key"),
        ("axes: {}", "axes: each needs at least one label"),
        ("axes: {method: {}}", "axes: each needs at least one label"),
        ("axes: [1]", "axes: must be a mapping"),
        ("seeds: 3", "seeds: must be a list of int (got 3)"),
        ("seeds: []", "seeds: at least one is needed"),
        ("seeds: [-1]", "seeds: must be from 0 to 4294967295 (got -1)"),
        ("seeds: [1, 1]", "seeds: one is given twice (got [1, 1])"),
        ("measures: [bets]", "measures: best, final, last10, at_best_val or round<N> (got bets)"),
        ("rows: [beta]", "rows: or columns must name alpha, once"),
        ("compare: beta", "compare: must name an axis (got beta)"),
        ("name: ../x", "name: must be a plain word: it names a folder (got ../x)"),
        ("special: [{where: {beta: 1}, set: {}}]", "special.where: must name axes (got beta)"),
        ("special: [{where: {alpha: 7}, set: {}}]", "special.where: alpha has no such label"),
        ("special: [{set: {}}]", "special: each needs where and set (got ['set'])"),
        ("paper: tabel", "paper: one of overview, "),
        ("config: nowhere.yaml", "alpha0.1-FedAvg-seed0: config: no such file"),
        ("set: {model.gama: 1}", "alpha0.1-FedAvg-seed0: "),
        ("set: {data.partition.alpha: -1}", "alpha"),
    ],
)
def test_a_bad_study_is_answered_in_one_line(
    change: str, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    key = change.split(":")[0]
    lines = MINI.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith(f"{key}:")), len(lines))
    end = start + 1
    while end < len(lines) and lines[end].startswith(" "):
        end += 1
    lines[start:end] = [change]
    file = tmp_path / "mini.yaml"
    if key == "set" and "alpha" in change:
        lines = [line for line in lines if "partition.alpha: 0.1}" not in line or key in line[:4]]
        lines = [line.replace("1: {data.partition.alpha: 1}", "1: {}") for line in lines]
    file.write_text("\n".join(lines))
    code = main(["compare", str(file), "--output_dir", str(tmp_path / "runs")])
    err = capfd.readouterr().err
    assert (code, err.count("error: ")) == (2, 1), err
    assert err.startswith(f"error: {told}") or told in err, err
    assert "Traceback" not in err
    assert sorted(tmp_path.iterdir()) == [file]


def test_flags_are_checked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mini.yaml").write_text(MINI)
    study = str(tmp_path / "mini.yaml")
    for words, told in (
        (["--jobs", "0"], "error: jobs: must be at least 1 (got 0)"),
        (["--rounds", "0"], "error: rounds: must be at least 1 (got 0)"),
        (["--model.gama", "1"], "error: alpha0.1-FedAvg-seed0: "),
        (["--model.min_clients", "50"], "error: alpha0.1-FedAvg-seed0: model.min_clients: must"),
        (["--resume", "x"], "error: resume: is not for the cells of a study\n"),
        (
            ["--name", "x"],
            f"error: name: is not for the cells of a study; change name: in {study}\n",
        ),
        (["--only", "beta=1"], "error: only: must be AXIS=LABEL,... with an axis of alpha, method"),
        (["--only", "method=MOON"], "error: only: method is one of FedAvg, FedGKD (got MOON)"),
    ):
        assert main(["compare", study, "--output_dir", str(tmp_path / "runs"), *words]) == 2
        assert capfd.readouterr().err.startswith(told)
    assert not (tmp_path / "runs").exists()
    assert main(["compare", "nowhere.yaml"]) == 2
    assert capfd.readouterr().err.startswith("error: study: no such file (fedgkd-pl configs")
    near = str(tmp_path / "minni.yaml")
    assert main(["compare", near]) == 2
    assert f"error: study: no such file, did you mean {study}?" in capfd.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["compare", study, "--output_dir", str(tmp_path / "file")]) == 2
    assert "error: output_dir: is not a folder" in capfd.readouterr().err


def test_every_study_of_ours_can_be_read() -> None:
    names = [name for name in available() if name.startswith("studies/")]
    assert len(names) >= 8
    cells = {name: len(read_study(name).cells()) for name in names}
    assert cells["studies/overview.yaml"] == 3 * 3 * 8 * 3
    assert cells["studies/rounds.yaml"] == 8 * 3
    assert cells["studies/participation.yaml"] == 8 * 4 * 3


# -- tables --------------------------------------------------------------------------------------


def test_a_table_by_hand() -> None:
    """The study has α 1 first; numbers are shown by size."""
    it = study(measures=["best"])
    values = {
        ("1", "FedAvg"): [[0.5, 0.7], [0.6, 0.2]],  # best 70, 60: 65 ± 7.07
        ("1", "FedGKD"): [[0.8, 0.1], [0.64, 0.2]],  # 80, 64: 72 ± 11.31
        ("1", "MOON"): [[0.1, 0.2], [0.2, 0.2]],
        ("0.1", "FedAvg"): [[0.3, 0.4]],  # one seed
    }
    (table,) = make_tables(it, results(it, values))
    assert table.to_markdown().splitlines() == [
        "**T: best**, test accuracy in %",
        "",
        "| α | FedAvg | FedGKD | MOON |",
        "|---|---:|---:|---:|",
        "| 0.1 | 40.00 † | - | - |",
        "| 1 | <u>65.00 ± 7.07</u> | **72.00 ± 11.31** | 20.00 ± 0.00 |",
        "",
        "- † of seed 0 only",
        "- α 1, best: FedGKD is ahead of FedAvg by 7.00 ± 4.24 points over 2 seeds; a test needs 3",
    ]
    latex = table.to_latex()
    assert r"1 & \underline{65.00$\pm$7.07} & \textbf{72.00$\pm$11.31} & 20.00$\pm$0.00 \\" in latex
    assert latex.startswith("\\begin{table}\n") and latex.endswith("\\end{table}\n")
    assert latex.count("{") == latex.count("}")


def test_a_method_that_failed_stays_in_the_table() -> None:
    it = study(measures=["best"], rows=["method"], columns=["alpha"])
    values = {
        ("1", "FedAvg"): [[0.5], [0.6]],
        ("1", "FedGKD"): [[0.8], [0.7]],
        ("0.1", "FedAvg"): [[0.4]],
    }
    failed = ["alpha1-MOON-seed0", "alpha1-MOON-seed1", "alpha0.1-FedAvg-seed1"]
    failed += ["alpha1-FedAvg-seed0"]  # on its way to more rounds: it has a number
    (table,) = make_tables(it, results(it, values), failed)
    lines = table.to_markdown().splitlines()
    assert lines[2:7] == [
        "| method | α 0.1 | α 1 |",
        "|---|---:|---:|",
        "| FedAvg | 40.00 † | <u>55.00 ± 7.07</u> |",
        "| FedGKD | - | **75.00 ± 7.07** |",
        "| MOON | - | failed |",
    ]
    assert lines[8:11] == [
        "- † of seed 0 only",
        "- α 0.1, FedAvg: failed in 1 of 2 seeds",
        "- α 1, MOON: failed in 2 of 2 seeds",
    ]
    assert r"MOON & - & failed \\" in table.to_latex() and "<td>failed</td>" in table.to_html()
    (table,) = make_tables(it, results(it, values))
    assert len(table.rows) == 2  # what was never tried is not in it


def test_the_papers_numbers_stand_beside() -> None:
    axes = {"dataset": {"CIFAR-10": {}}, "alpha": {"0.1": {}}, "method": {"FedGKD": {}}}
    rows = {"rows": ["dataset", "alpha"], "seeds": [0]}
    it = study(axes=axes, measures=["best"], paper="overview", **rows)
    labels = {"dataset": "CIFAR-10", "alpha": "0.1", "method": "FedGKD"}
    distils = {"gamma": 0.2, "buffer_size": 5, "distance": "kl", "temperature": 1.0}
    ours = grouped("FedGKD", 0, 0.1, **distils)
    ours.summary["best_test_acc"] = 0.7
    (table,) = make_tables(it, [(Cell(labels, 0, ()), ours)])
    assert "| CIFAR-10 | 0.1 | 70.00 (72.27 ± 0.84) |" in table.to_markdown()
    assert "In brackets: the paper's." in table.to_markdown()
    row = paper_row("rounds", {"method": "FedAvg"}, "round100")
    assert row and numbers(row) == (40.09, 2.29)
    assert paper_row("overview", {"method": "FedAvg"}, "best") is None, "which of nine?"
    row = paper_row("overview", labels | {"alpha": "0.10"}, "best")
    assert row and numbers(row) == (72.27, 0.84)


def test_measures_as_columns() -> None:
    axes = {"method": {"FedAvg": {}, "FedGKD": {}}}
    columns = {
        "rows": ["method"],
        "columns": ["measure"],
        "measures": ["round1", "round3", "round10"],
    }
    it = study(axes=axes, seeds=[0], paper="rounds", **columns)
    runs = [(Cell({"method": m}, 0, ()), fake(m, 0, [0.1, 0.2])) for m in ("FedAvg", "FedGKD")]
    (table,) = make_tables(it, runs)
    lines = table.to_markdown().splitlines()
    assert lines[2] == "| method | round 1 | round 10 |", "nobody has round 3"
    assert lines[4:6] == [
        "| FedAvg | **10.00** | - (36.30 ± 1.24) |",
        "| FedGKD | **10.00** | - (45.34 ± 1.10) |",
    ], "a tie"


def test_the_lead_is_a_paired_t_test() -> None:
    # differences 3, 2, 1: t = 2 / (1/√3) = 2√3; with two degrees of freedom p = 1 - t/√(t² + 2)
    p = 1 - math.sqrt(12 / 14)
    text = lead("a", {0: 13, 1: 12, 2: 11, 7: 99}, "b", {0: 10, 1: 10, 2: 10, 8: 1})
    assert text == (
        "a is ahead of b by 2.00 ± 1.00 points over 3 seeds, "
        f"paired t-test p = {p:.3f}: not significant at 5 %"
    )
    assert lead("a", {0: 2}, "b", {0: 1}).endswith("one seed says nothing of its significance")
    far = lead("a", {s: 50 + s / 10 for s in range(5)}, "b", dict.fromkeys(range(5), 10.0))
    assert far.endswith(": significant at 5 %")
    assert lead("a", {0: 2}, "b", {1: 1}) == "a and b have no seed in common"
    assert lead("a", {0: 2}, "b", {0: 2}) == "a and b are equal"
    assert lead("a", {0: 1, 1: 9}, "b", {0: 2}).startswith("b is ahead of a by 1.00 points")
    assert lead("a", {0: 2, 1: 3}, "b", {0: 1, 1: 2}).endswith(
        "1.00 ± 0.00 points in each of 2 seeds"
    )


def test_results_as_csv() -> None:
    it = study(measures=["round2"])
    rows = list(
        csv.DictReader(
            every_run(it, results(it, {("1", "MOON"): [[0.25, 0.5]]})).to_csv().splitlines()
        )
    )
    assert rows == [
        {
            "alpha": "1",
            "method": "MOON",
            "seed": "0",
            "rounds": "2",
            "best": "50.0000",
            "final": "50.0000",
            "last10": "37.5000",
            "at_best_val": "",
            "round2": "50.0000",
            "bytes_down": "1000000",
            "bytes_up": "500000",
            "cell": "alpha1-MOON-seed0",
        }
    ]


def test_groups_are_told_apart_by_what_differs() -> None:
    runs = [
        grouped("FedGKDVote", 0, 0.1, buffer_size=3),
        grouped("FedGKDVote", 1, 0.1, buffer_size=3),
        grouped("FedGKDVote", 0, 0.1, buffer_size=5),
        grouped("FedAvg", 0, 0.1),
        grouped("FedAvg", 0, 1),
    ]
    runs[1].summary["seed"] = 0  # data.seed may be the same in all
    groups = make_groups(runs)
    assert [(g.name, g.panel, sorted(g.runs)) for g in groups] == [
        ("FedGKD-Vote, M 3", "CIFAR-10, α 0.1", [0, 1]),
        ("FedGKD-Vote, M 5", "CIFAR-10, α 0.1", [0]),
        ("FedAvg", "CIFAR-10, α 0.1", [0]),
        ("FedAvg", "CIFAR-10, α 1", [0]),
    ]
    assert groups[3].paper == (77.30, 0.72)
    rows = overview(groups)
    assert rows[0]["paper's best"] == "72.99 †" and rows[0]["best"] == "50.00 ± 0.00", "M is 5"
    assert rows[2]["paper's best"] == "69.22", "FedAvg's protocol is the paper's"


def test_another_protocol_stands_not_beside_the_papers_numbers() -> None:
    for change in ({"clients": 500}, {"local_epochs": 1}, {"local_steps": 5}):
        (group,) = make_groups([grouped("FedAvg", 0, 1, **change)])
        assert group.paper is None, change
    short = grouped("FedAvg", 0, 1)
    short.summary["rounds_asked"] = 10
    assert make_groups([short])[0].paper is None


def test_runs_without_settings_are_not_taken_for_each_other() -> None:
    runs = [fake("FedAvg", 0, [0.5]), fake("FedAvg", 0, [0.9]), fake("FedAvg", 1, [0.7])]
    for number, run in enumerate(runs):
        runs[number] = Run(Path(f"run{number}"), run.summary)
    assert sorted(g.values("best") for g in make_groups(runs)) == [[50.0], [70.0], [90.0]]


def test_seeds_that_a_callback_ends_early_are_one_line() -> None:
    runs = [fake("FedAvg", seed, [0.5] * (seed + 2), rounds_asked=6) for seed in range(3)]
    assert [sorted(group.runs) for group in make_groups(runs)] == [[0, 1, 2]]


def test_labels_are_escaped() -> None:
    it = study(
        axes={"gamma": {"a|b": {}, "50%_$x$": {}}, "method": {"[/b]": {}}},
        rows=["gamma"],
        seeds=[0],
        measures=["best"],
    )
    runs = [
        (Cell({"gamma": label, "method": "[/b]"}, 0, ()), fake("x", 0, [0.5]))
        for label in it.axes["gamma"]
    ]
    (table,) = make_tables(it, runs)
    assert r"| a\|b | 50.00 |" in table.to_markdown()
    assert (
        r"50\%\_\$x\$ & 50.00 \\" in table.to_latex() and r"$\gamma$ & [/b] \\" in table.to_latex()
    )
    Console(file=io.StringIO()).print(table.to_rich())  # raises where a label is markup
    assert "<td>a|b</td>" in table.to_html()


def test_runs_of_different_length_are_told() -> None:
    it = study(measures=["best"], axes={"method": {"A": {}, "B": {}}}, rows=[], seeds=[0])
    pairs = [("A", 4), ("B", 2)]
    runs = [(Cell({"method": m}, 0, ()), fake(m, 0, [0.5], rounds_asked=n)) for m, n in pairs]
    assert make_tables(it, runs)[0].notes[-1] == ("the runs have different numbers of rounds: 2, 4")


def test_versions_come_in_their_order(tmp_path: Path) -> None:
    for number in (10, 9, 1):
        folder = tmp_path / f"version_{number}"
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps(fake("FedAvg", number, [0.5]).summary))
    assert [run.summary["seed"] for run in find_runs([str(tmp_path)])] == [1, 9, 10]
    with pytest.raises(SettingError):
        find_runs([str(tmp_path / "nowhere")])


def test_the_newest_is_that_of_every_name(tmp_path: Path) -> None:
    """Runs of other names are not older versions of it, nor are folders of Python's."""
    names = ("a/version_0", "a/version_1", "b/version_0", "mine", "other")
    for seed, name in enumerate(names):
        (tmp_path / name).mkdir(parents=True)
        file = tmp_path / name / "summary.json"
        file.write_text(json.dumps(fake("FedAvg", seed, [0.5]).summary))
        os.utime(file, (100 - seed, 100 - seed) if seed else (200, 200))
    seeds = [run.summary["seed"] for run in find_runs([str(tmp_path)], newest=True)]
    assert seeds == [0, 2, 3, 4], "version_0 of a was written last"


# -- runs ----------------------------------------------------------------------------------------


Compare = Callable[..., tuple[int, str]]


@pytest.fixture
def compare(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Compares within this process, whose fork server has everything imported: (code, output)."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def call(folder: Path, *words: str) -> tuple[int, str]:
        capfd.readouterr()
        with contextlib.chdir(folder):
            code = main(["compare", "mini.yaml", *words])
        return code, "".join(capfd.readouterr())

    return call


def tables(folder: Path) -> list[str]:
    top = folder / "runs" / "mini"
    return [(top / name).read_text() for name in ("results.csv", "table.md", "table.tex")]


def test_a_killed_study_goes_on(compare: Compare, tmp_path: Path) -> None:
    """What is finished is not repeated, and the results are those of an unbroken study."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
        (folder / "mini.yaml").write_text(PAIR)
    code, out = compare(whole)
    assert out.count("finished alpha") == 2 and code == 0, out

    process = Command(broken, "compare", "mini.yaml")
    top = broken / "runs" / "mini"
    second = top / "alpha0.1-FedGKD-seed0" / "version_0" / "metrics.csv"
    deadline = time.monotonic() + 120
    while not second.exists() or len(second.read_text().splitlines()) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.communicate()
    first = top / "alpha0.1-FedAvg-seed0" / "version_0" / "summary.json"
    made = first.stat().st_mtime_ns
    assert not (second.parent / "summary.json").exists()

    code, out = compare(broken)
    assert code == 0, out
    assert "2 cells, 1 finished before" in out
    assert first.stat().st_mtime_ns == made, "a finished cell was run again"
    assert tables(broken) == tables(whole)
    for cell in sorted(path.name for path in top.iterdir() if path.is_dir()):
        ours, theirs = (f / "runs" / "mini" / cell / "version_0" for f in (broken, whole))
        for name in ("metrics.csv", "global.safetensors"):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes(), (cell, name)

    (broken / "mini.yaml").write_text(PAIR.replace("model.gamma: 0.2", "model.gamma: 0.3"))
    code, out = compare(broken)
    told = (
        "seed0: model.gamma: the run began with 0.2 (got 0.3); give the study another name (name: "
    )
    assert code == 2 and f"{told}in " in out and "mini.yaml)" in out, out

    (broken / "mini.yaml").write_text(PAIR)
    first.write_text("{")  # a damaged summary is made again
    (top / "alpha0.1-FedAvg-seed0" / "log.txt").write_text("error: an old one\n")
    code, out = compare(broken, "--only", "method=FedAvg", "--rounds", "2")
    assert code == 0 and tables(broken) == tables(whole), out

    code, out = compare(broken, "--rounds", "5", "--jobs", "2")
    assert code == 0 and "round 5/5" in out, out
    rows = list(csv.DictReader((top / "results.csv").read_text().splitlines()))
    assert [row["rounds"] for row in rows] == ["5"] * 2


def test_a_finished_cell_of_other_data_is_not_skipped(compare: Compare, tmp_path: Path) -> None:
    even, odd = list(range(0, 1437, 2)), list(range(1, 1437, 2))
    file = tmp_path / "split.json"
    file.write_text(json.dumps([even, odd]))
    (tmp_path / "mini.yaml").write_text(
        "config: protocols/digits.yaml\nseeds: [0]\nmeasures: [final]\naxes: {method: [FedAvg]}\n"
        "set: {rounds: 1, model.local_steps: 1, data.num_clients: 2, data.participation: 1,\n"
        "  data.partition: FromFile, data.partition.path: split.json, model.engine.workers: 1}\n"
    )
    code, out = compare(tmp_path)
    assert code == 0 and "1 cells, 0 finished before" in out, out
    code, out = compare(tmp_path)
    assert code == 0 and "1 cells, 1 finished before" in out, out
    file.write_text(json.dumps([odd, even]))
    code, out = compare(tmp_path)
    assert code == 2 and "FedAvg-seed0: data: samples, labels or partition are not those" in out


def test_a_failing_cell_stops_no_other(compare: Compare, tmp_path: Path) -> None:
    (tmp_path / "mini.yaml").write_text(
        MINI.replace("FedAvg: {model: FedAvg}", "FedAvg: {model.optimizer.lr: 1.0e+30}").replace(
            "    1: {data.partition.alpha: 1}\n", ""
        )
    )
    code, out = compare(tmp_path)
    assert code == 3, out
    assert "error: alpha0.1-FedAvg-seed0: 3 rounds in a row failed" in out
    assert "finished alpha0.1-FedGKD-seed0" in out
    rows = list(csv.DictReader(tables(tmp_path)[0].splitlines()))
    assert [row["method"] for row in rows] == ["FedGKD"]
    assert "| failed |" in tables(tmp_path)[1]
    for text in (out, tables(tmp_path)[1]):
        assert "α 0.1, FedAvg: failed in 1 of 1 seed" in text, text


@pytest.mark.long
def test_a_stopped_study_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "mini.yaml").write_text(MINI)
    # a new interpreter: cells of a warm one's fork server, under load, sometimes end a stop late
    words = [sys.executable, "-m", "fedgkd_pl", "compare", "mini.yaml"]
    process = Popen(words, cwd=tmp_path, stdout=PIPE, stderr=STDOUT, text=True)
    first = tmp_path / "runs" / "mini" / "alpha0.1-FedAvg-seed0" / "version_0" / "config.yaml"
    deadline = time.monotonic() + 120
    while not first.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out = process.communicate()[0]
    assert process.returncode == 143
    assert out.endswith("stopped by SIGTERM; the same command goes on where this was\n")


def test_a_log_says_now_and_then_how_far_cells_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    tasks = [Task(Cell({"method": m}, 0, ()), tmp_path / m, 10) for m in ("FedAvg", "FedGKD")]
    tasks[0].folder.mkdir()
    (tasks[0].folder / "metrics.csv").write_text("round,test/acc\n1,0.25\n2,0.5\n")
    tasks[0].state, tasks[0].pace = "running", 30.0
    display = _Display("mine", tasks, 1, quiet=False)
    clock[0] += PAUSE - 1
    display.show()
    assert capsys.readouterr().out == ""
    clock[0] += 1
    display.show()
    display.show()  # which comes too soon
    line = "0/2 running  FedAvg-seed0: round 2/10, test/acc 50.00, 0:09:00 left\n"  # 18 rounds
    assert capsys.readouterr().out == line
