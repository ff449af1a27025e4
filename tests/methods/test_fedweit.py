"""FedWeIT against an oracle by somebody who had not seen it, and what is left without its parts."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import MLP, FedWeIT, LocalEngine, TaskAccuracy
from fedgkd_pl.errors import SettingError
from fedgkd_pl.methods.fedweit import (
    Memory,
    attend,
    compose,
    decomposed,
    draw,
    kept_channels,
    mean_of_sent,
    prune,
    received,
)
from fedgkd_pl.seeds import derive, seeded
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import SGD, Adam

from tests.conftest import fit, linear, quiet_trainer, same
from tests.oracles import oracle_fedweit as oracle
from tests.support.methods import batches_of, table
from tests.support.pieces import ROUNDS, Six, six_net

LAYERS = ["features.1.weight", "features.3.weight"]


def weit(**changes: Any) -> FedWeIT:
    settings: dict[str, Any] = {"lam1": 0.02, "lam2": 3.0, "optimizer": partial(Adam, lr=0.05)}
    settings |= {"local_epochs": 2, "engine": LocalEngine(1)}
    return FedWeIT(six_net(), **(settings | changes))


def double(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_vectors_of_the_notes() -> None:
    base, mask, adaptive, knowledge, attention = (
        double(oracle.VECTOR[name]) for name in ("B", "m", "A", "KB", "a")
    )
    theta = compose(base, mask, adaptive, attend(attention, knowledge))
    torch.testing.assert_close(theta, double(((1.1, 1.5), (1.5, 2.3))), atol=1e-15, rtol=0)
    total, count = torch.zeros(2, 2).double(), torch.zeros(2).double()
    for kept, sent in (((1, 0), ((2, 4), (9, 9))), ((1, 1), ((4, 8), (6, 10)))):
        total += double(kept)[:, None] * double(sent)
        count += double(kept)
    assert mean_of_sent(total, count).tolist() == [[3, 6], [6, 10]]
    nobody = mean_of_sent(total, count * double((1, 0)))
    assert nobody.tolist() == [[3, 6], [0, 0]]
    ten = torch.tensor([0.3, -0.1, 0.7, 1.0, -0.9, 0.2, 0.5, -0.6, 0.8, 0.4])
    assert kept_channels(ten, 0.3).tolist() == [0, 0, 1, 1, 1, 0, 1, 1, 1, 0]
    assert kept_channels(torch.tensor([2.0]), 0.3).tolist() == [0]
    assert prune(double((0.2, -0.1, 0.1, -0.3)), 0.1).tolist() == [0.2, 0, 0, -0.3]
    assert received(double((0, 2)), double((5, 6))).tolist() == [5, 2]


def test_with_masks_of_one_and_nothing_adaptive_it_is_b() -> None:
    """θ is B to the bit, and so is the gradient: a client that trains θ trains B."""
    base = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ones, zeros = torch.full((4,), torch.inf), torch.zeros(4, 3)
    theta = compose(base, ones, zeros, attend(torch.zeros(2), torch.randn(2, 4, 3)))
    assert torch.equal(theta, base)
    theta.square().sum().backward()
    assert base.grad is not None and torch.equal(base.grad, 2 * base.detach())


def test_the_drift_of_the_notes() -> None:
    """dB = diag(.1, .2): ‖dB ⊙ σ(m)‖² = .025, which λ2 = 100 makes 2.5."""
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 6))
    client = FedWeIT(net, optimizer=partial(SGD, lr=0.1)).client().double()
    groups = {"base": "B", "adaptive 0": "A", "mask 0": "m"}
    memory = Memory({g: {"0.weight": double(oracle.VECTOR[n])} for g, n in groups.items()}, [True])
    start = {n: t.double() for n, t in net.state_dict().items()}
    memory.begin({"0.weight": start["0.weight"]}, {}, clients=2)
    client.memory, client.start = memory, start
    client.net.load_state_dict(
        start | {"0.weight": double(oracle.VECTOR["B"]) + double(oracle.VECTOR["dB"])}
    )
    client._load(1)
    assert client.drift_term().item() == pytest.approx(0.025)
    assert client.lam2 * client.drift_term().item() == pytest.approx(2.5)
    drawn = memory.groups["mask 1"]["0.weight"].abs().sum() + start["0.weight"].abs().sum() / 3
    assert client.sparsity_term().item() == pytest.approx(0.3 + drawn.item())  # |A| of the first


class Bases(Callback):
    """The server's B after every round."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen.append({name: t.clone() for name, t in pl_module.base.items()})


class Missing(Six):
    """Client 1 is not there in the first round of the second task."""

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        sampler, draw = loader.sampler, loader.sampler.cohort
        sampler.cohort = lambda: [k for k in draw() if (sampler.epoch + 1, k) != (3, 1)]
        return loader


def forward(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for name in ("features.1", "features.3"):
        x = (x @ w[f"{name}.weight"].T + w[f"{name}.bias"]).relu()
    return x @ w["classifier.weight"].T + w["classifier.bias"]


@pytest.mark.parametrize("late", [False, True], ids=["all", "one late"])
@pytest.mark.parametrize(
    ("local", "settings", "clip"),
    [
        (partial(Adam, lr=0.001), {"optimizer": "adam", "lr": 0.001}, None),
        (
            partial(SGD, lr=0.02, momentum=0.9),
            {"optimizer": "sgd", "momentum": 0.9, "lr": 0.02},
            2.0,
        ),
    ],
    ids=["adam", "sgd, clipped"],
)
def test_three_tasks_of_three_clients(local: Any, settings: Any, clip: Any, late: bool) -> None:
    """All that the server and the clients have, after every round, to 1e-9.

    Where a gradient is rounding alone, Adam makes a step of it, by which the rate is chosen.
    """
    data = (Missing if late else Six)()
    model, bases, tested = weit(optimizer=local), Bases(), TaskAccuracy()
    start = {name: t.clone() for name, t in model.net.state_dict().items()}
    flags = {"precision": "64-true", "gradient_clip_val": clip, "callbacks": [bases, tested]}
    fit(model, data, ROUNDS, **flags)
    tasks = data.client_data.tasks
    assert tasks is not None and len({tuple(tasks.order(k)) for k in range(3)}) > 1
    cohorts = [[0, 1, 2] for _ in range(ROUNDS)]
    if late:
        cohorts[2] = [0, 2]

    def init(client: int, place: int, size: int) -> Any:
        """What is drawn in the package, in the client's first round of a task."""
        number = 2 * place + 1 + int(late and (client, place) == (1, 1))
        with seeded(derive(data.seed, "model", number, client)):
            found = {"m": {n: draw(len(start[n]), start[n]) for n in LAYERS}}
            return found | {"a": {n: draw(3, start[n]) if size else torch.zeros(0) for n in LAYERS}}

    arrays = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in data.arrays()]
    test = (torch.from_numpy(data.x[:25]), torch.from_numpy(data.y[:25]))
    expected = oracle.run(
        *(forward, start, LAYERS, arrays, cohorts),
        orders=[[tasks.groups[n] for n in tasks.order(k)] for k in range(3)],
        rounds_per_task=2,
        batches=batches_of(data, epochs=2),
        init=init,
        test=test,
        **(settings | {"lam1": 0.02, "lam2": 3.0, "clip": clip}),
    )
    close = partial(torch.testing.assert_close, atol=1e-9, rtol=0)
    for ours, theirs in zip(bases.seen, expected["B"], strict=True):
        for name in LAYERS:
            close(ours[name], theirs[name])
    for client, theirs in expected["clients"][-1].items():
        groups = Memory.read(model.client_states[client]).groups
        for name in LAYERS:
            close(groups["base"][name], theirs.B[name])
            close(groups["attention"][name], theirs.tasks[2].a[name])
            close(model.knowledge[client][name], expected["A_sent"][-1][client][name])
            for place, task in theirs.tasks.items():
                close(groups[f"mask {place}"][name], task.m[name])
                close(groups[f"adaptive {place}"][name], task.A[name])
                if place < 2:
                    close(groups[f"old {place}"][name], theirs.old[place][name])
        for place, task in theirs.tasks.items():
            for name, value in task.rest.items():
                close(groups[f"rest {place}"][name], value)
            for name, value in expected["thetas"][-1][client][place].items():
                close(model.model_of(client, place)[name], value)
    for row in tested.rows:
        number, client, place = (int(row[key]) for key in ("round", "client", "place"))
        if 0 < number and place <= row["learned"]:
            assert row["acc"] == expected["accuracy"][number - 1][client][place - 1]
    a = [expected["accuracy"][t] for t in (1, 3, 5)]
    lost = [oracle.forgetting([[*of[k].values()] for of in a]) for k in range(3)]
    assert model.report["task/forgetting"] == pytest.approx(np.mean(lost))


def test_a_resume_at_any_round_and_two_workers_give_the_same_bits(tmp_path: Path) -> None:
    """Three tasks of two rounds: within a task, at its end, at the beginning of the next."""
    models = [weit(), weit(engine=LocalEngine(2))]
    callbacks = [TaskAccuracy(), TaskAccuracy()]
    every = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    for model, callback, more in zip(models, callbacks, ([every], []), strict=True):
        flags = {"callbacks": [callback, *more], "enable_checkpointing": bool(more)}
        fit(model, Six(participation=0.67), ROUNDS, **flags)
        assert not model.results.failures
    for done in range(1, ROUNDS):
        models.append(weit())
        callbacks.append(TaskAccuracy())
        trainer = quiet_trainer(max_epochs=ROUNDS, callbacks=[callbacks[-1]])
        file = tmp_path / f"epoch={done - 1}.ckpt"
        trainer.fit(models[-1], Six(participation=0.67), ckpt_path=file)
    whole, *others = models
    assert len(others) == 6 and {row["learned"] for row in callbacks[0].rows} == {0, 1, 2, 3}
    for other, callback in zip(others, callbacks[1:], strict=True):
        assert same(whole.net.state_dict(), other.net.state_dict())
        assert same(whole.base, other.base)
        assert (whole.bytes_down, whole.bytes_up) == (other.bytes_down, other.bytes_up)
        assert callbacks[0].rows == callback.rows
        assert whole.client_states.keys() == other.client_states.keys()
        for client, state in whole.client_states.items():
            assert same(state, other.client_states[client])


def test_what_travels_is_counted_without_what_is_left_out() -> None:
    """Weights 7×4 and 5×7; of 7 channels 3 are left out (the 0.3 quantile's too), of 5 two."""
    model = weit(lam1=0.0)  # A keeps all of its entries
    seen: list[tuple[int, int]] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append((pl_module.results.bytes_down, pl_module.results.bytes_up))

    fit(model, Six(), 4, callbacks=[Watch()])
    base = 4 * (28 + 35) * 3
    sent = (4 * (4 * 4 + 3 * 7) + 1 + 1) * 3
    whole = 4 * (28 + 35) + 4 + 5  # a bit for each entry
    assert seen == [
        (base, sent),
        (base, sent + 3 * whole),
        (base + 9 * whole, sent),
        (base, sent + 3 * whole),
    ]


def test_data_without_tasks_is_one_task_that_never_ends() -> None:
    torch.manual_seed(0)
    model = FedWeIT(MLP(4, [6], 3), optimizer=partial(Adam, lr=0.05), engine=LocalEngine(1))
    fit(model, table(participation=0.67), 5)
    assert not model.results.failures and not model.knowledge
    places = {Memory.read(state).place for state in model.client_states.values()}
    assert places == {0} and model.report["client/sparsity_mean"] > 0


def test_the_weights_that_are_decomposed() -> None:
    assert decomposed(six_net()) == LAYERS
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 5))
    assert decomposed(net) == ["0.weight"]
    net[0].requires_grad_(False)
    assert decomposed(net) == []


def test_a_net_without_a_layer_to_decompose() -> None:
    model = FedWeIT(linear(), engine=LocalEngine(1))
    with pytest.raises(SettingError, match="net: FedWeIT decomposes the weights of Linear"):
        fit(model, table(), 1)
