"""Half precision: told, guarded, and without loss where that is free."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from fedgkd_pl import MLP, FedAvg, FedGKD, FedGKDVote, LocalEngine, ResNet8
from fedgkd_pl.federation.client_trainer import restart
from fedgkd_pl.federation.hardware import channels_last, is_channels_last
from fedgkd_pl.federation.teachers import FrozenNet
from fedgkd_pl.methods.feddistill import label_distillation
from fedgkd_pl.methods.fedgkd import distillation
from fedgkd_pl.methods.moon import contrast
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from tests.conftest import Table, fit

CPU = torch.device("cpu")


def some(*shape: int, seed: int) -> Tensor:
    """Numbers as autocast's net gives them."""
    random = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(shape, generator=random)).bfloat16()


LOSSES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, int]]]] = {  # of which shapes
    "kl": (distillation, [(16, 10)] * 2),
    "mse": (partial(distillation, distance="mse"), [(16, 10)] * 2),
    "labels": (
        lambda logits, means: label_distillation(
            logits, torch.arange(16) % 10, means, torch.ones(10)
        ),
        [(16, 10), (10, 10)],
    ),
    "contrast": (partial(contrast, tau=0.5), [(16, 6)] * 3),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_computed_in_float32_under_autocast(name: str) -> None:
    """Of bfloat16's eight bits, a KL of nearly equal answers would have none left."""
    loss, shapes = LOSSES[name]
    inputs = [some(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    expected = loss(*(tensor.double() for tensor in inputs))
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(*inputs)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)


def test_votes_are_mixed_in_float32_under_autocast() -> None:
    client = FedGKDVote(MLP(4, [3], num_classes=3), lam=0.5).client()
    teacher = FrozenNet(client.net)
    client.teachers, client.half_gammas = [teacher, teacher], torch.tensor([0.2, 0.3])
    x = torch.linspace(-1, 1, 8).view(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        mixture = client.teach(x)
        logits = teacher(x)
    assert mixture is not None and mixture.dtype == torch.float32
    log_p = logits.float().log_softmax(1)
    torch.testing.assert_close(mixture[:, :3], 0.5 * log_p.exp(), atol=1e-6, rtol=0)
    torch.testing.assert_close(mixture[:, 3], 0.5 * (log_p.exp() * log_p).sum(1), atol=1e-6, rtol=0)


def test_the_global_model_is_evaluated_in_float32() -> None:
    """So that its scores do not depend on what its clients train in."""
    torch.manual_seed(0)
    model, data = FedAvg(MLP(4, [16], num_classes=3), engine=LocalEngine(1)), Table(sizes=(30, 30))
    trainer = fit(model, data, rounds=1, precision="bf16-mixed")
    examples = data.test
    with torch.no_grad():
        logits = model.net(examples.transform(examples.inputs, None))
        expected = nn.functional.cross_entropy(logits, examples.targets).item()
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model.net(examples.transform(examples.inputs, None))
        assert rounded.dtype == torch.bfloat16
    assert trainer.callback_metrics["test/loss"].item() == pytest.approx(expected, rel=1e-6)
    said = torch.cat([torch.as_tensor(batch) for batch in trainer.predict(model, data) or ()])
    assert torch.allclose(said, logits.softmax(1), rtol=1e-6)


@pytest.mark.parametrize("method", [FedGKD, FedGKDVote])
def test_a_teacher_in_bfloat16(method: Any) -> None:
    """It answers in bfloat16, and a float32 student's loss is off by its rounding alone."""
    torch.manual_seed(0)
    net = MLP(4, [16], num_classes=3)
    other = {name: weight + 0.1 for name, weight in net.state_dict().items()}
    x, y = torch.randn(32, 4), torch.arange(32) % 3
    gradients = []
    for kind in ("same", "bf16"):
        client = method(deepcopy(net), teacher_precision=kind).client()
        teacher = FrozenNet(client.net, client.teacher_precision)
        teacher.load(other, CPU)
        client.teacher, client.teachers, client.distil = teacher, [teacher], True
        client.half_gammas = torch.tensor([0.1])
        assert teacher(x).dtype == (torch.bfloat16 if kind == "bf16" else torch.float32)
        loss, parts = client.objective(x, y, client.teach(x))
        assert loss.dtype == torch.float32 and parts["kd"] > 0
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in client.net.parameters()]))
    apart = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    assert 0 < apart < 2e-3


@pytest.mark.parametrize(("given", "starts_at"), [(65536.0, 1024.0), (16.0, 16.0)])
def test_every_client_in_16_mixed_starts_at_a_scale_that_fits(
    given: float, starts_at: float
) -> None:
    """At torch's first scale of 65,536, a gradient of 1 is beyond float16: its step is skipped."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=given))
    trainer = Trainer(plugins=[plugin], accelerator="cpu", logger=False, barebones=True)
    for _ in range(2):
        restart(trainer)
        scaler = plugin.scaler
        assert scaler is not None
        weight = nn.Parameter(torch.ones(1))
        scaled = scaler.scale((weight * torch.ones(1)).sum())
        assert scaled.item() == starts_at and torch.tensor(starts_at).half().isfinite()
        scaler._scale = torch.tensor(2.0)  # as a client may leave it


def test_channels_last_is_for_devices_whose_group_norm_keeps_it() -> None:
    x = torch.zeros(2, 3, 32, 32)
    for norm, kind, last in (
        ("group", "cpu", True),
        ("group", "cuda", False),
        ("batch", "cuda", True),
        ("group", "xpu", True),
    ):
        net = ResNet8(norm=norm)
        channels_last(net, x, torch.device(kind))
        assert is_channels_last(net) is last, (norm, kind)
