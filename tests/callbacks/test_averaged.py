"""AveragedModel: the average and its accuracies by hand, after a kill, in tables and files."""

import csv
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import AveragedModel, FedAvg, FedGKD, LocalEngine, RunFiles, read_checkpoint
from fedgkd_pl import read_run as read
from fedgkd_pl.cli.main import main
from fedgkd_pl.errors import SettingError
from fedgkd_pl.experiments.draw import plot
from fedgkd_pl.experiments.groups import make_groups
from fedgkd_pl.experiments.overview import measures_of, overview
from fedgkd_pl.experiments.protocol import Footnotes
from fedgkd_pl.experiments.runs import Run
from fedgkd_pl.experiments.study import Cell, read_study
from fedgkd_pl.experiments.tables import every_run, make_tables
from fedgkd_pl.federation.teachers import MovingMean
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD

from tests.conftest import Table, fit, linear, quiet_trainer, same
from tests.support.faults import Fault, Launcher, inject
from tests.support.studies import fake, study

State = dict[str, Tensor]
AVERAGES = ("average/acc", "average/loss", "average/val_acc", "average/val_loss")
FORMS: list[dict[str, Any]] = [{}, {"size": 2}, {"decay": 0.7}]


def normed() -> nn.Sequential:
    """A net with dropout, and with buffers, an integer one among them."""
    seed_everything(1, verbose=False)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def method(**kwargs: Any) -> FedGKD:
    local = partial(SGD, lr=0.3, momentum=0.9)
    settings: dict[str, Any] = {"engine": LocalEngine(1), "buffer_size": 2, "gamma": 1.0}
    return FedGKD(normed(), optimizer=local, **(settings | kwargs))


def table(**kwargs: Any) -> Table:
    settings: dict[str, Any] = {"sizes": (30, 20, 10), "batch_size": 5, "val_fraction": 0.1}
    return Table(**(settings | {"participation": 0.67, "eval_batch_size": 4} | kwargs))


class Rounds(Callback):
    """The global model and what is logged of every round; the clients' random numbers after it."""

    def __init__(self) -> None:
        self.models: list[State] = []
        self.rows: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        state = pl_module.net.state_dict()
        self.models.append({name: tensor.clone() for name, tensor in state.items()})
        self.rows.append(dict(pl_module.report))


def hand(models: list[State], weights: list[float]) -> State:
    """The weighted mean in NumPy; of integers the largest."""
    found = {}
    for name, like in models[0].items():
        arrays = [model[name].numpy() for model in models]
        if like.is_floating_point():
            parts = [w * a.astype(np.float64) for w, a in zip(weights, arrays, strict=True)]
            value = np.sum(parts, axis=0) / np.sum(weights)
        else:
            value = np.max(arrays, axis=0)
        found[name] = torch.from_numpy(np.asarray(value))
    return found


def by_hand(models: list[State], size: int | None = None, decay: float | None = None) -> State:
    """What a form of the average is of these models, all that there were so far."""
    if decay is None:
        last = models[-(size or 5) :]
        return hand(last, [1.0] * len(last))
    end = len(models)
    # the average that starts at zero: (1 - β) Σ β^(t-i) w_i, to be divided by 1 - β^t
    weights = [(1 - decay) * decay ** (end - number) for number in range(1, end + 1)]
    assert np.sum(weights) == pytest.approx(1 - decay**end, rel=1e-12)
    return hand(models, weights)


def close(found: State, expected: State) -> bool:
    """To the precision of the net's own numbers."""
    return found.keys() == expected.keys() and all(
        torch.allclose(found[name], value.to(found[name].dtype), rtol=3e-7, atol=1e-8)
        for name, value in expected.items()
    )


def scores(state: State, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Accuracy and cross-entropy of our net with BatchNorm in NumPy."""
    w = {name: tensor.double().numpy() for name, tensor in state.items()}
    z = x.astype(np.float64) @ w["0.weight"].T + w["0.bias"]
    z = (z - w["1.running_mean"]) / np.sqrt(w["1.running_var"] + 1e-5)
    z = (z * w["1.weight"] + w["1.bias"]) @ w["3.weight"].T + w["3.bias"]
    logs = z - np.log(np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True))
    logs -= z.max(1, keepdims=True)
    return float(np.mean(z.argmax(1) == y)), float(-np.mean(logs[np.arange(len(y)), y]))


# -- the average ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_the_average_and_its_scores_by_hand_from_the_checkpoints(
    form: dict[str, Any], tmp_path: Path
) -> None:
    averaged, data, rounds = AveragedModel(**form), table(), Rounds()
    save = ModelCheckpoint(tmp_path / "every", filename="{epoch}", save_top_k=-1)
    callbacks = [averaged, RunFiles(str(tmp_path)), save, rounds]
    model = method()
    fit(model, data, 7, callbacks=callbacks, enable_checkpointing=True)
    models: list[State] = []
    for number, row in enumerate(rounds.rows):
        checkpoint = read_checkpoint(tmp_path / "every" / f"epoch={number}.ckpt")
        weights = checkpoint["state_dict"].items()
        models.append({n.removeprefix("net."): t for n, t in weights if n.startswith("net.")})
        assert same(models[-1], rounds.models[number])
        expected = by_hand(models, **form)
        assert expected["1.num_batches_tracked"] == models[-1]["1.num_batches_tracked"] > 0
        again = AveragedModel(**form)
        again.load_state_dict(checkpoint["callbacks"]["AveragedModel"])
        assert close(again.average(model), expected)
        test, val = (data.x[:6], data.y[:6]), (data.x[60:], data.y[60:])
        hands = (*scores(expected, *test), *scores(expected, *val))
        assert [row[name] for name in AVERAGES] == pytest.approx(list(hands), rel=1e-5)
    exported = load_file(tmp_path / "average.safetensors")
    assert close(exported, by_hand(models, **form)) and same(exported, averaged.average(model))
    for name, tensor in exported.items():
        assert tensor.dtype == models[-1][name].dtype
    assert not same(exported, load_file(tmp_path / "global.safetensors"))


def test_the_moving_mean_by_hand() -> None:
    """β = 1/2 of 8, 4, 2: 8; (4 + 8/2) / 1.5; (2 + 4/2 + 8/4) / 1.75."""
    mean = MovingMean(0.5)
    assert not mean
    found = []
    for number, value in enumerate((8.0, 4.0, 2.0)):
        mean.append({"w": torch.tensor([value]), "n": torch.tensor(7 - number)})
        assert mean and mean.mean()["w"].dtype == torch.float32
        found.append(float(mean.mean()["w"]))
    assert found == pytest.approx([8, 16 / 3, 24 / 7], rel=1e-7)
    assert mean.mean()["n"] == 7
    again = MovingMean(0.5)
    again.load_state_dict(mean.state_dict())
    for each in (mean, again):
        each.append({"w": torch.tensor([1.0]), "n": torch.tensor(9)})
    assert same(mean.mean(), again.mean()) and again.mean()["n"] == 9


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_the_average_of_one_model_is_the_global_model(precision: Any) -> None:
    """To the bit: the same batches in the same precision. In bf16-true Lightning makes the sums of
    the global model's loss bfloat16, too; the average's are float32."""
    rounds = Rounds()
    model = method()
    fit(model, table(), 3, callbacks=[AveragedModel(size=1), rounds], precision=precision)
    for row in rounds.rows:
        for split, part in (("test", ""), ("val", "val_")):
            assert row[f"average/{part}acc"] == row[f"{split}/acc"]
            loss = row[f"average/{part}loss"]
            near = pytest.approx(loss, rel=1e-2) if precision == "bf16-true" else loss
            assert row[f"{split}/loss"] == near


def test_without_a_validation_set_and_where_it_is_evaluated() -> None:
    rounds, averaged = Rounds(), AveragedModel(size=3)
    model = method()
    data = table(val_fraction=0.0)
    trainer = fit(model, data, 5, callbacks=[averaged, rounds], check_val_every_n_epoch=2)
    found = [set(AVERAGES) & row.keys() for row in rounds.rows]
    assert found == [set(), set(AVERAGES[:2]), set(), set(AVERAGES[:2]), set(AVERAGES[:2])]
    assert close(averaged.average(model), by_hand(rounds.models, 3)), "rounds between count, too"
    told = trainer.validate(model, data, verbose=False)[0]
    assert not any(name.startswith("average") for name in told)
    rounds = Rounds()
    fit(method(), table(), 1, callbacks=[AveragedModel(), rounds], num_sanity_val_steps=-1)
    assert set(AVERAGES) <= rounds.rows[0].keys()


def test_a_part_of_the_data_is_the_same_part() -> None:
    rounds = Rounds()
    callbacks = [AveragedModel(size=1), rounds]
    fit(method(), table(), 2, callbacks=callbacks, limit_val_batches=1)
    assert [row["average/loss"] for row in rounds.rows] == [r["test/loss"] for r in rounds.rows]


def test_it_never_enters_training() -> None:
    ends = []
    for callbacks in ([], [AveragedModel()], [AveragedModel(decay=0.9)]):
        model, rounds = method(), Rounds()
        torch.manual_seed(5)
        fit(model, table(), 4, callbacks=[*callbacks, rounds])
        rest = [{k: v for k, v in r.items() if "average" not in k} for r in rounds.rows]
        ends.append((rounds.models, rest, torch.get_rng_state(), np.random.get_state()[1]))  # type: ignore[index]
        assert all(module.training for module in model.net.modules())
    for models, rows, torch_state, numpy_state in ends[1:]:
        assert all(same(*pair) for pair in zip(models, ends[0][0], strict=True))
        assert rows == ends[0][1]
        assert torch.equal(torch_state, ends[0][2]) and (numpy_state == ends[0][3]).all()


@pytest.mark.parametrize("form", [{}, {"decay": 0.5}])
def test_one_worker_or_two(form: dict[str, Any]) -> None:
    found = []
    for workers in (1, 2):
        averaged, rounds = AveragedModel(**form), Rounds()
        model = method(engine=LocalEngine(workers))
        fit(model, table(), 3, callbacks=[averaged, rounds])
        found.append((averaged.average(model), [[r[n] for n in AVERAGES] for r in rounds.rows]))
    assert same(found[0][0], found[1][0]) and found[0][1] == found[1][1]


@pytest.mark.parametrize("form", [{"size": 2}, {"decay": 0.7}])
def test_a_failed_round_adds_no_model(form: dict[str, Any]) -> None:
    averaged, rounds = AveragedModel(**form), Rounds()
    faults = [Fault(number, client, "raise") for number in (1, 3) for client in range(3)]
    model = inject(method(), faults)
    fit(model, table(), 5, callbacks=[averaged, rounds])
    assert model.failed_rounds == [1, 3]
    assert same(rounds.models[2], rounds.models[1])
    counted = [rounds.models[number] for number in (1, 3, 4)]
    assert close(averaged.average(model), by_hand(counted, **form))
    values = [[row[name] for name in AVERAGES] for row in rounds.rows]
    assert values[2] == values[1] != values[3]
    first = rounds.rows[0]
    assert values[0] == [first[n] for n in ("test/acc", "test/loss", "val/acc", "val/loss")]


def test_a_second_fit_is_a_new_run() -> None:
    averaged = AveragedModel(size=3)
    for _ in range(2):
        rounds = Rounds()
        model = method()
        fit(model, table(), 2, callbacks=[averaged, rounds])
        assert len(averaged.models) == 2  # type: ignore[arg-type]
        assert close(averaged.average(model), by_hand(rounds.models, 3))


def test_no_run_files_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fit(FedAvg(linear(), engine=LocalEngine(1)), Table(), 1, callbacks=[AveragedModel()])
    files = [AveragedModel(export=False), RunFiles(str(tmp_path / "run"))]
    fit(FedAvg(linear(), engine=LocalEngine(1)), Table(), 1, callbacks=files)
    assert not list(tmp_path.rglob("average*"))


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"size": 0}, "size: must be at least 1 (got 0)"),
        ({"size": -3}, "size: must be at least 1 (got -3)"),
        ({"decay": 0.0}, "decay: must be between 0 and 1 (got 0.0)"),
        ({"decay": 1.0}, "decay: must be between 0 and 1 (got 1.0)"),
        ({"decay": float("nan")}, "decay: must be between 0 and 1 (got nan)"),
        ({"size": 5, "decay": 0.9}, "size: is another average than that of decay"),
    ],
)
def test_settings_that_cannot_work(settings: Any, told: str, tmp_path: Path, capfd: Any) -> None:
    with pytest.raises(SettingError) as error:
        AveragedModel(**settings)
    assert str(error.value).startswith(told) and "\n" not in str(error.value)
    if "nan" not in told:
        callback = json.dumps({"class_path": "AveragedModel", "init_args": settings})
        words = ["fit", "--config", "smoke.yaml", "--output_dir", str(tmp_path)]
        assert main([*words, "--trainer.callbacks+", callback]) == 2
        err = capfd.readouterr().err
        assert told in err and len(err.splitlines()) == 1
        assert not list(tmp_path.iterdir())


def test_a_resume_with_another_average_is_refused(tmp_path: Path, capfd: Any) -> None:
    words = ["--config", "smoke.yaml", "--model.engine.workers", "1", "--rounds", "1"]
    words += ["--output_dir", str(tmp_path), "--trainer.callbacks+", "AveragedModel"]
    assert main(["fit", *words]) == 0
    folder = tmp_path / "smoke" / "version_0"
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    capfd.readouterr()
    for settings, told in (({"size": 4}, "size: a run"), ({"decay": 0.5}, "decay: a run")):
        callback = json.dumps([{"class_path": "AveragedModel", "init_args": settings}])
        again = ["fit", "--resume", str(folder), "--rounds", "2", "--trainer.callbacks", callback]
        assert main(again) == 2
        err = capfd.readouterr().err
        assert told in err and "it began with, here" in err and len(err.splitlines()) == 1
    after = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert after == before


@pytest.mark.parametrize("monitor", ["average/val_acc", "average/vall_acc", "average/f1"])
def test_the_best_round_may_be_of_the_average(monitor: str, tmp_path: Path, capfd: Any) -> None:
    words = ["fit", "--config", "smoke.yaml", "--model.engine.workers", "1", "--output_dir"]
    words += [str(tmp_path), "--checkpoint.monitor", monitor, "--checkpoint.mode", "max"]
    code = main([*words, "--trainer.callbacks+", "AveragedModel"])
    err = capfd.readouterr().err
    if monitor == "average/val_acc":
        assert code == 0, err
        (folder,) = tmp_path.glob("smoke/*")
        rows = read(folder).metrics()
        best = max(range(3), key=lambda number: rows[number][monitor]) + 1
        rounds = [read_checkpoint(f)["global_step"] for f in folder.glob("checkpoints/*.ckpt")]
        assert best in rounds
        assert main(words) == 2, "without the callback there is no such score"
    else:
        assert code == 2 and "no such score" in err and len(err.splitlines()) == 1


# -- a run that is killed -------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["validation end", "epoch end"])
@pytest.mark.parametrize("form", [{"size": 3}, {"decay": 0.7}])
def test_a_resumed_run_is_exact(when: str, form: dict[str, Any], tmp_path: Path) -> None:
    def go(name: str, rounds: int, ckpt: Path | None = None) -> dict[str, Any]:
        averaged = AveragedModel(**form)
        at_end = when == "epoch end"
        save = ModelCheckpoint(tmp_path / name, save_last=True, save_on_train_epoch_end=at_end)
        callbacks = [averaged, RunFiles(str(tmp_path / name)), save]
        trainer = quiet_trainer(max_epochs=rounds, callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(method(), table(), ckpt_path=ckpt)
        return averaged.state_dict()

    whole = go("whole", 6)
    go("parts", 4)
    parts = go("parts", 6, tmp_path / "parts" / "last.ckpt")
    assert bits(whole) == bits(parts)
    for name in ("average.safetensors", "metrics.csv", "global.safetensors"):
        files = [(tmp_path / run / name).read_bytes() for run in ("whole", "parts")]
        assert files[0] == files[1], name


def bits(value: Any) -> Any:
    """A state, with tensors as bytes."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    started = Launcher()
    yield started
    started.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="commands are forked")
@pytest.mark.parametrize("form", [{"size": 3}, {"decay": 0.7}])
def test_a_killed_run_is_exact(launcher: Launcher, form: dict[str, Any], tmp_path: Path) -> None:
    """SIGKILL around commits, the last when only the summary was missing."""
    callback = json.dumps({"class_path": "AveragedModel", "init_args": form})
    words = ("fit", "--config", "smoke.yaml", "--rounds", "5", "--output_dir", ".", "--name", "run")
    words += ("--model.engine.workers", "1", "--trainer.callbacks+", callback)
    assert launcher.run(tmp_path / "whole", *words) == 0
    points = [("writing", "last.ckpt", 2), ("committed", "last.ckpt", 1)]
    points += [("opened", "average.safetensors", 1), ("opened", "summary.json", 1)]
    for number, point in enumerate(points):
        again = ("fit", "--resume", "run/version_0") if number else words
        launcher.start(tmp_path / "parts", *again, stop_at=point)
        assert launcher.wait() == -9
    assert launcher.run(tmp_path / "parts", "fit", "--resume", "run/version_0") == 0
    folders = [tmp_path / name / "run" / "version_0" for name in ("whole", "parts")]
    for name in ("average.safetensors", "metrics.csv", "global.safetensors"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    ends = [read_checkpoint(folder / "checkpoints" / "last.ckpt") for folder in folders]
    states = [bits(end["callbacks"]["AveragedModel"]) for end in ends]
    assert states[0] == states[1] and states[0]["models"]
    assert read(folders[1]).summary["average"]["rounds"] == 5


# -- tables, reports, files -----------------------------------------------------------------------


def averaged_run(method: str, seed: int, curve: list[float], average: list[float]) -> Run:
    """Validation prefers the second round."""
    run = fake(method, seed, curve)
    numbers = range(1, len(curve) + 1)
    run.columns["average/acc"] = dict(zip(numbers, average, strict=True))
    run.columns["average/val_acc"] = {n: 0.9 if n == 2 else 0.1 for n in numbers}
    return run


AVERAGE_MEASURES = [
    *("average_best", "average_final", "average_last10", "average_at_best_val"),
    "average_round3",
]


def test_measures_by_hand() -> None:
    curve = [n / 100 for n in range(10, 22)]  # twelve rounds
    average = [0.5, 0.3, 0.7, *[0.6] * 8, 0.4]
    run = averaged_run("FedAvg", 0, curve, average)
    found = {name: run.measure(name) for name in AVERAGE_MEASURES}
    assert found == pytest.approx(
        {
            "average_best": 70.0,
            "average_final": 40.0,
            "average_last10": 100 * (0.7 + 8 * 0.6 + 0.4) / 10,
            "average_at_best_val": 30.0,
            "average_round3": 70.0,
        }
    )
    assert run.measure("best") == pytest.approx(21.0) and run.measure("average_round13") is None
    plain = fake("FedAvg", 0, curve)
    assert [plain.measure(name) for name in AVERAGE_MEASURES] == [None] * 5
    strange = averaged_run("FedAvg", 0, curve[:3], [float("nan"), 1e300, 0.25])
    assert strange.measure("average_best") == 25.0 and strange.measure("average_round2") is None


def test_runs_with_and_without_it_in_one_table() -> None:
    axes = {"method": {"FedAvg": {}, "FedGKD": {}}}
    measures = ["best", "average_best", "average_last10", "average_round2", "average_round9"]
    layout = {"rows": ["method"], "columns": ["measure"], "measures": measures}
    it = study(axes=axes, seeds=[0], **layout)
    runs = [averaged_run("FedAvg", 0, [0.1, 0.2], [0.3, 0.25]), fake("FedGKD", 0, [0.2, 0.4])]
    cells = [Cell({"method": run.summary["method"]}, 0, ()) for run in runs]
    results = list(zip(cells, runs, strict=True))
    (made,) = make_tables(it, results)
    lines = made.to_markdown().splitlines()
    assert lines[2] == "| method | best | average best | average last 10 | average round 2 |"
    assert lines[4:6] == [
        "| FedAvg | <u>20.00</u> | 30.00 | 27.50 † | 25.00 |",
        "| FedGKD | **40.00** | - | - | - |",
    ]
    assert "- average round 9: no run has so many rounds, the longest 2" in lines
    (first, second) = csv.DictReader(
        every_run(it, results).to_csv(float_format="%.4f").splitlines()
    )
    assert [first[name] for name in AVERAGE_MEASURES[:4]] == [
        *("30.0000", "25.0000", "27.5000", "25.0000"),
    ]
    assert [second[name] for name in AVERAGE_MEASURES[:4]] == [""] * 4
    groups = make_groups(runs)
    rows = overview(groups, Footnotes())  # whose † is for the settings
    names = ("average best", "average final", "average last 10", "average at best val")
    assert [rows[0][name] for name in names] == ["30.00", "25.00", "27.50 ‡", "25.00"]
    assert [rows[1][name] for name in names] == ["-"] * 4
    assert measures_of(runs[1:]) == ["best", "final", "last10", "at_best_val"]
    assert "average best" not in overview(groups[1:])[0]
    (made,) = make_tables(it, results[1:])
    note = "no run has an averaged model: trainer.callbacks+: AveragedModel"
    assert note in made.notes


def test_a_study_names_its_measures(tmp_path: Path) -> None:
    text = "config: smoke.yaml\naxes: {method: {FedAvg: {}}}\nmeasures: [MEASURE]\n"
    file = tmp_path / "study.yaml"
    for measure in AVERAGE_MEASURES:
        file.write_text(text.replace("MEASURE", measure))
        assert read_study(str(file)).measures == [measure]
    file.write_text(text.replace("MEASURE", "average_bets"))
    with pytest.raises(SettingError, match="measures: after average_: best, final, last10"):
        read_study(str(file))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of the command line, one without the callback."""
    top = tmp_path_factory.mktemp("averaged")
    words = ["fit", "--config", "smoke.yaml", "--model.engine.workers", "1", "--output_dir"]
    assert main([*words, str(top), "--name", "plain"]) == 0
    assert main([*words, str(top), "--name", "with", "--trainer.callbacks+", "AveragedModel"]) == 0
    return top


def test_what_a_run_of_the_command_line_leaves(folder: Path, capfd: Any) -> None:
    plain, run = (read(folder / name / "version_0") for name in ("plain", "with"))
    rows = run.metrics()
    best = max(rows, key=lambda row: row["average/acc"])
    assert run.summary["average"]["best_test_acc"] == best["average/acc"]
    assert run.summary["average"]["best_round"] == best["round"]
    assert run.summary["average"]["final_test_acc"] == rows[-1]["average/acc"]
    assert "average" not in plain.summary
    same_but = plain.metrics()
    for row, other in zip(rows, same_but, strict=True):
        assert {k: v for k, v in row.items() if not k.startswith("average/")} == other
    net = run.net(average=True)
    assert not net.training
    assert same(net.state_dict(), load_file(run.folder / "average.safetensors"))
    assert not same(net.state_dict(), run.net().state_dict())
    with pytest.raises(SettingError, match=r"average: no average\.safetensors"):
        plain.net(average=True)
    (panel,) = plot("average", [plain, run]).axes
    (line,) = panel.lines
    assert list(line.get_ydata()) == pytest.approx([100 * row["average/acc"] for row in rows])
    with pytest.raises(SettingError, match="average/acc"):
        plot("average", [plain])
    tags = points(run.folder)
    for name in AVERAGES[:2]:
        assert tags[name] == pytest.approx([row[name] for row in rows])


def points(folder: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_the_end_of_a_run_and_the_reports_show_it(
    run: Callable[..., tuple[int, str, str]], folder: Path, tmp_path: Path
) -> None:
    found = read(folder / "with" / "version_0")
    shown = f"{100 * found.summary['average']['best_test_acc']:.2f}"
    code, out, _ = run("report", "--all", folder)
    assert code == 0 and "average at best val" in out and shown in out and " - " in out
    code, out, _ = run("report", "--format", "md", folder)
    assert "| average best | average final |" in out and shown in out
    code, out, _ = run("report", "--format", "html", folder, "--output", "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert code == 0 and '<figure data-name="average"' in page and shown in page
    code, out, _ = run("report", folder / "plain")
    assert code == 0 and "average best" not in out
    words = ("--config", "smoke.yaml", "--rounds", "1", "--model.engine.workers", "1")
    code, out, err = run("fit", *words, "--trainer.callbacks+", "AveragedModel")
    last = f"{read('runs/smoke/version_0').metrics()[0]['average/acc']:.4f}"
    assert code == 0 and f"average/acc best {last} (round 1), final {last}" in out, err
