"""The same numbers whoever trains, at every precision; and steps that really step."""

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from fedgkd_pl import (
    MLP,
    MOON,
    FedAvg,
    FedDistill,
    FedDistillPlus,
    FedGen,
    FedGKD,
    FedGKDPlus,
    FedGKDVote,
    FedProx,
    LocalEngine,
    OtherData,
)
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.transforms import ImageTransform
from fedgkd_pl.engines.base import Session
from fedgkd_pl.engines.local import InProcessSession
from fedgkd_pl.errors import SettingError
from fedgkd_pl.federation.client_trainer import ClientTrainer, Job
from fedgkd_pl.federation.message import Answer, ClientUpdate, Message, decode_state, encode_state
from fedgkd_pl.federation.performance import fused
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from tests.conftest import Table, fit, same
from tests.support.methods import CLASSES, EVERY, SETTINGS

METHODS: list[Any] = [
    FedAvg,
    partial(FedProx, mu=0.1),
    partial(MOON, mu=1.0),
    FedDistill,
    FedDistillPlus,
    partial(FedGen, hidden=8, generator_steps=2),
    partial(FedGKD, gamma=1.0, buffer_size=2),
    partial(FedGKDVote, lam=0.5, buffer_size=2),
    partial(FedGKDPlus, gamma=1.0),
]


PRODUCT = list(METHODS)  # at every precision in a pool


def title(method: Any) -> str:
    return str(getattr(method, "func", method).title)


METHODS += [  # what is not above, by itself
    partial(CLASSES[name], **SETTINGS.get(name, {}))
    for name in EVERY
    if name not in map(title, PRODUCT)
]


class Island(nn.Module):
    """A layer that asks for float32, as people write it for numerical reasons."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            weight = next(self.layer.parameters())
            out: Tensor = self.layer(x.to(weight.dtype))
            return out


def net() -> MLP:
    torch.manual_seed(0)
    made = MLP(12, [8], num_classes=3, projection=6)
    made.features[1] = Island(made.features[1])  # type: ignore[index, arg-type]
    return made


class Noisy:
    """A user's transform that draws and multiplies in whatever dtype is the default."""

    random = True

    def __init__(self) -> None:
        self.images = ImageTransform((0.5,) * 3, (0.25,) * 3, padding=1)
        self.mix = torch.eye(12) + 0.1

    def __call__(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        flat = self.images(images, generator).flatten(1)
        if generator is None:
            return flat
        noise = torch.rand(flat.shape, generator=generator).float()
        return (flat + noise) @ self.mix


class Pictures(Table):
    """2 × 2 images with crop, flip, noise and a product."""

    def load(self) -> Splits:
        random = torch.Generator().manual_seed(3)
        images = torch.randint(256, (len(self.y), 3, 2, 2), generator=random, dtype=torch.uint8)
        all_ = Examples(images, torch.from_numpy(self.y), Noisy())
        return Splits(all_, all_[:6])


def pictures() -> Pictures:
    public = OtherData(Pictures(sizes=(9,), val_fraction=0.1))
    return Pictures(sizes=(11, 7), batch_size=4, val_fraction=0.1, public=public)


class Recorder(LocalEngine):
    """Trains in this process, and keeps what every client was given and answered."""

    def open(self, job: Job, cohort_size: int) -> Session:
        self.job, self.seen = job, []
        seen = self.seen

        class Recording(InProcessSession):
            def run(self, message: Message, cohort: Sequence[int]) -> Iterator[Answer]:
                given = message.encode()
                states = {k: encode_state(v) for k, v in job.states.items()}
                for answer in super().run(message, cohort):
                    assert isinstance(answer, ClientUpdate), answer
                    seen.append((given, states.get(answer.client), answer.encode()))
                    yield answer

        return Recording(job, 1)


OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in ("64-true", "bf16-mixed")]


@pytest.mark.parametrize("precision", ["bf16-true", *OTHERS])
@pytest.mark.parametrize("method", METHODS, ids=title)
def test_a_client_does_not_see_the_servers_precision(method: Any, precision: str) -> None:
    """What a client answers within the server's round is what it answers alone in a process."""
    engine = Recorder(workers=1)
    optimizer = partial(SGD, lr=0.1, momentum=0.9)
    model = method(net(), optimizer=optimizer, engine=engine)
    limits = {"limit_val_batches": 0, "gradient_clip_val": 10.0}
    fit(model, pictures(), rounds=2, precision=precision, **limits)
    assert len(engine.seen) == 4
    alone = ClientTrainer(engine.job)
    for given, state, answer in engine.seen:
        told = ClientUpdate.decode(answer)
        kept = decode_state(state) if state else {}
        again = alone.update(Message.decode(given), told.client, kept)
        for group in ("weights", "extra", "state"):
            assert same(getattr(told, group), getattr(again, group)), (told.client, group)
        assert told.metrics == again.metrics


EVERYWHERE = [
    pytest.param(
        *(method, precision),
        marks=[] if title(method) == "FedGKD" else [pytest.mark.engines],
        id=f"{title(method)}-{precision}",
    )
    for method in PRODUCT
    for precision in ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-true")
]
MIXED = [
    pytest.param(method, "bf16-mixed", marks=[pytest.mark.long], id=f"{title(method)}-bf16-mixed")
    for method in METHODS[len(PRODUCT) :]
]


@pytest.mark.parametrize(("method", "precision"), EVERYWHERE + MIXED)
def test_a_pool_gives_the_same_at_every_precision(method: Any, precision: str) -> None:
    models = []
    for workers in (1, 2):
        torch.manual_seed(0)
        optimizer, engine = partial(SGD, lr=0.01), LocalEngine(workers=workers)
        models.append(method(net(), local_epochs=2, optimizer=optimizer, engine=engine))
        fit(models[-1], pictures(), rounds=2, precision=precision)
        assert not models[-1].results.failures
    assert same(models[0].global_state(), models[1].global_state())
    assert models[0]._client_states.keys() == models[1]._client_states.keys()
    for client, state in models[0]._client_states.items():
        assert same(state, models[1]._client_states[client])


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        (partial(SGD, lr=1.0), "bf16-true"),
        (partial(SGD, lr=1.0), "16-true"),
        (partial(SGD, lr=1.0, momentum=0.9), "bf16-true"),
        (partial(Adam, lr=0.05), "bf16-true"),
        (partial(AdamW, lr=0.05), "bf16-true"),
    ],
)
def test_half_precision_weights_move_as_whole_ones_do(optimizer: Any, precision: str) -> None:
    """One step from the same start goes the same way in all weights, rounding apart."""
    steps = []
    for each in ("32-true", precision):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 96), nn.ReLU(), nn.Linear(96, 3))
        before = {name: t.detach().clone() for name, t in layers.named_parameters()}
        model = FedAvg(layers, local_steps=1, optimizer=optimizer)
        fit(model, Table(sizes=(16,), batch_size=16), rounds=1, precision=each)
        after = model.global_state()
        steps.append(torch.cat([(after[n].float() - t).flatten() for n, t in before.items()]))
    whole, half = steps
    assert torch.cosine_similarity(whole, half, dim=0) > 0.98
    assert half.norm() == pytest.approx(whole.norm().item(), rel=0.1)


def test_only_kernels_that_are_right_are_taken() -> None:
    def of(kind: Any, dtype: torch.dtype, **settings: Any) -> Any:
        weight = nn.Parameter(torch.zeros(100, dtype=dtype))
        return fused(kind([weight], lr=0.1, **settings)).param_groups[0]["fused"]

    for kind in (SGD, Adam, AdamW):
        assert of(kind, torch.float32) is True and of(kind, torch.float64) is True
    # a kernel that leaves weights as they are is found out, whatever torch is installed
    weight = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5, fused=True).step()
    works = bool((weight == 0.5).all())
    assert (of(SGD, torch.bfloat16) is True) == works
    assert of(SGD, torch.float32, foreach=True) is None
    if not works:
        with pytest.raises(SettingError, match="fused"):
            of(SGD, torch.bfloat16, fused=True)


def test_a_wrong_fused_step_is_refused_at_start(run: Any) -> None:
    words = ("fit", "--config", "smoke.yaml", "--model.optimizer", "torch.optim.SGD")
    words += ("--model.optimizer.lr", "0.1", "--model.optimizer.fused", "true")
    if fused(SGD([nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))])).param_groups[0]["fused"]:
        pytest.skip("this torch's fused step for bfloat16 is right")
    code, _, errors = run(*words, "--trainer.precision", "bf16-true")
    assert code == 2 and "fused" in errors and len(errors.splitlines()) == 1


def test_a_frozen_layer_does_not_move() -> None:
    """The server's weight decay is for what is trained."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    layers[0].requires_grad_(False)
    before = {name: t.clone() for name, t in layers.state_dict().items()}
    server = partial(SGD, lr=1.0, weight_decay=0.05, momentum=0.5)
    model = FedAvg(layers, server_optimizer=server)
    fit(model, Table(sizes=(8, 5)), rounds=4)
    after = model.global_state()
    assert all(torch.equal(after[f"0.{n}"], before[f"0.{n}"]) for n in ("weight", "bias"))
    assert not torch.equal(after["1.weight"], before["1.weight"])


def test_layers_in_eval_mode_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    layers = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    with caplog.at_level(logging.WARNING, "fedgkd_pl"):
        fit(FedAvg(layers), Table(sizes=(8, 5)), rounds=1)
        assert "eval mode" not in caplog.text
        layers[1].eval()
        fit(FedAvg(layers), Table(sizes=(8, 5)), rounds=1)
    assert "1 of its 3 layers are in eval mode" in caplog.text
