"""Runs put together in Python leave their settings, and are told apart by them."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import (
    IID,
    MLP,
    Arrays,
    CyclicCohorts,
    Digits,
    Dirichlet,
    FedAvg,
    FedGKD,
    LocalEngine,
    PriorAdjusted,
    Run,
    RunFiles,
    build,
    read_run,
)
from fedgkd_pl.errors import SettingError
from fedgkd_pl.experiments.runs import make_groups
from fedgkd_pl.runs.files import describe
from fedgkd_pl.storage.recorded import given
from lightning.pytorch import Trainer
from lightning.pytorch import seed_everything as seed_all
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.optim import SGD

from tests.support.pieces import quiet_trainer


def digits(**changes: Any) -> Digits:
    settings = {"num_clients": 4, "participation": 0.5, "batch_size": 256} | changes
    return Digits(partition=Dirichlet(alpha=0.5), **settings)


def fit(folder: Path, model: Any = None, data: Any = None, **trainer: Any) -> Run:
    trainer = {"max_epochs": 1, "callbacks": [RunFiles(str(folder))]} | trainer
    model = model or FedAvg(MLP(hidden=[4]), engine=LocalEngine(workers=1))
    quiet_trainer(**trainer).fit(model, data or digits())
    return read_run(folder)


def gkd(gamma: float) -> FedGKD:
    return FedGKD(MLP(hidden=[4]), gamma=gamma, engine=LocalEngine(workers=1))


def test_other_settings_are_other_rows_and_seeds_are_averaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [
        fit(tmp_path / f"unseeded{seed}", gkd(20), digits(seed=seed)) for seed in (3, 4)
    ]  # whose seed is the data's
    for gamma, seed in [(0.2, 0), (0.2, 1), (20, 0)]:
        seed_all(seed)
        runs.append(fit(tmp_path / f"{gamma}-{seed}", gkd(gamma), digits()))
    monkeypatch.delenv("PL_GLOBAL_SEED")
    groups = make_groups(runs)
    found = {(group.name, *sorted(group.runs)) for group in groups}
    assert found == {("FedGKD, γ 0.2", 0, 1), ("FedGKD, γ 20", 0, 3, 4)}


def test_a_run_in_python_is_the_command_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits, one row of a table, and a net that can be made again."""
    monkeypatch.chdir(tmp_path)
    of_config = build("smoke", rounds=2, seed_everything=5, **{"model.engine.workers": 1}).fit()
    assert of_config is not None
    seed_all(5)
    data = Digits(num_clients=4, participation=0.5, batch_size=32)
    net, engine = MLP(hidden=(32,)), LocalEngine(workers=1)
    model = FedGKD(net, buffer_size=2, optimizer=partial(SGD, lr=0.05), engine=engine)
    python = fit(tmp_path / "python", model, data, max_epochs=2, gradient_clip_val=10)
    for name in ("metrics.csv", "global.safetensors", "partition.json"):
        assert (python.folder / name).read_bytes() == (of_config.path / name).read_bytes()
    (group,) = make_groups([read_run(of_config.path), python])
    assert list(group.runs) == [5]
    again = python.net().state_dict()
    assert all(torch.equal(again[key], tensor) for key, tensor in net.state_dict().items())


def test_models_and_data_are_known_by_what_they_were_made_with() -> None:
    inputs, targets = np.random.default_rng(0).random((60, 3), dtype=np.float32), np.arange(60) % 3

    def make() -> list[Any]:
        net, sgd = MLP(hidden=[4]), partial(SGD, lr=0.1)
        return [
            *(FedAvg(net), FedAvg(MLP(hidden=[5])), gkd(0.2), gkd(20)),
            *(FedAvg(net, optimizer=sgd), FedAvg(net, optimizer=partial(sgd, momentum=0.9))),
            *(FedAvg(net, loss=PriorAdjusted(tau=tau)) for tau in (0.5, 1)),
            *(digits(), digits(cohorts=CyclicCohorts()), digits(batch_size=5)),
            *(Arrays(n * inputs, targets, num_clients=2) for n in (1, 2)),
        ]

    once, twice = ([describe(value) for value in make()] for _ in range(2))
    assert once == twice
    assert len({str(value) for value in once}) == len(once)
    rate = once[4]["init_args"]["optimizer"]
    assert rate["class_path"] == "torch.optim.SGD" and rate["init_args"]["lr"] == 0.1


def test_what_cannot_be_known_is_never_alike() -> None:
    sgd: Any = lambda params: SGD(params, lr=0.1)  # noqa: E731
    for value in (sgd, nn.Linear(3, 4), torch.Generator(), {"a": [sgd]}, FedAvg(nn.Linear(2, 2))):
        assert describe(value) != describe(value)


def test_objects_remember_their_arguments() -> None:
    assert repr(Dirichlet(0.1, balanced=True)) == "Dirichlet(alpha=0.1, balanced=True)"
    assert given(gkd(0.3)).keys() == {"net", "gamma", "engine"}
    with pytest.raises(TypeError, match=r"IID\(\) takes no arguments"):
        IID(alpha=3)


def test_a_run_with_a_logger_has_it_beside_the_rest(tmp_path: Path) -> None:
    trainer = Trainer(
        max_epochs=1,
        default_root_dir=tmp_path,
        callbacks=[RunFiles()],
        enable_progress_bar=False,
        enable_model_summary=False,
        devices=1,
    )
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    trainer.fit(FedAvg(net, engine=LocalEngine(workers=1)), digits())
    folder = tmp_path / "lightning_logs" / "version_0"
    names = {"config.yaml", "global.safetensors", "partition.json", "summary.json", "checkpoints"}
    assert names <= {file.name for file in folder.iterdir()}
    with pytest.raises(SettingError, match=r"^resume: "):
        build(resume=folder)
    with pytest.raises(SettingError, match=r"model\.net"):
        read_run(folder).net()  # which only the user can make


def test_a_logger_that_writes_the_same_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"^callbacks: "):
        fit(tmp_path, callbacks=[RunFiles()], logger=CSVLogger(tmp_path))
    assert not list(tmp_path.rglob("summary.json"))
