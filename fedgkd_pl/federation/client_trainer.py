"""One Lightning Trainer for all clients of a worker, as clean for each as a new one."""

import logging
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from fedgkd_pl.data.examples import ClientData
from fedgkd_pl.federation.exchange import taken_apart
from fedgkd_pl.federation.hardware import plain_precision
from fedgkd_pl.federation.message import ClientUpdate, Message, State
from fedgkd_pl.federation.nets import NetOf
from fedgkd_pl.federation.own_module import ModuleHooks, is_own_module
from fedgkd_pl.seeds import derive, seeded
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy

if TYPE_CHECKING:
    from fedgkd_pl.federation.client import FederatedClient


# of 16-mixed, at a client's first step: at torch's 65,536 every client would skip its first steps
LOSS_SCALE = 1024.0


@dataclass
class Job:
    """All that a worker needs to train any client of a run.

    Attributes:
        client: the client module; of the first net, where clients have several.
        data: every client's.
        trainer: other arguments of the client's Trainer, inherited from the server's.
        states: what clients keep between their rounds, by client id.
        compile: whether to compile the clients' steps.
        accelerator: the server's, copied for the clients' Trainer; None for Lightning's own.
        precision: the server's plugin, copied likewise; None for Lightning's own by its name.
        others: the client modules of the other nets.
        net_of: who has which; None where all have one.
    """

    client: "FederatedClient"
    data: ClientData
    device: torch.device
    trainer: dict[str, Any]
    states: Mapping[int, State]
    compile: bool = False
    accelerator: Accelerator | None = None
    precision: Precision | None = None
    others: "list[FederatedClient]" = field(default_factory=list)
    net_of: NetOf | None = None

    def on(self, device: torch.device) -> "Job":
        """The job of a worker with another device.

        Lightning's own plugins belong to a kind of device and are made anew for another one.
        """
        if device.type == self.device.type:
            return replace(self, device=device)
        lightnings = type(self.precision).__module__.startswith("lightning.")
        own = None if lightnings else self.precision
        return replace(self, device=device, accelerator=None, precision=own)


class ClientTrainer:
    """Trains one client after the other: a pure function of (message, state, data, seed)."""

    def __init__(self, job: Job) -> None:
        self.clients = [module.to(job.device) for module in (job.client, *job.others)]
        self.client = self.clients[0]  # that of the client at work
        self.net_of = job.net_of
        public = None if self.client.public is None else self.client.public.to(job.device)
        for module in self.clients:
            if job.compile:
                module.compile_steps(job.data.batch_size)
            module.public = public
        self.device = job.device
        self.load_data(job.data)
        net = self.client.net
        arguments = dict(job.trainer)
        plugins: list[Any] = [LightningEnvironment()]  # a client is no node of a cluster's job
        if job.precision is not None:
            arguments.pop("precision", None)
            plugins.append(deepcopy(job.precision))
        with quiet():
            self.trainer = Trainer(
                **arguments,
                callbacks=[ModuleHooks(net)] if is_own_module(net) else None,
                accelerator=deepcopy(job.accelerator) or job.device.type,
                devices=1 if job.device.index is None else [job.device.index],
                strategy=StayOnDevice(job.device),
                plugins=plugins,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                limit_val_batches=0,
                num_sanity_val_steps=0,
            )
        # Signals are the server's: Lightning would set all 62 again for every client, and
        # let a worker that ignores SIGTERM give up its client.
        self.trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        self.length = self.trainer.fit_loop.max_epochs, self.trainer.fit_loop.epoch_loop.max_steps

    def load_data(self, data: ClientData) -> None:
        """Takes data to the device: of all clients, or of those that are trained next."""
        self.data = replace(data, examples=data.examples.to(self.device))

    def close(self) -> None:
        """Ends what reads samples for it; the next client starts it again."""
        for examples in (self.data.examples, self.client.public):
            if examples is not None:
                examples.close()

    def update(self, message: Message, client: int, state: State) -> ClientUpdate:
        """Trains one client from w_t; ``state`` is empty if it never took part."""
        start = time.perf_counter()
        seed = derive(self.data.seed, "model", message.round, client)
        if self.net_of is not None:
            number = self.net_of(client)
            self.client, message = self.clients[number], message.for_net(number)
        with plain_precision(self.device), seeded(seed):
            batches = self.data.batches(client, message.round)
            samples = len(batches.examples)
            personal, state = taken_apart(state)
            self.client.begin(client, samples, self.data.task(client, message.round), personal)
            self.client.receive(message, state)
            restart(self.trainer)
            self._set_length(self.client.own_epochs)
            try:
                self.trainer.fit(self.client, batches)
            except SystemExit as error:  # of the user's net or data; Lightning's answer to Ctrl-C
                if isinstance(error.__context__, KeyboardInterrupt):
                    raise
                raise RuntimeError(f"called sys.exit({error.code})") from error
            update = self.client.reply()
            update.state = update.state | self.client.own_parts()
        teacher = self.client.teacher_seconds
        update.seconds = {"teacher": teacher, "student": time.perf_counter() - start - teacher}
        return update

    def _set_length(self, epochs: int | None) -> None:
        """For the next client; None for what is usual in the job."""
        loop = self.trainer.fit_loop
        length = self.length if epochs is None else (epochs, -1)
        loop.max_epochs, loop.epoch_loop.max_steps = length


class StayOnDevice(SingleDeviceStrategy):
    """A module that stays on its device from client to client.

    Lightning's own moves it to the host after every ``fit`` and empties the GPU's cache before
    and after it.
    """

    def setup(self, trainer: Trainer) -> None:
        """Sets the accelerator up for the first client only."""
        super().setup(trainer)
        assert self.accelerator is not None
        self.accelerator.setup = lambda trainer: None  # type: ignore[method-assign]

    def teardown(self) -> None:
        """Drops the client's optimizer, and that is all."""
        self.optimizers = []
        self.lr_scheduler_configs = []


def restart(trainer: Trainer) -> None:
    """Makes a used Trainer train again from epoch 0, as a new one would.

    A second ``fit`` on the same Trainer trains zero steps: the loops remember that they are done.
    Nothing else touches their private progress; a test compares it with a new Trainer.
    """
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    fit_loop.epoch_progress.reset()
    epoch_loop.batch_progress.reset()
    epoch_loop.scheduler_progress.reset()
    epoch_loop.automatic_optimization.optim_progress.reset()
    epoch_loop.manual_optimization.optim_step_progress.reset()
    epoch_loop._batches_that_stepped = 0
    # the loss scale of one client's half precision must not reach the next
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        trainer.precision_plugin.scaler = type(scaler)(  # type: ignore[attr-defined]
            device=scaler._device, init_scale=min(scaler._init_scale, LOSS_SCALE)
        )


@contextmanager
def quiet() -> Iterator[None]:
    """No line per client from Lightning ("GPU available", "max_epochs reached", ...).

    It is entered for every client, so it sets no level and resets no warnings: the first costs as
    much as a step of a small net, the second shows warnings again that were shown already.
    """
    names = logging.root.manager.loggerDict
    loggers = [x for x in _lightnings(len(names)) if _errors_only not in x.filters]
    for logger in loggers:
        logger.addFilter(_errors_only)
    warnings.filters.insert(0, _OF_LIGHTNING)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        warnings.filters.remove(_OF_LIGHTNING)  # type: ignore[attr-defined]
        for logger in loggers:
            logger.removeFilter(_errors_only)


_OF_LIGHTNING = ("ignore", None, Warning, re.compile("lightning.*|torchmetrics.*"), 0)


def _errors_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@lru_cache(maxsize=1)
def _lightnings(number: int) -> list[logging.Logger]:
    """Lightning's loggers; looked for again when there are more loggers than before."""
    loggers = [value for value in logging.root.manager.loggerDict.values()]
    homes = ("lightning.pytorch", "lightning.fabric")
    return [x for x in loggers if isinstance(x, logging.Logger) and x.name.startswith(homes)]
