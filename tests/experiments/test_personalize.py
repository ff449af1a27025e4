"""Fine-tuning for each client: against a loop in plain torch, and from the command line."""

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import MLP, Digits, personalize
from fedgkd_pl.cli.main import main
from fedgkd_pl.seeds import derive
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from tests.support.lit import LitClassifier
from tests.support.runs import QUICK, Run, version

pytestmark = pytest.mark.nightly

FLAGS = ("--data.client_test_fraction", "0.3", "--trainer.callbacks+", "ClientEvaluation")
FLAGS += ("--data.num_clients", "12", "--data.unseen_clients", "2", "--model.local_epochs", "2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of FedGKD with teachers, ten of whose twelve clients may be drawn."""
    folder = tmp_path_factory.mktemp("personalize")
    words = ("--output_dir", str(folder / "runs"), "--rounds", "2")
    assert main(["fit", *QUICK, *FLAGS, *words]) == 0
    return version(folder)


@pytest.fixture
def run_folder(trained: Path, tmp_path: Path) -> Path:
    """This test's own copy."""
    folder = tmp_path / "mine"
    shutil.copytree(trained, folder)
    return folder


def names_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir() if "personalized" in file.name}


def by_hand(folder: Path, client: int, epochs: int, lr: float) -> dict[str, float]:
    """One client in plain torch, from the final global model: cross-entropy alone."""
    data = Digits(
        num_clients=12, participation=0.5, batch_size=32, client_test_fraction=0.3, seed=0
    )
    data.setup()
    net = MLP(hidden=[32])
    net.load_state_dict(load_file(folder / "global.safetensors"))
    own = data.client_splits["test"]
    x, y = (
        own.examples.inputs[own.rows(client)].float() / 16,
        own.examples.targets[own.rows(client)],
    )

    def test() -> tuple[float, float]:
        with torch.no_grad():
            logits = net(x)
        return float((logits.argmax(1) == y).float().mean()), float(cross_entropy(logits, y))

    before = test()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    batches = replace(data.client_data, seed=derive(0, "personalize")).batches(client, 1)
    for _ in range(epochs):
        for inputs, labels in batches:
            optimizer.zero_grad()
            cross_entropy(net(inputs), labels).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 10)
            optimizer.step()
    after = test()
    samples = data.client_data.index.size(client)
    values = (client, samples, len(y), before[0], after[0], before[1], after[1])
    names = ("client", "samples", "test_samples")
    names += ("acc_before", "acc_after", "loss_before", "loss_after")
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize(("epochs", "lr"), [(None, None), (5, 0.2)])
def test_a_client_is_fine_tuned_as_in_plain_torch(
    epochs: int | None, lr: float | None, trained: Path, tmp_path: Path
) -> None:
    """By default with the run's two epochs and rate; without its teacher; unseen clients, too."""
    rows = personalize(trained, epochs, lr, output_dir=tmp_path / "new" / "out")
    for row in (rows[3], rows[11]):
        hand = by_hand(trained, int(row["client"]), epochs or 2, lr or 0.05)
        assert row == pytest.approx(hand, rel=1e-4)
        assert row["loss_after"] != row["loss_before"]
    assert names_in(tmp_path / "new" / "out") == {"personalized.csv", "personalized.svg"}
    assert not names_in(trained)


def test_all_clients_with_two_workers(run_folder: Path, run: Run, tmp_path: Path) -> None:
    """The same bits; a table whose numbers are those of the file; figures and the page."""
    err = run("figure", "personalized", run_folder)[2]
    assert "no personalized.csv" in err
    two = ("--model.engine.workers", "2", "--output_dir", "two")
    assert run("personalize", run_folder, *two)[0] == 0
    code, out, err = run("personalize", run_folder)
    assert code == 0, err
    text = (run_folder / "personalized.csv").read_text()
    assert text == (tmp_path / "two" / "personalized.csv").read_text()
    rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(text.splitlines())]
    assert [row["client"] for row in rows] == list(range(12))
    best = personalize(run_folder, ckpt_path="best", output_dir="best")
    assert best[5]["loss_before"] != rows[5]["loss_before"], "the round before"
    assert names_in(run_folder) == {"personalized.csv", "personalized.svg"}

    for when, name in (("before", "global"), ("after", "personalized")):
        accs = 100 * np.sort([row[f"acc_{when}"] for row in rows])
        numbers = (accs.mean(), accs[0], accs.std(), accs[0], accs[-1])  # the worst tenth is one
        shown = re.findall(rf"^{name} +([^\n]*)", out, re.MULTILINE)[0].split()
        assert [float(cell) for cell in shown[:5]] == pytest.approx(numbers, abs=0.0051)
    gains = [np.sign(row["acc_after"] - row["acc_before"]) for row in rows]
    told = f"gain: {gains.count(1)}, lose: {gains.count(-1)}, stay as they were: {gains.count(0)}"
    assert told in out and 0 < gains.count(1)
    for kind, text in (
        ("per_client", "own model, when last trained"),
        ("personalized", "personal"),
    ):
        code, _, err = run("figure", kind, run_folder)
        assert code == 0, err
        svg = (tmp_path / f"{kind}.svg").read_text()
        assert text in svg and "worst 10 %" in svg


def test_the_model_before_is_the_last_one_of_the_run_bit_for_bit(run: Run, tmp_path: Path) -> None:
    flags = ("--rounds", "1", "--trainer.precision", "bf16-true")
    assert run("fit", *QUICK, *FLAGS, *flags)[0] == 0
    rows = personalize(version(tmp_path), epochs=1)
    file = version(tmp_path) / "clients.csv"
    last = list(csv.DictReader(file.read_text().splitlines()))
    for ours, theirs in (("acc_before", "global_acc"), ("loss_before", "global_loss")):
        assert [row[ours] for row in rows] == [float(row[theirs]) for row in last]
    assert [row["test_samples"] for row in rows] == [int(row["samples"]) for row in last]


def test_a_rate_that_falls_with_the_rounds_goes_on_falling(run: Run, tmp_path: Path) -> None:
    """Halved after every round, it is a quarter of 0.05 after two; a rate that is given is not."""
    schedule = (
        '{"class_path": "torch.optim.lr_scheduler.ExponentialLR", "init_args": {"gamma": 0.5}}'
    )
    flags = ("--rounds", "2", "--model.round_scheduler", schedule)
    assert run("fit", *QUICK, *FLAGS, *flags)[0] == 0
    folder = version(tmp_path)
    for lr, expected in ((None, 0.0125), (0.05, 0.05)):
        row = personalize(folder, lr=lr)[4]
        assert row == pytest.approx(by_hand(folder, 4, 2, expected), rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (("--epochs", "0"), "epochs"),
        (("--lr", "inf"), "lr"),
        (("--ckpt_path", "nowhere.ckpt"), "ckpt_path"),
        (("--data.seed", "1"), "data.seed"),
        (("--output_dir", "file"), "output_dir"),
    ],
)
def test_bad_flags_are_one_line(
    flags: Any, key: str, run: Run, trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    code, out, err = run("personalize", trained, *flags)
    assert (code, out) == (2, "") and len(err.splitlines()) == 1, err
    assert err.startswith(f"error: {key}: ") and not names_in(trained)


def test_runs_that_cannot_be_personalized(
    run: Run, done: Path, run_folder: Path, tmp_path: Path
) -> None:
    def refused(*words: Any) -> str:
        code, _, err = run("personalize", *words)
        assert code == 2 and len(err.splitlines()) == 1, err
        return err

    assert "train with --data.client_test_fraction 0.2" in refused(done) and not names_in(done)
    other = done / "checkpoints" / "last.ckpt"
    assert "ckpt_path: belongs to another run" in refused(run_folder, "--ckpt_path", other)
    shutil.rmtree(run_folder / "checkpoints")
    assert "run: has no checkpoints/last.ckpt" in refused(run_folder)
    assert not names_in(run_folder)


def test_a_module_is_fine_tuned_with_its_own_step_and_optimizer(run: Run, tmp_path: Path) -> None:
    module = {"class_path": "tests.support.lit.LitClassifier", "init_args": {"hidden_size": 8}}
    model = {"class_path": "FedAvg", "init_args": {"module": module}}
    (tmp_path / "own.yaml").write_text(json.dumps({"model": model}))
    own = ("--import", "tests.support.lit")
    words = ("--data", "Digits", "--data.num_clients", "4", "--data.client_test_fraction", "0.3")
    words += ("--model.engine.workers", "1", "--name", "own", "--rounds", "1")
    code, _, err = run("fit", *own, "--config", "own.yaml", *words)
    assert code == 0, err
    folder = version(tmp_path, "own")
    row = personalize(folder, epochs=2, settings=own)[1]
    net = LitClassifier(8)
    net.load_state_dict(load_file(folder / "global.safetensors"))
    data = Digits(num_clients=4, client_test_fraction=0.3, seed=0)
    data.setup()
    batches = replace(data.client_data, seed=derive(0, "personalize")).batches(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5**epoch  # as its scheduler does
        for inputs, labels in batches:
            optimizer.zero_grad()
            cross_entropy(net(inputs), labels).backward()
            optimizer.step()
    test = data.client_splits["test"]
    part = test.examples[test.rows(1)]
    loss = cross_entropy(net(part.inputs.float() / 16), part.targets)
    assert row["loss_after"] == pytest.approx(float(loss), rel=1e-4) != row["loss_before"]
    code, _, err = run("personalize", folder, *own, "--lr", "0.1")
    assert code == 2 and "error: lr: the run's module makes its optimizer itself" in err
    assert run("personalize", folder)[0] == 2, "a stranger's module is not imported"


def test_a_client_that_diverges_is_left_out(
    trained: Path, tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    code, _, err = run("personalize", trained, "--lr", "1e38", "--output_dir", "out")
    assert code == 3 and "error: all clients failed; client" in err
    assert "left out client" in caplog.text and not (tmp_path / "out").exists()
