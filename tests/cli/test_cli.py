"""The command line as people use it: flags, files, errors, what a run leaves, resuming it."""

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fedgkd_pl import MLP, Digits, Dirichlet, FedGKD, LocalEngine, __version__, read_checkpoint
from fedgkd_pl.runs.files import accuracy_summary
from lightning.pytorch import Trainer, seed_everything
from safetensors.torch import load_file
from torch.optim import SGD

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
        *("features.tsv", "features_of.tsv", "hparams.yaml", "projector_config.pbtxt"),
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


def test_tensorboard_has_rounds_on_the_x_axis(done: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(done))
    events.Reload()
    tags = events.Tags()["scalars"]
    for tag in ("val/acc", "test/loss", "test/f1", "test/class_acc/3", "client/acc_p10"):
        assert tag in tags
        assert [event.step for event in events.Scalars(tag)] == [1, 2, 3], tag
    rows = list(csv.DictReader((done / "metrics.csv").open()))
    logged = [event.value for event in events.Scalars("test/acc")]
    assert logged == pytest.approx([float(row["test/acc"]) for row in rows])


def test_python_gives_the_same_weights_as_the_command_line(run: Run, tmp_path: Path) -> None:
    assert run("fit", "--config", "quickstart.yaml", "--rounds", "3")[0] == 0
    seed_everything(0, verbose=False)
    data = Digits(
        num_clients=20,
        partition=Dirichlet(alpha=0.1, balanced=True),
        participation=0.2,
        batch_size=16,
    )
    model = FedGKD(
        MLP(),
        gamma=0.2,
        buffer_size=5,
        local_epochs=10,
        optimizer=partial(SGD, lr=0.05, momentum=0.9),
        engine=LocalEngine(workers=1),
    )
    quiet = {"logger": False, "enable_checkpointing": False}
    Trainer(max_epochs=3, gradient_clip_val=10, **quiet).fit(model, data)
    assert same(
        load_file(version(tmp_path, "quickstart") / "global.safetensors"), model.net.state_dict()
    )


@pytest.fixture
def halfway(done: Path) -> Path:
    """Three rounds done; the checkpoint to go on from."""
    return done / "checkpoints" / "last.ckpt"


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


def test_a_resumed_run_remembers_its_best_round(run: Run, tmp_path: Path) -> None:
    still = (*QUICK, "--model.optimizer.lr", "0")
    assert run("fit", *still, "--rounds", "2")[0] == 0
    checkpoint = version(tmp_path) / "checkpoints" / "last.ckpt"
    code, _, err = run("fit", *still, "--rounds", "4", "--ckpt_path", checkpoint)
    assert code == 0, err
    names = sorted(file.name for file in (version(tmp_path, number=1) / "checkpoints").iterdir())
    assert names == ["best-round1.ckpt", *LAST]


def test_resume_is_exact(run: Run, tmp_path: Path, halfway: Path) -> None:
    assert run("fit", *QUICK, "--rounds", "6", "--name", "whole")[0] == 0
    code, _, err = run("fit", *QUICK, "--rounds", "6", "--name", "rest", "--ckpt_path", halfway)
    assert code == 0, err
    whole, rest = version(tmp_path, "whole"), version(tmp_path, "rest")
    assert (whole / "global.safetensors").read_bytes() == (rest / "global.safetensors").read_bytes()
    assert (whole / "metrics.csv").read_text() == (rest / "metrics.csv").read_text()
    a, b = (json.loads((f / "summary.json").read_text()) for f in (whole, rest))
    assert a | {"wall_seconds": 0} == b | {"wall_seconds": 0}


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (("--model.optimizer.lr", "0.5"), "model.optimizer.lr"),
        (("--model.buffer_size", "3"), "model.buffer_size"),
        (("--model.gamma", "0.3"), "model.gamma"),
        (("--data.num_clients", "5"), "data.num_clients"),
        (("--seed_everything", "1"), "seed_everything"),
        (("--model.net.hidden", "[16]"), "model.net.hidden"),
        (("--data.partition", "Dirichlet"), "data.partition"),
        (("--trainer.gradient_clip_val", "1"), "trainer.gradient_clip_val"),
        (("--trainer.gradient_clip_algorithm", "value"), "trainer.gradient_clip_algorithm"),
        (("--model.engine.threads", "2"), "model.engine.threads"),
        (("--model", "FedAvg"), "model"),
        (("--rounds", "3"), "rounds"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_resume_with_other_settings_is_refused(
    run: Run, tmp_path: Path, halfway: Path, flags: tuple[str, ...], key: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    words = ("fit", *QUICK, "--rounds", "6", "--ckpt_path", str(halfway), *flags)
    code, _, err = run(*words)
    assert code == 2
    assert len(err.splitlines()) == 1 and err.startswith(f"error: {key}")
    assert sorted(tmp_path.rglob("*")) == before, "something was written"


def test_resume_on_another_engine_is_allowed(run: Run, tmp_path: Path, halfway: Path) -> None:
    words = ("--rounds", "4", "--ckpt_path", halfway, "--model.engine.workers", "2")
    assert run("fit", *QUICK, *words)[0] == 0


def test_validate_test_and_predict(run: Run, tmp_path: Path, halfway: Path) -> None:
    rows = list(csv.DictReader((version(tmp_path) / "metrics.csv").open()))
    before = set(tmp_path.rglob("*"))
    for command, split in (("validate", "val"), ("test", "test")):
        code, out, err = run(command, *QUICK, "--ckpt_path", halfway)
        assert code == 0, err
        assert f"{float(rows[-1][f'{split}/acc']):.6f}"[:8] in out.replace(" ", "")
    assert set(tmp_path.rglob("*")) == before
    code, out, err = run("predict", *QUICK, "--ckpt_path", halfway)
    assert code == 0, err
    guesses = list(csv.DictReader((version(tmp_path) / "predictions.csv").open()))
    right = sum(row["label"] == row["prediction"] for row in guesses)
    assert len(guesses) == 360
    assert right / 360 == pytest.approx(float(rows[-1]["test/acc"]))


def test_a_saved_config_starts_the_same_run(run: Run, tmp_path: Path, done: Path) -> None:
    saved = done / "config.yaml"
    code, _, err = run("fit", "--config", saved)
    assert code == 0, err
    again = version(tmp_path, number=1)
    first = (done / "global.safetensors").read_bytes()
    assert (again / "global.safetensors").read_bytes() == first
    checkpoint = again / "checkpoints" / "last.ckpt"
    code, _, err = run("test", "--config", saved, "--ckpt_path", checkpoint)
    assert code == 0, err


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


def test_evaluation_every_second_round(run: Run, tmp_path: Path) -> None:
    words = ("--trainer.check_val_every_n_epoch", "2", "--rounds", "4")
    code, _, err = run("fit", *QUICK, *words)
    assert code == 0, err
    rows = list(csv.DictReader((version(tmp_path) / "metrics.csv").open()))
    assert [bool(row["test/acc"]) for row in rows] == [False, True, False, True]
    assert all(row["client/loss_mean"] for row in rows)


FLAGS = (
    "--rounds --seed_everything --data.num_clients --data.participation --data.partition.alpha "
    "--data.batch_size --data.data_dir --model.gamma --model.buffer_size --model.local_epochs "
    "--model.optimizer.lr --model.engine.workers"
).split()


def test_help_shows_and_explains_the_flags_people_type(run: Run) -> None:
    code, out, _ = run("fit", "--help")
    assert code == 0
    for flag in FLAGS:
        line = next(line for line in out.splitlines() if line.strip().startswith(flag))
        assert len(line.split()) >= 3, f"{flag} is not explained"


def test_every_flag_people_type_works(run: Run) -> None:
    code, out, err = run(
        *("fit", "--config", "cifar10_fedgkd.yaml", "--rounds", "7", "--seed_everything", "5"),
        *("--data.num_clients", "11", "--data.participation", "0.3", "--data.batch_size", "9"),
        *("--data.partition.alpha", "0.7", "--data.data_dir", "elsewhere"),
        *("--model.gamma", "0.4", "--model.buffer_size", "3", "--model.local_epochs", "2"),
        *("--model.optimizer.lr", "0.01", "--model.engine.workers", "2", "--print_config"),
    )
    assert code == 0, err
    config = yaml.safe_load(out)
    data, model = config["data"]["init_args"], config["model"]["init_args"]
    assert (config["rounds"], config["seed_everything"]) == (7, 5)
    assert (data["num_clients"], data["participation"], data["batch_size"]) == (11, 0.3, 9)
    assert data["partition"]["init_args"]["alpha"] == 0.7 and data["data_dir"] == "elsewhere"
    assert (model["gamma"], model["buffer_size"], model["local_epochs"]) == (0.4, 3, 2)
    assert model["optimizer"]["init_args"]["lr"] == 0.01
    assert model["optimizer"]["init_args"]["momentum"] == 0.9  # from the file
    assert model["engine"]["init_args"]["workers"] == 2


def test_environment_and_repeated_configs(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDGKD_FIT__OUTPUT_DIR", "from_environment")
    (tmp_path / "fedavg.yaml").write_text("model: {class_path: FedAvg}\n")
    words = ("fit", "--config", "quickstart.yaml", "--config", "fedavg.yaml")
    code, out, err = run(*words, "--print_config")
    assert code == 0, err
    config = yaml.safe_load(out)
    assert config["output_dir"] == "from_environment"
    assert config["model"]["class_path"] == "fedgkd_pl.FedAvg"
    assert config["model"]["init_args"]["local_epochs"] == 10  # from the first file
    assert "gamma" not in config["model"]["init_args"]


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


def test_own_classes_come_in_with_import(run: Run, tmp_path: Path) -> None:
    (tmp_path / "my_nets.py").write_text(
        "from torch import nn\n\n\nclass Tiny(nn.Linear):\n"
        "    def __init__(self, width: int = 64) -> None:\n"
        "        super().__init__(width, 10)\n"
    )
    words = ("--import", "my_nets", "--model.net", "Tiny", "--model.engine.workers", "2")
    code, _, err = run("fit", *QUICK, *words)
    assert code == 0, err
    assert load_file(version(tmp_path) / "global.safetensors")["weight"].shape == (10, 64)


def test_a_method_whose_net_has_no_type_is_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "untyped_method.py").write_text(
        "from fedgkd_pl import FedAvg\n\n\nclass Untyped(FedAvg):\n"
        "    def __init__(self, net=None, **kwargs):\n"
        "        super().__init__(net, **kwargs)\n"
    )
    words = ("--import", "untyped_method", "--model", "Untyped", "--model.net", "fedgkd_pl.MLP")
    code, _, err = run("fit", *QUICK, *words)
    assert code == 2 and err.startswith(
        "error: model.net: must be an nn.Module; in a class of yours"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_evaluating_needs_a_checkpoint(run: Run, tmp_path: Path, command: str) -> None:
    code, _, err = run(command, *QUICK)
    assert (code, err) == (2, "error: ckpt_path: which model? give a checkpoint\n")
    code, _, err = run(command, *QUICK, "--ckpt_path", "nowhere.ckpt")
    assert (code, err) == (2, "error: ckpt_path: no such file (got nowhere.ckpt)\n")
    (tmp_path / "bad.ckpt").write_text("nothing")
    code, _, err = run(command, *QUICK, "--ckpt_path", "bad.ckpt")
    assert (code, err) == (2, "error: ckpt_path: cannot be read as a checkpoint (got bad.ckpt)\n")


def test_evaluating_another_net_is_refused(run: Run, halfway: Path) -> None:
    code, _, err = run("test", *QUICK, "--model.net.hidden", "[7]", "--ckpt_path", halfway)
    assert code == 2 and len(err.splitlines()) == 1
    assert err.startswith("error: ckpt_path: holds another net: net.classifier.weight is (10, 32)")


@pytest.mark.parametrize(
    "flags",
    [
        "--trainer.logger false",
        "--trainer.logger CSVLogger --trainer.logger.save_dir logs",
        "--trainer.enable_progress_bar false",
        "--trainer.callbacks+=RichProgressBar",
        "--trainer.enable_checkpointing false",
    ],
)
def test_lightnings_own_options_work(run: Run, tmp_path: Path, flags: str) -> None:
    for number in (0, 1):  # and the second run finds its own folder
        code, _, err = run("fit", *QUICK, "--rounds", "2", *flags.split())
        assert code == 0, err
        folder = version(tmp_path, number=number)
        names = {file.name for file in folder.iterdir()}
        assert {"config.yaml", "metrics.csv", "summary.json", "global.safetensors"} <= names
        assert ("checkpoints" in names) is ("checkpointing" not in flags)
    assert {file.name for file in tmp_path.iterdir()} <= {"runs", "logs"}


def test_fast_dev_run_writes_nothing(run: Run, tmp_path: Path) -> None:
    code, _, err = run("fit", *QUICK, "--trainer.fast_dev_run", "true")
    assert code == 0, err
    assert not list(tmp_path.iterdir())


def test_debug_shows_where(run: Run) -> None:
    from fedgkd_pl.errors import SettingError

    with pytest.raises(SettingError):
        run("fit", *QUICK, "--data.num_clients", "0", "--debug")


def test_top_level(run: Run) -> None:
    assert run("--help")[0] == 0
    assert run("--version")[1].strip() == __version__
    code, out, _ = run()
    assert code == 2 and "fit" in out
    code, _, err = run("fitt")
    assert code == 2 and "fitt" in err
    code, _, err = run("report", "nowhere")
    assert code == 2 and err.startswith("error: runs: no finished run")


def test_report_over_seeds(run: Run, tmp_path: Path) -> None:
    for seed, best in enumerate((0.5, 0.7, 0.9)):
        for name, settings in (("x", "model: {class_path: FedAvg}"), ("unknown", "")):
            folder = tmp_path / "runs" / name / f"version_{seed}"
            folder.mkdir(parents=True)
            summary = {"method": "FedAvg", "dataset": "d", "seed": seed, "rounds": 3}
            summary |= {"bytes_down": 2_000_000, "best_test_acc": best, "final_test_acc": 0.25}
            summary |= {"mean_last_10_test_acc": 0.3, "test_acc_at_best_val": None}
            (folder / "summary.json").write_text(json.dumps(summary))
            if settings:
                (folder / "config.yaml").write_text(settings)
    code, out, _ = run("report", "--format", "md", "runs/x")
    assert code == 0
    row = "| FedAvg | d | 3 | 0, 1, 2 | 70.00 ± 20.00 | 25.00 ± 0.00 | 30.00 ± 0.00 † | - | 2.0 |"
    note = "the mean of 3 rounds: no more were tested"
    assert row in out and f"- † {note}" in out
    code, out, _ = run("report", "--format", "md", "runs/unknown")
    for seed, best in enumerate(("50.00", "70.00", "90.00")):
        assert f"| FedAvg, runs/unknown/version_{seed} † | d | 3 | {seed} | {best} |" in out
    assert "- † settings not known (no config.yaml): not averaged with others" in out


def test_summary_of_no_rounds() -> None:
    assert accuracy_summary([])["best_test_acc"] is None
    rows = [{"round": n, "test/acc": n / 100, "val/acc": -n} for n in range(1, 13)]
    summary = accuracy_summary(rows)
    assert summary["mean_last_10_test_acc"] == pytest.approx(0.075)
    assert (summary["best_round"], summary["test_acc_at_best_val"]) == (12, 0.01)


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


def test_threads_are_given_back(run: Run) -> None:
    before = torch.get_num_threads()
    assert run("fit", *QUICK, "--rounds", "1")[0] == 0
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("content", ["{", "[]", "3", '{"method": "x"}', "[" * 100_000])
def test_a_summary_of_something_else_is_refused(run: Run, tmp_path: Path, content: str) -> None:
    (tmp_path / "summary.json").write_text(content)
    code, _, err = run("report", ".")
    assert (code, err) == (2, "error: runs: not a summary.json of fedgkd-pl (got summary.json)\n")


def test_the_partition_of_clients_that_keep_test_samples(run: Run, tmp_path: Path) -> None:
    flags = (*QUICK, "--data.client_test_fraction", "0.2")
    code, out, _ = run("partition", *flags)
    assert code == 0 and "of 4 clients" in out
    content = json.loads((tmp_path / "runs" / "partitions" / "digits.json").read_text())
    assert sum(map(sum, content["counts"])) + content["num_client_test"] == 1293
    code, _, err = run("partition", *flags, "--export", "cut.json")
    assert code == 2 and "error: data.client_test_fraction: cannot be exported" in err
    assert not (tmp_path / "cut.json").exists()
