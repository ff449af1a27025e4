"""Callbacks that measure a run: every number against NumPy, and a resumed run against a whole one.

Where clients' models are needed, an engine answers with hand-made ones.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import (
    AveragedModel,
    ClientEvaluation,
    FedAvg,
    FedGKDVote,
    LocalEngine,
    RunFiles,
    TextClassifier,
)
from fedgkd_pl.callbacks.client_evaluation import LocalModels
from fedgkd_pl.callbacks.drift import ClientDrift, Forgetting, TeacherAgreement
from fedgkd_pl.callbacks.export import FILES, ModelExport, exported
from fedgkd_pl.callbacks.profile import Communication
from fedgkd_pl.data.examples import Examples, Scale, Splits
from fedgkd_pl.engines.base import Engine, Session, schedule
from fedgkd_pl.errors import SettingError
from fedgkd_pl.federation.message import ClientFailure, ClientUpdate, Message, State
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from safetensors.torch import load_file
from torch import nn

from tests.callbacks.by_hand import copied, gkd, logits_of, rows_of, score, softmax, watched
from tests.conftest import Table, fit, linear, quiet_trainer, same
from tests.support.datasets import TINY

Answer = Callable[[Message, int], State]


class Scripted(Engine, Session):
    """Clients whose models a test makes: one with n + 1 samples for client n."""

    max_samples = 100  # they are not those of the table

    def __init__(self, answer: Answer, fails: Sequence[int] = ()) -> None:
        self.answer = answer
        self.fails = fails
        self.messages: list[Message] = []

    def open(self, job: Any, cohort_size: int) -> Session:
        self.job = job
        return self

    def run(
        self, message: Message, cohort: Sequence[int]
    ) -> Iterator[ClientUpdate | ClientFailure]:
        models = {name: copied(state) for name, state in message.models.items()}
        self.messages.append(replace(message, models=models))
        for client in schedule(self.job, cohort):
            if client in self.fails:
                yield ClientFailure(client, "does not answer")
            else:
                yield ClientUpdate(client, client + 1, self.answer(message, client))


class Record(Logger):
    """What loggers are told: every value, by name and step."""

    def __init__(self) -> None:
        super().__init__()
        self.points: dict[str, list[tuple[int | None, float]]] = {}

    name = "record"
    version = 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            self.points.setdefault(name, []).append((step, value))

    def steps(self, name: str) -> list[int | None]:
        return [step for step, _ in self.points.get(name, [])]


class Wide(Table):
    """Forty test samples, so that decisions differ."""

    def load(self) -> Splits:
        splits = super().load()
        return Splits(splits.train, splits.train[:40])


def wide(**kwargs: Any) -> Wide:
    return Wide(**({"sizes": (30, 20, 10), "eval_batch_size": 16} | kwargs))


def random_model(message: Message, client: int) -> State:
    """A hand-made model: other numbers in every round and client."""
    generator = torch.Generator().manual_seed(1000 * message.round + client)
    drawn = {
        name: (2 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in message.models["global"].items()
    }
    positive = ("running_var", "num_batches_tracked")
    return {name: t.abs() if name.endswith(positive) else t for name, t in drawn.items()}


def drift(start: State, *models: State) -> dict[str, float]:
    """What is logged of a round, the hooks being called by hand."""
    heard: dict[str, float] = {}
    server: Any = SimpleNamespace(log_round=heard.update)
    callback, trainer = ClientDrift(), quiet_trainer()
    callback.on_broadcast(trainer, server, Message(1, {"global": start}), range(len(models)))
    for client, model in enumerate(models):
        callback.on_client_end(trainer, server, ClientUpdate(client, 1, model), len(models))
    callback.on_train_batch_end(trainer, server, None, None, 0)
    return heard


def vector(*numbers: float) -> State:
    """With a counter, which is none of the distance."""
    counter = torch.randint(99, ())
    return {"w": torch.tensor(numbers[:2]), "b": torch.tensor(numbers[2:]), "count": counter}


ROOT = 2**-0.5


@pytest.mark.parametrize(
    ("deltas", "mean", "largest", "cosine", "diversity"),
    [
        ([(3, 0, 0), (0, 0, 4)], 3.5, 4, 0, 1),  # orthogonal
        ([(0, 3, 4)] * 4, 5, 5, 1, 1 / 4),  # equal
        ([(0, 1, 0), (0, -1, 0)], 1, 1, -1, None),  # opposite: their sum is zero
        ([(1, 0, 0), (0, 2, 0), (1, 1, 0)], (3 + 1 / ROOT) / 3, 2, 2 * ROOT / 3, 7 / 13),
        ([(0, 0, 0), (0, 3, 4)], 2.5, 5, None, 1),  # one did not move
        ([(0, 0, 0), (0, 3, 4), (3, 4, 0)], 10 / 3, 5, 12 / 25, 50 / (9 + 49 + 16)),
        ([(0, 0, 0)] * 3, 0, 0, None, None),  # nobody moved
        ([(6, 0, 8)], 10, 10, None, 1),  # alone
    ],
)
def test_drift_by_hand(
    deltas: Any, mean: float, largest: float, cosine: float | None, diversity: float | None
) -> None:
    start = np.array([1.0, 2.0, 4.0])
    found = drift(vector(*start), *(vector(*(start + delta)) for delta in deltas))
    expected = {"norm_mean": mean, "norm_max": largest, "cosine": cosine, "diversity": diversity}
    told = {f"drift/{name}": value for name, value in expected.items() if value is not None}
    assert found == pytest.approx(told, abs=1e-14)


@pytest.mark.parametrize(("split", "max_samples"), [("val", None), ("test", 7)])
def test_local_models_against_numpy(split: Any, max_samples: int | None, tmp_path: Path) -> None:
    model, data = FedAvg(linear(), engine=Scripted(random_model, [1])), wide(val_fraction=0.1)
    local, record = LocalModels(split=split, max_samples=max_samples), Record()
    watch = watched(model, data, 2, local, RunFiles(str(tmp_path)), logger=record)
    rows = np.arange(40) if split == "test" else np.arange(60, 66)
    if max_samples == 7:
        rows = np.sort(np.random.default_rng(0).choice(40, 7, replace=False))
    found = rows_of(tmp_path / "local_models.csv")
    assert [row["client"] for row in found] == [0, 2, 0, 2]
    for number, answers in enumerate(watch.answers):
        hands = {c: score(logits_of(w, data.x[rows]), data.y[rows]) for c, w in answers.items()}
        for row in found[2 * number :][:2]:
            client = int(row["client"])
            expected = (number + 1, client, client + 1, *hands[client])
            assert tuple(row.values()) == pytest.approx(expected, rel=1e-5)
        accs, losses = np.array([*hands.values()]).T
        expected = {
            "local/acc_mean": np.mean(accs),
            "local/acc_std": np.sqrt(np.mean((accs - np.mean(accs)) ** 2)),
            "local/acc_min": min(accs),
            "local/acc_max": max(accs),
            "local/loss_mean": np.mean(losses),
        }
        assert watch.values("local/", number) == pytest.approx(expected, rel=1e-5)
        for name in expected:
            assert record.steps(name) == [1, 2], name


def test_agreement_with_the_mixture_of_voters() -> None:
    engine, data = Scripted(random_model), wide(val_fraction=0.1)
    model = FedGKDVote(linear(), engine=engine, buffer_size=3, lam=0.1)
    watch = watched(model, data, 4, TeacherAgreement(split="test"))
    x, y, differs = data.x[:40], data.y[:40], 0
    for number, (message, answers) in enumerate(zip(engine.messages, watch.answers, strict=True)):
        models, numbers = message.models, message.numbers
        voters = [models[f"teacher{place}"] for place in range(len(models) - 1)]
        gammas = [numbers[f"teacher{place}"] for place in range(len(numbers))] or [1.0]
        voices = [softmax(logits_of(w, x)) for w in [*voters, models["global"]]]
        assert len(voices) == len(gammas) == max(1, min(number, 3))
        said = np.sum([g * p for g, p in zip(gammas, voices, strict=True)], axis=0).argmax(1)
        differs += sum(int((said != voice.argmax(1)).any()) for voice in voices)
        shares = [np.mean(logits_of(w, x).argmax(1) == said) for w in answers.values()]
        assert len(shares) == 3
        expected = {"agreement_mean": np.mean(shares), "agreement_min": min(shares)}
        expected = {f"teacher/{k}": v for k, v in (expected | {"acc": np.mean(said == y)}).items()}
        assert watch.values("teacher/", number) == pytest.approx(expected, rel=1e-12)
    assert differs >= 4, "the test could not tell the mixture from its parts"


def evaluated(callback: Forgetting, right: Sequence[int]) -> dict[str, float]:
    """One evaluation, with so many right of 10, 4 and 0 samples of three classes."""
    heard: dict[str, float] = {}
    trainer: Any = SimpleNamespace(sanity_checking=False, state=SimpleNamespace(fn="fit"))
    a, b = right
    confusion = torch.tensor([[a, 10 - a, 0], [4 - b, b, 0], [0, 0, 0]])
    server: Any = SimpleNamespace(log_round=heard.update)
    callback.on_evaluated(trainer, server, "test", {}, confusion)
    return heard


def test_forgetting_by_hand() -> None:
    callback = Forgetting()
    assert evaluated(callback, (5, 4)) == {}, "nothing can be forgotten in the first round"
    names = ("mean", "max", "class/0", "class/1")  # the third class has no samples
    for right, lost in [((8, 1), (-0.3, 0.75)), ((6, 2), (0.2, 0.5)), ((8, 4), (0, 0))]:
        expected = dict(zip(names, (sum(lost) / 2, max(lost), *lost), strict=True))
        found = evaluated(callback, right)
        assert found == pytest.approx({f"forgetting/{k}": v for k, v in expected.items()})
        copy = Forgetting()
        copy.load_state_dict(callback.state_dict())
        callback = copy  # a resumed run
    assert callback.best == {0: 0.8, 1: 1.0}


def test_bytes_add_up_and_seconds_go_to_the_loggers_alone() -> None:
    """A linear net of 4·3 + 3 floats is 60 bytes; three get it, two answer."""
    record, model = Record(), FedAvg(linear(), engine=Scripted(random_model, fails=[1]))
    watch = watched(model, wide(), 2, Communication(), logger=record)
    for number, row in enumerate(watch.logged, start=1):
        assert row["comm/total_mb_down"] == pytest.approx(number * 3 * 60 / 1e6, rel=1e-12)
        assert row["comm/total_mb_up"] == pytest.approx(number * 2 * 60 / 1e6, rel=1e-12)
        assert not any(name.startswith("time/") for name in row)
    for name in ("comm/total_mb_up", "time/clients", "time/evaluation"):
        assert record.steps(name) == [1, 2], name


def measured() -> list[Callback]:
    ours = [ClientDrift(), LocalModels(), TeacherAgreement(), Forgetting(), Communication()]
    return [*ours, AveragedModel(decay=0.7), ClientEvaluation()]


def small() -> Wide:
    fractions = {"val_fraction": 0.1, "client_test_fraction": 0.2}
    return wide(batch_size=5, participation=0.67, **fractions)


FILES_OF_A_RUN = ("local_models.csv", "clients.csv", "metrics.csv")
FILES_OF_A_RUN += ("model.safetensors", "average.safetensors")
OURS = ("drift/", "local/", "teacher/", "forgetting/", "comm/total", "average/")


def test_measuring_changes_nothing() -> None:
    plain, seen = gkd(), gkd()
    states = []
    for model, callbacks in ((plain, []), (seen, measured())):
        torch.manual_seed(5)
        fit(model, small(), 3, callbacks=callbacks)
        states.append((torch.get_rng_state(), np.random.get_state()[1]))  # type: ignore[index]
    assert same(plain.net.state_dict(), seen.net.state_dict())
    assert torch.equal(states[0][0], states[1][0]) and (states[0][1] == states[1][1]).all()
    assert {m.training for m in plain.net.modules()} == {m.training for m in seen.net.modules()}


def test_a_resumed_run_measures_the_same(tmp_path: Path) -> None:
    def go(name: str, rounds: int, ckpt: Path | None = None) -> Record:
        record = Record()
        save = ModelCheckpoint(tmp_path / name, save_last=True, save_on_train_epoch_end=True)
        callbacks = [*measured(), ModelExport(), RunFiles(str(tmp_path / name)), save]
        trainer = quiet_trainer(
            max_epochs=rounds, logger=record, callbacks=callbacks, enable_checkpointing=True
        )
        trainer.fit(gkd(), small(), ckpt_path=ckpt)
        return record

    whole, first = go("whole", 4).points, go("parts", 2).points
    with (tmp_path / "parts" / "local_models.csv").open("a") as file:
        file.write("3,0,1,0.5,0.5\r\n")  # of a round that was never committed
    second = go("parts", 4, tmp_path / "parts" / "last.ckpt").points
    names = [name for name in whole if name.startswith(OURS)]
    assert len(names) == 4 + 5 + 3 + 5 + 2 + 4
    for name in names:
        assert first.get(name, []) + second[name] == whole[name], name
        begins = 2 if name.startswith("forgetting") else 1
        assert [step for step, _ in whole[name]] == list(range(begins, 5)), name
    for name in FILES_OF_A_RUN:
        files = [(tmp_path / run / name).read_bytes() for run in ("whole", "parts")]
        assert files[0] == files[1], name
    assert len(rows_of(tmp_path / "parts" / "local_models.csv")) == 4 * 2
    header = (tmp_path / "parts" / "metrics.csv").read_text().splitlines()[0]
    assert "drift/cosine" in header and "forgetting/mean" in header
    assert "time/" not in header and "/class" not in header


class Images(Table):
    def load(self) -> Splits:
        x, y = torch.from_numpy(self.x).view(-1, 3, 8, 8), torch.from_numpy(self.y)
        all_ = Examples(x, y, Scale(1))
        return Splits(all_, all_[: len(y) // 10])  # of the thirteen by default, one


def conv_net() -> nn.Module:
    seed_everything(2, verbose=False)
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    )


def test_exported_nets_give_the_same_logits(tmp_path: Path) -> None:
    """Of ONNX see tests of ``fedgkd-pl export``."""
    forms: Any = ("safetensors", "torchscript", "torch_export")
    model = FedAvg(conv_net(), engine=LocalEngine(1))
    before = torch.get_rng_state()
    fit(model, Images(features=192), 1, callbacks=[ModelExport(forms), RunFiles(str(tmp_path))])
    assert torch.equal(before, torch.get_rng_state())
    assert model.net.training and all(p.requires_grad for p in model.net.parameters())
    net = model.net.eval()
    assert same(load_file(tmp_path / FILES["safetensors"]), net.state_dict())
    script: Any = torch.jit.load(tmp_path / FILES["torchscript"])
    program = torch.export.load(tmp_path / FILES["torch_export"]).module()
    for rows in (5, 1):
        x = torch.randn(rows, 3, 8, 8)
        for found in (script, program):
            torch.testing.assert_close(found(x), net(x), atol=1e-5, rtol=0)


def test_exported_texts_may_be_of_any_length() -> None:
    net = TextClassifier(3, encoder_config=TINY).eval()
    file = BytesIO(exported(net, torch.tensor([[2, 5, 6, 3, 0]]), "torch_export"))
    ids = torch.tensor([[2, 5, 3], [2, 6, 3]])
    torch.testing.assert_close(torch.export.load(file).module()(ids), net(ids))


class KnowsItsBatch(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.tensor([float(len(x))])


def test_a_net_that_a_format_cannot_hold_is_refused_before_training() -> None:
    model = FedAvg(KnowsItsBatch(4, 3), engine=Scripted(random_model))
    with pytest.raises(SettingError, match=r"formats: torchscript cannot hold this net: ."):
        fit(model, wide(), 1, callbacks=[ModelExport(["torchscript"])])
    assert not model.engine.messages  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("callback", "settings"),
    [
        (LocalModels, {"every_n_rounds": 0}),
        (LocalModels, {"split": "train"}),
        (ModelExport, {"formats": ["safetensors", "pickle"]}),
        (ModelExport, {"formats": []}),
        (AveragedModel, {"size": 0}),
        (AveragedModel, {"decay": 1.0}),
        (AveragedModel, {"size": 5, "decay": 0.9}),
    ],
)
def test_settings_that_cannot_work(callback: Any, settings: Any) -> None:
    with pytest.raises(SettingError, match=f"^{next(iter(settings))}: "):
        callback(**settings)
