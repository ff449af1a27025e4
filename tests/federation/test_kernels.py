"""What makes it fast changes no result: layouts, fused steps, cached teachers, compiled steps."""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fedgkd_pl import MLP, MOON, FedAvg, FedDistillPlus, FedGKD, FedGKDVote, LocalEngine
from fedgkd_pl.data.examples import Batches
from fedgkd_pl.data.transforms import ImageTransform
from fedgkd_pl.federation import checks
from fedgkd_pl.federation.client import FederatedClient
from fedgkd_pl.federation.client_trainer import ClientTrainer, Job
from fedgkd_pl.federation.message import Message, State
from fedgkd_pl.federation.performance import (
    channels_last,
    fused,
    is_channels_last,
    missing_compiler,
)
from fedgkd_pl.federation.precision import has_bf16, slow_precision
from fedgkd_pl.methods.fedavg import FedAvgClient
from fedgkd_pl.methods.fedgkd import FedGKDClient
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from tests.conftest import Table, fit, same

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(bool(missing_compiler(CPU)), reason="no C++ compiler here")


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
    "FedGKD, mse": (
        FedGKD(mlp(), gamma=1.0, distance="mse"),
        Message(4, {"global": models(1)[0]}, {"distil": 1}),
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


def test_one_pass_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    half = half_of("FedGKD")
    _, message, _ = HALVES["FedGKD"]
    asked: list[int] = []
    teach = half.teach
    monkeypatch.setattr(half, "teach", lambda x: (asked.append(len(x)), teach(x))[1])
    data = Table(sizes=(23,), batch_size=8).client_data
    data.examples.transform.random = False  # type: ignore[attr-defined]
    for epochs, steps, cached in ((1, -1, False), (2, -1, True), (-1, 3, False), (-1, 4, True)):
        asked.clear()
        job = Job(half, data, CPU, {"max_epochs": epochs, "max_steps": steps}, {})
        ClientTrainer(job).update(message, 0, {})
        assert (asked == [23]) is cached, (epochs, steps)


def test_a_training_step_of_the_users_gets_inputs_and_labels() -> None:
    class Own(FedGKDClient):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            output = self.teach(x)
            assert output is not None
            return self.objective(x, y, output)[0]

    settings = {"gamma": 5.0, "distance": "kl", "temperature": 1.0}
    half = Own(mlp(), partial(SGD, lr=0.2, momentum=0.9), None, **settings)
    _, message, state = HALVES["FedGKD"]
    [(weights, _)] = train(half, message, state)
    [(expected, _)] = train(half_of("FedGKD"), message, state)
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, atol=1e-6, rtol=0)


def test_which_inputs_repeat() -> None:
    def images(**settings: Any) -> bool:
        transform = ImageTransform((0.5,), (0.5,), **settings)
        first = Table().client_data.examples
        return type(first)(first.inputs, first.targets, transform).repeat

    assert not images() and not images(padding=0) and not images(flip=False)
    assert images(padding=0, flip=False)
    table = Table().client_data.examples
    assert table.repeat

    class Noisy(type(table.transform)):  # type: ignore[misc]
        def __call__(self, x: Tensor, generator: Any) -> Tensor:
            return super().__call__(x, generator) + torch.rand(1)

    assert not type(table)(table.inputs, table.targets, Noisy(1)).repeat, "nor is it inherited"
    stranger = type(table)(table.inputs, table.targets, lambda x, generator: x)
    assert not stranger.repeat, "a transform that says nothing may draw anything"


def test_rows_of_the_teacher_output_belong_to_their_samples() -> None:
    examples = Table(sizes=(23,)).client_data.examples
    batches = Batches(examples, 8, torch.Generator().manual_seed(3))
    batches.teacher_output = examples.inputs * 2
    rows = 0
    for x, _, output in batches:
        assert torch.equal(output, 2 * x)
        rows += len(x)
    assert rows == 23


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
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n != "FedGKDVote")) for n in HALVES]
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


@pytest.mark.long
@needs_compiler
def test_a_compiled_run_in_a_pool(tmp_path: Path) -> None:
    def weights(**settings: Any) -> State:
        model = FedGKD(mlp(), local_epochs=2, engine=LocalEngine(workers=2), **settings)
        fit(model, Table(sizes=(16, 11, 8), batch_size=8), rounds=3)
        return model.net.state_dict()

    eager, compiled = weights(), weights(compile=True)
    for key, value in eager.items():
        torch.testing.assert_close(compiled[key], value, atol=1e-4, rtol=1e-3)


def test_without_a_compiler_it_is_one_line(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    words = ("--config", "quickstart.yaml", "--rounds", "1", "--model.compile", "true")
    code, _, err = run("fit", *words)
    assert code == 2 and err.startswith("error: model.compile: needs a C++ compiler (g++)"), err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


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


class Mixed(Viewing):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Conv3d(1, 1, 1)


class Images(Table):
    def __init__(self) -> None:
        super().__init__(sizes=(8, 5), features=2 * 64)
        self.x = self.x.reshape(-1, 2, 8, 8)


@pytest.mark.parametrize("build", [Viewing, Mixed, cnn])
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


@pytest.mark.parametrize(
    "build", [partial(SGD, lr=0.3, momentum=0.9, weight_decay=0.1), partial(Adam, lr=0.1)]
)
def test_fused_steps_are_the_same_steps(build: Any) -> None:
    def walk(wrap: Callable[[Optimizer], Optimizer]) -> Tensor:
        net = mlp().double()
        optimizer = wrap(build(net.parameters()))
        for step in range(5):
            optimizer.zero_grad()
            x = torch.full((2, 4), step / 3, dtype=torch.float64)
            net(x).square().sum().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    torch.testing.assert_close(walk(fused), walk(lambda o: o), atol=1e-12, rtol=1e-12)
    assert fused(build(mlp().parameters())).param_groups[0]["fused"] is True


def test_what_the_user_chose_stays() -> None:
    parameters = list(mlp().parameters())
    for way in ({"foreach": True}, {"foreach": False}, {"fused": False}, {"differentiable": True}):
        group = fused(SGD(parameters, lr=0.1, **way)).param_groups[0]  # type: ignore[arg-type]
        assert group["fused"] in (None, False), way

    class Own(SGD):
        pass

    assert fused(Own(parameters, lr=0.1)).param_groups[0]["fused"] is None


FAULTS = """
import resource, sys, torch
if sys.argv[1:]:
    from fedgkd_pl.federation.performance import keep_memory
    keep_memory()

def step():
    blocks = [torch.ones(2**21) for _ in range(4)]
    return sum(block[0] for block in blocks)

for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_kept(tmp_path: Path) -> None:
    """A step's 32 MB are 8,192 pages; without it, most of them are new in every step."""

    def faults(*words: str, **environment: str) -> int:
        command = [sys.executable, "-c", FAULTS, *words]
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | environment, check=True
        )
        return int(done.stdout)

    assert faults("keep") < 5000  # a block of 2,048 pages may be new once
    if faults() > 20000:  # another allocator may keep it anyway
        tuned = {"MALLOC_TRIM_THRESHOLD_": "131072"}
        assert faults("keep", **tuned) > 20000, "what the user chose stays"


def test_a_client_stays_on_its_device() -> None:
    """Lightning would move it to the host after every fit."""
    half = half_of("FedGKD")
    moved: list[Any] = []
    half.cpu = lambda: moved.append(1) or half  # type: ignore[method-assign, func-returns-value]
    train(half, *HALVES["FedGKD"][1:], clients=(0, 1))
    assert not moved
    assert half.trainer.strategy.optimizers == [], "nor does its momentum stay"


def test_emulated_precision_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not slow_precision("32-true", CPU) and not slow_precision("64-true", CPU)
    emulates = not has_bf16()
    assert slow_precision("bf16-mixed", CPU) is emulates
    for slow in (True, False):
        monkeypatch.setattr(checks, "slow_precision", lambda *_, slow=slow: slow)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fedgkd_pl"):
            fit(FedAvg(mlp()), Table(), rounds=1, precision="bf16-mixed")
        assert ("only emulates bf16-mixed" in caplog.text) is slow
