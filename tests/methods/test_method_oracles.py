"""The baselines against the bare-torch oracle, which knows nothing of the package."""

from functools import cache, partial
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import MLP, Digits, FedAvg, FedGen, FedGKDPlus, FedGKDVote, LocalEngine
from fedgkd_pl.errors import SettingError
from fedgkd_pl.federation.losses import MarginAdjusted, PriorAdjusted, RestrictedSoftmax
from fedgkd_pl.federation.message import joined
from fedgkd_pl.methods.fedgen import Generator, generator_loss
from fedgkd_pl.models.heads import Ensemble
from fedgkd_pl.seeds import derive
from torch.optim import SGD

from tests.conftest import Table, fit, quiet_trainer, same
from tests.oracles import oracle_fedgen as fedgen
from tests.oracles import oracle_methods as oracle
from tests.oracles import oracle_more as more
from tests.support.lit import LitClassifier
from tests.support.methods import (
    EVERY,
    LOCAL,
    METHODS,
    MORE,
    PROJECTION,
    agree,
    batches_of,
    build,
    clients_of,
    cohorts,
    double,
    net,
    table,
    watched,
)

OFF = {
    "FedProx": {"mu": 0.0},
    "FedGKD": {"gamma": 0.0},
    "FedGKD+": {"gamma": 0.0},
    "FedGKD-Vote": {"lam": 0.0},
    "MOON": {"mu": 0.0},
    "FedDistill+": {"coefficient": 0.0},
    "FedGen": {"alpha": 0.0, "beta": 0.0},
}


TWO_OF_THREE = pytest.mark.parametrize("participation", [1.0, 0.67], ids=["all", "two of three"])


@TWO_OF_THREE
@pytest.mark.parametrize("name", [*METHODS, *MORE])
def test_whole_rounds(name: str, participation: float) -> None:
    data = table(participation=participation)
    data.setup()
    reference, given = more, {}
    if name in METHODS:
        reference, given = oracle, {"val": (data.val.inputs.double(), data.val.targets)}
    compare(build(name), data, reference, *(METHODS | MORE)[name][1:], given)


@pytest.mark.parametrize(
    "name, changes, theirs",
    [
        ("FedLSD", {"form": "additive", "tau": 3.0}, {"form": "additive", "tau": 3.0}),
        ("FedNova", {"mu": 0.0}, {"mu": 0.0}),
        ("FedDyn", {"server_term": False}, {"server_term": False}),
        ("FedDyn", {"weighting": "samples"}, {"uniform": False}),
        ("SCAFFOLD", {"weighting": "uniform"}, {"uniform": True}),
        ("FedExP", {"weighting": "samples", "epsilon": 0.0}, {"uniform": False, "eps": 1e-300}),
        ("FedGMT", {"teach_from_start": True}, {"bias_corrected": False}),
        ("FedGMT", {"server_term": False, "beta": inf}, {"server_term": False, "beta": inf}),
    ],
)
def test_whole_rounds_of_variants_with_clipping(
    name: str, changes: dict[str, Any], theirs: dict[str, Any]
) -> None:
    _, kind, settings = MORE[name]
    data = table(participation=0.67)
    compare(build(name, **changes), data, more, kind, settings | theirs, {"clip": 0.5})


def test_whole_rounds_of_fedgkd_with_a_moving_average() -> None:
    """FedGMT without its duals."""
    model = build("FedGKD", gamma=1.2, temperature=2.0, tau_squared=True, ema=0.8)
    settings = {"gamma": 0.6, "tau": 2.0, "alpha": 0.8, "beta": inf}
    settings |= {"server_term": False, "bias_corrected": True}
    compare(model, table(participation=0.67), more, "fedgmt", settings, {})


@pytest.mark.parametrize(
    "loss, kind, settings",
    [
        (PriorAdjusted(tau=0.8), "prior", {"tau": 0.8}),
        (MarginAdjusted(tau=0.8), "fedlc", {"tau": 0.8}),
        (RestrictedSoftmax(alpha=0.3), "fedrs", {"alpha": 0.3}),
    ],
)
@pytest.mark.parametrize("name", ["FedAvg", "FedGKD", "FedNTD"])
def test_whole_rounds_with_a_loss_that_knows_the_labels(
    loss: Any, kind: str, settings: dict[str, float], name: str
) -> None:
    own: dict[str, Any] = {}
    theirs = MORE[name][1:] if name in MORE else ("fedavg", {})
    if name == "FedGKD":  # M=1 with w_0: FedLSD with τ=1 and β=γ/2
        own = {"gamma": 0.8, "buffer_size": 1, "teach_from_start": True}
        theirs = ("fedlsd", {"form": "additive", "tau": 1.0, "beta": 0.4})
    model, data = build(name, loss=loss, **own), table(participation=0.67)
    compare(model, data, more, *theirs, {"prior": {"kind": kind, **settings}})


def compare(
    model: FedAvg, data: Table, reference: Any, theirs: str, settings: Any, given: Any
) -> None:
    """Five rounds of a method and of an oracle."""
    expected = reference.run(
        *(theirs, double(model.net.state_dict()), clients_of(data), cohorts(data, 5)),
        batches=batches_of(data, epochs=2),
        **(given | LOCAL | settings),
    )
    seen = watched(model)
    fit(model, data, 5, precision="64-true", gradient_clip_val=given.get("clip"))
    agree(seen, expected["models"])


def test_whole_rounds_of_fedgen() -> None:
    data, rounds, model = table(participation=0.67), 4, build("FedGen")
    assert isinstance(model, FedGen)
    data.setup()
    batches, clients, drawn = batches_of(data, 2), clients_of(data), cohorts(data, rounds)
    held: list[list[int]] = []  # labels reported up to each round
    for cohort in drawn:
        now = {int(label) for client in cohort for label in clients[client][1].unique()}
        held.append(sorted(now.union(*held[-1:])))

    def server_draws(round: int) -> list[Any]:
        random = torch.Generator().manual_seed(derive(0, "generator", round))
        labels = torch.cat([clients[client][1] for client in drawn[round - 1]]).unique()
        draws = []
        for _ in range(6):
            noise = torch.rand(8, 5, generator=random).double()
            draws.append((noise, labels[torch.randint(len(labels), (8,), generator=random)]))
        return draws

    def client_draws(round: int, client: int, step: int) -> Any:
        torch.manual_seed(derive(0, "model", round, client))
        for batch in batches(round, client)[: step + 1]:
            fake = torch.tensor(held[round - 2])[torch.randint(len(held[round - 2]), (8,))]
            noise = torch.rand(8 + len(batch), 5).double()
        return (noise[:8], fake), noise[8:]

    expected = fedgen.run(
        double(model.net.state_dict()),
        {k: t.double() if t.is_floating_point() else t.clone() for k, t in model._fresh.items()},
        *(clients, drawn),
        **{"batches": batches, "server_draws": server_draws, "client_draws": client_draws},
        **{"alpha": 0.8, "beta": 0.6, "decay": 0.9, "gen_lr": 0.05},
        **LOCAL,
    )
    nets = model.net, model.generator
    seen = watched(model, lambda: [double(net.state_dict()) for net in nets])
    fit(model, data, rounds, precision="64-true")
    for number, name in enumerate(("models", "generators")):
        agree([each[number] for each in seen], [double(each) for each in expected[name]])


def test_fedgens_losses_on_fixed_tensors() -> None:
    rng = torch.Generator().manual_seed(1)
    noise = torch.rand(6, 5, generator=rng, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 1, 0, 1])
    heads = [(torch.randn(3, 4).double(), torch.randn(3).double()) for _ in range(2)]
    shares = torch.tensor([[0.25, 1.0, 0.0], [0.75, 0.0, 1.0]], dtype=torch.float64)
    generator = Generator(3, 4, noise=5, hidden=7).double()
    state = {k: t.clone() for k, t in generator.state_dict().items()}
    loss = generator_loss(generator(noise, y), noise, y, heads, shares)
    loss.backward()
    g = {k: t.requires_grad_() if t.is_floating_point() else t for k, t in state.items()}
    expected, _ = fedgen.generator_loss(g, noise, y, heads, shares)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-10)
    for key, parameter in generator.named_parameters():
        torch.testing.assert_close(parameter.grad, g[key].grad, atol=1e-10, rtol=0)


@cache
def fedavg(name: str) -> FedAvg:
    """FedAvg after four rounds, with a method's net."""
    local = {"local_epochs": 2, "optimizer": partial(SGD, **LOCAL), "engine": LocalEngine(1)}
    model = FedAvg(net(PROJECTION.get(name)), **local)
    fit(model, table(), 4)
    return model


@pytest.mark.parametrize("name", EVERY)
def test_the_method_is_not_fedavg(name: str) -> None:
    """Otherwise the comparison above would prove little."""
    plain, model = fedavg(name), build(name)
    fit(model, table(), 4)
    theirs = model.net.nets[0] if isinstance(model.net, Ensemble) else model.net
    if name == "Ditto":  # whose global model is FedAvg's; what counts are the clients'
        theirs.load_state_dict(model.model_of(0))
    weight = plain.net.classifier.weight - theirs.classifier.weight  # type: ignore[union-attr, operator]
    assert weight.abs().max() > 1e-3


@pytest.mark.parametrize("name", OFF)
def test_switched_off_it_is_fedavg_bit_for_bit(name: str) -> None:
    plain, off = fedavg(name), build(name, **OFF[name])
    fit(off, table(), 4)
    assert same(plain.net.state_dict(), off.net.state_dict())
    assert (plain.bytes_down, plain.bytes_up) == (off.bytes_down, off.bytes_up)


def test_bytes_are_those_of_the_paper() -> None:
    """M models down for Vote; a table of logits beside the model for FedDistill+."""
    size = sum(p.numel() for p in net().parameters()) * 4
    vote = build("FedGKD-Vote", buffer_size=3)
    fit(vote, table(), 5)
    assert vote.bytes_down == (1 + 1 + 2 + 3 + 3) * size * 3  # rounds; three clients each
    assert vote.bytes_up == 5 * size * 3
    distill = build("FedDistill+")
    fit(distill, table(), 3)
    report = (3 * 3 + 3) * 4
    assert distill.bytes_up == 3 * 3 * (size + report)
    assert distill.bytes_down == 3 * (3 * size + 2 * report)
    plain = build("FedDistill")
    fit(plain, table(), 3)
    assert (plain.bytes_up, plain.bytes_down) == (3 * 3 * report, 3 * 2 * report)
    moon = build("MOON")
    fit(moon, table(), 3)
    larger = sum(p.numel() for p in net(5).parameters()) * 4
    assert moon.bytes_down == moon.bytes_up == 3 * 3 * larger  # the previous model stays at home


def test_votes_coefficients_follow_the_validation_loss() -> None:
    model = FedGKDVote(net(), lam=0.1, buffer_size=3, engine=LocalEngine(1))
    model.losses.extend([0.9, 0.5, 0.7])
    scores = np.exp(-np.array([0.9, 0.5, 0.7]) * 3)
    np.testing.assert_allclose(model.coefficients(), 0.1 * scores / scores.sum(), atol=1e-12)
    trainer = fit(model, table(), 4)
    logged = [float(trainer.callback_metrics[f"vote/teacher_{m}"]) for m in range(3)]
    assert sum(logged) == pytest.approx(0.1, abs=1e-6)


def test_fedgkd_plus_takes_a_module_with_a_projection_head() -> None:
    module = LitClassifier()
    with pytest.raises(SettingError, match=r"FedGKD\+ needs a projection head"):
        FedGKDPlus(module=module)
    module.model = MLP(hidden=[16], projection=8)
    model = FedGKDPlus(module=module, engine=LocalEngine(workers=1))
    fit(model, Digits(num_clients=2, batch_size=256), 1)
    assert model.net is module and model.report["client/failed"] == 0
    with pytest.raises(SettingError, match="net: missing"):
        FedGKDPlus()


def test_moons_previous_model_is_the_clients_own_and_not_the_global_one() -> None:
    model = build("MOON")
    data = table()
    updates: dict[int, Any] = {}
    on_update = model.on_update

    def keep(update: Any) -> None:
        on_update(update)
        updates[update.client] = {k: t.clone() for k, t in update.weights.items()}

    model.on_update = keep  # type: ignore[method-assign]
    fit(model, data, 2)
    for client, state in model.client_states.items():
        assert same(state, updates[client]), "not the model after the client's own training"
        assert not same(state, model.net.state_dict())


def test_feddistills_targets_are_the_others_and_not_uniform() -> None:
    """Three clients with reports; each must be taught by the two others alone."""
    reports = {
        k: {"means": torch.full((3, 3), float(k)), "holds": torch.tensor([1.0, 1.0, float(k == 2)])}
        for k in range(3)
    }
    model = build("FedDistill+")
    model.reports = reports  # type: ignore[attr-defined]
    model.trainer = quiet_trainer(max_epochs=1)
    message = model.broadcast()
    client = model.client()
    client.receive(message, joined({"report": reports[2]}))
    assert client.targets[0].tolist() == [0.5] * 3  # type: ignore[attr-defined]
    assert client.known.tolist() == [True, True, False]  # type: ignore[attr-defined]
    client.receive(message, {})  # a newcomer has no report to take out
    assert client.targets[1].tolist() == [1.0] * 3  # type: ignore[attr-defined]
    assert client.known.tolist() == [True, True, True]  # type: ignore[attr-defined]
