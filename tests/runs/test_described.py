"""Runs put together in Python leave their settings, and are told apart by them."""

from collections.abc import Callable
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
    LocalLoss,
    PriorAdjusted,
    Run,
    RunFiles,
    TorchDataset,
    build,
    read_run,
)
from fedgkd_pl.errors import SettingError
from fedgkd_pl.experiments.groups import make_groups
from fedgkd_pl.runs.described import describe, settings_of
from fedgkd_pl.runs.settings import fixed_settings
from fedgkd_pl.settings.files import pairs
from fedgkd_pl.storage.recorded import given
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import seed_everything as seed_all
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from tests.support.pieces import quiet_trainer
from tests.support.runs import of_families

METHODS = sorted({method.stem for _, method in pairs().values()})


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


def test_other_settings_are_other_rows_and_seeds_are_averaged(tmp_path: Path) -> None:
    runs = []
    for number, (gamma, seed) in enumerate([(0.2, 0), (0.2, 1), (20, 0), (20, 1)]):
        seed_all(seed)
        runs.append(fit(tmp_path / f"{number}", gkd(gamma), digits(seed=seed)))
    groups = make_groups(runs)
    names = [(group.name, sorted(group.runs)) for group in groups]
    assert names == [("FedGKD, γ 0.2", [0, 1]), ("FedGKD, γ 20", [0, 1])]


@pytest.mark.parametrize("method", of_families(METHODS))
def test_objects_have_the_settings_of_the_config_that_they_come_from(method: str) -> None:
    made = build(
        f"digits/{method}", **{"trainer.precision": "64-true", "data.seed": 3, "seed_everything": 2}
    )
    made.model.trainer = made.trainer
    made.trainer.datamodule = made.data  # type: ignore[attr-defined]
    assert fixed_settings(settings_of(made.trainer, made.model)) == made.fixed


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
    model = FedGKD(net, buffer_size=2, engine=engine)
    python = fit(tmp_path / "python", model, data, max_epochs=2, gradient_clip_val=10)
    for name in ("metrics.csv", "global.safetensors", "partition.json"):
        assert (python.folder / name).read_bytes() == (of_config.path / name).read_bytes()
    (group,) = make_groups([read_run(of_config.path), python])
    assert list(group.runs) == [5]
    again = python.net().state_dict()
    assert all(torch.equal(again[key], tensor) for key, tensor in net.state_dict().items())


class Loss(LocalLoss):
    """Of a test, whose one argument is no attribute."""

    def __init__(self, factor: float) -> None:
        self.twice = 2 * factor

    def __call__(self, logits: Any, y: Any, counts: Any) -> Any:
        return self.twice * nn.functional.cross_entropy(logits, y)


class Lit(LightningModule):
    """A module of the user's."""

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))
        self.scale = scale

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self.layers(self.scale * x), y)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


def net(classes: int = 10, act: Any = nn.ReLU, p: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes), act(), nn.Dropout(p))


def headless() -> nn.Module:
    made = MLP(hidden=[4])
    made.classifier = nn.Linear(4, 5)
    return made


def sgd(lr: float) -> Any:
    return lambda params: SGD(params, lr=lr)


def two_groups(lr: float) -> Any:
    def make(params: Any) -> Any:
        weights = list(params)
        return SGD([{"params": weights[:1]}, {"params": weights[1:], "lr": lr}], lr=1.0)

    return make


# all of them differ, and what is made twice alike is alike
MODELS: dict[str, Callable[[], Any]] = {
    "default": lambda: FedAvg(MLP(hidden=[4])),
    "width": lambda: FedAvg(MLP(hidden=[5])),
    "head": lambda: FedAvg(headless()),
    "net": lambda: FedAvg(net()),
    "classes": lambda: FedAvg(net(11)),
    "activation": lambda: FedAvg(net(act=nn.Tanh)),
    "dropout": lambda: FedAvg(net(p=0.5)),
    "lit": lambda: FedAvg(module=Lit(3)),
    "lit width": lambda: FedAvg(module=Lit(4)),
    "lit scale": lambda: FedAvg(module=Lit(3, scale=2)),
    "rate": lambda: FedAvg(MLP(hidden=[4]), optimizer=partial(SGD, lr=0.1)),
    "rate of a lambda": lambda: FedAvg(MLP(hidden=[4]), optimizer=sgd(0.2)),
    "groups": lambda: FedAvg(MLP(hidden=[4]), optimizer=two_groups(0.2)),
    "rate of a group": lambda: FedAvg(MLP(hidden=[4]), optimizer=two_groups(0.3)),
    "loss": lambda: FedAvg(MLP(hidden=[4]), loss=PriorAdjusted(tau=0.5)),
    "own loss": lambda: FedAvg(MLP(hidden=[4]), loss=Loss(1)),
    "factor": lambda: FedAvg(MLP(hidden=[4]), loss=Loss(2)),
    "schedule": lambda: FedAvg(
        MLP(hidden=[4]), scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    ),
    "lambda schedule": lambda: FedAvg(
        MLP(hidden=[4]),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1),
    ),
    "step of a lambda": lambda: FedAvg(
        MLP(hidden=[4]),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=2),
    ),
}


def test_models_are_told_apart() -> None:
    once, twice = ({key: describe(make()) for key, make in MODELS.items()} for _ in range(2))
    assert once == twice
    texts = {key: str(value) for key, value in once.items()}
    assert len(set(texts.values())) == len(texts)
    same = describe(FedAvg(MLP(hidden=(4,)), optimizer=sgd(0.1)))
    assert same == once["rate"], "a lambda that makes the same optimizer"


def test_what_was_changed_later_counts() -> None:
    model = gkd(0.2)
    model.gamma = 20
    model.optimizer = partial(SGD, lr=7.0)
    arguments = describe(model)["init_args"]
    assert arguments["gamma"] == 20 and arguments["optimizer"]["init_args"]["lr"] == 7.0
    data = digits()
    data.batch_size, data.partition = 5, Dirichlet(alpha=9.0)
    arguments = describe(data)["init_args"]
    assert arguments["batch_size"] == 5 and arguments["partition"]["init_args"]["alpha"] == 9.0


def test_own_samples_are_known_by_what_they_hold() -> None:
    rng = np.random.default_rng(0)
    inputs, targets = rng.random((60, 3), dtype=np.float32), np.arange(60) % 3

    def of(factor: float, cls: Any) -> Any:
        if cls is Arrays:
            return describe(Arrays(factor * inputs, targets, num_clients=2))
        pair = (torch.from_numpy(factor * inputs), torch.from_numpy(targets))
        return describe(TorchDataset(TensorDataset(*pair), num_clients=2))

    for cls in (Arrays, TorchDataset):
        assert of(1, cls) == of(1, cls) != of(2, cls)
    assert describe(digits(cohorts=CyclicCohorts())) != describe(digits())


def test_what_cannot_be_known_is_never_alike() -> None:
    generator = torch.Generator()
    one, two = describe(generator), describe(torch.Generator())
    assert one != two and "not_known" in one
    assert describe([generator])[0] == one, "but it is like itself"


def test_what_is_long_is_known_by_a_digest() -> None:
    class Filled:
        def __init__(self, *values: Any) -> None:
            self.values = values

    for make in (lambda last: [*range(2000), last], lambda last: "x" * 2000 + str(last)):
        assert describe(make(1)) == describe(make(1)) != describe(make(2))
        assert len(describe(make(1))) < 40
        assert describe(Filled(make(1))) == describe(Filled(make(1))) != describe(Filled(make(2)))
    many = [describe(Filled(*["word"] * 500, last)) for last in (1, 1, 2)]
    assert many[0] == many[1] != many[2] and len(many[0]["state"]) == 12
    assert describe(partial(max, 1)).keys() == {"class_path", "not_known"}


def test_objects_remember_their_arguments() -> None:
    assert repr(Dirichlet(0.1, balanced=True)) == "Dirichlet(alpha=0.1, balanced=True)"
    assert given(gkd(0.3)).keys() == {"net", "gamma", "engine"}
    with pytest.raises(TypeError, match=r"IID\(\) takes no arguments"):
        IID(alpha=3)


def test_seeds_of_unseeded_runs_are_the_datas(tmp_path: Path) -> None:
    runs = [fit(tmp_path / str(seed), gkd(0.2), digits(seed=seed)) for seed in (3, 4)]
    assert [run.seed for run in runs] == [3, 4]
    (group,) = make_groups(runs)
    assert sorted(group.runs) == [3, 4]


def test_a_run_with_a_logger_has_it_beside_the_rest(tmp_path: Path) -> None:
    trainer = Trainer(
        max_epochs=1,
        default_root_dir=tmp_path,
        callbacks=[RunFiles()],
        enable_progress_bar=False,
        enable_model_summary=False,
        devices=1,
    )
    trainer.fit(gkd(0.2), digits())
    folder = tmp_path / "lightning_logs" / "version_0"
    names = {"config.yaml", "global.safetensors", "partition.json", "summary.json", "checkpoints"}
    assert names <= {file.name for file in folder.iterdir()}
    assert read_run(folder).settings["model"]["class_path"] == "fedgkd_pl.FedGKD"
    with pytest.raises(SettingError, match="resume: was trained in Python: go on with"):
        build(resume=folder)


def test_a_net_that_only_its_layers_describe_is_not_made_again(tmp_path: Path) -> None:
    run = fit(tmp_path, FedAvg(net(), engine=LocalEngine(workers=1)))
    with pytest.raises(SettingError, match=r"model\.net"):
        run.net()


def test_a_logger_that_writes_the_same_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="callbacks: RunFiles and CSVLogger both write"):
        fit(tmp_path, callbacks=[RunFiles()], logger=CSVLogger(tmp_path))
    assert not list(tmp_path.rglob("summary.json"))
