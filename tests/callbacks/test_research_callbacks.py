"""Callbacks that measure a run: every number against NumPy, and a resumed run against a whole one.

Where clients' models are needed, an engine answers with hand-made ones.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
    FedDistill,
    FedGKD,
    FedGKDVote,
    LocalEngine,
    RunFiles,
    TextClassifier,
)
from fedgkd_pl.callbacks.agreement import TeacherAgreement
from fedgkd_pl.callbacks.communication import Communication
from fedgkd_pl.callbacks.drift import ClientDrift
from fedgkd_pl.callbacks.export import FILES, ModelExport
from fedgkd_pl.callbacks.forgetting import Forgetting
from fedgkd_pl.callbacks.local_models import LocalModels
from fedgkd_pl.data.datasets.text import TrimPadding
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.transforms import Scale
from fedgkd_pl.engines.base import Engine, Session, schedule
from fedgkd_pl.errors import SettingError
from fedgkd_pl.federation.message import ClientFailure, ClientUpdate, Message, State
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.optim import SGD

from tests.conftest import Table, fit, linear, quiet_trainer, same
from tests.support.datasets import TINY

Array = np.ndarray[Any, Any]
Answer = Callable[[Message, int], State]


class Scripted(Engine, Session):
    """Clients whose models a test makes: one with n + 1 samples for client n."""

    max_samples = 100  # they are not those of the table

    def __init__(self, answer: Answer, fails: Sequence[int] = ()) -> None:
        self.answer = answer
        self.fails = fails
        self.messages: list[tuple[dict[str, dict[str, Array]], dict[str, float]]] = []
        self.answers: list[dict[int, dict[str, Array]]] = []

    def open(self, job: Any, cohort_size: int) -> Session:
        self.job = job
        return self

    def run(
        self, message: Message, cohort: Sequence[int]
    ) -> Iterator[ClientUpdate | ClientFailure]:
        models = {name: arrays(state) for name, state in message.models.items()}
        self.messages.append((models, dict(message.numbers)))
        self.answers.append({})
        for client in schedule(self.job, cohort):
            if client in self.fails:
                yield ClientFailure(client, "does not answer")
                continue
            weights = self.answer(message, client)
            self.answers[-1][client] = arrays(weights)
            yield ClientUpdate(client, client + 1, weights)


class Watch(Callback):
    """What was logged of every round."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []
        self.modes: set[bool] = set()

    def on_client_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.modes |= {module.training for module in pl_module.net.modules()}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.rounds.append(dict(pl_module.report))


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


def arrays(state: State) -> dict[str, Array]:
    return {
        name: (t.float() if t.dtype == torch.bfloat16 else t).detach().cpu().numpy().copy()
        for name, t in state.items()
    }


def random_model(message: Message, client: int) -> State:
    """A hand-made model: other numbers in every round and client."""
    generator = torch.Generator().manual_seed(1000 * message.round + client)
    drawn = {
        name: (2 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in message.models["global"].items()
    }
    positive = ("running_var", "num_batches_tracked")
    return {name: t.abs() if name.endswith(positive) else t for name, t in drawn.items()}


def logits_of(model: dict[str, Array], x: Array) -> Array:
    """Of a Linear, in NumPy."""
    logits: Array = x.astype(np.float64) @ model["weight"].T.astype(np.float64) + model["bias"]
    return logits


def softmax(logits: Array) -> Array:
    raised = np.exp(logits - logits.max(1, keepdims=True))
    probabilities: Array = raised / raised.sum(1, keepdims=True)
    return probabilities


def cross_entropy(logits: Array, y: Array) -> float:
    return float(-np.log(softmax(logits)[np.arange(len(y)), y]).mean())


def watched(model: Any, data: Table, rounds: int, *callbacks: Callback, **kwargs: Any) -> Watch:
    watch = Watch()
    fit(model, data, rounds, callbacks=[*callbacks, watch], **kwargs)
    return watch


def some(prefix: str, values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name.startswith(prefix)}


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
    return {"w": torch.tensor(numbers[:2]), "b": torch.tensor(numbers[2:])}


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


def test_drift_of_a_whole_state_pair_by_pair() -> None:
    """Buffers count, counters do not; a client that fails does not; sums are in float64."""
    seed_everything(3, verbose=False)
    net = nn.Sequential(nn.Linear(4, 40), nn.BatchNorm1d(40), nn.Linear(40, 3))
    engine = Scripted(random_model, fails=[2])
    model = FedAvg(net, engine=engine)
    data = Table(sizes=(4, 5, 6, 7), batch_size=4)
    watch = watched(model, data, 2, ClientDrift())
    for number in range(2):
        start = engine.messages[number][0]["global"]
        names = [name for name in start if "num_batches_tracked" not in name]
        assert len(names) == len(start) - 1 and "1.running_var" in names
        deltas = [
            np.concatenate([(w[n].astype(float) - start[n].astype(float)).ravel() for n in names])
            for w in engine.answers[number].values()
        ]
        norms = [np.sqrt((d**2).sum()) for d in deltas]
        assert len(norms) == 3
        pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
        cosines = [deltas[i] @ deltas[j] / norms[i] / norms[j] for i, j in pairs]
        expected = {
            "drift/norm_mean": np.mean(norms),
            "drift/norm_max": np.max(norms),
            "drift/cosine": np.mean(cosines),
            "drift/diversity": np.sum(np.square(norms)) / (sum(deltas) ** 2).sum(),
        }
        assert some("drift/", watch.rounds[number]) == pytest.approx(expected, rel=1e-12)


def rows_of(file: Path) -> list[dict[str, float]]:
    return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file.open())]


@pytest.mark.parametrize(("split", "max_samples"), [("val", None), ("test", 7)])
def test_local_models_against_numpy(split: Any, max_samples: int | None, tmp_path: Path) -> None:
    engine = Scripted(random_model, fails=[1])
    data = wide(val_fraction=0.1)
    local = LocalModels(split=split, max_samples=max_samples)
    record = Record()
    files = RunFiles(str(tmp_path))
    watch = watched(FedAvg(linear(), engine=engine), data, 2, local, files, logger=record)
    rows = np.arange(40) if split == "test" else np.arange(60, 66)
    if max_samples == 7:
        rows = np.sort(np.random.default_rng(0).choice(40, 7, replace=False))
    x, y = data.x[rows], data.y[rows]
    table = []
    for number in (1, 2):
        accs, losses = [], []
        for client, model in engine.answers[number - 1].items():
            logits = logits_of(model, x)
            accs.append(np.mean(logits.argmax(1) == y))
            losses.append(cross_entropy(logits, y))
            values = (number, client, client + 1, accs[-1], losses[-1])
            names = ("round", "client", "samples", "acc", "loss")
            table.append(dict(zip(names, values, strict=True)))
        expected = {
            "local/acc_mean": np.mean(accs),
            "local/acc_std": np.sqrt(np.mean((np.array(accs) - np.mean(accs)) ** 2)),
            "local/acc_min": min(accs),
            "local/acc_max": max(accs),
            "local/loss_mean": np.mean(losses),
        }
        assert some("local/", watch.rounds[number - 1]) == pytest.approx(expected, rel=1e-5)
    assert [row["client"] for row in table] == [0, 2, 0, 2]
    found = rows_of(tmp_path / "local_models.csv")
    assert len(found) == 4
    for row, hand in zip(found, table, strict=True):
        assert row == pytest.approx(hand, rel=1e-5)
    for name in expected:
        assert record.steps(name) == [1, 2], name


def test_local_models_are_evaluated_in_the_servers_precision() -> None:
    """Clients that answer what they got are worth what the server's own evaluation says."""
    model = FedAvg(conv_net(), engine=Scripted(lambda message, _: message.models["global"]))
    data = Images(sizes=(30, 10), features=192, eval_batch_size=7)
    callbacks = LocalModels(), TeacherAgreement(split="test")
    (row,) = watched(model, data, 1, *callbacks, precision="bf16-mixed").rounds
    assert row["local/acc_mean"] == pytest.approx(row["test/acc"])
    assert row["local/loss_mean"] == pytest.approx(row["test/loss"], rel=4e-3)  # bfloat16's
    assert row["teacher/agreement_min"] == 1 and row["teacher/acc"] == row["local/acc_min"]


def test_clients_that_keep_their_models_are_evaluated() -> None:
    """FedDistill sends none, and they are what counts there."""
    local, data = LocalModels(), Table()
    model = FedDistill(linear(), engine=LocalEngine(1), optimizer=partial(SGD, lr=0.5))
    watch = watched(model, data, 2, local, TeacherAgreement(split="test"))
    assert not some("teacher/", watch.rounds[1]), "there is no teacher to agree with"
    for row in local.rows[-2:]:
        kept = model._client_states[int(row["client"])]
        own = {name.removeprefix("own model: "): t for name, t in kept.items() if "own" in name}
        logits = logits_of(arrays(own), data.x[:6])
        assert row["loss"] == pytest.approx(cross_entropy(logits, data.y[:6]), rel=1e-5)


def check_agreement(engine: Scripted, number: int, teacher: Array, data: Table, row: Any) -> None:
    shares = [
        np.mean(logits_of(model, data.x[:40]).argmax(1) == teacher)
        for model in engine.answers[number].values()
    ]
    assert len(shares) == 3
    assert some("teacher/", row) == pytest.approx(
        {
            "teacher/agreement_mean": np.mean(shares),
            "teacher/agreement_min": min(shares),
            "teacher/acc": np.mean(teacher == data.y[:40]),
        },
        rel=1e-12,
    )


def test_agreement_with_the_mixture_of_voters() -> None:
    engine, data = Scripted(random_model), wide(val_fraction=0.1)
    model = FedGKDVote(linear(), engine=engine, buffer_size=3, lam=0.1)
    watch = watched(model, data, 4, TeacherAgreement(split="test"))
    differs = 0
    for number, (models, numbers) in enumerate(engine.messages):
        voters = [models[f"teacher{place}"] for place in range(len(models) - 1)]
        gammas = [numbers[f"teacher{place}"] for place in range(len(numbers))] or [1.0]
        voices = [softmax(logits_of(w, data.x[:40])) for w in [*voters, models["global"]]]
        assert len(voices) == len(gammas) == max(1, min(number, 3))
        said = np.sum([g * p for g, p in zip(gammas, voices, strict=True)], axis=0).argmax(1)
        differs += sum(int((said != voice.argmax(1)).any()) for voice in voices)
        check_agreement(engine, number, said, data, watch.rounds[number])
    assert differs >= 4, "the test could not tell the mixture from its parts"


def evaluated(callback: Forgetting, right: Sequence[int], **state: Any) -> dict[str, float]:
    """One evaluation, with so many right of 10, 4 and 0 samples of three classes."""
    heard: dict[str, float] = {}
    fn = state.pop("fn", "fit")
    trainer: Any = SimpleNamespace(
        **({"sanity_checking": False, "state": SimpleNamespace(fn=fn)} | state)
    )
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
    for number, row in enumerate(watch.rounds, start=1):
        assert row["comm/total_mb_down"] == pytest.approx(number * 3 * 60 / 1e6, rel=1e-12)
        assert row["comm/total_mb_up"] == pytest.approx(number * 2 * 60 / 1e6, rel=1e-12)
        assert not some("time/", row)
    for name in ("comm/total_mb_up", "time/clients", "time/evaluation"):
        assert record.steps(name) == [1, 2], name


def measured() -> list[Callback]:
    ours = [ClientDrift(), LocalModels(), TeacherAgreement(), Forgetting(), Communication()]
    return [*ours, AveragedModel(decay=0.7), ClientEvaluation()]


def dropout_gkd() -> FedGKD:
    seed_everything(1, verbose=False)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    local = partial(SGD, lr=0.3, momentum=0.9)
    return FedGKD(net, optimizer=local, engine=LocalEngine(1), buffer_size=2, gamma=1.0)


def small() -> Wide:
    fractions = {"val_fraction": 0.1, "client_test_fraction": 0.2}
    return wide(batch_size=5, participation=0.67, **fractions)


FILES_OF_A_RUN = ("local_models.csv", "clients.csv", "metrics.csv")
FILES_OF_A_RUN += ("model.safetensors", "average.safetensors")
OURS = ("drift/", "local/", "teacher/", "forgetting/", "comm/total", "average/")


def ours(record: Record) -> dict[str, list[tuple[int | None, float]]]:
    return {name: points for name, points in record.points.items() if name.startswith(OURS)}


def test_measuring_changes_nothing() -> None:
    plain, seen = dropout_gkd(), dropout_gkd()
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
        trainer.fit(dropout_gkd(), small(), ckpt_path=ckpt)
        return record

    whole = ours(go("whole", 4))
    first = ours(go("parts", 2))
    with (tmp_path / "parts" / "local_models.csv").open("a") as file:
        file.write("3,0,1,0.5,0.5\r\n")  # of a round that was never committed
    second = ours(go("parts", 4, tmp_path / "parts" / "last.ckpt"))
    assert len(whole) == 4 + 5 + 3 + 5 + 2 + 4
    for name, points in whole.items():
        assert first.get(name, []) + second[name] == points, name
        begins = 2 if name.startswith("forgetting") else 1
        assert [step for step, _ in points] == list(range(begins, 5)), name
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


class Tokens(Table):
    """Texts of 2 to 6 of the tiny encoder's words, filled up with 0."""

    def load(self) -> Splits:
        ids = torch.from_numpy(tokens(len(self.y), 8, np.random.default_rng(3)))
        all_ = Examples(ids, torch.from_numpy(self.y), TrimPadding(0))
        return Splits(all_, all_[:6])


def tokens(rows: int, width: int, rng: np.random.Generator) -> Array:
    ids = rng.integers(1, TINY["vocab_size"], (rows, width))  # type: ignore[call-overload]
    ids[np.arange(width)[None] >= rng.integers(2, width - 1, (rows, 1))] = 0
    found: Array = ids
    return found


def conv_net() -> nn.Module:
    seed_everything(2, verbose=False)
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    )


def text_net() -> nn.Module:
    seed_everything(2, verbose=False)
    return TextClassifier(3, encoder_config=TINY)


def fresh(kind: str, rows: int) -> torch.Tensor:
    rng = np.random.default_rng(11)
    if kind == "images":
        return torch.from_numpy(rng.normal(size=(rows, 3, 8, 8)).astype(np.float32))
    return torch.from_numpy(tokens(rows, 9, rng))


def loaded(form: str, file: Path, net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """What another program makes of a file."""
    if form == "safetensors":
        from safetensors.torch import load_file

        with torch.no_grad():  # nothing of the fit may be left
            for parameter in net.parameters():
                parameter.zero_()
        net.load_state_dict(load_file(file))
        return net.eval()
    if form == "torchscript":
        script: Any = torch.jit.load(file)
        return script  # type: ignore[no-any-return]
    if form == "torch_export":
        return torch.export.load(file).module()
    try:
        from onnxruntime import InferenceSession

        session: Any = InferenceSession(file)
    except ImportError:
        from onnx.reference import ReferenceEvaluator

        session = ReferenceEvaluator(str(file))
    return lambda x: torch.from_numpy(session.run(["logits"], {"inputs": x.numpy()})[0])


@pytest.mark.parametrize(
    ("kind", "form"), [*(("images", form) for form in FILES), ("texts", "torch_export")]
)
def test_exported_nets_give_the_same_logits(form: Any, kind: str, tmp_path: Path) -> None:
    if form == "onnx":
        for package in ("onnx", "onnxscript"):
            pytest.importorskip(package, reason="pip install 'fedgkd-pl[export]'")
    data = Images(features=192) if kind == "images" else Tokens()
    net = conv_net() if kind == "images" else text_net()
    model = FedAvg(net, engine=LocalEngine(1))
    callbacks = [ModelExport([form]), RunFiles(str(tmp_path))]
    before = torch.get_rng_state()
    fit(model, data, 1, callbacks=callbacks)
    assert torch.equal(before, torch.get_rng_state())
    assert model.net.training and all(p.requires_grad for p in model.net.parameters())
    for rows in (5, 1):
        x = fresh(kind, rows)
        with torch.no_grad():
            expected = model.net.eval()(x)
            assert expected.abs().max() > 1e-3
            other = conv_net() if kind == "images" else text_net()
            found = loaded(form, tmp_path / FILES[form], other)(x)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


class Branches(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class KnowsItsBatch(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.tensor([float(len(x))])


@pytest.mark.parametrize(
    ("net", "form"), [(Branches, "torch_export"), (KnowsItsBatch, "torchscript")]
)
def test_a_net_that_a_format_cannot_hold_is_refused_before_training(
    net: Any, form: Any, tmp_path: Path
) -> None:
    engine = Scripted(random_model)
    callbacks = [ModelExport([form])]
    with pytest.raises(SettingError, match=f"formats: {form} cannot hold this net: .") as error:
        fit(FedAvg(net(4, 3), engine=engine), wide(), 1, callbacks=callbacks)
    assert len(str(error.value).splitlines()) == 1 and not engine.messages


@pytest.mark.parametrize("settings", [{"every_n_rounds": 0}, {"split": "train"}])
def test_settings_that_cannot_work(settings: Any) -> None:
    with pytest.raises(SettingError, match=f"^{next(iter(settings))}: "):
        LocalModels(**settings)


@pytest.mark.parametrize("formats", [["safetensors", "pickle"], []])
def test_formats_that_cannot_be_written(formats: Any) -> None:
    with pytest.raises(SettingError, match=r"^formats: "):
        ModelExport(formats)
