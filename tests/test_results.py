"""Tables and curves of the pages are what ``make results`` writes from the kept results."""

import csv
import os
import re
import shutil
from pathlib import Path

import pytest
from fedgkd_pl.experiments.runs import read_run

from tests.conftest import REPO
from tools.registry import add, read_registry
from tools.results import BLOCK, PAGES, generate, main

FILES = [file for pattern in PAGES for file in sorted(REPO.glob(pattern))]
STUDIES = sorted(file.parent for file in REPO.glob("results/*/runs.csv"))


def test_every_block_and_figure_is_what_make_results_writes() -> None:
    files = generate(REPO)
    assert {file.suffix for file in files} == {".md", ".svg"} and len(files) > len(FILES)
    different = [str(f.relative_to(REPO)) for f, t in files.items() if f.read_text("utf-8") != t]
    assert not different, f"{different}: make results"


def test_accuracies_of_tables_stand_in_blocks_only() -> None:
    for file in FILES:
        text = BLOCK.sub("", re.sub(r"```.*?```", "", file.read_text("utf-8"), flags=re.DOTALL))
        if file.parent.name != "benchmarks" or file.name == "DIGITS.md":  # the others are of speed
            assert not re.findall(r"^\|.*\b\d\d\.\d\d ± .*", text, re.MULTILINE), file


@pytest.mark.parametrize("folder", STUDIES, ids=lambda folder: folder.name)
def test_every_entry_says_where_it_comes_from(folder: Path) -> None:
    runs = read_registry(folder)
    with (folder / "rounds.csv").open(newline="") as file:
        assert {row["run"] for row in csv.DictReader(file)} == {run.entry["run"] for run in runs}
    for run in runs:
        assert run.entry["rounds"] == str(len(run.by_round("test/acc")))
        for key in ("command", "commit", "date", "machine", "precision"):
            assert run.entry[key], (run.entry["run"], key)
        assert run.entry["seconds"] or run.entry["commit"] == "not recorded"
        assert not re.search(r"/(home|work|tmp|var|root)/", str(run.entry))


def study(done: Path, top: Path) -> Path:
    """A study's folder with copies of a run: two seeds of one method, the second not finished."""
    for seed in (0, 1):
        folder = top / f"FedGKD-seed{seed}" / "version_0"
        shutil.copytree(done, folder)
        config = (folder / "config.yaml").read_text()
        config = config.replace("seed_everything: 0", f"seed_everything: {seed}")
        (folder / "config.yaml").write_text(config)
    lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join(lines[:3]))  # two of three rounds
    return top


def test_runs_are_kept_as_they_are(done: Path, tmp_path: Path) -> None:
    top, kept = study(done, tmp_path / "long" / "runs" / "digits"), tmp_path / "results" / "digits"
    (tmp_path / "long" / "log.txt").write_text(
        "== 2001-01-01T00:00:00Z commit aaaaaaa: --rounds 1\n"
        "== 2001-01-02T00:00:00Z commit bbbbbbb: --rounds 2\n"
        "== 2100-01-01T00:00:00Z commit ccccccc: --rounds 3\n"
    )
    assert add(top, kept, {"note": "tried"}) == ["FedGKD-seed0", "FedGKD-seed1"]
    whole, part = read_registry(kept)
    run = read_run(done)
    for measure in ("best", "final", "last10", "at_best_val", "round2"):
        assert whole.measure(measure) == pytest.approx(run.measure(measure), abs=1e-4)
    assert whole.entry["bytes_down"] == str(run.summary["bytes_down"])
    assert whole.labels == {"method": "FedGKD"} and part.entry["seed"] == "1"
    assert part.entry["rounds"] == "2" and float(part.entry["seconds"]) > 0  # from its checkpoint
    assert whole.entry["commit"] == "bbbbbbb" and whole.entry["note"] == "tried"
    assert whole.entry["command"] == "fedgkd-pl compare studies/digits.yaml --rounds 3"
    assert "data_dir" not in (kept / "settings.yaml").read_text()

    shutil.copy(done / "metrics.csv", top / "FedGKD-seed1" / "version_0" / "metrics.csv")
    add(top, kept, {}, compact=True)  # anew
    runs = read_registry(kept)
    assert [run.entry["rounds"] for run in runs] == ["3", "3"] and not runs[0].entry["note"]
    assert set(runs[0].rows[0]) == {"round", "test/acc", "val/acc"}
    add(top, kept, {}, label="float32")
    titles = [run.labels["method"] for run in read_registry(kept)]
    assert titles == ["FedGKD"] * 2 + ["FedGKD float32"] * 2


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry of two methods and two seeds, in the working directory."""
    monkeypatch.chdir(tmp_path)
    os.makedirs("results/mine")
    facts = "digits,2,5,,,bf16-mixed,2001-01-01,abcdef0,a CPU,do it,"
    names = "seconds,bytes_down,diverged,precision,date,commit,machine,command,note"
    runs = ("a,FedAvg,0", "b,FedAvg,1", "c,FedGKD,0", "d,FedGKD,1")
    lines = [f"run,method,seed,dataset,rounds,{names}", *(f"{run},{facts}" for run in runs)]
    Path("results/mine/runs.csv").write_text("\n".join(lines) + "\n")
    Path("results/mine/rounds.csv").write_text(
        "run,round,test/acc,average/acc\na,1,0.5,0.5\na,2,0.4,0.6\nb,1,0.3,\nb,2,0.2,\n"
        "c,1,0.7,\nc,2,0.8,\nd,1,0.7,\nd,2,0.8,\n"
    )


@pytest.mark.usefixtures("kept")
def test_a_wrong_block_is_one_line_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "<!-- results: table mine -->\nold\n<!-- end -->\n"
    Path("README.md").write_text(f"{text}<!-- results: table mine onyl=FedAvg -->\n<!-- end -->\n")
    before = Path("README.md").read_bytes()
    assert main(["write"]) == 2
    assert capsys.readouterr().err.startswith("error: README.md: onyl: ")
    assert Path("README.md").read_bytes() == before


@pytest.mark.usefixtures("kept")
def test_pages_are_filled(capsys: pytest.CaptureFixture[str]) -> None:
    Path("README.md").write_text(
        "<!-- results: table mine measures=best,round1-2 -->\nold\n<!-- end -->\n"
        "It is <!-- results: value mine only=FedGKD measure=final -->?<!-- end --> now.\n"
        "<!-- results: table mine measures=test/acc,average_best names=test,mean plain -->\n"
        "<!-- end -->\n<!-- results: table mine measures=final rows=measure plain -->\n"
        "<!-- end -->\n<!-- results: curves mine average bottom=60 -->\n<!-- end -->\n"
    )
    assert main(["write"]) == 0
    text = Path("README.md").read_text()
    # best of a seed 50 and 30: mean 40, deviation √((10² + 10²) / 1) = 14.14
    assert (
        "| method | best | round 1 | round 2 |\n|---|---:|---:|---:|\n"
        "| FedAvg | <u>40.00 ± 14.14</u> | <u>40.00 ± 14.14</u> | <u>30.00 ± 14.14</u> |\n"
        "| FedGKD | **80.00 ± 0.00** | **70.00 ± 0.00** | **80.00 ± 0.00** |\n<!-- end -->"
    ) in text
    assert "-->80.00 ± 0.00<!-- end --> now." in text
    assert "| method | test | mean |\n" in text and "\n| FedAvg | 30.00 ± 14.14 | 60.00 |\n" in text
    assert "\n| FedGKD | 80.00 ± 0.00 | - |\n" in text
    assert "| measure | FedAvg | FedGKD |\n|---|---:|---:|\n| final | 30.00 ± 14.14 |" in text
    assert "![Learning curves](results/mine/curves.svg)\n<!-- end -->" in text
    drawn = Path("results/mine/curves.svg").read_text()
    assert "FedAvg, average" in drawn and ">60</text>" in drawn and ">50</text>" not in drawn
    assert main(["write"]) == 0 and Path("README.md").read_text() == text
    capsys.readouterr()
    assert main(["add", "results"]) == 2 and "folder" in capsys.readouterr().err
