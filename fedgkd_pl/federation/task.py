"""What there is to learn, and whether a method, a net, a loss and the data agree on it."""

import warnings
from inspect import signature
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
from torch import Tensor, nn

if TYPE_CHECKING:
    from fedgkd_pl.data.datamodule import FederatedDataModule
    from fedgkd_pl.federation.server import FederatedServer

# a class of every sample, a class of every pixel, labels of which several may be right, numbers
Task = Literal["classes", "dense", "labels", "values"]
TASKS: tuple[Task, ...] = ("classes", "dense", "labels", "values")
PRECISIONS = {
    torch.float64: "64-true",
    torch.bfloat16: "bf16-true",
    torch.float16: "16-true",
}
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
    """Raises a clear error if method, net, loss and data do not fit together."""
    task, loss, method = task_of(server, data), server.local_loss, type(server).__name__
    known = ", ".join(server.tasks)
    text = f"{method} is for {known}; the targets of {data.name} are {task}"
    require(task in server.tasks, "model", text)
    text = f"{method} distils samples of all classes, of which clients know one task at a time"
    require(data.tasks is None or server.takes_sequences, "tasks", text)
    if server.needs_outputs and server.distils_classes and task not in ("classes", "dense"):
        text = f"kl is of classes, and {data.name} has none: set it to mse"
        raise SettingError("distance", text)
    if is_own_module(server.net):
        text = "hide the outputs of other classes from the loss, which here is the module's own"
        require(data.tasks is None, "tasks", text)
        check_module(server, data)
        _try_module(server, data)
        server.new_scores(data)
        return
    has = "classes" if data.num_classes else "values"
    fits = loss.targets == has or (loss.targets == "labels" and has == "values")
    actual = data.test.targets.dtype
    text = f"{type(loss).__name__} needs {NEEDED[loss.targets]} ({data.name} has {actual})"
    require(fits, "loss", text)
    text = f"{type(loss).__name__} counts classes, of which {data.name} has one per pixel"
    require(task != "dense" or not loss.needs_counts, "loss", text)
    if loss.targets == "labels":
        targets = data.client_data.examples.targets
        binary = targets.ndim == 2 and bool(((targets == 0) | (targets == 1)).all())
        require(binary, "loss", f"{type(loss).__name__} needs {NEEDED['labels']}")
    for net in server.every_net():
        _check_shape(server, data, net)


class _Trial(FederatedClient):
    """A client that learns the task and nothing else."""

    outputs: Tensor | None = None

    def objective(self, x: Tensor, y: Tensor, teacher_output: Tensor | None) -> Objective:
        self.outputs, loss, parts = self.task_loss(x, y)
        return loss, parts


def _try_module(server: "FederatedServer", data: "FederatedDataModule") -> None:
    """Trains a copy of a module on two samples, as a client would, with its hooks and optimizer."""
    net, examples = server.net, data.client_data.examples
    some, cpu = examples[:2], torch.device("cpu")
    client = _Trial(net, server.optimizer, server.scheduler)
    client.num_classes, client.run_seed, client.local_loss = data.num_classes, 0, server.local_loss
    client.needs_outputs = server.needs_outputs
    weights = {name: tensor.detach().cpu() for name, tensor in net.state_dict().items()}
    kinds = {weight.dtype for weight in weights.values()}
    precision = next((text for kind, text in PRECISIONS.items() if kind in kinds), "32-true")
    own = ClientData(some, SingleClientIndex(0, len(some)), len(some), 0)
    job = Job(client, own, cpu, {"max_epochs": 1, "precision": precision}, {})
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ClientTrainer(job).update(Message(1, {"global": weights}), 0, {})
    except SettingError:
        raise
    except Exception as error:  # the user's may fail in any way
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        shape = tuple(some.transform(some.inputs, None).shape)
        text = f"a step of {type(net).__name__} fails on {data.name}, {shape}: {reason}"
        raise SettingError("module", text) from error
    if server.needs_outputs and client.outputs is not None:
        check_outputs(server, client.outputs.detach(), data)


def _check_shape(server: "FederatedServer", data: "FederatedDataModule", net: nn.Module) -> None:
    inputs = server.some_inputs(data)
    modes = {module: module.training for module in net.modules()}
    net.eval()
    try:
        with torch.no_grad():
            outputs = net(inputs)
            shape = tuple(outputs.shape)
    except Exception as error:  # a net of the user's may fail in any way
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SettingError(
            "net", f"does not take {data.name} inputs of shape {tuple(inputs.shape)}: {reason}"
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training
    targets = data.test[:2].targets.to(inputs.device)
    makers = [vars(cls)["__init__"] for cls in type(net).__mro__ if "__init__" in vars(cls)]
    named = any("num_classes" in signature(maker).parameters for maker in makers)
    _compare_shape(shape, tuple(targets.shape), data, "num_classes" if named else "net")
    server.new_scores(data).check_metrics(outputs, targets)


def _compare_shape(
    shape: tuple[int, ...], targets: tuple[int, ...], data: "FederatedDataModule", key: str
) -> None:
    """Refuses outputs of another shape than the targets ask for; ``key`` decides how many logits.

    More logits than classes are as wrong as fewer: a net of ImageNet's thousand would learn to
    avoid most of them.
    """
    if not data.num_classes:
        text = f"gives outputs of shape {shape} for targets of shape {targets}"
        hint = ": give targets a column, y[:, None]" if shape == (*targets, 1) else ""
        require(shape == targets, "net", text + hint)
        return
    logits = f"{data.name} has {data.num_classes} classes, the net gives {shape[-1]} logits"
    if len(targets) == 1:
        require(shape == (*targets, data.num_classes), key, logits)
        return
    expected = (targets[0], data.num_classes, *targets[1:])
    text = f"gives outputs of shape {shape}, not logits {expected} for the labels of all pixels"
    require(shape == expected, "net", text)
