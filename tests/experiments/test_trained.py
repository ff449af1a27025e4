"""A run's model afterwards: evaluated, predicted and exported by the run's folder alone."""

import csv
import shutil
from pathlib import Path

import pytest
import torch
from fedgkd_pl import Digits, export, read_checkpoint, read_run
from fedgkd_pl.errors import SettingError
from safetensors.torch import load_file

from tests.support.runs import Run, version


def weights(file: Path) -> dict[str, torch.Tensor]:
    state = read_checkpoint(file)["state_dict"]
    return {name.removeprefix("net."): tensor for name, tensor in state.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_is_evaluated_by_its_folder(run: Run, done: Path) -> None:
    code, out, err = run("test", done)
    assert code == 0, err
    final = read_run(done).metrics()[-1]["test/acc"]
    assert f"{final:.6f}"[:7] in out
    code, out, err = run("predict", done, "--ckpt_path", "best")
    assert code == 0 and f"wrote {done / 'predictions.csv'}" in out
    with (done / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    right = sum(row["label"] == row["prediction"] for row in rows) / len(rows)
    best = max(read_run(done).metrics(), key=lambda row: row["val/acc"])
    assert right == pytest.approx(best["test/acc"])
    assert run("validate", done)[0] == 0


def test_an_export_gives_the_nets_logits_from_a_copied_folder(
    run: Run, done: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "elsewhere"
    shutil.copytree(done, copied)
    shutil.rmtree(done)
    data = Digits(num_clients=2)
    data.setup()
    x = data.test.transform(data.test.inputs, None)
    logits = read_run(copied).net()(x)
    code, out, err = run("export", copied, "--format", "torch_export")
    assert code == 0 and out == f"wrote {copied / 'model.pt2'}\n", err
    torch.testing.assert_close(torch.export.load(copied / "model.pt2").module()(x), logits)
    traced = export(copied, "torchscript", output=tmp_path / "net.pt")
    torch.testing.assert_close(torch.jit.load(traced)(x), logits)
    assert same(load_file(export(copied)), load_file(copied / "global.safetensors"))


def test_the_best_round_is_exported(run: Run, done: Path, tmp_path: Path) -> None:
    (best,) = (done / "checkpoints").glob("best-*.ckpt")
    copied = shutil.copytree(done, tmp_path / "copied")
    last, file = export(copied), export(copied, ckpt_path="best")
    assert (last.name, file.name) == ("model.safetensors", "model-best.safetensors")
    assert same(load_file(file), weights(best))


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["nowhere"], "run: no run was begun there"),
        (["RUN", "--average"], "average: no average.safetensors in the run"),
        (["RUN", "--ckpt_path", "nope"], "ckpt_path: no such file (got nope)"),
        (["RUN", "--output", "no/such/file"], "output: its folder does not exist"),
        (["RUN", "--model.gamma", "9"], "model.gamma: the run began with"),
        (["RUN", "--format", "keras"], "argument --format: invalid choice"),
    ],
)
def test_what_cannot_be_exported(run: Run, done: Path, argv: list[str], error: str) -> None:
    before = sorted(done.rglob("*"))
    code, out, err = run("export", *(str(done) if word == "RUN" else word for word in argv))
    assert (code, out) == (2, "") and err.startswith(f"error: {error}") and err.count("\n") == 1
    assert sorted(done.rglob("*")) == before


def test_a_checkpoint_of_another_run_is_refused(done: Path, tmp_path: Path) -> None:
    shutil.copytree(done, tmp_path / "other")
    with pytest.raises(SettingError, match="ckpt_path: belongs to another run"):
        export(done, ckpt_path=str(tmp_path / "other" / "checkpoints" / "last.ckpt"))
    assert version(tmp_path) == done
