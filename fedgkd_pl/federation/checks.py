"""What is refused before a run begins: method, net, loss and data that do not fit, stock flags.

A round is one batch and one step of the server's Trainer, which has no loss of its own; see
docs/lightning.md for what works per round and what cannot.
"""

from collections.abc import Callable
from copy import deepcopy
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.examples import ClientData
from fedgkd_pl.data.partition import ClientIndex
from fedgkd_pl.errors import RunFailed, SettingError, require
from fedgkd_pl.federation.callback import FederatedCallback
from fedgkd_pl.federation.client import BatchNorms, FederatedClient, Objective
from fedgkd_pl.federation.client_trainer import ClientTrainer, Job, quiet
from fedgkd_pl.federation.evaluation import failing
from fedgkd_pl.federation.hardware import in_eval_mode
from fedgkd_pl.federation.message import Message
from fedgkd_pl.federation.optimizer import as_text, check_scheduler, first_optimizer
from fedgkd_pl.federation.own_module import check_module, check_outputs, has_outputs, is_own_module
from fedgkd_pl.storage.checkpoint import SafeCheckpointIO
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
)
from torch import Tensor, nn

if TYPE_CHECKING:
    from fedgkd_pl.federation.server import FederatedServer

SCORES = ("val/", "test/", "average/")
# a class of every sample, a class of every pixel, labels of which several may be right, numbers
Task = Literal["classes", "dense", "labels", "values"]
TASKS: tuple[Task, ...] = ("classes", "dense", "labels", "values")
NEEDED = {
    "classes": "class numbers, which are integers; floats: SquaredError, BinaryCrossEntropy",
    "labels": "a column of zeros and ones for every label, as float32",
    "values": "numbers that are no classes, as float32",
}
# flag → whether a value works, and what to do instead
FLAGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    # before limit_train_batches, which it sets
    "overfit_batches": (lambda n: not n, "is for batches: set data.partition for fewer samples"),
    "accumulate_grad_batches": (lambda n: n == 1, "a round is one step: nothing to accumulate"),
    "barebones": (lambda on: not on, "switches off what a round is recorded by"),
    "check_val_every_n_epoch": (lambda n: n is not None and n >= 1, "must be at least 1"),
    "gradient_clip_val": (lambda norm: norm is None or norm >= 0, "must not be negative"),
    "limit_train_batches": (
        lambda n: n is None or n >= 1,
        "a round is one batch: nothing would be trained; data.participation is for fewer clients",
    ),
    "max_steps": (lambda n: n == -1 or n >= 1, "a round is one step: must be at least 1, or -1"),
    "val_check_interval": (lambda n: n in (None, 1), "is for batches: set check_val_every_n_epoch"),
}
# callbacks that are about steps, losses or layers that the server's Trainer does not have
REFUSED: dict[type[Callback], str] = {
    StochasticWeightAveraging: "averages steps, not rounds: take EMAWeightAveraging or "
    "WeightAveraging",
    GradientAccumulationScheduler: "a round is one step: nothing to accumulate",
    BatchSizeFinder: "would train rounds to find it: set data.batch_size",
    LearningRateFinder: "would train rounds to find it: set lr of model.optimizer",
    BaseFinetuning: "thaws the server's net, which clients only copy: freeze layers of the net",
    SpikeDetection: "needs the loss of a step: a round has none",
    ModelPruning: "gives the server's net parameters that the clients' nets do not have",
}


def check_method(server: "FederatedServer", data: FederatedDataModule) -> None:
    """Raises a clear error if the net does not fit the data, or an optimizer the net."""
    server.client_nets.check(data.num_clients)
    server.client_nets.fill(server.net, data.num_clients)
    nets = server.every_net()
    for net in nets:
        data.check_net(net)
    text = f"must be at most the {data.cohort_size} clients of a round"
    require(server.min_clients <= data.cohort_size, "min_clients", text, server.min_clients)
    normed = any(BatchNorms(net).layers for net in nets)
    text = "must be at least 2 for a net with BatchNorm (or norm: group)"
    require(data.batch_size > 1 or not normed, "batch_size", text, data.batch_size)
    check_task(server, data)
    if server.is_personal and not server.engine.states_stay:
        text = "must be above 0: clients with parts of their own are scored on their own samples"
        for split in ("val", "test") if len(data.val) else ("test",):
            require(split in data.client_splits, f"client_{split}_fraction", text)
    clients = [("optimizer", server.client(number)) for number in range(len(server.nets))]
    for key, module in ("server_optimizer", server), *clients:
        with failing(key, "cannot be made"):
            try:
                check_scheduler(made := module.configure_optimizers())
                if module is not server:
                    server.client_optimizer = as_text(first_optimizer(made))
            except RuntimeError:
                if not is_own_module(server.net):  # which may ask for its Trainer: not there yet
                    raise


def check_fit(server: "FederatedServer", data: FederatedDataModule, trainer: Trainer) -> None:
    """Raises a clear error for flags, callbacks, a device or a precision that cannot work."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, FederatedCallback):
            text = f"{type(callback).__name__} is for models of all clients, which have own parts"
            fits = not server.is_personal or not callback.needs_whole
            require(fits, "callbacks", text)
            callback.check(server, data)
        unscored = server.is_personal and server.engine.states_stay
        monitor = str(getattr(callback, "monitor", None))
        text = "must be null: what clients keep stays on their nodes, so nothing is scored here"
        require(not unscored or not monitor.startswith(SCORES), "checkpoint.monitor", text, monitor)
    for number in range(len(server.nets)):
        client: Any = trainer.precision_plugin.convert_module(server.client(number))
        if client.optimizer is not None:  # a module's own may ask for its Trainer
            client.configure_optimizers()


def check_resumed(
    server: "FederatedServer", data: FederatedDataModule, saved: dict[str, Any]
) -> None:
    """Refuses other data, or an engine that lacks the clients' states."""
    require(
        saved["data"] == data.fingerprint(),
        "data",
        "the checkpoint was trained on other data: its samples, labels or partition differ",
    )
    stay = saved.get("states_stay", False)
    where = "with the clients" if stay else "in the checkpoint"
    require(
        not saved["client_states"] or stay == server.engine.states_stay,
        "engine",
        f"what clients keep between rounds is {where}: go on with the engine that began",
    )


def check_learned(server: "FederatedServer") -> None:
    """Raises an error at the end of a run that has learned nothing."""
    done = server.current_epoch
    if done and len(server.failed_rounds) >= done:
        raise RunFailed(f"none of {done} rounds counted: too few clients succeeded in each")
    for split in ("val", "test"):
        loss = server.report.get(f"{split}/loss", 0.0)
        if not isfinite(loss):
            raise RunFailed(f"after round {done} the global model's {split}/loss is {loss}")


def check_alone(trainer: Trainer) -> None:
    """Refuses, for every command, a CheckpointIO of somebody else's and several servers."""
    writer = trainer.strategy._checkpoint_io
    text = "must not have a CheckpointIO: ours keeps states in their files, and runs nothing"
    require(writer is None or isinstance(writer, SafeCheckpointIO), "plugins", text)
    text = "must be 1: the server takes one, the engine spreads clients over all GPUs"
    devices = trainer.num_devices * trainer.num_nodes
    require(devices == 1, "devices", text, devices)


def check_trainer(trainer: Trainer) -> None:
    """Raises a clear error for a flag or callback that would do something else than it says."""
    for name, (is_right, instead) in FLAGS.items():
        value = getattr(trainer, name, None)
        require(value is None or is_right(value), name, instead, value)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        for cls, reason in REFUSED.items():
            if isinstance(callback, cls):
                raise SettingError("callbacks", f"{name} {reason}")
        if isinstance(callback, ModelCheckpoint):
            _check_checkpoint(callback)


def _check_checkpoint(callback: ModelCheckpoint) -> None:
    by_steps = callback._every_n_train_steps or callback._train_time_interval
    if by_steps and str(callback.monitor).startswith(SCORES):
        raise SettingError(
            "callbacks",
            "ModelCheckpoint would name a round's file by the score of the round before: "
            "every_n_epochs instead of every_n_train_steps or train_time_interval",
        )


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
    own = ClientData(some, ClientIndex([np.arange(len(some))]), len(some), 0)
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
