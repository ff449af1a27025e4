"""``--resume`` and ``--ckpt_path`` as people type them; what kills a run is in test_faults.py."""

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from fedgkd_pl import read_checkpoint
from fedgkd_pl.errors import SettingError
from fedgkd_pl.runs.resume import compare_settings
from fedgkd_pl.storage.checkpoint import referred_states
from fedgkd_pl.storage.files import previous
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.runs import QUICK, Run, version


def tree(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def curve(folder: Path, tag: str = "test/acc") -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder), purge_orphaned_data=False)
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_a_finished_run_can_be_made_longer(run: Run, tmp_path: Path, done: Path) -> None:
    code, _, err = run("fit", "--resume", "runs/smoke/version_0", "--rounds", "5")
    assert code == 0, err
    assert run("fit", *QUICK, "--rounds", "5", "--name", "whole")[0] == 0
    whole = version(tmp_path, "whole")
    for name in ("global.safetensors", "metrics.csv"):
        assert (done / name).read_bytes() == (whole / name).read_bytes()
    assert curve(done) == curve(whole) and [step for step, _ in curve(done)] == [1, 2, 3, 4, 5]
    scores = [step for step, _ in curve(done, "hp/best_test_acc")]
    assert scores == [step for step, _ in curve(whole, "hp/best_test_acc")]
    assert sorted(tmp_path.glob("runs/smoke/*")) == [done]


def test_a_finished_run_is_left_alone(run: Run, tmp_path: Path, done: Path) -> None:
    before = tree(tmp_path)
    code, _, err = run("fit", "--resume", done)
    told = "error: rounds: the run is finished: to go on, --rounds N with more than 3 (got 3)\n"
    assert (code, err) == (2, told)
    assert tree(tmp_path) == before


def test_a_run_that_only_lacks_its_summary_gets_it(run: Run, tmp_path: Path, done: Path) -> None:
    """Killed after the last round was committed."""
    before = {f.name: f.read_bytes() for f in (done / "global.safetensors", done / "metrics.csv")}
    summary = json.loads((done / "summary.json").read_text())
    (done / "summary.json").unlink()
    (done / "global.safetensors").unlink()
    code, out, err = run("fit", "--resume", done)
    assert code == 0, err
    assert "round 3/3" not in out, "nothing was left to train"
    assert {name: (done / name).read_bytes() for name in before} == before
    again = json.loads((done / "summary.json").read_text())
    assert again | {"wall_seconds": 0} == summary | {"wall_seconds": 0}


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("--model.optimizer.lr 0.5", "model.optimizer.lr"),
        ("--model.buffer_size 3", "model.buffer_size"),
        ("--data.num_clients 5", "data.num_clients"),
        ("--seed_everything 1", "seed_everything"),
        ("--model.net.hidden [16]", "model.net.hidden"),
        ("--data.val_fraction 0.2", "data.val_fraction"),
        ("--data Toy2D", "data"),
        ("--model FedAvg", "model"),
        ("--model.min_clients 2", "model.min_clients"),
        ("--trainer.precision bf16-true", "trainer.precision"),
    ],
)
def test_other_settings_are_refused(
    run: Run, tmp_path: Path, done: Path, flags: str, key: str
) -> None:
    """R9."""
    before = tree(tmp_path)
    code, _, err = run("fit", "--resume", done, "--rounds", "5", *flags.split())
    assert code == 2 and len(err.splitlines()) == 1 and err.startswith(f"error: {key}"), err
    assert tree(tmp_path) == before


def test_other_data_under_the_same_settings_is_refused(
    run: Run, tmp_path: Path, done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R9."""
    from fedgkd_pl import Digits

    load = Digits.load

    def changed(self: Digits) -> Any:
        splits = load(self)
        splits.train.inputs[5] = 0
        return splits

    monkeypatch.setattr(Digits, "load", changed)
    before = tree(tmp_path)
    code, _, err = run("fit", "--resume", done, "--rounds", "5")
    assert code == 2 and err.startswith("error: data: the checkpoint was trained on other data")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "flags",
    [
        "--model.engine.workers 2",
        "--model.engine.timeout 60",
        "--model.max_failed_rounds 9",
        "--trainer.logger false",
        "--trainer.enable_progress_bar false",
        "--data.eval_batch_size 100",
    ],
)
def test_what_does_not_decide_the_result_may_change(run: Run, done: Path, flags: str) -> None:
    """R9."""
    code, _, err = run("fit", "--resume", done, "--rounds", "4", *flags.split())
    assert code == 0, err
    assert len(list(csv.DictReader((done / "metrics.csv").open()))) == 4


def test_where_nothing_was_begun(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("nowhere", "empty"):
        code, _, err = run("fit", "--resume", folder)
        told = f"error: resume: no run was begun there: no config.yaml (got {folder})\n"
        assert (code, err) == (2, told)
    assert run("fit", "--resume")[0] == 2


def test_a_run_without_a_commit_begins_again(run: Run, tmp_path: Path, done: Path) -> None:
    expected = {name: (done / name).read_bytes() for name in ("global.safetensors", "metrics.csv")}
    shutil.rmtree(done / "checkpoints")
    (done / "summary.json").unlink()
    code, _, err = run("fit", f"--resume={done}")
    assert code == 0, err
    assert {name: (done / name).read_bytes() for name in expected} == expected
    assert [step for step, _ in curve(done)] == [1, 2, 3]


def test_ckpt_path_last_and_a_folder(run: Run, tmp_path: Path, done: Path) -> None:
    assert run("fit", *QUICK, "--rounds", "1")[0] == 0  # version_1
    for path, acc in (("last", version(tmp_path, number=1)), (done, done)):
        expected = list(csv.DictReader((acc / "metrics.csv").open()))[-1]["test/acc"]
        code, out, err = run("test", *QUICK, "--ckpt_path", path)
        assert code == 0, err
        assert f"{float(expected):.6f}"[:7] in out.replace(" ", "")
    code, _, err = run("fit", *QUICK, "--rounds", "2", "--ckpt_path", "last")
    assert code == 0, err
    again = version(tmp_path, number=2)
    assert read_checkpoint(again / "checkpoints" / "last.ckpt")["global_step"] == 2
    assert (version(tmp_path, number=1) / "summary.json").exists()
    code, _, err = run("test", *QUICK, "--name", "other", "--ckpt_path", "last")
    told = "error: ckpt_path: no run in runs/other has a checkpoint (got last)\n"
    assert (code, err) == (2, told)


def test_an_unknown_version_of_the_format_is_named(run: Run, done: Path) -> None:
    from tests.support.runs import resealed

    file = done / "checkpoints" / "last.ckpt"
    (done / "checkpoints" / "last.previous.ckpt").unlink()
    content = resealed(file.read_bytes(), lambda h: h["__metadata__"].update(version="2"))
    file.write_bytes(content)
    code, _, err = run("test", *QUICK, "--ckpt_path", file)
    told = f"error: ckpt_path: has format version 2, this is 1 (got {file})\n"
    assert (code, err) == (2, told)


def test_the_output_folder_is_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for flags in (("--output_dir", "file"), ("--output_dir", ".", "--name", "file")):
        code, _, err = run("fit", *QUICK, *flags)
        assert code == 2 and err.startswith("error: output_dir: is not a folder"), err
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_an_output_folder_that_cannot_be_made_is_a_storage_error(run: Run) -> None:
    code, _, err = run("fit", *QUICK, "--output_dir", "/proc/nowhere")
    assert code == 4 and err.startswith("error: /proc/nowhere") and len(err.splitlines()) == 1


def test_an_existing_run_is_never_overwritten(run: Run, tmp_path: Path, done: Path) -> None:
    before = tree(done)
    assert run("fit", *QUICK, "--rounds", "1")[0] == 0
    assert tree(done) == before and version(tmp_path, number=1).is_dir()


def test_a_run_that_a_callback_ended_stays_ended(run: Run, tmp_path: Path) -> None:
    still = ("--model.optimizer.lr", "0", "--rounds", "9", "--trainer.callbacks", "EarlyStopping")
    stop = ("--trainer.callbacks.monitor", "val/acc", "--trainer.callbacks.patience", "1")
    code, _, err = run("fit", *QUICK, *still, *stop)
    assert code == 0, err
    folder = version(tmp_path)
    weights = (folder / "global.safetensors").read_bytes()
    metrics = (folder / "metrics.csv").read_bytes()
    code, _, err = run("fit", "--resume", folder)
    assert code == 2
    assert err.startswith("error: resume: the run is finished: a callback ended it after round 2; ")
    for name in ("summary.json", "global.safetensors"):  # killed before it said how it went
        (folder / name).unlink()
    code, _, err = run("fit", "--resume", folder)
    assert code == 0, err
    assert (folder / "global.safetensors").read_bytes() == weights
    assert (folder / "metrics.csv").read_bytes() == metrics
    assert (folder / "summary.json").exists()


def test_settings_are_those_of_the_beginning_before_the_first_commit(run: Run, done: Path) -> None:
    shutil.rmtree(done / "checkpoints")
    code, _, err = run("fit", "--resume", done)
    told = "error: resume: the run is finished and kept no checkpoint"
    assert code == 2 and err.startswith(told)
    (done / "summary.json").unlink()
    code, _, err = run("fit", "--resume", done, "--model.optimizer.lr", "0.5")
    assert code == 2 and err.startswith("error: model.optimizer.lr: the run began with"), err


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({"a": 1, "b": 3}, "b: the run began with 2 (got 3)"),
        ({"a": 0, "b": 3}, "a: the run began with 1 (got 0); b differs, too"),
        (
            {"a": 1, "b": 2, "c.init_args.d": 5, "e": 6},
            "c.d: the run began with None (got 5); e dif",
        ),
        (
            dict.fromkeys("abcdefgh", 0),
            "a: the run began with 1 (got 0); b, c, d, e, f, 2 more differ, too",
        ),
    ],
)
def test_what_was_changed_stands_beside_its_key(now: dict[str, int], told: str) -> None:
    with pytest.raises(SettingError, match=f"^{re.escape(told)}"):
        compare_settings({"a": 1, "b": 2}, now)


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
    folder = version(tmp_path, number=1)
    assert [step for step, _ in curve(folder)] == [1, 2, 3, 4, 5]
    (folder / "summary.json").unlink()
    assert run("fit", "--resume", folder)[0] == 0
    assert [step for step, _ in curve(folder)] == [1, 2, 3, 4, 5]


def test_only_a_fit_needs_what_clients_keep(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few = ("--data.participation", "0.1", "--model.local_steps", "1", "--model.engine.workers", "1")
    words = ("--config", "digits/scaffold.yaml", *few, "--name", "smoke")
    assert run("fit", *words, "--rounds", "2")[0] == 0
    alone, folder = tmp_path / "alone.ckpt", version(tmp_path)
    last = folder / "checkpoints" / "last.ckpt"
    shutil.copy(last, alone)
    for command in ("test", "predict"):
        code, _, err = run(command, *words, "--ckpt_path", alone)
        assert code == 0, err
    before = tree(tmp_path)
    code, _, err = run("fit", *words, "--rounds", "3", "--ckpt_path", alone)
    assert code == 2 and err.startswith("error: ckpt_path: cannot be used: what client "), err
    assert "is not beside the checkpoint" in err and tree(tmp_path) == before
    older = referred_states(previous(last)) or set()
    (new, *_) = (referred_states(last) or set()) - older
    (last.parent / "states" / f"{new.hex()}.safetensors").write_bytes(b"other")
    code, _, err = run("export", folder, "--ckpt_path", "last")
    assert code == 0 and "going on" not in caplog.text, err
    code, _, err = run("fit", "--resume", folder, "--rounds", "3")
    assert code == 0, err
    assert "is damaged (its checksum is wrong): going on from last.previous.ckpt" in caplog.text
