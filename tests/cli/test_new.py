"""``fedgkd-pl new``: what it writes trains, compares and tests itself; bad names write nothing."""

import csv
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fedgkd_pl.cli.new import TEMPLATE, new_project

from tests.support.faults import warm_script
from tests.support.runs import Run

LONGEST = "A" + 39 * "a"  # forty letters


def commands(out: str) -> list[list[str]]:
    """What was printed to go on with."""
    return [shlex.split(line) for line in out.splitlines() if line.startswith("  ")]


@pytest.mark.nightly
def test_the_printed_commands_work(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run("new", "first-steps")
    assert code == 0 and not err
    change, fit, compare, test = commands(out)

    assert change == ["cd", "first-steps"]
    project = tmp_path / "first-steps"
    monkeypatch.chdir(project)

    assert fit[:2] == ["fedgkd-pl", "fit"]
    code, _, err = run(*fit[1:], "--rounds", "2")
    assert code == 0, err
    with (project / "runs/first-steps/version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 and float(rows[1]["test/acc"]) > 0.2
    assert float(rows[1]["client/kd_mean"]) > 0

    assert compare[:2] == ["fedgkd-pl", "compare"]
    code, out, err = run(*compare[1:], "--dry_run")  # checks net, data and method of every cell
    assert code == 0 and out.count("waiting") == 6, err
    code, _, err = run(*compare[1:], "--rounds", "1", "--only", "method=MyMethod", "--only=seed=0")
    assert code == 0, err
    assert "| MyMethod |" in (project / "runs/study/table.md").read_text()

    assert test == ["pytest"]
    done = warm_script("import sys, pytest\nsys.exit(pytest.main([]))\n", project)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout


def test_its_own_test_notices_a_wrong_method(tmp_path: Path) -> None:
    new_project(str(tmp_path / "wrong"))
    method = tmp_path / "wrong" / "wrong" / "method.py"
    text = method.read_text(encoding="utf-8")
    assert text.count("(trust * kl)") == 1
    method.write_text(text.replace("(trust * kl)", "kl"), encoding="utf-8")
    lines = "import sys, pytest\nsys.exit(pytest.main(['-k', 'equation']))\n"
    done = warm_script(lines, tmp_path / "wrong")
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout


@pytest.mark.parametrize("name", ["Two-Words", "my-project-my_project"])
def test_the_name_is_the_only_difference(name: str, tmp_path: Path) -> None:
    module = name.lower().replace("-", "_")
    new_project(str(tmp_path / name))
    written = {file for file in (tmp_path / name).rglob("*") if file.is_file()}
    assert len(written) == len(list(TEMPLATE.rglob("*.tpl"))) == 10
    for file in written:
        found = file.relative_to(tmp_path / name).as_posix()
        source = found.replace(module, "my_project", 1) if found.startswith(module) else found
        text = (TEMPLATE / f"{source}.tpl").read_text(encoding="utf-8")
        text = text.replace("my-project", "\0").replace("my_project", module).replace("\0", name)
        assert file.read_text(encoding="utf-8") == text, found
    for words in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *words, "--no-cache", str(tmp_path / name)]
        done = subprocess.run(ruff, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_an_empty_folder_is_taken_and_needs_no_cd(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    code, out, _ = run("new", ".")
    assert code == 0 and (tmp_path / "mine/mine/net.py").is_file()
    assert [words[1] for words in commands(out)[:2]] == ["fit", "compare"]
    code, out, _ = run("new", "../a folder/other")
    assert code == 0 and commands(out)[0] == ["cd", "../a folder/other"]


BAD = ["", "/", "1st", "my-", "a\nb", LONGEST + "a"]
TAKEN = ["class", "json", "Torch", "tests"]


@pytest.mark.parametrize("name", [*BAD, *TAKEN])
def test_a_bad_name_is_one_line(run: Run, tmp_path: Path, name: str) -> None:
    code, out, err = run("new", name and f"{tmp_path}/{name}" if name != "/" else name)
    assert code == 2 and not out and not list(tmp_path.iterdir())
    assert err.startswith("error: folder: ") and len(err.splitlines()) == 1, err


def test_what_is_there_stays(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("mine", "link"):
        code, _, err = run("new", name)
        assert code == 2 and err.startswith("error: folder: there is one already"), err
    assert {file.name for file in tmp_path.rglob("*")} == {"mine", "thesis.tex", "link"}
