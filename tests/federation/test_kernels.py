"""What makes it fast changes no result: layouts, fused steps, cached teachers, compiled steps."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from fedgkd_pl import MLP, MOON, FedDistillPlus, FedGKD, FedGKDVote, LocalEngine
from fedgkd_pl.errors import SettingError
from fedgkd_pl.federation.client import FederatedClient
from fedgkd_pl.federation.client_trainer import ClientTrainer, Job
from fedgkd_pl.federation.hardware import channels_last, is_channels_last
from fedgkd_pl.federation.message import Message, State
from fedgkd_pl.federation.optimizer import fuse
from fedgkd_pl.methods.fedavg import FedAvgClient
from torch import Tensor, nn
from torch.optim import SGD

from tests.conftest import Table, fit, same

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler here")


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return MLP(4, [8], num_classes=3, projection=5)


def models(number: int, like: Callable[[], nn.Module] = mlp) -> list[State]:
    torch.manual_seed(1)
    return [
        {name: t + 0.3 * torch.randn_like(t) for name, t in like().state_dict().items()}
        for _ in range(number)
    ]


# method → its client half, and a message and a client's state with teachers in them
HALVES: dict[str, tuple[Any, Message, State]] = {
    "FedGKD": (
        FedGKD(mlp(), gamma=5.0),
        Message(4, dict(zip(("global", "teacher"), models(2), strict=True)), {"distil": 1}),
        {},
    ),
    "FedGKDVote": (
        FedGKDVote(mlp(), lam=2.0, buffer_size=3),
        Message(
            4,
            dict(zip(("global", "teacher0", "teacher1"), models(3), strict=True)),
            {"teacher0": 1.5, "teacher1": 0.2, "teacher2": 0.3},
        ),
        {},
    ),
    "MOON": (MOON(mlp(), mu=2.0), Message(4, {"global": models(1)[0]}), models(2)[1]),
}


def train(
    half: FederatedClient,
    message: Message,
    state: State,
    random: bool = False,
    clients: tuple[int, ...] = (0,),
    **job: Any,
) -> list[tuple[State, dict[str, float]]]:
    """The clients' models and reports; ``random`` claims that inputs do not repeat."""
    data = Table(sizes=(23, 8, 5, 17), batch_size=8).client_data
    data.examples.transform.random = random  # type: ignore[attr-defined]
    epochs = {"max_epochs": 3, "max_steps": -1, "gradient_clip_val": 10.0}
    trainer = ClientTrainer(Job(half, data, CPU, epochs, {}, **job))
    updates = [trainer.update(message, client, state) for client in clients]
    return [(update.weights, update.metrics) for update in updates]


def half_of(name: str) -> FederatedClient:
    model = HALVES[name][0]
    model.optimizer = partial(SGD, lr=0.2, momentum=0.9)
    half: FederatedClient = model.client()
    return half


@pytest.mark.parametrize("name", HALVES)
def test_cached_teachers_teach_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, message, state = HALVES[name]
    asked: list[int] = []

    def counting(half: FederatedClient) -> FederatedClient:
        teach = half.teach
        monkeypatch.setattr(half, "teach", lambda x: (asked.append(len(x)), teach(x))[1])
        return half

    [(weights, report)] = train(counting(half_of(name)), message, state, random=True)
    assert asked == [8, 8, 7] * 3, "without a cache, the teacher sees every batch"
    asked.clear()
    [(cached, told)] = train(counting(half_of(name)), message, state, random=False)
    assert asked == [23], "with it, every sample once"
    for key, value in weights.items():
        torch.testing.assert_close(cached[key], value, atol=1e-6, rtol=0)
    assert told == pytest.approx(report, abs=1e-6)
    [(alone, _)] = train(half_of(name), Message(4, {"global": message.models["global"]}), {})
    assert not same(alone, weights), "the teacher taught nothing"


# -- compiled --------------------------------------------------------------------------------------


@contextmanager
def no_more_code() -> Iterator[None]:
    """Any compilation is an error, as it would be a minute's stop in a user's run."""
    torch.compiler.set_stance("fail_on_recompile")
    try:
        yield
    finally:
        torch.compiler.set_stance("default")


@needs_compiler
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] * (n != "FedGKDVote")) for n in HALVES]
)
def test_compiled_is_the_same_and_compiled_once(name: str) -> None:
    """For all clients, ragged batches of 7, 5 and 1 samples, and other numbers in the message."""
    torch._dynamo.reset()
    _, message, state = HALVES[name]
    expected = train(half_of(name), message, state, random=True, clients=(0, 1, 2, 3))
    half = half_of(name)
    first = train(half, message, state, random=True, clients=(0,), compile=True)
    with no_more_code():
        later = train_again(half, message, state, clients=(1, 2, 3))
        for (weights, report), (compiled, told) in zip(expected, first + later, strict=True):
            for key, value in weights.items():
                torch.testing.assert_close(compiled[key], value, atol=1e-5, rtol=1e-4)
            assert told == pytest.approx(report, abs=1e-4)
        numbers = {key: value * 0.9 for key, value in message.numbers.items()}
        train_again(half, Message(5, message.models, numbers), state, clients=(0, 3))
    torch._dynamo.reset()


@needs_compiler
def test_compiled_clients_observe_the_same() -> None:
    """The logits that FedDistill gathers leave the compiled step beside the loss."""
    torch._dynamo.reset()
    logits = {"means": torch.ones(3, 3).cumsum(0), "holds": torch.ones(3)}
    message = Message(4, {"global": models(1)[0]}, {}, {"logits": logits})
    data = Table(sizes=(23,), batch_size=8).client_data
    updates = []
    for compiles in (False, True):
        half = FedDistillPlus(mlp(), coefficient=1.0).client()
        job = Job(half, data, CPU, {"max_epochs": 2, "max_steps": -1}, {}, compile=compiles)
        updates.append(ClientTrainer(job).update(message, 0, {}))
    eager, compiled = updates
    assert eager.metrics.keys() == {"loss", "acc", "ce", "kd"}
    assert compiled.metrics == pytest.approx(eager.metrics, abs=1e-4)
    labels = set(data.examples.targets.tolist())
    assert eager.extra["holds"].tolist() == [float(label in labels) for label in range(3)]
    torch.testing.assert_close(compiled.extra, eager.extra, atol=1e-4, rtol=1e-4)
    torch._dynamo.reset()


def train_again(
    half: FederatedClient, message: Message, state: State, clients: tuple[int, ...]
) -> list[tuple[State, dict[str, float]]]:
    """More clients on the same compiled half."""
    compiled = half._compiled
    assert compiled is not None
    half.compile_steps = lambda size: None  # type: ignore[method-assign]
    return train(half, message, state, random=True, clients=clients, compile=True)


# -- kernels ---------------------------------------------------------------------------------------


def cnn() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3))


def test_channels_last_is_a_layout_and_no_more() -> None:
    x = torch.randn(5, 2, 8, 8, dtype=torch.float64)
    plain, net = cnn().double(), cnn().double()
    channels_last(net, x)
    assert is_channels_last(net) and not is_channels_last(plain)
    assert net[3].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[operator,index,union-attr]
    assert not plain[3].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[operator,index,union-attr]
    torch.testing.assert_close(net(x), plain(x), atol=1e-12, rtol=0)
    client = FedAvgClient(net.float(), partial(SGD, lr=0.1))
    assert is_channels_last(client.net), "a copy has the layout"
    start = {name: t.clone() for name, t in cnn().state_dict().items()}
    client.begin(0, 5, None)
    client.receive(Message(1, {"global": start}), {})
    assert same(client.net.state_dict(), start)
    decoded = type(client.reply()).decode(client.reply().encode())
    assert same(decoded.weights, start), "another layout travels as the same numbers"


class Viewing(nn.Module):
    """As in torch's own tutorial: such a view cannot be taken of channels-last features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.conv(x).relu().view(-1, 4 * 36))
        return logits


class Images(Table):
    def __init__(self) -> None:
        super().__init__(sizes=(8, 5), features=2 * 64)
        self.x = self.x.reshape(-1, 2, 8, 8)


@pytest.mark.parametrize("build", [Viewing, cnn])
def test_any_net_with_convolutions_trains(build: Callable[[], nn.Module]) -> None:
    model = FedGKD(build(), engine=LocalEngine(workers=1))
    before = {name: t.clone() for name, t in model.net.state_dict().items()}
    fit(model, Images(), rounds=2)
    assert is_channels_last(model.net) is (build is cnn)
    assert not same(before, model.net.state_dict())


@pytest.mark.parametrize(
    "layer, last",
    [
        (nn.Conv2d(4, 8, 1, stride=2), False),
        (nn.Conv2d(32, 32, 1, stride=(1, 2), groups=4), False),
        (nn.Conv2d(4, 8, 1), True),
        (nn.Conv2d(4, 8, 3, stride=2, padding=1), True),
        (nn.Conv2d(16, 8, 1, stride=2), True),  # the shortcuts of our ResNets
    ],
)
def test_convolutions_whose_gradients_overrun_their_memory_keep_their_layout(
    layer: nn.Conv2d, last: bool
) -> None:
    """oneDNN's issue 6035: without this, a gradient that is wrong, or a process that is gone."""
    net = nn.Sequential(nn.Conv2d(3, layer.in_channels, 3, padding=1), layer)
    x = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    exact = deepcopy(net).double()
    channels_last(net, x)
    assert is_channels_last(net) is last
    for copy, inputs in ((net, x), (exact, x.double())):
        copy(inputs.contiguous()).square().mean().backward()
    for found, expected in zip(net.parameters(), exact.parameters(), strict=True):
        assert found.grad is not None
        torch.testing.assert_close(found.grad.double(), expected.grad, rtol=1e-4, atol=1e-6)


def test_sparse_gradients_and_hooks_of_a_method_are_not_fused() -> None:
    class Hooked(FedAvgClient):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for parameter in self.net.parameters():
                parameter.grad = torch.ones(parameter.shape)

    sgd = partial(SGD, lr=0.1)
    sparse = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    for client, expected in (
        (FedAvgClient(mlp(), sgd), True),
        (Hooked(mlp(), sgd), None),
        (FedAvgClient(sparse, sgd), None),
    ):
        assert client.configure_optimizers().param_groups[0]["fused"] is expected


def test_a_fused_step_of_half_precision_on_a_cpu_is_refused() -> None:
    with pytest.raises(SettingError, match="fused"):
        fuse(SGD(mlp().bfloat16().parameters(), lr=0.1, fused=True))


def test_a_client_stays_on_its_device() -> None:
    """Lightning would move it to the host after every fit."""
    half = half_of("FedGKD")
    moved: list[Any] = []
    half.cpu = lambda: moved.append(1) or half  # type: ignore[method-assign, func-returns-value]
    train(half, *HALVES["FedGKD"][1:], clients=(0, 1))
    assert not moved
    assert half.trainer.strategy.optimizers == [], "nor does its momentum stay"
