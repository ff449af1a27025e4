"""AveragedModel: the average and its accuracies by hand, after a kill, in tables and files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import AveragedModel, RunFiles, read_checkpoint
from fedgkd_pl import read_run as read
from fedgkd_pl.cli.main import main
from fedgkd_pl.errors import SettingError
from fedgkd_pl.runs.folder import AVERAGE
from lightning.pytorch.callbacks import LambdaCallback
from safetensors.torch import load_file
from torch import Tensor

from tests.callbacks.by_hand import gkd, watched
from tests.conftest import Table, same
from tests.support.faults import Fault, inject

State = dict[str, Tensor]
AVERAGES = ("average/acc", "average/loss", "average/val_acc", "average/val_loss")
FORMS: list[dict[str, Any]] = [{}, {"size": 2}, {"decay": 0.7}]


def table(**kwargs: Any) -> Table:
    settings: dict[str, Any] = {"sizes": (30, 20, 10), "batch_size": 5, "val_fraction": 0.1}
    return Table(**(settings | {"participation": 0.67, "eval_batch_size": 4} | kwargs))


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
def test_the_average_and_its_scores_by_hand(form: dict[str, Any], tmp_path: Path) -> None:
    model, data, averaged, seen = gkd(), table(), AveragedModel(**form), []
    look = LambdaCallback(on_train_batch_end=lambda *_: seen.append(averaged.average(model)))
    watch = watched(model, data, 7, averaged, look, RunFiles(str(tmp_path)))
    for number, row in enumerate(watch.logged):
        expected = by_hand(watch.after[: number + 1], **form)
        assert expected["1.num_batches_tracked"] == watch.after[number]["1.num_batches_tracked"] > 0
        assert close(seen[number], expected)
        test, val = (data.x[:6], data.y[:6]), (data.x[60:], data.y[60:])
        hands = (*scores(expected, *test), *scores(expected, *val))
        assert [row[name] for name in AVERAGES] == pytest.approx(list(hands), rel=1e-5)
    exported = load_file(tmp_path / "average.safetensors")
    assert same(exported, seen[-1])
    for name, tensor in exported.items():
        assert tensor.dtype == watch.after[-1][name].dtype
    assert not same(exported, load_file(tmp_path / "global.safetensors"))


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_the_average_of_one_model_is_the_global_model(precision: Any) -> None:
    """To the bit: the same batches in the same precision."""
    for row in watched(gkd(), table(), 3, AveragedModel(size=1), precision=precision).logged:
        for split, part in (("test", ""), ("val", "val_")):
            assert row[f"average/{part}acc"] == row[f"{split}/acc"]
            assert row[f"average/{part}loss"] == row[f"{split}/loss"]


@pytest.mark.parametrize("form", FORMS[1:])
def test_a_failed_round_adds_no_model(form: dict[str, Any]) -> None:
    averaged = AveragedModel(**form)
    faults = [Fault(number, client, "raise") for number in (1, 3) for client in range(3)]
    model = inject(gkd(), faults)
    watch = watched(model, table(), 5, averaged)
    assert model.failed_rounds == [1, 3]
    counted = [watch.after[number] for number in (1, 3, 4)]
    assert close(averaged.average(model), by_hand(counted, **form))
    values = [[row[name] for name in AVERAGES] for row in watch.logged]
    assert values[2] == values[1] != values[3]
    first = watch.logged[0]
    assert values[0] == [first[n] for n in ("test/acc", "test/loss", "val/acc", "val/loss")]


@pytest.mark.parametrize("other", [{"size": 4}, {"decay": 0.5}])
def test_a_resume_with_another_average_is_refused(other: Any) -> None:
    with pytest.raises(SettingError, match=r"^(size|decay): "):
        AveragedModel(**other).load_state_dict(AveragedModel(size=3).state_dict())


def test_a_run_of_the_command_line(tmp_path: Path) -> None:
    """Its best round by the average, and the average that it leaves."""
    words = ["fit", "--config", "smoke.yaml", "--model.engine.workers", "1", "--output_dir"]
    words += [str(tmp_path), "--checkpoint.monitor", "average/val_acc", "--checkpoint.mode", "max"]
    assert main([*words, "--trainer.callbacks+", "AveragedModel"]) == 0
    assert main(words) == 2, "without the callback there is no such score"
    found = read(tmp_path / "smoke" / "version_0")
    rows = found.metrics()
    best = max(range(3), key=lambda number: rows[number]["average/val_acc"]) + 1
    files = (found.folder / "checkpoints").glob("*.ckpt")
    assert best in [read_checkpoint(file)["global_step"] for file in files]
    assert found.summary["average"]["final_test_acc"] == rows[-1]["average/acc"]
    assert same(found.net(average=True).state_dict(), load_file(found.folder / AVERAGE))
