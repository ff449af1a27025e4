"""``--resume`` and ``--ckpt_path`` as people type them; what kills a run is in test_faults.py."""

import csv
import json
import shutil
from pathlib import Path

import pytest
from fedgkd_pl import read_checkpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.runs import QUICK, Run, version


def tree(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def curve(folder: Path, tag: str = "test/acc") -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return sorted({(event.step, event.value) for event in events.Scalars(tag)})


def test_a_finished_run_can_be_made_longer(run: Run, tmp_path: Path, done: Path) -> None:
    code, _, err = run("fit", "--resume", "runs/smoke/version_0", "--rounds", "5")
    assert code == 0, err
    assert run("fit", *QUICK, "--rounds", "5", "--name", "whole")[0] == 0
    whole = version(tmp_path, "whole")
    for name in ("global.safetensors", "metrics.csv"):
        assert (done / name).read_bytes() == (whole / name).read_bytes()
    assert curve(done) == curve(whole) and [step for step, _ in curve(done)] == [1, 2, 3, 4, 5]
    score = "hp/best_test_acc"
    assert curve(whole, score)[0] in curve(done, score)
    assert sorted(tmp_path.glob("runs/smoke/*")) == [done]


def test_a_finished_run_is_left_alone(run: Run, tmp_path: Path, done: Path) -> None:
    """One that was killed after its last round gets its summary, and nothing is trained."""
    before = tree(tmp_path)
    code, _, err = run("fit", "--resume", done)
    assert code == 2 and err.startswith("error: rounds: ")
    assert tree(tmp_path) == before
    summary = json.loads((done / "summary.json").read_text())
    (done / "summary.json").unlink()
    (done / "global.safetensors").unlink()
    code, out, err = run("fit", "--resume", done)
    assert code == 0 and "round 3/3" not in out, err
    for file in (done / "global.safetensors", done / "metrics.csv"):
        assert file.read_bytes() == before[file]
    again = json.loads((done / "summary.json").read_text())
    assert again | {"wall_seconds": 0} == summary | {"wall_seconds": 0}


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("--model.optimizer.lr 0.5", "model.optimizer.lr"),
        ("--data Toy2D", "data"),
        ("--trainer.precision bf16-true", "trainer.precision"),
        ("--trainer.gradient_clip_val 1", "trainer.gradient_clip_val"),
        ("--seed_everything 1", "seed_everything"),
        ("--model.engine.threads 2", "model.engine.threads"),
    ],
)
def test_other_settings_are_refused(
    run: Run, tmp_path: Path, done: Path, flags: str, key: str
) -> None:
    before = tree(tmp_path)
    code, _, err = run("fit", "--resume", done, "--rounds", "5", *flags.split())
    assert code == 2 and len(err.splitlines()) == 1 and err.startswith(f"error: {key}"), err
    assert tree(tmp_path) == before


def test_what_does_not_decide_the_result_may_change(run: Run, done: Path) -> None:
    flags = ("--model.engine.workers", "2", "--model.max_failed_rounds", "9")
    code, _, err = run("fit", "--resume", done, "--rounds", "4", *flags)
    assert code == 0, err
    assert len(list(csv.DictReader((done / "metrics.csv").open()))) == 4


def test_where_nothing_was_begun(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("nowhere", "empty"):
        code, _, err = run("fit", "--resume", folder)
        assert code == 2 and err.startswith("error: resume: ") and folder in err
    assert run("fit", "--resume")[0] == 2


def test_a_run_without_a_commit_begins_again(run: Run, tmp_path: Path, done: Path) -> None:
    expected = {name: (done / name).read_bytes() for name in ("global.safetensors", "metrics.csv")}
    shutil.rmtree(done / "checkpoints")
    code, _, err = run("fit", "--resume", done)
    assert code == 2 and err.startswith("error: resume: ")
    (done / "summary.json").unlink()
    code, _, err = run("fit", "--resume", done, "--model.optimizer.lr", "0.5")
    assert code == 2 and err.startswith("error: model.optimizer.lr: "), err
    code, _, err = run("fit", f"--resume={done}")
    assert code == 0, err
    assert {name: (done / name).read_bytes() for name in expected} == expected
    assert [step for step, _ in curve(done)] == [1, 2, 3]


def test_ckpt_path_is_a_folder(run: Run, tmp_path: Path, done: Path) -> None:
    expected = list(csv.DictReader((done / "metrics.csv").open()))[-1]["test/acc"]
    code, out, err = run("test", *QUICK, "--ckpt_path", done)
    assert code == 0, err
    assert f"{float(expected):.6f}"[:7] in out.replace(" ", "")
    before = tree(done)
    code, _, err = run("fit", *QUICK, "--rounds", "4", "--ckpt_path", done)
    assert code == 0, err
    again = version(tmp_path, number=1)
    assert read_checkpoint(again / "checkpoints" / "last.ckpt")["global_step"] == 4
    assert tree(done) == before


def test_a_run_that_a_callback_ended_stays_ended(run: Run, tmp_path: Path) -> None:
    still = ("--model.optimizer.lr", "0", "--rounds", "9", "--trainer.callbacks", "EarlyStopping")
    stop = ("--trainer.callbacks.monitor", "val/acc", "--trainer.callbacks.patience", "1")
    code, _, err = run("fit", *QUICK, *still, *stop)
    assert code == 0, err
    folder = version(tmp_path)
    metrics = (folder / "metrics.csv").read_bytes()
    code, _, err = run("fit", "--resume", folder)
    assert code == 2 and err.startswith("error: resume: ")
    (folder / "summary.json").unlink()  # killed before it said how it went
    code, _, err = run("fit", "--resume", folder)
    assert code == 0, err
    assert (folder / "metrics.csv").read_bytes() == metrics
    assert (folder / "summary.json").exists()


def test_settings_are_those_of_the_beginning_before_the_first_commit(run: Run, done: Path) -> None:
    shutil.rmtree(done / "checkpoints")
    code, _, err = run("fit", "--resume", done)
    assert code == 2 and err.startswith("error: resume: ")
    (done / "summary.json").unlink()
    code, _, err = run("fit", "--resume", done, "--model.optimizer.lr", "0.5")
    assert code == 2 and err.startswith("error: model.optimizer.lr: "), err


def test_a_users_own_save_last_does_not_meet_ours(run: Run, tmp_path: Path) -> None:
    words = ("--trainer.callbacks", "ModelCheckpoint", "--trainer.callbacks.save_last", "true")
    code, _, err = run("fit", *QUICK, "--rounds", "2", *words)
    assert code == 0, err
    names = {file.name for file in (version(tmp_path) / "checkpoints").iterdir()}
    assert {"last.ckpt", "last.previous.ckpt", "newest.ckpt"} <= names
    before = read_checkpoint(version(tmp_path) / "checkpoints" / "last.previous.ckpt")
    assert before["global_step"] == 1


def test_a_round_without_validation_has_no_score(run: Run, tmp_path: Path) -> None:
    flags = ("--trainer.check_val_every_n_epoch", "2", "--checkpoint.save_top_k", "-1")
    code, _, err = run("fit", *QUICK, "--rounds", "4", *flags)
    assert code == 0 and "could not find" not in err, err
    names = {file.name for file in (version(tmp_path) / "checkpoints").glob("best*")}
    assert names == {"best-round2.ckpt", "best-round4.ckpt"}


def test_a_run_from_another_shows_the_whole_curve(run: Run, tmp_path: Path, done: Path) -> None:
    assert run("fit", *QUICK, "--rounds", "5", "--ckpt_path", done)[0] == 0
    assert run("fit", *QUICK, "--rounds", "5", "--name", "whole")[0] == 0
    folder, whole = version(tmp_path, number=1), version(tmp_path, "whole")
    for name in ("global.safetensors", "metrics.csv"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    a, b = (json.loads((each / "summary.json").read_text()) for each in (folder, whole))
    assert a | {"wall_seconds": 0} == b | {"wall_seconds": 0}
    assert [step for step, _ in curve(folder)] == [1, 2, 3, 4, 5]
    (folder / "summary.json").unlink()
    assert run("fit", "--resume", folder)[0] == 0
    assert [step for step, _ in curve(folder)] == [1, 2, 3, 4, 5]
