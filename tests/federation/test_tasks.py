"""What can be learned beside classes, and what is measured of it."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fedgkd_pl import (
    BinaryCrossEntropy,
    CrossEntropy,
    FedAvg,
    FederatedData,
    FedGKD,
    FedGKDVote,
    FedGMT,
    FedLSD,
    FedNTD,
    FedProx,
    LocalEngine,
    PriorAdjusted,
    ResNet8,
    SquaredError,
)
from fedgkd_pl.errors import SettingError
from fedgkd_pl.methods.fedgkd import distillation
from torch import nn
from torch.optim import SGD
from torchmetrics.classification import MulticlassAUROC, MultilabelAUROC, MultilabelF1Score
from torchmetrics.regression import R2Score

from tests.conftest import Table, fit, linear

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 0.5]) + 0.3)[:, None].astype(np.float32)
LABELS = (X > 0).astype(np.float32)
IMAGES = RNG.normal(size=(30, 1, 4, 4)).astype(np.float32)
PIXELS = (IMAGES[:, 0] > 0).astype(np.int64)
SETTINGS: dict[str, Any] = {"optimizer": partial(SGD, lr=0.1), "engine": LocalEngine(1)}


def arrays(x: Any = X, y: Any = Y, **kwargs: Any) -> Any:
    settings = {"num_clients": 2, "batch_size": 100, "seed": 0, "test_fraction": 0.2}
    return FederatedData.from_arrays(x, y, **settings | kwargs)


def net(outputs: int = 1) -> nn.Linear:
    return linear(3, outputs)


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [FedAvg, partial(FedProx, mu=0.4), partial(FedGKD, gamma=0.6)])
def test_two_rounds_of_regression_by_hand(method: Any) -> None:
    """Full-batch gradient steps in NumPy: FedAvg, a proximal term, distillation by squares."""
    distance = {"distance": "mse", "buffer_size": 1} if getattr(method, "func", 0) is FedGKD else {}
    model = method(net(), loss=SquaredError(), local_epochs=2, **distance, **SETTINGS)
    start = [p.detach().numpy().astype(float) for p in (model.net.weight, model.net.bias)]
    data = arrays()
    fit(model, data, 2)
    examples, index = data.client_data.examples, data.client_data.index
    w, b = start[0][0], start[1][0]
    for number in range(2):
        moved = []
        for client in range(2):
            x = examples.inputs[index[client]].numpy().astype(float)
            y = examples.targets[index[client]].numpy().astype(float)[:, 0]
            v, c = w.copy(), b
            for _ in range(2):
                error = x @ v + c - y
                gradient, shift = 2 * error @ x / len(x), 2 * error.mean()
                if method is not FedAvg and method.func is FedProx:
                    gradient, shift = gradient + 0.4 * (v - w), shift + 0.4 * (c - b)
                if method is not FedAvg and method.func is FedGKD and number:
                    away = x @ v + c - (x @ w + b)
                    gradient = gradient + 0.3 * 2 * away @ x / len(x)
                    shift = shift + 0.3 * 2 * away.mean()
                v, c = v - 0.1 * gradient, c - 0.1 * shift
            moved.append((len(x), v, c))
        total = sum(n for n, _, _ in moved)
        w = sum(n * v for n, v, _ in moved) / total
        b = sum(n * c for n, _, c in moved) / total
    assert model.net.weight[0].tolist() == pytest.approx(w.tolist(), rel=1e-5)
    assert model.net.bias.item() == pytest.approx(b, rel=1e-5)
    error = data.test.inputs.numpy() @ w + b - data.test.targets.numpy()[:, 0]
    expected = {"loss": (error**2).mean(), "mae": np.abs(error).mean()}
    expected["rmse"] = np.sqrt(expected["loss"])
    for name, value in expected.items():
        assert model.report[f"test/{name}"] == pytest.approx(value, rel=1e-4)
    assert "test/acc" not in model.report and "client/mse_mean" in model.report


# -- labels, pixels --------------------------------------------------------------------------------


def test_samples_with_several_labels() -> None:
    data = arrays(y=LABELS)
    f1 = MultilabelF1Score(num_labels=3, average="micro")
    metrics = {"micro": f1, "auroc": MultilabelAUROC(num_labels=3)}  # which takes no floats
    model = FedAvg(net(3), loss=BinaryCrossEntropy(), metrics=metrics, **SETTINGS)
    fit(model, data, 3)
    assert model.report["client/failed"] == 0 and 0 < model.report["client/auroc_mean"] < 1
    x, y = data.test.inputs, data.test.targets
    logits = model.net(x).detach()
    assert model.report["test/acc"] == pytest.approx(
        ((logits > 0) == y.bool()).float().mean().item()
    )
    loss = F.binary_cross_entropy_with_logits(logits, y)
    assert model.report["test/loss"] == pytest.approx(loss.item(), rel=1e-5)
    both = ((logits > 0) & y.bool()).sum()
    share = 2 * both / ((logits > 0).sum() + y.sum())
    assert model.report["test/micro"] == pytest.approx(share.item())


def test_a_class_for_every_pixel() -> None:
    data = arrays(IMAGES, PIXELS)
    torch.manual_seed(0)
    model = FedGKD(nn.Conv2d(1, 2, 1), local_epochs=5, **SETTINGS)
    fit(model, data, 8)
    logits = model.net(data.test.inputs).detach()
    right = (logits.argmax(1) == data.test.targets).float().mean().item()
    assert model.report["test/acc"] == pytest.approx(right) and right > 0.7
    loss = F.cross_entropy(logits, data.test.targets).item()
    assert model.report["test/loss"] == pytest.approx(loss, rel=1e-5)
    assert model.report["client/kd_mean"] > 0


def test_distillation_of_pixels_is_their_mean() -> None:
    torch.manual_seed(1)
    student, teacher = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    p, q = teacher.softmax(1), student.softmax(1)
    by_hand = (p * (p / q).log()).sum(1).mean()
    torch.testing.assert_close(distillation(student, teacher), by_hand)


# -- metrics ---------------------------------------------------------------------------------------


def test_metrics_asked_for_are_measured_of_splits_and_clients() -> None:
    auroc = MulticlassAUROC(num_classes=3)
    model = FedAvg(linear(), metrics={"auroc": auroc}, **SETTINGS)
    data = Table((30, 20), val_fraction=0.1)
    fit(model, data, 1)
    for split in ("val", "test"):
        examples = getattr(data, split)
        value = MulticlassAUROC(num_classes=3)(model.net(examples.inputs), examples.targets)
        assert model.report[f"{split}/auroc"] == pytest.approx(value.item())
    # one batch, so what a client has measured was measured before its step
    start = linear()
    values = [
        MulticlassAUROC(num_classes=3)(start(torch.from_numpy(x)), torch.from_numpy(y)).item()
        for x, y in data.arrays()
    ]
    assert model.report["client/auroc_mean"] == pytest.approx(sum(values) / 2)
    assert auroc.update_count == 0


# -- what is refused -------------------------------------------------------------------------------


pixels = partial(arrays, IMAGES, PIXELS)
REFUSED: dict[str, tuple[Any, Any]] = {  # by what the error says
    "loss: CrossEntropy needs class numbers": (lambda: FedAvg(net()), arrays),
    "zeros and ones": (lambda: FedAvg(net(), loss=BinaryCrossEntropy()), arrays),
    r"shape \(2, 1\) .*got \(2, 2\)": (lambda: FedAvg(net(2), loss=SquaredError()), arrays),
    'distance: must be "mse"': (lambda: FedGKD(net(), loss=SquaredError()), arrays),
    "model: FedLSD is for classes, dense": (lambda: FedLSD(net(), loss=SquaredError()), arrays),
    "model: FedGMT is for classes": (lambda: FedGMT(net(), loss=SquaredError()), arrays),
    "model: FedGKDVote is for": (lambda: FedGKDVote(net(), loss=SquaredError()), arrays),
    "FedNTD is for": (lambda: FedNTD(nn.Conv2d(1, 2, 1)), pixels),
    "PriorAdjusted counts classes": (
        lambda: FedAvg(nn.Conv2d(1, 2, 1), loss=PriorAdjusted()),
        pixels,
    ),
    r"outputs of shape \(2, 2, 4, 4\)": (lambda: FedAvg(nn.Conv2d(1, 3, 1)), pixels),
    "loss: SquaredError needs numbers": (lambda: FedAvg(linear(), loss=SquaredError()), Table),
    "metrics.acc: is measured": (lambda: FedAvg(linear(), metrics={"acc": R2Score()}), Table),
    "metrics: must be plain": (lambda: FedAvg(linear(), metrics={"a b": R2Score()}), Table),
    "metrics.r2: does not": (lambda: FedAvg(linear(), metrics={"r2": R2Score()}), Table),
    "metrics.each: must give one number": (
        lambda: FedAvg(linear(), metrics={"each": MulticlassAUROC(3, average=None)}),
        Table,
    ),
    "loss: Cross": (lambda: FedAvg(net(), loss=CrossEntropy()), partial(arrays, y=Y.round())),
    r"net: must give outputs of shape \(2, 3\)": (lambda: FedAvg(linear(classes=5)), Table),
    "net: fails on table": (lambda: FedAvg(ResNet8(3)), Table),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_does_not_fit_is_refused(text: str) -> None:
    make, data = REFUSED[text]
    with pytest.raises(SettingError, match=text):
        fit(make(), data(), 1)
