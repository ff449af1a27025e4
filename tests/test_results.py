"""Tables and curves of the pages are what ``make results`` writes from the kept results."""

import csv
import errno
import os
import re
import shutil
from pathlib import Path

import pytest
from fedgkd_pl.experiments.registry import add, read_registry
from fedgkd_pl.experiments.results import BLOCK, KINDS, PAGES, generate, main
from fedgkd_pl.experiments.runs import read_run

from tests.conftest import REPO

FILES = [file for pattern in PAGES for file in sorted(REPO.glob(pattern))]
STUDIES = sorted(file.parent for file in REPO.glob("results/*/runs.csv"))
INLINE = ("value", "lead", "wins")  # the kinds of blocks that stand in a sentence
NOT_YET: set[str] = set()  # studies whose files were not kept


def test_every_block_and_figure_is_what_make_results_writes() -> None:
    files, absent = generate(REPO)
    assert absent <= NOT_YET
    assert {file.suffix for file in files} == {".md", ".svg"} and len(files) > len(FILES)
    different = [str(f.relative_to(REPO)) for f, t in files.items() if f.read_text("utf-8") != t]
    assert not different, f"{different}: make results"


def test_accuracies_stand_in_blocks_only() -> None:
    typed = {}
    for file in FILES:
        text = BLOCK.sub("", re.sub(r"```.*?```", "", file.read_text("utf-8"), flags=re.DOTALL))
        for line in text.splitlines():
            if line.startswith("|") and re.search(r"\b\d\d\.\d{1,2}\b", line):
                typed[file.relative_to(REPO).as_posix(), line.split("|")[1].strip()] = line
    assert not typed


def cut(text: str) -> list[str]:
    """The lines that begin with a value's comment: CommonMark takes such a line for HTML."""
    return re.findall(rf"^[\s>*+-]*<!-- results: (?:{'|'.join(INLINE)}) .*", text, re.MULTILINE)


def test_no_line_begins_with_a_value() -> None:
    """A comment at a line's start ends the paragraph, and what follows it is shown as it is."""
    assert set(INLINE) < set(KINDS)
    assert len(cut("It is\n  <!-- results: value a -->1<!-- end --> *now*.\n")) == 1
    assert len(cut("- <!-- results: wins a -->1<!-- end -->")) == 1
    assert not cut("is <!-- results: value a -->1<!-- end -->\n<!-- results: table a -->\n")
    files = {*FILES, *REPO.glob("docs/**/*.md")}
    found = {file.relative_to(REPO).as_posix(): cut(file.read_text("utf-8")) for file in files}
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize("folder", STUDIES, ids=lambda folder: folder.name)
def test_every_entry_says_where_it_comes_from(folder: Path) -> None:
    runs = read_registry(folder)
    with (folder / "rounds.csv").open(newline="") as file:
        assert {row["run"] for row in csv.DictReader(file)} == {run.entry["run"] for run in runs}
    for run in runs:
        assert run.entry["rounds"] == str(len(run.accuracy))
        for key in ("command", "commit", "date", "machine", "precision"):
            assert run.entry[key], (run.entry["run"], key)
        assert run.entry["seconds"] or run.entry["commit"] == "not recorded"
        assert not re.search(r"/(home|work|tmp|var|root)/", str(run.entry) + str(run.settings))


def test_the_results_stay_small() -> None:
    sizes = [file.stat().st_size for file in (REPO / "results").rglob("*") if file.is_file()]
    assert sum(sizes) < 600_000


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
    assert whole.summary["bytes_down"] == run.summary["bytes_down"]
    assert float(whole.entry["seconds"]) == pytest.approx(run.summary["wall_seconds"], abs=0.051)
    assert whole.labels == {"method": "FedGKD"} and whole.seed == 0 and part.seed == 1
    assert whole.settings["model.init_args.buffer_size"] == 2
    assert not any("data_dir" in key for key in whole.settings)
    assert list(part.accuracy) == [1, 2] and part.entry["rounds"] == "2"
    assert float(part.entry["seconds"]) > 0  # from its checkpoint
    assert whole.entry["commit"] == "bbbbbbb" and whole.entry["note"] == "tried"
    assert whole.entry["command"] == "fedgkd-pl compare studies/digits.yaml --rounds 3"

    shutil.copy(done / "metrics.csv", top / "FedGKD-seed1" / "version_0" / "metrics.csv")
    add(top, kept, {}, compact=True)  # anew
    runs = read_registry(kept)
    assert [run.entry["rounds"] for run in runs] == ["3", "3"] and not runs[0].entry["note"]
    assert set(runs[0].columns) == {"test/acc", "val/acc"}
    add(top, kept, {}, label="float32")
    assert [run.labels["method"] for run in read_registry(kept)] == ["FedGKD"] * 2 + [
        "FedGKD float32"
    ] * 2


def test_accuracies_of_nets_are_kept(done: Path, tmp_path: Path) -> None:
    """With ``compact``, too: what NetAccuracy logs, by the names of its columns."""
    top, kept = tmp_path / "mine", tmp_path / "results"
    shutil.copytree(done, top / "a" / "version_0")
    file = top / "a" / "version_0" / "metrics.csv"
    first, *others = file.read_text().splitlines()
    values = ["0.25,0.5,9", "0.375,0.625,9", "0.125,0.75,9"]
    lines = [f"{line},{value}" for line, value in zip(others, values, strict=True)]
    heads = f"{first},nets/MLP0_val_acc,nets/MLP0_test_acc,nets/other"
    file.write_text("\n".join([heads, *lines, ""]))
    add(top, kept, {"command": "by hand"}, compact=True)
    (run,) = read_registry(kept)
    assert set(run.columns) == {"test/acc", "val/acc", "nets/MLP0_val_acc", "nets/MLP0_test_acc"}
    assert run.columns["nets/MLP0_test_acc"] == {1: 0.5, 2: 0.625, 3: 0.75}


def test_runs_that_do_not_fit_leave_the_registry_as_it_is(
    done: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    say = ["--study", "kept", "--command", "by hand"]
    assert main(["add", str(study(done, tmp_path / "digits")), *say]) == 0
    kept = Path("results/kept")
    before = {file.name: file.read_bytes() for file in sorted(kept.iterdir())}
    assert list(before) == ["rounds.csv", "runs.csv", "settings.yaml"]

    def refused(top: Path) -> str:
        capfd.readouterr()
        assert main(["add", str(top), *say]) == 2
        assert {file.name: file.read_bytes() for file in sorted(kept.iterdir())} == before
        (line,) = capfd.readouterr().err.splitlines()
        return line

    shutil.copytree(done, "split_digits/own-FedGKD-seed0/version_0")  # a study with another axis
    line = refused(Path("split_digits"))
    assert line.startswith("error: study: ") and "has runs by method" in line
    assert "by method, order" in line and "another --study" in line and "FedGKD-own-seed0" in line

    for name in ("a", "b"):  # of other names, but one method and seed
        shutil.copytree(done, f"twice/{name}/version_0")
    line = refused(Path("twice"))
    assert "twice/a/version_0 and twice/b/version_0" in line and "--label" in line
    for name in ("a", "b"):  # of one name
        shutil.copytree(done, f"same/{name}/mine/version_0")
    assert "same/a/mine/version_0 and same/b/mine/version_0" in refused(Path("same"))
    for name in ("a", "b"):  # without versions
        shutil.copytree(done, f"bare/{name}")
    assert "bare/a and bare/b" in refused(Path("bare"))

    shutil.copytree(done, "versions/a/version_9")
    shutil.copytree(done, "versions/a/version_10")  # of one folder the last version counts
    assert main(["add", "versions", *say, "--note", "again"]) == 0
    assert [run.entry["note"] for run in read_registry(kept)] == ["again", ""]

    text = (kept / "runs.csv").read_text().replace("FedGKD-seed1,FedGKD", "FedGKD-seed1,Fed GKD")
    (kept / "runs.csv").write_text(text)
    before = {file.name: file.read_bytes() for file in sorted(kept.iterdir())}
    assert "is kept there as Fed GKD" in refused(Path("digits"))


def test_a_registry_that_cannot_be_written_stays_whole(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["add", str(study(done, tmp_path / "digits"))]
    assert main(words) == 0
    before = {file.name: file.read_bytes() for file in Path("results/digits").iterdir()}

    def full(step: str, target: Path) -> None:
        if step == "writing" and target.name == "rounds.csv":
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fedgkd_pl.storage.files.reached", full)
    assert main([*words, "--label", "again"]) == 4
    assert "rounds.csv: No space left" in capfd.readouterr().err
    assert {file.name: file.read_bytes() for file in Path("results/digits").iterdir()} == before


def keep() -> None:
    """A registry of two methods and two seeds, in the working directory."""
    os.makedirs("results/mine")
    facts = "digits,2,5,,,bf16-mixed,2001-01-01,abcdef0,a CPU,do it,"
    Path("results/mine/runs.csv").write_text(
        "run,method,seed,dataset,rounds,seconds,bytes_down,diverged,precision,date,commit,machine,"
        f"command,note\na,FedAvg,0,{facts}\nb,FedAvg,1,{facts}\nc,FedGKD,0,{facts}\n"
        f"d,FedGKD,1,{facts}\n"
    )
    Path("results/mine/rounds.csv").write_text(
        "run,round,test/acc,average/acc\na,1,0.5,0.5\na,2,0.4,0.6\nb,1,0.3,\nb,2,0.2,\n"
        "c,1,0.7,\nc,2,0.8,\nd,1,0.7,\nd,2,0.8,\n"
    )


def test_seeds_in_which_a_method_is_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.makedirs("results/tasks")
    # task/forgetting in %, of which less is better, after the second of two rounds:
    #          seed 0  seed 1  seed 2
    # A same      1       2       2
    # B same      2       2       3
    # C same      3       1       -
    # A own       9       9       9
    # B own       8       9       9
    forgotten = {
        ("A", "same"): (1, 2, 2),
        ("B", "same"): (2, 2, 3),
        ("C", "same"): (3, 1),
        ("A", "own"): (9, 9, 9),
        ("B", "own"): (8, 9, 9),
    }
    runs = [(*cell, seed, v) for cell, of in forgotten.items() for seed, v in enumerate(of)]
    facts = "digits,2,5,,,bf16-mixed,2001-01-01,abcdef0,a CPU,do it,"
    Path("results/tasks/runs.csv").write_text(
        "run,method,order,seed,dataset,rounds,seconds,bytes_down,diverged,precision,date,commit,"
        "machine,command,note\n"
        + "".join(f"{m}{o}{seed},{m},{o},{seed},{facts}\n" for m, o, seed, _ in runs)
    )
    Path("results/tasks/rounds.csv").write_text(
        "run,round,test/acc,task/forgetting\n"
        + "".join(f"{m}{o}{s},1,0.5,\n{m}{o}{s},2,0.{v},0.0{v}\n" for m, o, s, v in runs)
    )
    expected = {
        'only="A,B" key=task_forgetting where=order=same': "in 2 of 3 seeds",  # a tie is no win
        'only="B,A" key=task_forgetting where=order=same': "in 0 of 3 seeds",
        'only="A,B,C" key=task_forgetting where=order=same': "in 1 of 2 seeds",  # ahead of both
        'only="B,A" key=task_forgetting where=order=own': "in 1 of 3 seeds",
        'only="B,A" key=test/acc where=order=same': "in 2 of 3 seeds",  # of this, more is better
        'only="C,A" key=final where=order=same': "in 1 of 2 seeds",
    }
    for words, text in expected.items():
        Path("README.md").write_text(f"So <!-- results: wins tasks {words} -->?<!-- end -->.\n")
        assert main(["write"]) == 0
        assert f" -->{text}<!-- end -->.\n" in Path("README.md").read_text(), words
    # rounds of one cell are compared with those of the same cell, whatever its axes:
    # test/acc of A − B in round 2, same: 10 − 20, 20 − 20, 20 − 30; own: 90 − 80, 0, 0; mean −10/6
    Path("README.md").write_text("By <!-- results: lead tasks only=A,B rounds=2-2 -->?<!-- end -->")
    assert main(["write"]) == 0
    text = "-->-1.7 points on average over rounds 2 to 2, in 1 of 6<!-- end -->"
    assert text in Path("README.md").read_text()


BAD_BLOCKS = {  # and what the one line says
    "table": "needs a kind and a study",
    'table mine only="FedAvg': "needs a kind and a study",
    "tabel mine": "none of table, value, lead",
    "table mine only=FedTypo": "only: no run of FedTypo; there are FedAvg, FedGKD",
    "table mine only=FedAvg,FedTypo": "only: no run of FedTypo; there are FedAvg, FedGKD",
    "table mine onyl=FedAvg": "onyl: no option of table: only, measures, paper, rows, notes, plain",
    "table other onyl=FedAvg": "onyl: no option of table",  # though nothing is kept of it
    "table mine measures=besst": "measures: best, final",
    "table mine measures=round2-1": "measures: ",
    "table mine paper=overwiev": "paper: one of overview",
    "table mine rows=method": "rows: must be measure",
    "table mine notes=some": "notes: must be all",
    "value mine only=FedAvg": "measure: value needs it",
    "value mine measure=besst": "measure: best, final",
    "value mine measure=averag_best": "measure: best, final",
    "value mine measure=average_besst": "measure: after average_: best, final",
    "value mine measure=round3": "measure: no run has it",
    "lead mine rounds=1-2": "only: lead needs it",
    "lead mine only=FedGKD,FedAvg": "rounds: lead needs it",
    "lead mine only=FedGKD rounds=1-2": "only: must be two methods",
    "lead mine only=FedGKD,FedAvg rounds=2": "rounds: must be FROM-TO",
    "lead mine only=FedGKD,FedAvg rounds=8-9": "rounds: FedGKD and FedAvg have none in common",
    "wins mine only=FedGKD,FedAvg": "key: wins needs it",
    "wins mine only=FedGKD key=final": "only: must be two methods or more",
    "wins mine only=FedGKD,FedAvg key=besst": "key: best, final",
    "wins mine only=FedGKD,FedAvg key=test/loss": "key: a measure, or a column of accuracies",
    "wins mine only=FedGKD,FedAvg key=test/ac": "key: a measure, or a column of accuracies",
    "wins mine only=FedGKD,FedAvg key=tst/acc": "key: no run has tst/acc; there are average/acc",
    "wins mine only=FedGKD,FedAvg key=average/acc": "key: FedGKD, FedAvg have it in no seed in co",
    "wins mine only=FedGKD,FedAvg key=final where=order=own": "where: the runs are by method",
    "wins mine+again only=FedGKD,FedAvg key=final": "where: FedGKD has several runs of seed 0",
    "columns mine": "keys: columns needs it",
    "columns mine keys=test/acc,test/ac": "keys: no run has test/ac; there are average/acc, test/a",
    "columns mine keys=test/acc names=a,b": "names: must be as many as keys",
    "origin mine title=no": "title: no option of origin: only",
}


@pytest.mark.parametrize("block", BAD_BLOCKS)
def test_a_wrong_block_is_one_line_and_nothing_is_written(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    keep()
    shutil.copytree("results/mine", "results/again")
    pages = {
        "README.md": "<!-- results: table mine -->\nold\n<!-- end -->\n",
        "docs/one.md": f"Before.\n\n<!-- results: {block} -->\nold\n<!-- end -->\n",
    }
    os.makedirs("docs")
    for name, text in pages.items():
        Path(name).write_text(text)
    assert main(["write"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: docs/one.md: ") and line.endswith(f" (got {block})")
    assert BAD_BLOCKS[block] in line
    assert {name: Path(name).read_text() for name in pages} == pages


def test_a_block_without_an_end_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    keep()
    whole = "<!-- results: table mine -->\nold\n<!-- end -->\n"
    for text in (f"<!-- results: origin mine -->\nWords.\n\n{whole}", whole.replace("end", "and")):
        Path("README.md").write_text(text)
        assert main(["write"]) == 2 and Path("README.md").read_text() == text
        assert capsys.readouterr().err == (
            "error: README.md: a block has no <!-- end --> of its own\n"
        )


def test_pages_are_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    keep()
    before = (
        "<!-- results: table mine measures=best,round1-2 -->\nold\n<!-- end -->\n"
        "It is <!-- results: value mine only=FedGKD measure=final -->?<!-- end --> now.\n"
        "Ahead by <!-- results: lead mine only=FedGKD,FedAvg rounds=1-2 -->?<!-- end -->.\n"
        "Behind by <!-- results: lead mine only=FedAvg,FedGKD rounds=2-2 -->?<!-- end -->.\n"
        "<!-- results: columns mine keys=test/acc,average/acc names=test,mean -->\n<!-- end -->\n"
        "<!-- results: curves mine average -->\n<!-- end -->\n"
        "<!-- results: table other -->\nkept\n<!-- end -->\n"
        "<!-- results: origin mine only=FedAvg -->\n<!-- end -->\n"
    )
    Path("README.md").write_text(before)
    assert main(["write"]) == 0
    assert "blocks of other" in capsys.readouterr().out
    text = Path("README.md").read_text()
    # best of a seed 50 and 30: mean 40, deviation √((10² + 10²) / 1) = 14.14
    assert (
        "| method | best | round 1 | round 2 |\n|---|---:|---:|---:|\n"
        "| FedAvg | <u>40.00 ± 14.14</u> | <u>40.00 ± 14.14</u> | <u>30.00 ± 14.14</u> |\n"
        "| FedGKD | **80.00 ± 0.00** | **70.00 ± 0.00** | **80.00 ± 0.00** |\n<!-- end -->"
    ) in text
    assert "-->80.00 ± 0.00<!-- end --> now." in text and "\nkept\n" in text
    # 70 − 50, 70 − 30, 80 − 40, 80 − 20: mean 40
    assert "by <!-- results: lead mine only=FedGKD,FedAvg rounds=1-2 -->40.0 points on " in text
    assert "points on average over rounds 1 to 2, in 4 of 4<!-- end -->." in text
    assert "-->-50.0 points on average over rounds 2 to 2, in 0 of 2<!-- end -->." in text
    assert "| method | test | mean |\n" in text and "\n| FedAvg | 30.00 ± 14.14 | 60.00 |\n" in text
    assert "\n| FedGKD | 80.00 ± 0.00 | - |\n" in text
    assert "![Learning curves](results/mine/curves.svg)\n<!-- end -->" in text
    assert "FedAvg, average" in Path("results/mine/curves.svg").read_text()
    assert "| FedAvg | 0, 1 | 2 | bf16-mixed | abcdef0 | 2001-01-01 | 10 | not recorded |" in text
    assert "- `do it`\n- a CPU\n<!-- end -->" in text
    assert main(["write"]) == 0 and Path("README.md").read_text() == text
    assert "wrote" not in capsys.readouterr().out
    assert main(["add", "results"]) == 2 and "no run" in capsys.readouterr().err
