"""Clients with nets of their own: FedMD and FedDF's prototypes against the bare-torch oracle."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fedgkd_pl import CFD, MLP, SCAFFOLD, FedAvg, FedDF, FedDistill, FedMD, LocalEngine
from fedgkd_pl.data.datamodule import sampled_rows
from fedgkd_pl.data.examples import Examples
from fedgkd_pl.errors import SettingError
from fedgkd_pl.methods.fedmd import DIGEST, PRIVATE, digest_loss
from fedgkd_pl.models.heads import Ensemble
from fedgkd_pl.seeds import derive
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import SGD, Adam

from tests.conftest import Table, fit, quiet_trainer, same
from tests.oracles import oracle_nets as oracle
from tests.support.methods import (
    CLASSES,
    FEDDF,
    LOCAL,
    SETTINGS,
    Inputs,
    agree,
    batches_of,
    client_seed,
    clients_of,
    cohorts,
    double,
    passes,
    watched,
)

ROUNDS = 4
LAYERS = (("features.1", "classifier"), ("features.1", "features.3", "classifier"))
NETS = [oracle.mlp(*layers) for layers in LAYERS]
TWO_OF_THREE = pytest.mark.parametrize("participation", [1.0, 0.67], ids=["all", "two of three"])


class Labelled(Inputs):
    """The ten rows, with labels: 5, 3 and 2 of the classes."""

    labelled = True

    def take(self, train: Examples, num_classes: int, generator: Any) -> Any:
        rows, public = super().take(train, num_classes, generator)
        return rows, replace(public, targets=torch.tensor([0, 1, 0, 2, 0, 1, 0, 2, 1, 0]))


def nets(count: int = 2) -> list[nn.Module]:
    torch.manual_seed(0)
    every: list[nn.Module] = [MLP(4, [6], 3), MLP(4, [5, 7], 3), MLP(4, [6], 3)]
    return every[:count]


def table(**kwargs: Any) -> Table:
    settings = {"sizes": (8, 5, 6), "batch_size": 4, "val_fraction": 0.1, "public": Labelled()}
    return Table(**(settings | kwargs))


def members(model: FedAvg) -> list[dict[str, torch.Tensor]]:
    assert isinstance(model.net, Ensemble)
    return [double(net.state_dict()) for net in model.net.nets]


def members_agree(ours: Any, theirs: Any) -> None:
    for a, b in zip(ours, theirs, strict=True):
        agree(a, b)


def trained(model: FedAvg) -> list[int]:
    return [n for n, member in enumerate(model.net.members) if member.trained]  # type: ignore


FEDMD: dict[str, Any] = {"public_samples": 6, "public_epochs": 2, "public_lr": 0.01}
FEDMD |= {"public_batch_size": 4, "start_epochs": 3, "digest_epochs": 2, "digest_batch_size": 4}
FEDMD |= {"digest_decay": 0.01, "distil_lr": 0.02, "local_epochs": 2}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (partial(Adam, lr=0.01), {"optimizer": "adam", "lr": 0.01}),
    "SGD": (partial(SGD, **LOCAL), {"optimizer": "sgd", **LOCAL}),
}


def fedmd(optimizer: str = "Adam", workers: int = 1, **changes: Any) -> FedMD:
    own = {"optimizer": OPTIMIZERS[optimizer][0], "engine": LocalEngine(workers)}
    return FedMD(**({"nets": nets()} | FEDMD | own | changes))


def reference(data: Table, model: FedMD, optimizer: str, rounds: int = ROUNDS) -> dict[str, Any]:
    data.setup()
    assert data.public is not None
    public, own = data.public, batches_of(data, model.local_epochs)
    first = batches_of(data, model.start_epochs)
    labelled = bool(data.public_source and data.public_source.labelled)

    def rows(round: int) -> torch.Tensor:
        seed = derive(0, "public", round)
        return sampled_rows(public, model.public_samples, labelled, seed)

    def batches(round: int, client: int, phase: str) -> list[torch.Tensor]:
        if phase in ("start", "revisit"):
            return (first if phase == "start" else own)(round, client)  # type: ignore[no-any-return]
        seed = client_seed(round, client)
        if phase == "public":
            return list(passes(len(public), model.public_batch_size, seed, model.public_epochs))
        return list(passes(len(rows(round)), model.digest_batch_size, seed, model.digest_epochs))

    kinds = [model.net_index(client) for client in range(3)]
    settings = {name: getattr(model, name) for name in ("public_lr", "distil_lr", "digest_decay")}
    return oracle.run_fedmd(
        NETS,
        [double(model.nets[kind].state_dict()) for kind in kinds],
        clients_of(data),
        cohorts(data, rounds),
        public=public.inputs,
        labels=public.targets if labelled else None,
        rows=rows,
        batches=batches,
        nets_of=kinds,
        **settings,
        **OPTIMIZERS[optimizer][1],
    )


@TWO_OF_THREE
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_whole_rounds_of_fedmd(optimizer: str, participation: float) -> None:
    data, model = table(participation=participation), fedmd(optimizer)
    expected = reference(data, model, optimizer)
    seen = watched(
        model, lambda: (members(model), trained(model), model.consensus["logits"].clone())
    )
    fit(model, data, ROUNDS, precision="64-true")
    members_agree([each[0] for each in seen], expected["models"])
    assert [each[1] for each in seen] == expected["trained"]
    agree([{"it": each[2]} for each in seen], [{"it": each} for each in expected["consensus"]])
    assert any(expected["mae"][t] for t in range(ROUNDS))  # something was digested
    item = 8 // 4  # of doubles, against the paper's floats
    for name in "bytes_up", "bytes_down":
        assert getattr(model, name) == item * sum(sum(row.values()) for row in expected[name])
    for client, state in model.client_states.items():
        names = [name for name, _ in model.nets[model.net_index(client)].named_parameters()]
        for prefix, phase in (PRIVATE, "private"), (DIGEST, "digest"):
            steps, m, v = expected["optimizers"][-1][client][phase]
            is_sgd = optimizer == "SGD" and phase == "private"
            parts = {"momentum_buffer": v} if is_sgd else {"exp_avg": m, "exp_avg_sq": v}
            for name in names:
                for part, values in parts.items():
                    ours = state[f"{prefix}: {name}/{part}"]
                    theirs = values.get(name, torch.zeros_like(ours))
                    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)
                if not is_sgd:
                    assert state[f"{prefix}: {name}/step"] == steps


def test_fedmd_of_data_without_labels_and_a_list_of_nets() -> None:
    data = table(participation=0.67, public=Inputs())
    model = fedmd(public_epochs=0, nets_of=[1, 0, 0])
    expected = reference(data, model, "Adam")
    seen = watched(model, lambda: members(model))
    fit(model, data, ROUNDS, precision="64-true")
    members_agree(seen, expected["models"])
    names = [set(member) for member in seen[0]]
    assert names[0] > names[1] == names[2]  # client 0 has the deeper net


def feddf(workers: int = 1, **changes: Any) -> FedDF:
    own = {"local_epochs": 2, "optimizer": partial(SGD, **LOCAL), "engine": LocalEngine(workers)}
    return FedDF(**({"nets": nets()} | SETTINGS["FedDF"] | own | changes))


def prototypes(data: Table, model: FedDF, **changes: Any) -> dict[str, Any]:
    data.setup()
    assert data.public is not None
    public = data.public
    return oracle.run_feddf(
        NETS[: len(model.nets)],
        [double(net.state_dict()) for net in model.nets],
        *(clients_of(data), cohorts(data, ROUNDS)),
        public=public.inputs,
        batches=batches_of(data, 2),
        public_batches=lambda t, _: passes(len(public), 4, derive(0, "server", t)),
        val=(data.val.inputs, data.val.targets),
        nets_of=[model.net_index(client) for client in range(3)],
        **({"steps": 7, "tau": 1.5, "optimizer": "sgd"} | FEDDF | LOCAL | changes),
    )


@TWO_OF_THREE
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("kinds", [1, 2])
def test_whole_rounds_of_feddf(kinds: int, weighting: Any, participation: float) -> None:
    """With one net for all, and with prototypes."""
    one: dict[str, Any] = {"nets": None, "net": nets()[0]} if kinds == 1 else {}
    data, model = table(participation=participation), feddf(weighting=weighting, **one)
    expected = prototypes(data, model, weighted=weighting == "samples")
    alone = kinds == 1
    seen = watched(model, lambda: [double(model.net.state_dict())] if alone else members(model))
    fit(model, data, ROUNDS, precision="64-true")
    members_agree(seen, expected["models"])
    assert not same(expected["models"][-1][0], expected["means"][-1][0])
    if not alone:
        assert trained(model) == expected["trained"][-1]
        absent = [t for t, means in enumerate(expected["means"]) if len(means) < 2]
        assert bool(absent) == (participation < 1)  # then a prototype has stayed as it was
    for name in "bytes_up", "bytes_down":
        assert getattr(model, name) == 2 * sum(sum(row.values()) for row in expected[name])


def test_feddf_stops_early_and_keeps_the_best() -> None:
    """The oracle's evaluations say so; the table's rounds must show it."""
    data, model = table(), feddf(distil_steps=40, patience=6)
    expected = prototypes(data, model, steps=40, patience=6)
    seen = watched(model, lambda: members(model))
    fit(model, data, ROUNDS, precision="64-true")
    members_agree(seen, expected["models"])
    assert any(made < 40 for steps in expected["steps"] for made in steps.values())


def several(name: str, workers: int = 1) -> FedAvg:
    """Every method that takes nets."""
    own = {"local_epochs": 2, "optimizer": partial(SGD, **LOCAL), "engine": LocalEngine(workers)}
    if name == "FedMD":
        return fedmd("SGD", workers)
    if name == "FedDF":
        return feddf(workers)
    if name == "FedDistill":
        return FedDistill(nets=nets(), coefficient=0.7, **own)
    settings: dict[str, Any] = SETTINGS["CFD"] | own
    return CFD(nets(3)[2], nets=nets(), **settings)


SEVERAL = ("FedMD", "FedDF", "FedDistill", "CFD")


@pytest.mark.parametrize("name", SEVERAL)
def test_a_pool_and_a_resume_change_nothing(name: str, tmp_path: Any) -> None:
    """Six rounds in one go; in two; and with two worker processes: the same bits."""
    whole, first, second, pool = (several(name, workers) for workers in (1, 1, 1, 2))
    data = {"participation": 0.67}
    fit(whole, table(**data), 6)
    save = ModelCheckpoint(tmp_path, save_last=True)
    fit(first, table(**data), 3, callbacks=[save], enable_checkpointing=True)
    quiet_trainer(max_epochs=6).fit(second, table(**data), ckpt_path=tmp_path / "last.ckpt")
    fit(pool, table(**data), 6)
    assert not whole.failed_rounds and not whole.results.failures
    for other in (second, pool):
        assert same(whole.state_dict(), other.state_dict())
        assert (whole.bytes_down, whole.bytes_up) == (other.bytes_down, other.bytes_up)
    again = type(first).load_from_checkpoint(tmp_path / "last.ckpt", **several_args(name))
    assert same(first.state_dict(), again.state_dict())


def several_args(name: str) -> dict[str, Any]:
    return {"nets": nets()} | ({"net": nets(3)[2]} if name == "CFD" else {})


def test_feddistill_of_equal_nets_is_feddistill() -> None:
    """Each client's own model is the same, whether its net is common or one of three."""
    own = {"local_epochs": 2, "optimizer": partial(SGD, **LOCAL), "engine": LocalEngine(1)}
    common = FedDistill(nets()[0], coefficient=0.7, **own)
    listed = FedDistill(nets=[nets()[0] for _ in range(3)], coefficient=0.7, **own)
    for model in (common, listed):
        fit(model, table(participation=0.67), 4)
    assert common.client_states.keys() == listed.client_states.keys()
    for client, state in common.client_states.items():
        assert same(state, listed.client_states[client])
        kept = {n.removeprefix("own model: "): t for n, t in state.items() if "own model" in n}
        assert same(kept, listed.net.nets[client].state_dict())  # type: ignore[union-attr]


def test_cfd_of_equal_nets_is_cfd() -> None:
    settings: dict[str, Any] = SETTINGS["CFD"] | {"optimizer": partial(SGD, **LOCAL)}
    common = CFD(nets()[0], engine=LocalEngine(1), **settings)
    listed = CFD(nets()[0], nets=[nets()[0], nets()[0]], engine=LocalEngine(1), **settings)
    for model in (common, listed):
        fit(model, table(participation=0.67), 3)
    assert same(common.net.state_dict(), listed.net.state_dict())
    assert (common.bytes_down, common.bytes_up) == (listed.bytes_down, listed.bytes_up)


def test_the_papers_vectors() -> None:
    logits = torch.tensor(oracle.FEDMD_LOGITS, dtype=torch.float64)
    own = logits[:1].clone().requires_grad_()
    loss = digest_loss(own, logits.mean(0, keepdim=True), None, 0.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.mean(0).tolist() == list(oracle.FEDMD_MEAN)
    assert loss.item() == pytest.approx(oracle.FEDMD_MAE)
    assert own.grad is not None
    assert own.grad[0].tolist() == pytest.approx(list(oracle.FEDMD_GRADIENT))
    last = nn.Linear(2, 1)
    last.weight.data = torch.tensor([[3.0, 4.0]])
    zero = torch.zeros(1, 3)
    assert digest_loss(zero, zero, last, 0.1).item() == pytest.approx(2.5)


def test_nets_that_nobody_has_are_refused() -> None:
    model = FedDistill(nets=nets(3), engine=LocalEngine(1))
    with pytest.raises(SettingError, match="nets: no client uses net 2"):
        fit(model, table(sizes=(8, 5)), 1)


@pytest.mark.parametrize("name", ["FedDF", "CFD"])
def test_a_last_batch_of_one_public_sample_with_batchnorm(name: str) -> None:
    """Ten public rows in batches of three: the fourth has one, which has no statistics."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    names = ["distil_steps"] if name == "FedDF" else ["client_steps", "server_steps"]
    own: dict[str, Any] = dict.fromkeys(names, 9)
    model = CLASSES[name](net, distil_batch_size=3, engine=LocalEngine(1), **own)
    fit(model, table(), 2)
    assert not model.failed_rounds and not model.results.failures
    assert all(module.training for module in model.net.modules())


def test_an_ensemble_is_of_those_that_have_trained() -> None:
    votes = torch.tensor(oracle.FEDMD_VOTES)
    constant = [nn.Linear(1, 2) for _ in votes]
    for net, vote in zip(constant, votes, strict=True):
        nn.init.zeros_(net.weight)
        net.bias.data = vote.clone()
    ensemble, x = Ensemble(constant), torch.zeros(4, 1)
    torch.testing.assert_close(ensemble(x), votes.mean(0).expand(4, 2))
    assert ensemble(x).argmax(1).tolist() == [0] * 4  # probabilities would pick 1
    ensemble.members[1].trained.fill_(True)  # type: ignore[union-attr, operator]
    torch.testing.assert_close(ensemble(x), votes[1].expand(4, 2))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: FedMD(nets()[0], nets=nets()), "nets: takes the place of net"),
        (lambda: FedMD(), "net: missing"),
        (lambda: FedAvg(nn.Sequential(nn.LazyLinear(3))), "net: has lazy layers"),
        (lambda: FedAvg(nn.LazyBatchNorm1d(affine=False)), "net: has lazy layers"),
        (lambda: SCAFFOLD(nn.LazyLinear(3)), "net: has lazy layers"),
        (lambda: FedMD(nets=[nets()[0], nn.LazyLinear(3)]), "net: has lazy layers"),
        (lambda: FedDF(nets=[nets()[0], nn.LazyLinear(3)]), "net: has lazy layers"),
        (lambda: CFD(nets()[0], nets=[nn.LazyLinear(3)]), "net: has lazy layers"),
        (lambda: FedDF(nets=nets(), nets_of=[0, 2]), r"nets_of: must be 0 to 1 \(got 2\)"),
        (lambda: FedDF(nets()[0], nets_of=[0]), "nets_of: needs nets"),
        (lambda: FedDF(nets=[]), "nets: is empty"),
        (lambda: FedDF(nets=nets(1) * 2), "nets: has one object twice"),
        (lambda: CFD(nets=nets()), "net: missing"),
        (lambda: FedMD(nets()[0], start_epochs=0), "start_epochs: must be at least 1"),
        (lambda: FedMD(nets()[0], digest_decay=-1.0), "digest_decay: must not be negative"),
    ],
)
def test_what_is_refused(make: Any, text: str) -> None:
    with pytest.raises(SettingError, match=text):
        make()


ONLY_CONV = nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 3, 1), nn.Flatten())


@pytest.mark.parametrize(
    ("model", "data", "text"),
    [
        (lambda: fedmd(), {"public": Inputs()}, "public: FedMD begins with labels"),
        (lambda: fedmd(), {"public": None}, "public: must have at least 1 inputs"),
        (lambda: fedmd(nets_of=[0, 1]), {}, "nets_of: must have 3 entries"),
        (
            lambda: fedmd(nets=[nets()[0], nn.Linear(4, 2)]),
            {},
            r"net: must give outputs of shape \(2, 3\)",
        ),
        (lambda: fedmd(optimizer="Adam", nets=[ONLY_CONV]), {}, "is of a Linear layer"),
        (lambda: feddf(nets=[nets()[0], nn.Linear(5, 3)]), {}, "net: fails on table"),
    ],
)
def test_what_does_not_fit_is_refused(model: Any, data: Any, text: str) -> None:
    with pytest.raises(SettingError, match=text):
        fit(model(), table(**data), 1)
