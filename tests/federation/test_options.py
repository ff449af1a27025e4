"""What every method can be given: a loss, a rate over rounds, weights, public data; and steps."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fedgkd_pl import (
    FedAvg,
    FedNova,
    FedProx,
    HeldOut,
    LocalEngine,
    MarginAdjusted,
    OtherData,
    PriorAdjusted,
    RestrictedSoftmax,
    SimCLR,
)
from fedgkd_pl.errors import SettingError
from fedgkd_pl.federation.message import ClientUpdate
from fedgkd_pl.federation.optimizer import UnitGradient
from fedgkd_pl.methods.fedaux import contrastive
from fedgkd_pl.methods.fedopt import Adaptive
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, ReduceLROnPlateau

from tests.conftest import Table, fit, linear, quiet_trainer, same
from tests.oracles import oracle_more as more
from tests.support.methods import build, table

LOCAL: dict[str, Any] = {"optimizer": partial(SGD, lr=0.3), "engine": LocalEngine(1)}

# -- losses ----------------------------------------------------------------------------------------


def logits_and_labels() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    logits = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    return logits, torch.tensor([0, 1, 1, 3, 0, 1]), torch.tensor([5.0, 9.0, 0.0, 2.0]).double()


@pytest.mark.parametrize(
    "loss, kind, settings",
    [
        (PriorAdjusted(1.0), "prior", {"tau": 1.0}),
        (PriorAdjusted(0.3), "prior", {"tau": 0.3}),
        (MarginAdjusted(1.0), "fedlc", {"tau": 1.0}),
        (RestrictedSoftmax(0.0), "fedrs", {"alpha": 0.0}),
        (RestrictedSoftmax(0.5), "fedrs", {"alpha": 0.5}),
    ],
)
def test_losses_are_the_oracles(loss: Any, kind: str, settings: dict[str, float]) -> None:
    logits, y, counts = logits_and_labels()
    other = logits.detach().clone().requires_grad_()
    ours = loss(logits, y, counts)
    theirs = more.cross_entropy(other, y, {"kind": kind, **settings}, counts)
    ours.backward()
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-12)
    torch.testing.assert_close(logits.grad, other.grad, atol=1e-12, rtol=0)
    assert logits.grad is not None
    absent = logits.grad[:, 2]
    assert kind == "fedrs" or not absent.any()  # exactly


def test_a_client_of_one_class_learns_nothing_from_it() -> None:
    """Its loss and gradient are exactly 0, so its model stays as it came."""
    data = Table(sizes=(5,), batch_size=2)
    data.y[:] = 1
    model = FedAvg(linear(), loss=PriorAdjusted(), **LOCAL)
    before = {n: t.clone() for n, t in model.net.state_dict().items()}
    fit(model, data, 2)
    assert same(before, model.net.state_dict())
    logits = torch.tensor([[1.0, 0.5, 0.2, 0.1]])
    counts = torch.tensor([0.0, 4.0, 0.0, 0.0])
    value = RestrictedSoftmax(0.0)(logits, torch.tensor([1]), counts).item()
    assert value == pytest.approx(math.log(1 + 3 * math.exp(-0.5)))


# -- rates over rounds -----------------------------------------------------------------------------


class Rates(FedAvg):
    """Remembers the clients' rates of every round."""

    def on_update(self, update: ClientUpdate) -> None:
        self.seen = [*getattr(self, "seen", []), self.schedule.factor]  # type: ignore[union-attr]


def test_a_scheduler_over_rounds_is_one_rate_per_round() -> None:
    """Three rounds of one full batch, whose order does not matter, against three runs of one."""
    decaying = FedAvg(linear(), round_scheduler=partial(ExponentialLR, gamma=0.5), **LOCAL)
    fit(decaying, Table(), 3, precision="64-true")
    net: nn.Module = linear()
    for lr in (0.3, 0.15, 0.075):
        plain = FedAvg(net, optimizer=partial(SGD, lr=lr), engine=LocalEngine(1))
        fit(plain, Table(), 1, precision="64-true")
        net = plain.net
    for name, value in net.state_dict().items():
        torch.testing.assert_close(decaying.net.state_dict()[name], value, atol=1e-12, rtol=0)


@pytest.mark.parametrize("when", [{}, {"every_n_train_steps": 1}])
def test_a_scheduler_over_rounds_resumes(when: dict[str, Any], tmp_path: Path) -> None:
    cosine = partial(CosineAnnealingLR, T_max=6, eta_min=0.03)
    whole, first, second = (Rates(linear(), round_scheduler=cosine, **LOCAL) for _ in range(3))
    fit(whole, Table(), 6)
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * r / 6)) / 2 for r in range(6)]
    assert whole.seen[::2] == pytest.approx(expected)  # two clients a round
    save = ModelCheckpoint(tmp_path, save_last=True, **when)
    fit(first, Table(), 4, callbacks=[save], enable_checkpointing=True)
    quiet_trainer(max_epochs=6).fit(second, Table(), ckpt_path=tmp_path / "last.ckpt")
    assert second.seen == whole.seen[8:]
    assert same(whole.net.state_dict(), second.net.state_dict())


def test_a_scheduler_that_needs_a_score_is_refused() -> None:
    with pytest.raises(SettingError, match="round_scheduler"):
        FedAvg(linear(), round_scheduler=ReduceLROnPlateau, **LOCAL)


# -- steps and weights -----------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_a_unit_gradient_moves_as_far_as_a_weight_does(settings: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = SGD([weight], lr=0.05, dampening=0.0, **settings)
    schedule = ExponentialLR(optimizer, 0.9)
    for mu in (0.0, 0.3):
        unit, start = UnitGradient(mu), weight.item()
        optimizer.state.clear()
        for step in range(30):
            unit.step(optimizer)
            weight.grad = torch.ones_like(weight) + mu * (weight.detach() - start)
            optimizer.step()
            if step % 10 == 9:
                schedule.step()
        assert unit.moved == pytest.approx(start - weight.item(), abs=1e-12)


def test_the_effective_steps_of_the_paper() -> None:
    unit = UnitGradient()
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    for _ in range(720):
        unit.step(optimizer)
    assert unit.moved == pytest.approx(7110, abs=0.5)
    assert unit.moved == pytest.approx(more.effective_steps(0.9, 1.0, 720), rel=1e-12)


@pytest.mark.parametrize("name", ["SCAFFOLD", "FedNova"])
def test_steps_that_cannot_be_counted_are_refused(name: str) -> None:
    with pytest.raises(SettingError, match=f"optimizer: {name} counts the steps"):
        fit(build(name, optimizer=Adam), table(), 1)


def test_fednova_is_fedavg_for_equal_work() -> None:
    sizes: Any = {"sizes": (6, 6, 6)}
    for mu, plain in ((0.0, build("FedAvg")), (0.4, build("FedProx"))):
        nova = build("FedNova", mu=mu)
        assert isinstance(nova, FedNova) and isinstance(plain, FedProx if mu else FedAvg)
        fit(plain, table(**sizes), 3, precision="64-true")
        fit(nova, table(**sizes), 3, precision="64-true")
        for key, value in plain.net.state_dict().items():
            torch.testing.assert_close(nova.net.state_dict()[key], value, atol=1e-12, rtol=0)


def test_fedgkd_with_one_teacher_is_fedlsd_from_the_start() -> None:
    gkd = build("FedGKD", gamma=0.2, buffer_size=1, teach_from_start=True)
    lsd = build("FedLSD", beta=0.1, tau=1.0)
    fit(gkd, table(), 4)
    fit(lsd, table(), 4)
    assert same(gkd.net.state_dict(), lsd.net.state_dict())


def test_adaptive_steps_are_the_oracles_also_after_a_checkpoint() -> None:
    for rule in ("adam", "yogi", "adagrad"):
        torch.manual_seed(1)
        start = {"w": torch.randn(3, dtype=torch.float64)}
        moves = [torch.randn(3, dtype=torch.float64) for _ in range(4)]
        weight = nn.Parameter(start["w"].clone())
        make = partial(Adaptive, rule=rule, lr=0.1, betas=(0.9, 0.99))
        optimizer = make([weight])  # type: ignore[arg-type]
        state: dict[str, Any] = {}
        model = start
        settings = {"lr": 0.1, "b1": 0.9} | ({} if rule == "adagrad" else {"b2": 0.99})
        for move in moves:
            model, state = more.server_step(
                model, more.plus(model, {"w": move}), state, rule, **settings
            )
            weight.grad = -move
            optimizer.step()
            saved = optimizer.state_dict()
            optimizer = make([weight])  # type: ignore[arg-type]
            optimizer.load_state_dict(saved)
        torch.testing.assert_close(weight.detach(), model["w"], atol=1e-12, rtol=0)


# -- public data -----------------------------------------------------------------------------------


def test_a_held_out_part_is_nobodys_and_has_no_labels() -> None:
    from fedgkd_pl import IID

    data = Table(sizes=(20, 20), public=HeldOut(0.25), partition=IID())
    data.setup()
    assert data.public is not None and len(data.public) == 10
    assert not data.public.targets.any()
    owned = data.client_data.examples.inputs
    assert len(owned) == 30
    everything = torch.cat([owned, data.public.inputs])
    assert len(everything.unique(dim=0)) == 40 == len(torch.from_numpy(data.x).unique(dim=0))
    assert data.summary()["num_public"] == 10


def test_public_data_that_does_not_fit_is_told() -> None:
    with pytest.raises(SettingError, match=r"public: the inputs of table are \(5,\)"):
        Table(public=OtherData(Table(features=5))).setup()
    with pytest.raises(SettingError, match="samples: must be at most 13"):
        Table(public=OtherData(Table(), samples=99)).setup()
    for bad in (0.0, 1.0):
        with pytest.raises(SettingError, match="fraction"):
            HeldOut(bad)


# -- pre-training and nets -------------------------------------------------------------------------


def test_simclrs_loss_by_hand() -> None:
    outputs = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
    # rows 0 and 2 are one direction, 1 and 3 the other: each has its partner at 1, two others at 0
    expected = -math.log(math.exp(2) / (math.exp(2) + 2))
    assert contrastive(outputs, 0.5).item() == pytest.approx(expected, rel=1e-6)


def test_pre_training_changes_the_features_and_resumes(tmp_path: Path) -> None:
    make = partial(build, "FedAUX", pretraining=SimCLR(epochs=3, batch_size=5))
    plain, whole, first, second = build("FedAUX"), make(), make(), make()
    classifier = whole.net.classifier.weight.clone()  # type: ignore[union-attr, operator]
    fit(whole, table(), 3)
    fit(plain, table(), 3)
    start = whole.start  # type: ignore[attr-defined]
    assert not same(plain.start, start)  # type: ignore[attr-defined]
    assert torch.equal(start["classifier.weight"], classifier)
    save = ModelCheckpoint(tmp_path, save_last=True)
    fit(first, table(), 2, callbacks=[save], enable_checkpointing=True)
    quiet_trainer(max_epochs=3).fit(second, table(), ckpt_path=tmp_path / "last.ckpt")
    assert same(whole.net.state_dict(), second.net.state_dict())
