"""Clients with nets of their own: FedMD and FedDF's prototypes against the bare-torch oracle."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fedgkd_pl import CFD, MLP, FedAvg, FedDF, FedDistill, FedMD, LocalEngine
from fedgkd_pl.data.examples import Batches, Examples
from fedgkd_pl.data.public import sampled_rows
from fedgkd_pl.errors import SettingError
from fedgkd_pl.methods.fedmd import DIGEST, PRIVATE, digest_loss
from fedgkd_pl.models.ensemble import Ensemble
from fedgkd_pl.seeds import derive
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import SGD, Adam

from tests.conftest import Table, fit, quiet_trainer, same
from tests.oracles import oracle_nets as oracle
from tests.support.methods import CLASSES, LOCAL, SERVER, Inputs, batches_of, cohorts, double

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


def clients_of(data: Table) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.from_numpy(x).double(), torch.from_numpy(y)) for x, y in data.arrays()]


def passes(length: int, size: int, seed: int, epochs: int = 1) -> list[torch.Tensor]:
    """The rows of every batch of some passes, found by drawing them again."""
    rows = torch.arange(length)
    numbered = Batches(
        Examples(rows, rows, lambda x, _: x), size, torch.Generator().manual_seed(seed)
    )
    return [batch for _ in range(epochs) for batch, _ in numbered]


def client_seed(round: int, client: int) -> int:
    torch.manual_seed(derive(0, "model", round, client))
    return int(torch.randint(2**62, ()))


def watched(model: FedAvg, see: Callable[[], Any]) -> list[Any]:
    """What is to be seen after every round."""
    seen: list[Any] = []
    step = model.server_step

    def keep(mean: Any) -> None:
        step(mean)
        seen.append(see())

    model.server_step = keep  # type: ignore[method-assign]
    return seen


def members(model: FedAvg) -> list[dict[str, torch.Tensor]]:
    assert isinstance(model.net, Ensemble)
    return [double(net.state_dict()) for net in model.net.nets]


def trained(model: FedAvg) -> list[int]:
    return [n for n, member in enumerate(model.net.members) if member.trained]  # type: ignore


def agree(ours: list[Any], theirs: list[Any]) -> None:
    for round, pairs in enumerate(zip(ours, theirs, strict=True), 1):
        for a, b in zip(*pairs, strict=True):
            for key in b:
                close = partial(torch.testing.assert_close, atol=1e-9, rtol=0)
                close(a[key], b[key], msg=f"{key}, round {round}")


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
            of = first if phase == "start" else own
            return [torch.from_numpy(batch) for batch in of(round, client)]
        seed = client_seed(round, client)
        if phase == "public":
            return passes(len(public), model.public_batch_size, seed, model.public_epochs)
        return passes(len(rows(round)), model.digest_batch_size, seed, model.digest_epochs)

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
    agree([each[0] for each in seen], expected["models"])
    assert [each[1] for each in seen] == expected["trained"]
    for (*_, ours), theirs in zip(seen, expected["consensus"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)
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
    agree(seen, expected["models"])
    names = [set(member) for member in seen[0]]
    assert names[0] > names[1] == names[2]  # client 0 has the deeper net


FEDDF = {name: value for name, value in SERVER["FedDF"][0].items()}


def feddf(workers: int = 1, **changes: Any) -> FedDF:
    own = {"local_epochs": 2, "optimizer": partial(SGD, **LOCAL), "engine": LocalEngine(workers)}
    return FedDF(**({"nets": nets()} | FEDDF | own | changes))


def prototypes(data: Table, model: FedDF, **changes: Any) -> dict[str, Any]:
    data.setup()
    assert data.public is not None
    public, own = data.public, batches_of(data, 2)

    def public_batches(round: int, kind: int) -> Iterator[torch.Tensor]:
        yield from passes(len(public), model.distil_batch_size, derive(0, "server", round), 20)

    return oracle.run_feddf(
        NETS,
        [double(net.state_dict()) for net in model.nets],
        clients_of(data),
        cohorts(data, ROUNDS),
        public=public.inputs,
        batches=lambda round, client: [torch.from_numpy(b) for b in own(round, client)],
        public_batches=public_batches,
        val=(data.val.inputs, data.val.targets),
        nets_of=[model.net_index(client) for client in range(3)],
        **(SERVER["FedDF"][2] | {"optimizer": "sgd"} | LOCAL | changes),
    )


@TWO_OF_THREE
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_whole_rounds_of_feddf_with_prototypes(weighting: Any, participation: float) -> None:
    data, model = table(participation=participation), feddf(weighting=weighting)
    expected = prototypes(data, model, weighted=weighting == "samples")
    seen = watched(model, lambda: (members(model), trained(model)))
    fit(model, data, ROUNDS, precision="64-true")
    agree([each[0] for each in seen], expected["models"])
    assert [each[1] for each in seen] == expected["trained"]
    absent = [t for t, means in enumerate(expected["means"]) if len(means) < 2]
    assert bool(absent) == (participation < 1)  # then a prototype has stayed as it was
    for name in "bytes_up", "bytes_down":
        assert getattr(model, name) == 2 * sum(sum(row.values()) for row in expected[name])


def test_feddf_without_steps_is_fedavg_of_every_group() -> None:
    """Clients 0 and 2 have one net, client 1 the other: two federations that do not meet."""
    together = feddf(distil_steps=0, weighting="samples")
    fit(together, table(), 3)
    for number, sizes in enumerate(((8, 6), (5,))):
        alone = Alone(number)
        model = FedAvg(nets()[number], 2, optimizer=partial(SGD, **LOCAL), engine=LocalEngine(1))
        fit(model, alone, 3)
        assert len(alone.drawn) == len(sizes)
        assert same(model.net.state_dict(), together.net.nets[number].state_dict())  # type: ignore


class Alone(Table):
    """The table, of which only the clients of one net are asked."""

    def __init__(self, number: int) -> None:
        super().__init__((8, 5, 6), batch_size=4, val_fraction=0.1, public=Labelled())
        self.drawn = [client for client in range(3) if client % 2 == number]

    def setup(self, stage: Any = None) -> None:
        super().setup(stage)
        self.population = replace(self.population, clients=self.drawn, size=len(self.drawn))


def several(name: str, workers: int = 1) -> FedAvg:
    """Every method that takes nets."""
    own = {"local_epochs": 2, "optimizer": partial(SGD, **LOCAL), "engine": LocalEngine(workers)}
    if name == "FedMD":
        return fedmd("SGD", workers)
    if name == "FedDF":
        return feddf(workers)
    if name == "FedDistill":
        return FedDistill(nets=nets(), coefficient=0.7, **own)
    settings: dict[str, Any] = SERVER["CFD"][0] | own
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
    settings: dict[str, Any] = SERVER["CFD"][0] | {"optimizer": partial(SGD, **LOCAL)}
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


@pytest.mark.parametrize(
    ("model", "data", "text"),
    [
        (lambda: fedmd(), {"public": Inputs()}, "public: FedMD begins with labels"),
        (lambda: fedmd(), {"public": None}, "public: FedMD needs public data"),
        (lambda: fedmd(nets_of=[0, 1]), {}, "nets_of: must have 3 entries"),
        (
            lambda: fedmd(nets=[nets()[0], nn.Linear(4, 2)]),
            {},
            r"net: must give outputs of shape \(2, 3\)",
        ),
        (lambda: fedmd(optimizer="Adam", nets=[nn.Bilinear(4, 4, 3)]), {}, "is of a Linear layer"),
        (lambda: feddf(nets=[nets()[0], nn.Linear(5, 3)]), {}, "net: fails on table"),
    ],
)
def test_what_does_not_fit_is_refused(model: Any, data: Any, text: str) -> None:
    with pytest.raises(SettingError, match=text):
        fit(model(), table(**data), 1)
