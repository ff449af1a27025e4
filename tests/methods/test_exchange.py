"""What travels and what stays: references, identities, bytes, engines, states, refusals."""

import json
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fedgkd_pl import (
    MLP,
    SCAFFOLD,
    Ditto,
    Exchange,
    FedAvg,
    FedBABU,
    FedBN,
    FedGKD,
    FedGKDVote,
    FedGMT,
    FedMD,
    FedPer,
    FedRep,
    LocalEngine,
    load_run,
)
from fedgkd_pl.errors import SettingError
from fedgkd_pl.federation.exchange import taken_apart
from torch import Tensor, nn
from torch.optim import SGD

from tests.conftest import Table, fit, same
from tests.oracles import oracle_personal as oracle
from tests.support.methods import (
    LOCAL,
    agree,
    batches_of,
    clients_of,
    cohorts,
    double,
    net,
    table,
    watched,
)
from tests.support.runs import Run, version

HEAD = {"classifier.weight", "classifier.bias"}
ROUNDS = 5
OWN: dict[str, Any] = {"client_test_fraction": 0.2, "client_val_fraction": 0.2}


def data(**changes: Any) -> Table:
    return table(**({"participation": 0.67, "sizes": (14, 9, 12)} | OWN | changes))


def local(engine: Any = None, **changes: Any) -> dict[str, Any]:
    settings = {"local_epochs": 2, "optimizer": partial(SGD, **LOCAL)}
    return settings | {"engine": engine or LocalEngine(1)} | changes


def states(model: Any) -> dict[int, Any]:
    """What every client keeps of its own parts."""
    if isinstance(model, Ditto):
        return {client: double(state) for client, state in model.client_states.items()}
    return {k: double(taken_apart(state)[0]) for k, state in model.client_states.items()}


def compare(model: Any, theirs: str, epochs: int = 2, clip: float | None = None, **how: Any) -> Any:
    """Five rounds of a method and of the reference: the global model and what clients keep."""
    given = data()
    given.setup()
    batches = batches_of(given, epochs=epochs)
    heads = how.pop("head_epochs", None)
    if heads is not None:
        how["head_steps"] = lambda round, client: len(batches(round, client)) * heads // epochs
    expected = oracle.run(
        *(theirs, double(model.net.state_dict()), clients_of(given), cohorts(given, ROUNDS)),
        **{"batches": batches, "clip": clip, **LOCAL, **how},
    )
    kept: list[Any] = []
    seen = watched(model, lambda: (double(model.net.state_dict()), kept.append(states(model)))[0])
    fit(model, given, ROUNDS, precision="64-true", gradient_clip_val=clip)
    agree(seen, expected["models"])
    if how.get("personal") or theirs == "ditto":
        for ours, reference in zip(kept, expected["personal"], strict=True):
            assert ours.keys() == reference.keys()
            agree(list(ours.values()), [reference[client] for client in ours])
    return model


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    ("make", "theirs", "how"),
    [
        (FedPer, "fedavg", {"personal": HEAD}),
        (partial(FedRep, head_epochs=3), "fedrep", {"personal": HEAD, "head_epochs": 3}),
        (partial(FedBABU, weighting="samples"), "fedbabu", {"frozen": HEAD}),
        (partial(Ditto, lam=0.7), "ditto", {"lam": 0.7}),
        (
            partial(FedGKD, gamma=0.8, buffer_size=2, exchange=Exchange(personal="head")),
            "fedgkd",
            {"personal": HEAD, "gamma": 0.8, "buffer_size": 2},
        ),
        (partial(SCAFFOLD, exchange=Exchange(personal="head")), "scaffold", {"personal": HEAD}),
    ],
    ids=["FedPer", "FedRep", "FedBABU", "Ditto", "FedGKD", "SCAFFOLD"],
)
def test_whole_rounds(make: Any, theirs: str, how: dict[str, Any], clip: float | None) -> None:
    epochs = 5 if theirs == "fedrep" else 2
    compare(make(net(), **local()), theirs, epochs, clip, **how)


class Normed(nn.Module):
    """A net whose norm is not called one; GroupNorm has no statistics, as the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.downsample = nn.Linear(4, 6), nn.GroupNorm(2, 6)
        self.classifier = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.downsample(self.first(x)).relu())  # type: ignore[no-any-return]


def normed(w: Any, x: Tensor) -> Tensor:
    h = x @ w["first.weight"].T + w["first.bias"]
    h = nn.functional.group_norm(h, 2, w["downsample.weight"], w["downsample.bias"])
    return h.relu() @ w["classifier.weight"].T + w["classifier.bias"]  # type: ignore[no-any-return]


def test_whole_rounds_of_fedbn() -> None:
    own = {"downsample.weight", "downsample.bias"}
    torch.manual_seed(0)
    model = FedBN(Normed(), weighting="samples", **local())
    compare(model, "fedavg", personal=own, forward=normed)


class LowRank(nn.Module):
    """A frozen layer with an adapter, as LoRA makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 6).requires_grad_(False)
        self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(2, 6, bias=False)
        nn.init.zeros_(self.b.weight)
        self.classifier = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier((self.base(x) + 2 * self.b(self.a(x))).relu())  # type: ignore[no-any-return]


def low_rank(w: Any, x: Tensor) -> Tensor:
    h = x @ w["base.weight"].T + w["base.bias"] + 2 * (x @ w["a.weight"].T) @ w["b.weight"].T
    return h.relu() @ w["classifier.weight"].T + w["classifier.bias"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("method", "theirs", "how"),
    [
        (FedAvg, "fedavg", {}),
        (FedGKD, "fedgkd", {"gamma": 0.8, "buffer_size": 2}),
        (SCAFFOLD, "scaffold", {}),
    ],
)
def test_whole_rounds_of_trained_parts(method: Any, theirs: str, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = method(LowRank(), exchange=Exchange(share="trainable"), **how, **local())
    frozen = {"base.weight", "base.bias"}
    compare(model, theirs, frozen=frozen, forward=low_rank, **how)
    shared = sum(p.nbytes for p in model.net.parameters() if p.requires_grad)
    assert model.results.bytes_up == 2 * shared * (2 if method is SCAFFOLD else 1)
    for state in model.client_states.values():
        assert not {*state} & frozen


def test_student_and_teacher_have_one_frozen_base() -> None:
    model = FedGKD(LowRank(), exchange=Exchange(share="trainable"), buffer_size=2, **local())
    trained(model)
    student = model.client()
    teacher = student.teacher.net
    assert teacher.base.weight is student.net.base.weight
    assert teacher.a.weight is not student.net.a.weight
    assert all(state.keys() == {*model.split.shared} for state in model.buffer)  # type: ignore[union-attr]


# -- identities ------------------------------------------------------------------------------------


def trained(model: Any, rounds: int = 4, **changes: Any) -> Any:
    fit(model, data(**changes), rounds)
    return model


METHODS = [FedAvg, partial(FedGKD, buffer_size=2), SCAFFOLD, partial(FedGMT, beta=10), FedGKDVote]


@pytest.mark.parametrize("method", METHODS)
def test_sharing_what_is_trained_is_sharing_all(method: Any) -> None:
    """Frozen weights do not change, so that they need not travel; bit for bit."""

    def frozen() -> nn.Module:
        given = net()
        given.get_submodule("features.1").requires_grad_(False)
        return given

    whole = trained(method(frozen(), **local()))
    part = trained(method(frozen(), exchange=Exchange(share="trainable"), **local()))
    assert same(whole.net.state_dict(), part.net.state_dict())
    assert part.bytes_up < whole.bytes_up and part.bytes_down < whole.bytes_down


@pytest.mark.parametrize(
    "model",
    [
        lambda: FedBN(net(), weighting="samples", **local()),
        lambda: FedPer(net(), personal=[], **local()),
        lambda: Ditto(net(), lam=3.0, **local()),
    ],
    ids=["FedBN without norms", "FedPer of nothing", "Ditto's global model"],
)
def test_is_fedavg(model: Any) -> None:
    expected = trained(FedAvg(net(), **local()))
    assert same(trained(model()).net.state_dict(), expected.net.state_dict())


def test_fedbabu_is_fedavg_with_a_frozen_classifier() -> None:
    frozen = net()
    frozen.classifier.requires_grad_(False)
    expected = trained(FedAvg(frozen, **local()))
    babu = trained(FedBABU(net(), weighting="samples", **local()))
    assert same(babu.net.state_dict(), expected.net.state_dict())
    assert all(p.requires_grad for p in babu.net_to_tune().parameters())


class WithIdle(nn.Module):
    """A net beside a parameter that nothing uses: all else may be personal."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.net = nn.Parameter(torch.zeros(1)), net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def test_all_personal_is_local_training() -> None:
    model = trained(FedPer(WithIdle(), personal=["net.*"], **local()), participation=1.0)
    alone = deepcopy(data(participation=1.0))
    alone.setup()
    for client in range(3):
        weights = oracle.run(
            *("fedavg", double(net().state_dict()), clients_of(alone), [[client]] * 4),
            **{"batches": batches_of(alone, 2), **LOCAL},
        )["models"][-1]
        own = {n.removeprefix("net."): t for n, t in states(model)[client].items()}
        for name, tensor in weights.items():
            torch.testing.assert_close(own[name], tensor, atol=1e-4, rtol=0)


def test_fedper_of_one_client_is_fedavg() -> None:
    one = {"sizes": (9,), "participation": 1.0}
    expected = trained(FedAvg(net(), **local()), **one)
    model = trained(FedPer(net(), **local()), **one)
    for (
        name,
        tensor,
    ) in expected.net.state_dict().items():  # but for the server's step, which rounds
        torch.testing.assert_close(model.model_of(0)[name], tensor, atol=1e-6, rtol=0)


# -- the house -------------------------------------------------------------------------------------

MAKE = {
    "FedPer": FedPer,
    "FedRep": partial(FedRep, head_epochs=2),
    "Ditto": Ditto,
    "FedGKD": partial(FedGKD, buffer_size=2, exchange=Exchange(personal=["classifier.*"])),
    "SCAFFOLD": partial(SCAFFOLD, exchange=Exchange(personal="head")),
}


@pytest.mark.parametrize("name", MAKE)
def test_one_worker_or_two(name: str) -> None:
    one = trained(MAKE[name](net(), **local()))
    two = trained(MAKE[name](net(), **local(LocalEngine(2))))
    assert same(one.net.state_dict(), two.net.state_dict())
    for client, state in states(one).items():
        assert same(state, states(two)[client])
    assert one.report == two.report


@pytest.mark.parametrize("name", MAKE)
def test_a_resumed_run_is_the_same(name: str, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tests.conftest import quiet_trainer

    whole = trained(MAKE[name](net(), **local()))
    saver = ModelCheckpoint(tmp_path, filename="last", save_on_train_epoch_end=True)
    quiet_trainer(max_epochs=2, callbacks=[saver], enable_checkpointing=True).fit(
        MAKE[name](net(), **local()), data()
    )
    model = MAKE[name](net(), **local())
    quiet_trainer(max_epochs=4).fit(model, data(), ckpt_path=str(tmp_path / "last.ckpt"))
    assert same(model.net.state_dict(), whole.net.state_dict())
    for client, state in states(whole).items():
        assert same(state, states(model)[client])
    assert model.report == whole.report


def test_clients_are_scored_with_their_own_models() -> None:
    model = trained(FedPer(net(), **local()))
    given = data()
    given.setup()
    own = given.client_splits["test"]
    accs = []
    for client in own.clients:
        judge = net()
        judge.load_state_dict(model.model_of(client))
        rows = own.examples.view(own.rows(client))
        x = rows.transform(rows.inputs, None)
        accs.append(float((judge(x).argmax(1) == rows.targets).double().mean()))
    assert model.report["test/acc"] == pytest.approx(sum(accs) / len(accs), abs=1e-6)
    head = model.model_of(0)["classifier.weight"]
    assert not torch.equal(head, model.net.classifier.weight)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: FedAvg(net(), exchange=Exchange(personal=["clasifier.*"])), "exchange.personal"),
        (lambda: FedAvg(net(), exchange=Exchange(share=["body.*"])), "exchange.share"),
        (lambda: FedAvg(net(), exchange=Exchange(personal=["*"])), "exchange"),
        (lambda: FedMD(net(), exchange=Exchange(share="trainable")), "exchange.share"),
        (lambda: FedGKDVote(net(), exchange=Exchange(personal="head")), "exchange.personal"),
        (lambda: FedRep(net(), local_steps=3), "local_steps"),
        (lambda: Ditto(net(), compile=True), "compile"),
    ],
)
def test_refused_alone(make: Any, key: str) -> None:
    with pytest.raises(SettingError) as found:
        make()
    assert found.value.key == key and "\n" not in str(found.value)


def test_near_names_are_listed() -> None:
    with pytest.raises(SettingError, match=r"such as classifier\.(weight|bias)"):
        FedAvg(net(), exchange=Exchange(personal=["clasifier.weight"]))


@pytest.mark.parametrize("split", ["test", "val"])
def test_scores_need_samples_of_their_own(split: str) -> None:
    with pytest.raises(SettingError, match=f"client_{split}_fraction: must be above 0"):
        given = data(scored=False, **{f"client_{split}_fraction": 0})
        fit(FedPer(net(), **local()), given, 1)


def test_callbacks_of_whole_models_are_refused() -> None:
    from fedgkd_pl import AveragedModel

    with pytest.raises(SettingError, match="AveragedModel is for models of all clients"):
        fit(FedPer(net(), **local()), data(), 1, callbacks=[AveragedModel()])


def test_mlp_has_the_names_of_the_reference() -> None:
    assert {*MLP(in_features=4, hidden=[6], num_classes=3).state_dict()} >= HEAD


def test_a_run_of_the_command_line(run: Run, tmp_path: Path) -> None:
    """Scored by clients, resumed, and used client by client."""
    words = ("--config", "digits/fedper.yaml", "--rounds", "2", "--model.engine.workers", "1")
    code, out, _ = run("fit", *words, "--name", "smoke", "--model.local_epochs", "1")
    assert code == 0 and "scored: each client's own model on its own samples" in out
    folder = version(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["scored"] == "each client's own model"
    assert (folder / "clients.csv").exists()
    assert run("fit", "--resume", str(folder), "--rounds", "3")[0] == 0
    models = [load_run(folder, client=client).net.state_dict() for client in range(20)]
    heads = {model["classifier.weight"].numpy().tobytes() for model in models}
    bodies = {model["features.1.weight"].numpy().tobytes() for model in models}
    assert len(bodies) == 1 and 4 < len(heads) <= 13  # four clients a round, and w_0's
    code, _, err = run("export", str(folder))
    assert code == 2 and err.startswith("error: client: each client of this run has a model")
    assert run("export", str(folder), "--client", "1")[0] == 0
    code, _, err = run("predict", str(folder))
    assert code == 2 and "--client" in err
    assert run("test", str(folder))[0] == 0
