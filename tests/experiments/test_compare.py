"""Studies: their files, their tables against numbers worked out here, and a kill in the middle."""

import contextlib
import csv
import io
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from fedgkd_pl.cli.main import main
from fedgkd_pl.config.request import available
from fedgkd_pl.errors import SettingError
from fedgkd_pl.experiments.compare import _without_additions
from fedgkd_pl.experiments.paper import numbers, paper_row
from fedgkd_pl.experiments.study import Cell, make_study, read_study
from fedgkd_pl.experiments.tables import Table, every_run, make_tables

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
  method:
    FedAvg: {model: FedAvg}
    FedGKD: {model: FedGKD, model.gamma: 0.2}
""".lstrip()
CONTENT: dict[str, Any] = yaml.safe_load(MINI) | {"name": "mini"}

# -- study files ---------------------------------------------------------------------------------


def test_cells_and_their_words(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(
        "# Title; more\nconfig: [a.yaml, b.yaml]\nseeds: [3, 4]\nset: {rounds: 7}\n"
        "rows: [dataset]\naxes:\n"
        "  dataset: {AG News: {config: c.yaml}, digits: {data.flat: true}}\n"
        "  method: {FedAvg: {}, FedProx: {model: FedProx, model.mu: 'on', x.y: [1, 2]}}\n"
        "special:\n  - {where: {method: FedProx, dataset: digits}, set: {model.mu: 2}}\n"
    )
    it = read_study(str(file))
    assert (it.name, it.title) == ("study", "Title")
    cells = it.cells(["--data.data_dir", "d"])
    names = ["AG_News-FedAvg", "AG_News-FedProx", "digits-FedAvg", "digits-FedProx"]
    assert [cell.name for cell in cells] == [f"{name}-seed{n}" for n in (3, 4) for name in names]
    base = ("--config=a.yaml", "--config=b.yaml")
    prox = ("--model=FedProx", "--model.mu=on", "--x.y=[1, 2]")
    end = ("--data.data_dir", "d")
    assert cells[0].words == (*base, "--config=c.yaml", "--rounds=7", *end)
    assert cells[1].words == (*base, "--config=c.yaml", "--rounds=7", *prox, *end)
    of_digits = (*base, "--rounds=7", "--data.flat=true")
    assert cells[7].words == (*of_digits, *prox, "--model.mu=2", *end)
    numbered = Cell({"alpha": "0.1", "method": "FedGKD+", "M": "5"}, 2, ())
    assert numbered.name == "alpha0.1-FedGKD+-M5-seed2"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"sedes": [0]}, "sedes"),
        ({"axes": {}}, "axes"),
        ({"axes": {"method": ["Nope"]}}, "axes.method"),
        ({"seeds": [1, 1]}, "seeds"),
        ({"measures": ["bets"]}, "measures"),
        ({"rows": ["alpha", "alpha"]}, "rows"),
        ({"compare": "beta"}, "compare"),
        ({"name": "../x"}, "name"),
        ({"special": [{"where": {"alpha": 7}, "set": {}}]}, "special.where"),
        # nothing that would import code, choose a folder or resume a run
        ({"set": {"import": "evil"}}, "set"),
        ({"set": {"x\n--import": "evil"}}, "set"),
        ({"set": {"model.engine": {"ray_address": "evil:1"}}}, "set"),
        ({"axes": {"alpha": {"1": {"output_dir": "/"}}}, "rows": ["alpha"]}, "axes.alpha.1"),
    ],
)
def test_a_bad_study_is_refused_with_its_key(change: dict[str, Any], key: str) -> None:
    make_study(CONTENT)
    with pytest.raises(SettingError) as refused:
        make_study(CONTENT | change)
    assert refused.value.key == key and "\n" not in str(refused.value)


def test_a_part_of_a_study() -> None:
    it = make_study(CONTENT | {"seeds": [0, 1, 2]})
    part = it.part(["method=FedGKD", "seed=2,0"])
    assert [cell.name for cell in part.cells()] == [f"alpha0.1-FedGKD-seed{n}" for n in (0, 2)]
    for wrong in ("beta=1", "method=MOON", "seed=0,7", "method="):
        with pytest.raises(SettingError, match="only: "):
            it.part([wrong])


def test_a_resumed_cell_is_not_given_additions_again() -> None:
    words = ["--a+=1", "--b=x+=1", "--c+", "[2]", "--d", "3", "--e=\n--import=x"]
    assert _without_additions(words) == ["--b=x+=1", "--d", "3", "--e=\n--import=x"]


def test_every_study_of_ours_can_be_read() -> None:
    names = [name for name in available() if name.startswith("studies/")]
    cells = {name: len(read_study(name).cells()) for name in names}
    assert len(names) >= 8 and cells["studies/overview.yaml"] == 3 * 3 * 8 * 3
    assert cells["studies/rounds.yaml"] == 8 * 3


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
    ahead = (
        "α 1, best: FedGKD is ahead of FedAvg by 7.00 ± 4.24 points over 2 seeds; a test needs 3"
    )
    assert table.to_markdown().splitlines() == [
        "**T: best**, test accuracy in %",
        "",
        "| α | FedAvg | FedGKD | MOON |",
        "|---|---:|---:|---:|",
        "| 0.1 | 40.00 † | - | - |",
        "| 1 | <u>65.00 ± 7.07</u> | **72.00 ± 11.31** | 20.00 ± 0.00 |",
        "",
        "- † of seed 0 only",
        f"- {ahead}",
    ]
    latex = table.to_latex()
    assert latex.startswith("% needs \\usepackage{booktabs}\n")
    assert r"1 & \underline{65.00 ± 7.07} & \textbf{72.00 ± 11.31} & 20.00 ± 0.00 \\" in latex
    assert latex.count("{") == latex.count("}") and r"$\alpha$ 1, best: FedGKD" in latex
    page = table.to_html()
    assert "<td><b>72.00 ± 11.31</b></td>" in page and f"<li>{ahead}</li>" in page
    assert "*72.00 ± 11.31*" in repr(table) and repr(table).endswith(ahead)
    assert table.frame["MOON"].tolist() == ["-", "20.00 ± 0.00"]


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
    assert table.frame.to_dict("list") == {
        "method": ["FedAvg", "FedGKD", "MOON"],
        "α 0.1": ["40.00 †", "-", "-"],
        "α 1": ["55.00 ± 7.07", "75.00 ± 7.07", "failed"],
    }
    assert table.notes[:3] == [
        "† of seed 0 only",
        "α 0.1, FedAvg: failed in 1 of 2 seeds",
        "α 1, MOON: failed in 2 of 2 seeds",
    ]
    (table,) = make_tables(it, results(it, values))
    assert len(table.frame) == 2  # what was never tried is not in it


def test_the_papers_numbers_stand_beside() -> None:
    axes = {"dataset": {"CIFAR-10": {}}, "alpha": {"0.1": {}}, "method": {"FedGKD": {}}}
    it = study(axes=axes, measures=["best"], paper="overview", rows=["dataset", "alpha"], seeds=[0])
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
    columns = {"rows": ["method"], "columns": ["measure"]}
    measures = ["round1", "round3", "round10"]
    axes = {"method": {"FedAvg": {}, "FedGKD": {}}}
    it = study(axes=axes, seeds=[0], paper="rounds", measures=measures, **columns)
    runs = [(Cell({"method": m}, 0, ()), fake(m, 0, [0.1, 0.2])) for m in ("FedAvg", "FedGKD")]
    (table,) = make_tables(it, runs)
    lines = table.to_markdown().splitlines()
    assert lines[2] == "| method | round 1 | round 10 |", "nobody has round 3"
    assert lines[4:6] == [
        "| FedAvg | **10.00** | - (36.30 ± 1.24) |",
        "| FedGKD | **10.00** | - (45.34 ± 1.10) |",
    ], "a tie"


def test_results_as_csv() -> None:
    it = study(measures=["round2"])
    frame = every_run(it, results(it, {("1", "MOON"): [[0.25, 0.5]]}))
    text = frame.to_csv(index=False, float_format="%.4f")
    accuracies = {"best": "50.0000", "final": "50.0000", "last10": "37.5000", "at_best_val": ""}
    assert list(csv.DictReader(io.StringIO(text))) == [
        {
            **{"alpha": "1", "method": "MOON", "seed": "0", "rounds": "2"},
            **(accuracies | {"round2": "50.0000"}),
            **{"bytes_down": "1000000", "bytes_up": "500000", "cell": "alpha1-MOON-seed0"},
        }
    ]
    assert list(every_run(it, []).columns) == list(frame.columns)
    (empty,) = make_tables(it, [])
    assert empty.to_latex() and empty.to_html() and empty.to_markdown() and repr(empty)


def test_labels_are_escaped() -> None:
    table = Table(pd.DataFrame([{"γ|": "a|b", "method": "50%_$x$ <b>"}]), 2)
    assert r"| γ\| | method |" in table.to_markdown() and r"| a\|b |" in table.to_markdown()
    assert (
        r"$\gamma$| & method \\" in table.to_latex() and r"50\%\_\$x\$ <b> \\" in table.to_latex()
    )
    assert "<td>50%_$x$ &lt;b&gt;</td>" in table.to_html() == table._repr_html_()


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


def test_flags_are_checked_before_anything_runs(compare: Compare, tmp_path: Path) -> None:
    (tmp_path / "mini.yaml").write_text(MINI)
    for words, told in (
        (["--jobs", "0"], "error: jobs: "),
        (["--rounds", "0"], "error: rounds: "),
        (["--model.gama", "1"], "error: alpha0.1-FedAvg-seed0: "),
        (["--model.min_clients", "50"], "error: alpha0.1-FedAvg-seed0: model.min_clients: "),
        (["--config", "nowhere.yaml"], "error: alpha0.1-FedAvg-seed0: config: "),
        (["--resume", "x"], "error: resume: "),
        (["--output_dir", "mini.yaml"], "error: output_dir: "),
    ):
        code, out = compare(tmp_path, *words)
        assert code == 2 and told in out and out.count("error: ") == 1, (words, out)
    code, out = compare(tmp_path, "--dry_run", "--rounds", "1")
    assert code == 0 and "waiting   alpha0.1-FedGKD-seed0: " in out
    (tmp_path / "mini.yaml").write_text(MINI.replace("[best, round2]", "[round5]"))
    code, out = compare(tmp_path)
    assert code == 2 and "error: rounds: must be at least 5 for round5; for fewer, copy" in out
    assert list(tmp_path.iterdir()) == [tmp_path / "mini.yaml"]


def tables(folder: Path) -> list[str]:
    top = folder / "runs" / "mini"
    return [(top / name).read_text() for name in ("results.csv", "table.md", "table.tex")]


def test_a_killed_study_goes_on(compare: Compare, tmp_path: Path) -> None:
    """What is finished is not repeated, and the results are those of an unbroken study."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
        (folder / "mini.yaml").write_text(MINI)
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
    assert code == 0 and "2 cells, 1 finished before" in out, out
    assert first.stat().st_mtime_ns == made, "a finished cell was run again"
    assert tables(broken) == tables(whole)
    for cell in ("alpha0.1-FedAvg-seed0", "alpha0.1-FedGKD-seed0"):
        ours, theirs = (f / "runs" / "mini" / cell / "version_0" for f in (broken, whole))
        for name in ("metrics.csv", "global.safetensors"):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes(), (cell, name)

    (broken / "mini.yaml").write_text(MINI.replace("model.gamma: 0.2", "model.gamma: 0.3"))
    code, out = compare(broken)
    assert code == 2 and "alpha0.1-FedGKD-seed0: model.gamma: " in out, out

    (broken / "mini.yaml").write_text(MINI)
    first.write_text("{")  # a damaged summary is made again
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
    for before in range(2):
        code, out = compare(tmp_path)
        assert code == 0 and f"1 cells, {before} finished before" in out, out
    file.write_text(json.dumps([odd, even]))
    code, out = compare(tmp_path)
    assert code == 2 and "error: FedAvg-seed0: data: " in out


def test_a_cell_that_fails_or_is_killed_stops_no_other(compare: Compare, tmp_path: Path) -> None:
    (tmp_path / "killing.py").write_text(
        "import os, signal\nfrom fedgkd_pl import FedProx\n\n"
        "class Killed(FedProx):\n    def on_train_batch_end(self, *_):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    failing = "    FedAvg: {model.optimizer.lr: 1.0e+30}\n    Killed: {model: killing.Killed}\n"
    text = MINI.replace("    FedAvg: {model: FedAvg}\n", failing)
    (tmp_path / "mini.yaml").write_text(text)
    code, out = compare(tmp_path, "--jobs", "2", "--import", "killing")
    assert code == 3, out
    assert "error: alpha0.1-FedAvg-seed0: 3 rounds in a row failed" in out
    assert "error: alpha0.1-Killed-seed0: ended with code -9" in out
    assert "finished alpha0.1-FedGKD-seed0" in out
    rows = list(csv.DictReader(tables(tmp_path)[0].splitlines()))
    assert [row["method"] for row in rows] == ["FedGKD"]
    for method in ("FedAvg", "Killed"):
        assert f"α 0.1, {method}: failed in 1 of 1 seed" in tables(tmp_path)[1]


def test_a_stopped_study_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "mini.yaml").write_text(MINI)
    process = Command(tmp_path, "compare", "mini.yaml")
    first = tmp_path / "runs" / "mini" / "alpha0.1-FedAvg-seed0" / "version_0" / "config.yaml"
    deadline = time.monotonic() + 120
    while not first.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert "the same command goes on where this was" in process.output.read_text()
