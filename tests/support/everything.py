"""One method that uses every field of every message, for what must be alike on all engines."""

import json
from dataclasses import replace
from typing import Any

import torch
from fedgkd_pl import IID, MLP, ClassTasks, Digits, Engine, FedDF, HeldOut
from fedgkd_pl.data.examples import Examples, Scale
from fedgkd_pl.federation.client import Objective
from fedgkd_pl.federation.message import ClientUpdate, Message, Spec, Specs, State
from fedgkd_pl.methods.fedavg import FedAvgClient
from torch import Tensor
from typing_extensions import override

PRECISIONS = ["32-true", "64-true", "bf16-mixed"]


class EverythingClient(FedAvgClient):
    """Learns from its task, public inputs, what the server sends and what it kept."""

    uses_public = True

    @override
    def receive(self, message: Message, state: State) -> None:
        super().receive(message, state)
        self.shift = message.tensors["shift"]["by"]
        self.rate = message.numbers["rate"]
        self.times = state.get("times", torch.zeros(1, dtype=torch.int64)) + 1
        self.before = state.get("answers", torch.zeros(10))

    def _on_public(self) -> Tensor:
        assert self.public is not None
        x = self.public.transform(self.public.inputs[:8], None)
        return self.net(x.to(next(self.net.parameters()))).mean(0).float()  # type: ignore[no-any-return]

    @override
    def objective(self, x: Tensor, y: Tensor, teacher_output: Tensor | None) -> Objective:
        loss, parts = super().objective(x, y, teacher_output)
        target = (self.shift + self.before).to(x.device)
        seen = target > -100  # not the classes of another task
        return loss + self.rate * (self._on_public() - target)[seen].clamp(-9, 9).pow(
            2
        ).mean(), parts

    @override
    def reply(self) -> ClientUpdate:
        update = super().reply()
        with torch.no_grad():
            answers = self._on_public().cpu().clamp(-9, 9)
        update.metrics["times"] = float(self.times)
        update.extra = {"answers": answers, "half": answers.bfloat16()}
        update.state = {"answers": answers, "times": self.times}
        return update


class Everything(FedDF):
    """FedDF with two nets, whose clients send, get and keep tensors beside their models."""

    title = "Everything"
    client_class = EverythingClient
    takes_sequences = True
    keeps = ("shift",)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shift = {"by": torch.zeros(10)}

    @override
    def client_extra(self) -> Specs:
        return {"answers": Spec((10,), torch.float32), "half": Spec((10,), torch.bfloat16)}

    @override
    def client_state(self, number: int = 0) -> Specs:
        return {"answers": Spec((10,), torch.float32), "times": Spec((1,), torch.int64)}

    @override
    def broadcast(self) -> Message:
        self.told: list[Tensor] = []
        message = super().broadcast()
        return replace(message, tensors={"shift": self.shift}, numbers={"rate": 0.1 / self.round})

    @override
    def on_update(self, update: ClientUpdate) -> None:
        super().on_update(update)
        self.told += [update.extra["answers"], update.extra["half"].float()]

    @override
    def server_step(self, mean: State) -> None:
        super().server_step(mean)
        self.shift = {"by": torch.stack(self.told).mean(0)}


HIDDEN = [[8], [6, 6]]
SETTINGS: dict[str, Any] = {"distil_steps": 2, "validate_every": 1}
DATA: dict[str, Any] = {"num_clients": 5, "participation": 0.8, "batch_size": 20}
TASKS = {"tasks": 2, "rounds_per_task": 2}
ROUNDS = 3


def train(
    engine: Engine,
    precision: str | None = "32-true",
    method: dict[str, Any] | None = None,
    **trainer: Any,
) -> Everything:
    """Trains it for three rounds; ``method``: more of its settings."""
    from tests.conftest import fit, seed_everything  # not where Flower imports this file

    seed_everything(3, verbose=False)
    data = Digits(**DATA, partition=IID(), tasks=ClassTasks(**TASKS), public=HeldOut(0.1))
    nets = [MLP(hidden=hidden) for hidden in HIDDEN]
    model = Everything(nets=nets, engine=engine, **SETTINGS, **(method or {}))
    fit(model, data, ROUNDS, **({"precision": precision} | trainer))
    return model


def words() -> list[str]:
    """The flags of ``fit`` that train the same, where this file's folder is on the path."""
    nets = [{"class_path": "fedgkd_pl.MLP", "init_args": {"hidden": hidden}} for hidden in HIDDEN]
    flags = {f"data.{key}": value for key, value in DATA.items()}
    flags |= {"data.partition": "IID", "data.public": "HeldOut", "data.public.fraction": 0.1}
    flags |= {"data.tasks": "ClassTasks"} | {f"data.tasks.{k}": v for k, v in TASKS.items()}
    flags |= {f"model.{key}": value for key, value in SETTINGS.items()}
    flags |= {"model.nets": json.dumps(nets), "rounds": ROUNDS, "seed_everything": 3}
    start = ["--import", "everything", "--model", "everything.Everything", "--data", "Digits"]
    return start + [word for key, value in flags.items() for word in (f"--{key}", str(value))]


def assert_same(model: Everything, other: Everything) -> None:
    """All that a run has learned and counted is equal, bit for bit, wherever it was."""
    from tests.conftest import same

    def host(state: State) -> State:
        return {name: tensor.cpu() for name, tensor in state.items()}

    assert not model.results.failures and not other.results.failures
    for ours, theirs in zip(model.nets, other.nets, strict=True):
        assert same(host(ours.state_dict()), host(theirs.state_dict()))
    assert same(model.shift, other.shift) and model.shift["by"].abs().sum() > 0
    assert (model.bytes_down, model.bytes_up) == (other.bytes_down, other.bytes_up)
    assert model.client_states.keys() == other.client_states.keys()
    for client, state in model.client_states.items():
        assert same(state, other.client_states[client])


def examples(inputs: Tensor) -> Examples:
    """Some inputs with their numbers as labels."""
    return Examples(inputs, torch.arange(len(inputs)), Scale(1))
