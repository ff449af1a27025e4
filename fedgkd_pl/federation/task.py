"""What there is to learn, and whether a method, a net, a loss and the data agree on it."""

from copy import deepcopy
from typing import TYPE_CHECKING, Literal

import torch
from fedgkd_pl.data.examples import ClientData
from fedgkd_pl.data.index import SingleClientIndex
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.federation.client import FederatedClient, Objective
from fedgkd_pl.federation.client_trainer import ClientTrainer, Job, quiet
from fedgkd_pl.federation.message import Message
from fedgkd_pl.federation.own_module import (
    check_module,
    check_outputs,
    has_outputs,
    is_own_module,
)
from fedgkd_pl.federation.precision import in_eval_mode
from fedgkd_pl.federation.scores import failing
from torch import Tensor, nn

if TYPE_CHECKING:
    from fedgkd_pl.data.datamodule import FederatedDataModule
    from fedgkd_pl.federation.server import FederatedServer

# a class of every sample, a class of every pixel, labels of which several may be right, numbers
Task = Literal["classes", "dense", "labels", "values"]
TASKS: tuple[Task, ...] = ("classes", "dense", "labels", "values")
NEEDED = {
    "classes": "class numbers, which are integers; floats: SquaredError, BinaryCrossEntropy",
    "labels": "a column of zeros and ones for every label, as float32",
    "values": "numbers that are no classes, as float32",
}


def task_of(server: "FederatedServer", data: "FederatedDataModule") -> Task:
    """What is learned, by the data and, of what is no class, the loss."""
    if data.num_classes:
        return "dense" if data.test.targets.ndim > 1 else "classes"
    return "labels" if server.local_loss.targets == "labels" else "values"


def require_classes(
    server: "FederatedServer", data: "FederatedDataModule", callback: object
) -> None:
    """Refuses a callback that compares classes where the logits of classes cannot be had."""
    text = f"{type(callback).__name__} needs the logits of classes, which this model does not have"
    fits = task_of(server, data) == "classes" and "acc" in server.new_scores(data).names
    require(fits and has_outputs(server.net), "callbacks", text)


def check_task(server: "FederatedServer", data: "FederatedDataModule") -> None:
    """Requires that method, net, loss and data fit together; a net is tried on two samples."""
    task, loss, method = task_of(server, data), server.local_loss, type(server).__name__
    text = f"{method} is for {', '.join(server.tasks)}; the targets of {data.name} are {task}"
    require(task in server.tasks, "model", text)
    text = f"{method} distils samples of all classes, of which clients know one task at a time"
    require(data.tasks is None or server.takes_sequences, "tasks", text)
    if server.needs_outputs and server.distils_classes and task not in ("classes", "dense"):
        raise SettingError("distance", 'must be "mse" for targets that are not classes')
    if is_own_module(server.net):
        text = "must not be set with a LightningModule, whose loss sees the outputs of all classes"
        require(data.tasks is None, "tasks", text)
        check_module(server)
        _try_module(server, data)
        server.new_scores(data)
        return
    has = "classes" if data.num_classes else "values"
    fits = loss.targets == has or (loss.targets == "labels" and has == "values")
    text = f"{type(loss).__name__} needs {NEEDED[loss.targets]} ({data.name} has"
    require(fits, "loss", f"{text} {data.test.targets.dtype})")
    text = f"{type(loss).__name__} counts classes, of which {data.name} has one per pixel"
    require(task != "dense" or not loss.needs_counts, "loss", text)
    if loss.targets == "labels":
        targets = data.client_data.examples.targets
        binary = targets.ndim == 2 and bool(((targets == 0) | (targets == 1)).all())
        require(binary, "loss", f"{type(loss).__name__} needs {NEEDED['labels']}")
    for net in server.every_net():
        _try_net(server, data, net)


class _Trial(FederatedClient):
    """A client that learns the task and nothing else."""

    outputs: Tensor | None = None

    def objective(self, x: Tensor, y: Tensor, teacher_output: Tensor | None) -> Objective:
        self.outputs, loss, parts = self.task_loss(x, y)
        return loss, parts


def _try_module(server: "FederatedServer", data: "FederatedDataModule") -> None:
    """Trains a copy of a module on two samples, as a client would, with its hooks and optimizer."""
    some, net = data.client_data.examples[:2], deepcopy(server.net).float()
    client = _Trial(net, server.optimizer, server.scheduler)
    client.num_classes, client.run_seed, client.local_loss = data.num_classes, 0, server.local_loss
    client.needs_outputs = server.needs_outputs
    weights = {name: tensor.detach().cpu() for name, tensor in net.state_dict().items()}
    own = ClientData(some, SingleClientIndex(0, len(some)), len(some), 0)
    job = Job(client, own, torch.device("cpu"), {"max_epochs": 1}, {})
    with failing("module", f"a step of {type(net).__name__} fails on {data.name}"), quiet():
        ClientTrainer(job).update(Message(1, {"global": weights}), 0, {})
    if server.needs_outputs and client.outputs is not None:
        check_outputs(server, client.outputs.detach(), data)


def _try_net(server: "FederatedServer", data: "FederatedDataModule", net: nn.Module) -> None:
    """Asks a net about two samples: a logit for every class, or a value for every target."""
    inputs = server.some_inputs(data)
    what = f"fails on {data.name}, inputs of shape {tuple(inputs.shape)}"
    with failing("net", what), in_eval_mode(net), torch.no_grad():
        outputs = net(inputs)
    targets = data.test[:2].targets.to(inputs.device)
    expected = tuple(targets.shape)
    if data.num_classes:
        expected = (expected[0], data.num_classes, *expected[1:])
    text = f"must give outputs of shape {expected} for {data.name}"
    require(tuple(outputs.shape) == expected, "net", text, tuple(outputs.shape))
    server.new_scores(data).check_metrics(outputs, targets)
