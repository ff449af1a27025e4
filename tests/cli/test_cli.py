"""The command line as people use it: flags, files, errors, what a run leaves, resuming it."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fedgkd_pl import __version__, read_checkpoint
from safetensors.torch import load_file

from tests.conftest import REPO, same
from tests.support.runs import QUICK, Run, version

LAST = ["last.ckpt", "last.previous.ckpt"]


def test_what_a_run_leaves(run: Run, tmp_path: Path) -> None:
    code, out, err = run("fit", *QUICK, "--rounds", "4")
    assert code == 0, err
    folder = version(tmp_path)
    assert {file.name for file in folder.iterdir()} == {
        ".lock",
        "checkpoints",
        "config.yaml",
        "global.safetensors",
        "hparams.yaml",
        "metrics.csv",
        "model.json",
        "partition.json",
        "summary.json",
        next(folder.glob("events.out.tfevents.*")).name,
    }
    assert len(list(folder.glob("events.*"))) == 1
    names = sorted(file.name for file in (folder / "checkpoints").iterdir())
    assert names[0].startswith("best-round") and names[1:] == LAST

    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["rounds"] == 4 and config["model"]["init_args"]["buffer_size"] == 2

    partition = json.loads((folder / "partition.json").read_text())
    assert (partition["num_clients"], partition["num_classes"]) == (4, 10)
    assert [len(counts) for counts in partition["counts"]] == [10] * 4
    assert sum(map(sum, partition["counts"])) == 1293

    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    assert [row["round"] for row in rows] == ["1", "2", "3", "4"]
    for name in ("val/acc", "val/loss", "test/acc", "test/loss", "client/loss_mean"):
        assert all(float(row[name]) >= 0 for row in rows), name
    assert [bool(row["client/kd_mean"]) for row in rows] == [False, True, True, True]

    summary = json.loads((folder / "summary.json").read_text())
    accuracies = [float(row["test/acc"]) for row in rows]
    assert summary["best_test_acc"] == max(accuracies)
    assert summary["best_round"] == accuracies.index(max(accuracies)) + 1
    assert summary["final_test_acc"] == accuracies[-1]
    assert summary["mean_last_10_test_acc"] == pytest.approx(sum(accuracies) / 4)
    assert (summary["method"], summary["dataset"]) == ("FedGKD", "digits")
    assert (summary["seed"], summary["rounds"]) == (0, 4)
    model = 4 * (64 * 32 + 32 + 32 * 10 + 10)
    assert summary["bytes_up"] == 4 * 2 * model
    assert summary["bytes_down"] == (1 + 1 + 2 + 2) * 2 * model
    assert summary["wall_seconds"] > 0 and summary["versions"]["fedgkd_pl"] == __version__
    assert "round 4/4" in out and "tensorboard --logdir" in out

    code, out, _ = run("report", "runs")
    assert code == 0 and "FedGKD" in out and f"{100 * max(accuracies):.2f}" in out


def test_last_is_the_last_round_and_best_the_best(run: Run, tmp_path: Path) -> None:
    """Nothing is learned after round 1: Lightning's own save_last would stay there."""
    assert run("fit", *QUICK, "--rounds", "4", "--model.optimizer.lr", "0")[0] == 0
    folder = version(tmp_path) / "checkpoints"
    assert sorted(file.name for file in folder.iterdir()) == ["best-round1.ckpt", *LAST]
    for name, rounds in (("best-round1", 1), ("last", 4)):
        checkpoint = read_checkpoint(folder / f"{name}.ckpt")
        assert checkpoint["global_step"] == rounds
    last = read_checkpoint(folder / "last.ckpt")["state_dict"]
    final = load_file(version(tmp_path) / "global.safetensors")
    assert same({name.removeprefix("net."): t for name, t in last.items()}, final)


def test_lightning_callbacks_from_yaml(run: Run, tmp_path: Path) -> None:
    (tmp_path / "callbacks.yaml").write_text(
        """
rounds: 20
model: {init_args: {optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.0}}}}
trainer:
  callbacks:
    - class_path: EarlyStopping
      init_args: {monitor: val/acc, mode: max, patience: 2}
    - class_path: ModelCheckpoint
      init_args: {monitor: test/loss, filename: mine, dirpath: mine}
    - class_path: LearningRateMonitor
      init_args: {logging_interval: epoch}
"""
    )
    code, _, err = run("fit", *QUICK, "--config", "callbacks.yaml")
    assert code == 0, err
    rows = list(csv.DictReader((version(tmp_path) / "metrics.csv").open()))
    assert len(rows) == 3  # nothing is learned: one round to compare with, two of patience
    assert (tmp_path / "mine" / "mine.ckpt").is_file()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(version(tmp_path)))
    events.Reload()
    assert [event.value for event in events.Scalars("lr-SGD")] == [1.0, 1.0, 1.0]


def test_without_validation_data_the_last_round_is_kept(run: Run, tmp_path: Path) -> None:
    code, _, err = run("fit", *QUICK, "--data.val_fraction", "0")
    assert code == 0, err
    kept = sorted(file.name for file in (version(tmp_path) / "checkpoints").iterdir())
    assert kept == LAST
    summary = json.loads((version(tmp_path) / "summary.json").read_text())
    assert summary["test_acc_at_best_val"] is None and summary["best_test_acc"] > 0


def test_configs_are_listed_and_found_by_name(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("configs")
    ours = REPO / "configs"
    files = sorted(file.relative_to(ours).as_posix() for file in ours.rglob("*.yaml"))
    assert code == 0
    assert sorted(line.split()[0] for line in out.splitlines()) == files
    assert all(len(line.split()) > 3 for line in out.splitlines()), "a config without a header"
    (tmp_path / "smoke.yaml").write_text("rounds: 77\n")  # one of the user's own goes first
    code, out, _ = run("fit", "--config", "smoke.yaml", "--print_config")
    assert "rounds: 77" in out


def test_partition_is_shown_before_anyone_trains(run: Run, tmp_path: Path) -> None:
    flags = ("--data.partition", "Dirichlet", "--data.partition.alpha", "0.3")
    code, out, err = run("partition", *QUICK, *flags)
    assert code == 0, err
    folder = tmp_path / "runs" / "partitions"
    assert {file.name for file in folder.iterdir()} == {
        f"digits.{s}" for s in ("json", "png", "svg")
    }
    shown = json.loads((folder / "digits.json").read_text())
    assert f"{shown['heterogeneity']['effective_classes']:.2f} of 10 per client" in out
    assert all(str(sum(row)) in out for row in shown["counts"])
    assert list((tmp_path / "runs").iterdir()) == [folder], "something was trained"
    assert run("fit", *QUICK, *flags)[0] == 0
    trained = json.loads((version(tmp_path) / "partition.json").read_text())
    assert trained == shown

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(version(tmp_path)))
    events.Reload()
    assert events.Tags()["images"] == ["partition", "test/confusion"]


def test_fast_dev_run_writes_nothing(run: Run, tmp_path: Path) -> None:
    code, _, err = run("fit", *QUICK, "--trainer.fast_dev_run", "true")
    assert code == 0, err
    assert not list(tmp_path.iterdir())


def test_a_failing_client_ends_with_code_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedgkd_pl.federation.client_trainer import ClientTrainer

    def fail(*_: Any) -> None:
        raise ArithmeticError("no number")

    monkeypatch.setattr(ClientTrainer, "update", fail)
    code, _, err = run("fit", *QUICK)
    assert code == 3 and err.count("error:") == 1
    told = err.splitlines()[-1]
    assert told.startswith(
        "error: 3 rounds in a row failed (max_failed_rounds); in this one, client"
    )
    assert told.endswith(": ArithmeticError: no number")
