"""The baselines against the bare-torch oracle, which knows nothing of the package."""

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import MLP, Digits, FedAvg, FedGen, FedGKDPlus, FedGKDVote, LocalEngine
from fedgkd_pl.data.examples import Examples
from fedgkd_pl.errors import SettingError
from fedgkd_pl.federation.losses import MarginAdjusted, PriorAdjusted, RestrictedSoftmax
from fedgkd_pl.federation.message import Message, joined
from fedgkd_pl.methods.fedgen import Generator, generator_loss
from fedgkd_pl.models.ensemble import Ensemble
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
    batches_of,
    build,
    cohorts,
    double,
    net,
    table,
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


@pytest.mark.parametrize("name", [*METHODS, *MORE])
@pytest.mark.parametrize("participation", [1.0, 0.67], ids=["all", "two of three"])
def test_whole_rounds(name: str, participation: float) -> None:
    data = table(participation=participation)
    data.setup()
    given: dict[str, Any] = {"val": (data_of(data.val))} if name in METHODS else {}
    theirs = METHODS[name][2:4] if name in METHODS else MORE[name][1:3]
    compare(build(name), data, oracle if name in METHODS else more, *theirs, given)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    "name, changes, theirs",
    [
        ("FedLSD", {"tau": 3.0}, {"form": "additive", "tau": 3.0}),
        ("FedNova", {"mu": 0.0}, {"mu": 0.0}),
        ("FedDyn", {"server_term": False}, {"server_term": False}),
        ("FedDyn", {"weighting": "samples"}, {"uniform": False}),
        ("SCAFFOLD", {"weighting": "uniform"}, {"uniform": True}),
        ("FedExP", {"weighting": "samples", "epsilon": 0.0}, {"uniform": False, "eps": 1e-300}),
        ("FedGMT", {"teach_from_start": True}, {"bias_corrected": False}),
        ("FedGMT", {"server_term": False, "beta": float("inf")}, {"server_term": False}),
    ],
)
def test_whole_rounds_of_variants(
    name: str, changes: dict[str, Any], theirs: dict[str, Any], clip: float | None
) -> None:
    settings = MORE[name][2] | theirs
    if name == "FedGMT":
        settings |= {"beta": changes.get("beta", 4.0)}
    data = table(participation=0.67)
    compare(build(name, **changes), data, more, MORE[name][1], settings, {"clip": clip})


def test_whole_rounds_of_fedgkd_with_a_moving_average() -> None:
    """FedGMT without its duals."""
    model = build("FedGKD", gamma=1.2, temperature=2.0, tau_squared=True, ema=0.8)
    settings = {"gamma": 0.6, "tau": 2.0, "alpha": 0.8, "beta": float("inf")}
    settings |= {"server_term": False, "bias_corrected": True}
    compare(model, table(participation=0.67), more, "fedgmt", settings, {})


@pytest.mark.parametrize("kind", ["prior", "fedlc", "fedrs"])
@pytest.mark.parametrize("name", ["FedAvg", "FedGKD", "FedNTD"])
def test_whole_rounds_with_a_loss_that_knows_the_labels(kind: str, name: str) -> None:
    losses = {
        "prior": PriorAdjusted(tau=0.8),
        "fedlc": MarginAdjusted(tau=0.8),
        "fedrs": RestrictedSoftmax(alpha=0.3),
    }
    data = table(participation=0.67)
    given = {"kind": kind, **({"alpha": 0.3} if kind == "fedrs" else {"tau": 0.8})}
    if name == "FedGKD":  # M=1 with w_0: FedLSD with τ=1 and β=γ/2
        settings = {"gamma": 0.8, "buffer_size": 1, "teach_from_start": True}
        theirs = ("fedlsd", {"form": "additive", "tau": 1.0, "beta": 0.4})
    else:
        settings, theirs = {}, MORE[name][1:3] if name in MORE else ("fedavg", {})
    model = build(name, loss=losses[kind], **settings)
    compare(model, data, more, *theirs, {"prior": given})


def data_of(examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
    return examples.inputs.double(), examples.targets


def compare(
    model: FedAvg, data: Table, reference: Any, theirs: str, settings: Any, given: Any
) -> None:
    """Five rounds of a method and of an oracle."""
    rounds = 5
    batches = batches_of(data, epochs=2)
    clients = [(torch.from_numpy(x).double(), torch.from_numpy(y)) for x, y in data.arrays()]
    expected = reference.run(
        theirs,
        double(model.net.state_dict()),
        clients,
        cohorts(data, rounds),
        batches=lambda round, client: [torch.from_numpy(b) for b in batches(round, client)],
        **given,
        **LOCAL,
        **settings,
    )["models"]
    seen: list[dict[str, torch.Tensor]] = []
    step = model.server_step

    def keep(mean: Any) -> None:
        step(mean)
        seen.append(double(model.net.state_dict()))

    model.server_step = keep  # type: ignore[method-assign]
    fit(model, data, rounds, precision="64-true", gradient_clip_val=given.get("clip"))
    for round, (ours, theirs) in enumerate(zip(seen, expected, strict=True), 1):
        for key in theirs:
            torch.testing.assert_close(
                ours[key], theirs[key], atol=1e-9, rtol=0, msg=f"{key} in round {round}"
            )


def test_whole_rounds_of_fedgen() -> None:
    data, rounds = table(participation=0.67), 4
    model = build("FedGen")
    assert isinstance(model, FedGen)
    data.setup()
    batches = batches_of(data, epochs=2)
    clients = [(torch.from_numpy(x).double(), torch.from_numpy(y)) for x, y in data.arrays()]
    drawn = cohorts(data, rounds)
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
        clients,
        drawn,
        batches=lambda round, client: [torch.from_numpy(b) for b in batches(round, client)],
        alpha=0.8,
        beta=0.6,
        decay=0.9,
        server_draws=server_draws,
        client_draws=client_draws,
        gen_lr=0.05,
        **LOCAL,
    )
    for done in range(1, rounds + 1):
        model = build("FedGen")
        assert isinstance(model, FedGen)
        fit(model, table(participation=0.67), done, precision="64-true")
        for key, value in expected["models"][done - 1].items():
            ours = model.net.state_dict()[key]
            torch.testing.assert_close(ours, value, atol=1e-9, rtol=0, msg=f"{key}, round {done}")
        for key, value in expected["generators"][done - 1].items():
            ours = model.generator.state_dict()[key]
            torch.testing.assert_close(ours, value, atol=1e-9, rtol=0, msg=f"{key}, round {done}")


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

    model = build("FedGen")
    client = model.client().double()
    client.generator.net.double()  # type: ignore[attr-defined]
    (start,) = models(1, None)
    made = {k: t.detach().clone() for k, t in Generator(3, 6, 5, 7).double().state_dict().items()}
    known = {"labels": torch.tensor([0, 2])}
    sent, numbers = {"global": start, "generator": made}, {"alpha": 0.3, "beta": 0.2}
    client.receive(Message(2, sent, numbers, {"labels": known}), {})
    client.on_train_epoch_start()
    x, labels = fixed_batch()
    torch.manual_seed(4)
    loss = client.training_step((x, labels), 0)
    loss.backward()
    torch.manual_seed(4)
    fake = torch.tensor([0, 2])[torch.randint(2, (8,))]
    both = torch.rand(8 + 7, 5).double()
    w = {k: t.clone().requires_grad_() for k, t in start.items()}
    settings = {"fake": (both[:8], fake), "same": both[8:], "alpha": 0.3, "beta": 0.2}
    expected = fedgen.local_loss(w, x, labels, generator=made, **settings)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-10)
    for key, parameter in client.net.named_parameters():
        torch.testing.assert_close(parameter.grad, w[key].grad, atol=1e-10, rtol=0)


@cache
def fedavg(projection: int | None) -> FedAvg:
    """FedAvg after four rounds."""
    local = partial(SGD, **LOCAL)
    model = FedAvg(net(projection), local_epochs=2, optimizer=local, engine=LocalEngine(1))
    fit(model, table(), 4)
    return model


@pytest.mark.parametrize("name", EVERY)
def test_the_method_is_not_fedavg(name: str) -> None:
    """Otherwise the comparison above would prove little."""
    plain, model = fedavg(METHODS[name][4] if name in METHODS else None), build(name)
    fit(model, table(), 4)
    theirs = model.net.nets[0] if isinstance(model.net, Ensemble) else model.net
    weight = plain.net.classifier.weight - theirs.classifier.weight  # type: ignore[union-attr, operator]
    assert weight.abs().max() > 1e-3


def fixed_batch() -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(5)
    return torch.from_numpy(rng.normal(size=(7, 4))), torch.from_numpy(rng.integers(0, 3, 7))


def models(count: int, projection: int | None) -> list[dict[str, torch.Tensor]]:
    built = []
    for seed in range(count):
        torch.manual_seed(seed + 10)
        built.append(double(MLP(4, [6], 3, projection).state_dict()))
    return built


@pytest.mark.parametrize("name", METHODS)
def test_local_loss_and_gradient_on_fixed_tensors(name: str) -> None:
    _, settings, theirs, _, projection = METHODS[name]
    start, other, third = models(3, projection)
    client = build(name).client().double()
    targets = torch.from_numpy(np.random.default_rng(3).normal(size=(3, 3)))
    message = Message(3, {"global": start}, {})
    state: dict[str, torch.Tensor] = {}
    context: dict[str, Any] = {}
    for frozen in ("teacher", "anchor", "previous"):
        if hasattr(client, frozen):
            getattr(client, frozen).net.double()
    if theirs == "fedprox":
        context = {"start": start, "mu": settings["mu"]}
    elif theirs == "fedgkd":
        message = Message(3, {"global": start, "teacher": other}, {"distil": 1})
        context = {"teacher": other, "gamma": settings["gamma"]}
    elif theirs == "vote":
        message = Message(
            *(3, {"global": start, "teacher0": other, "teacher1": third}),
            {"teacher0": 0.1, "teacher1": 0.25, "teacher2": 0.15},
        )
        context = {"teachers": [other, third, start], "coefficients": [0.1, 0.25, 0.15]}
    elif theirs == "moon":
        state = other
        context = {"start": start, "previous": other, "mu": 2.0, "tau": 0.5}
    else:  # labels 0 and 1 are held by two others, label 2 by this client alone
        own = {"means": torch.full((3, 3), 0.5), "holds": torch.ones(3)}
        holds = torch.tensor([3.0, 3.0, 1.0], dtype=torch.float64)
        sums = 2 * targets + own["means"].double()
        state = joined({"report": {key: value.double() for key, value in own.items()}})
        logits = {"means": sums, "holds": holds}
        message = Message(3, {"global": start}, {}, {"logits": logits})
        known = torch.tensor([True, True, False])
        context = {"targets": targets, "known": known, "coefficient": settings["coefficient"]}
    client.receive(message, state)
    client.net.load_state_dict(models(4, projection)[3])  # the client has moved since
    x, y = fixed_batch()
    loss = client.training_step((x, y), 0)
    loss.backward()
    w = {k: t.requires_grad_() for k, t in models(4, projection)[3].items()}
    expected = oracle.local_loss(theirs, w, x, y, **context)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-10)
    for key, parameter in client.net.named_parameters():
        torch.testing.assert_close(parameter.grad, w[key].grad, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", OFF)
def test_switched_off_it_is_fedavg_bit_for_bit(name: str) -> None:
    plain = fedavg(METHODS[name][4] if name in METHODS else None)
    off = build(name, **OFF[name])
    fit(off, table(), 4)
    assert same(plain.net.state_dict(), off.net.state_dict())
    assert (plain.bytes_down, plain.bytes_up) == (off.bytes_down, off.bytes_up)


def test_vote_with_one_teacher_is_fedgkd() -> None:
    vote = build("FedGKD-Vote", lam=0.3, buffer_size=1)
    gkd = build("FedGKD", gamma=0.6, buffer_size=1)
    fit(vote, table(), 4, precision="64-true")
    fit(gkd, table(), 4, precision="64-true")
    for key, value in gkd.net.state_dict().items():
        torch.testing.assert_close(vote.net.state_dict()[key], value, atol=1e-12, rtol=0)


def test_votes_gradient_is_that_of_the_mixture() -> None:
    """Σ c_m KL(p_m ‖ q) and (Σ c_m) KL(mixture ‖ q) differ by a constant."""
    from fedgkd_pl.methods.fedgkd import distillation

    torch.manual_seed(0)
    student = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    teachers, c = torch.randn(3, 5, 4, dtype=torch.float64), torch.tensor([0.1, 0.3, 0.2]).double()
    summed = sum(w * distillation(student, t) for w, t in zip(c, teachers, strict=True))
    (a,) = torch.autograd.grad(summed, student)  # type: ignore[arg-type]
    mixture = (c[:, None, None] * teachers.softmax(2)).sum(0) / c.sum()
    (b,) = torch.autograd.grad(c.sum() * distillation(student, mixture.log()), student)
    torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_fedgkd_with_one_teacher_is_fedlsd() -> None:
    """FedLSD: CE + β KL(global ‖ local) at τ=1, with β = γ/2, from round 2 on."""
    start, student = models(2, None)
    client = build("FedGKD", gamma=0.6, buffer_size=1).client().double()
    client.teacher.net.double()  # type: ignore[attr-defined]
    client.receive(Message(2, {"global": start}, {"distil": 1}), {})
    client.net.load_state_dict(student)
    x, y = fixed_batch()
    p, q = oracle.forward(start, x)[1].softmax(1), oracle.forward(student, x)[1].softmax(1)
    lsd = -q[range(7), y].log().mean() + 0.3 * (p * (p / q).log()).sum(1).mean()
    assert client.training_step((x, y), 0).item() == pytest.approx(lsd.item(), abs=1e-12)


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
