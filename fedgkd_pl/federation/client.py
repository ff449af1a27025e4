"""The client's half of a round: weights in, weights and a report out. No loss."""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any, Self, cast

import torch
from fedgkd_pl.data.examples import Batch, Batches, Examples
from fedgkd_pl.data.tasks import Task
from fedgkd_pl.federation.losses import CrossEntropy, LocalLoss
from fedgkd_pl.federation.message import LR_FACTOR, ClientUpdate, Message, State
from fedgkd_pl.federation.norms import BatchNorms
from fedgkd_pl.federation.own_module import Recorder, is_own_module, training_loss
from fedgkd_pl.federation.performance import fused, is_channels_last
from fedgkd_pl.federation.steps import UnitGradient, first_optimizer
from fedgkd_pl.federation.task_view import TaskView
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

# a loss, and by name what to report beside it: batch means, and "outputs" for observe()
Objective = tuple[Tensor, dict[str, Tensor]]
Parts = dict[str, Tensor]
OUTPUTS = "outputs"
TASK = "task"  # what a LightningModule's own loss is reported as
GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
TEACHER_BATCH = 256  # rows at a time where teachers are asked ahead of training


class FederatedClient(LightningModule):
    """A LightningModule whose ``fit`` is one client's local update.

    One instance serves all clients of a worker, so :meth:`receive` must set everything that a
    method keeps. A method subclasses it with :meth:`objective` and, where there is a teacher,
    :meth:`teach`; both together are what is compiled.

    Args:
        net: copied; its weights come with every message. May be a LightningModule with a
            training step of its own.
        optimizer: built anew for every client and round; None for that of a LightningModule.
        scheduler: of the learning rate, stepped once per local epoch.
        settings: a method's own, which become attributes of the same names.
    """

    num_classes: int  # of the data, like the following set for a run
    run_seed: int
    needs_outputs = False  # whether a module's outputs cost another pass where no step shows them
    uses_public = False  # whether :attr:`public` is needed
    public: Examples | None = None
    local_loss: LocalLoss = CrossEntropy()  # the server's
    # added to the gradient of every parameter in every step, before it is clipped
    correction: list[Tensor] | None = None
    unit_steps: UnitGradient | None = None  # what they would do with a gradient of 1
    task: Task | None = None  # what the client at hand learns in this round; None: everything
    view: TaskView | None = None  # shared by the net and its copies, where data has tasks
    own_epochs: int | None = None  # of this client in this round, if other than the usual

    def __init__(
        self,
        net: nn.Module,
        optimizer: OptimizerCallable | None,
        scheduler: LRSchedulerCallable | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.settings = settings
        for name, value in settings.items():
            setattr(self, name, value)
        # layers that the user froze in eval mode stay so
        self.net = deepcopy(net).cpu()
        # the server's, reported of the last local epoch
        self.metrics: nn.ModuleDict | None = None
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._norms = BatchNorms(self.net)
        self._channels_last = is_channels_last(self.net)
        travels = self.net.state_dict().keys()
        self._stays = {n: b.clone() for n, b in self.net.named_buffers() if n not in travels}
        self._sums: dict[str, Tensor] = {}
        self._seen = 0
        self._batch_idx = 0
        self.recorder: Recorder | None = None  # of what a module logs
        if is_own_module(self.net):
            self.recorder = Recorder()
            self.net.__dict__["log"] = self.recorder.log
        self._compiled: Callable[..., Objective] | None = None
        self._full_batch = 0
        self._lr_factor = 1.0
        self._counts: Tensor | None = None
        self.teacher_seconds = 0.0

    def __setattr__(self, name: str, value: Any) -> None:
        """As torch's, but for the name of the hook at work, set 28 times a step by Lightning."""
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    @classmethod
    def like(cls, client: "FederatedClient", **settings: Any) -> Self:
        """This client half with all that another one was made with, and some settings more.

        For a method that builds on another: ``MyClient.like(super().client(), mu=self.mu)``.
        """
        given = client.settings | settings
        return cls(client.net, client.optimizer, client.scheduler, **given)

    @abstractmethod
    def objective(self, x: Tensor, y: Tensor, teacher_output: Tensor | None) -> Objective:
        """The local loss of a batch, and what to report beside it.

        ``teacher_output`` is what :meth:`teach` gave for ``x``; None without a teacher.
        """

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch of labels, as the server's ``loss`` has it."""
        return self.local_loss(logits, y, self._counts)

    def task_loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Parts]:
        """The net's outputs for a batch, the loss of what is to be learned, and its report.

        Of a LightningModule it is the loss of its own ``training_step``. Its outputs are None where
        it does not say what they are; a method that uses them has ``needs_outputs``.
        """
        if self.recorder is not None:
            module = cast(LightningModule, self.net)
            batch, needed = (x, y), self.needs_outputs
            loss, known = training_loss(module, batch, self._batch_idx, self.recorder, needed)
            return cast(Tensor, known), loss, {TASK: loss, **self._to_measure(known)}
        outputs: Tensor = self.net(x)
        return outputs, *self.loss_of(outputs, y)

    def loss_of(self, outputs: Tensor, y: Tensor) -> Objective:
        """The loss of a net's outputs, and its report, for a method that asks the net itself."""
        if self.view is not None:  # of a part of the net, which has not hidden other classes yet
            outputs = self.view.only(outputs)
        loss = self.cross_entropy(outputs, y)
        parts = {self.local_loss.name: loss}
        if self.local_loss.targets == "classes":
            parts = {"acc": accuracy(outputs, y), **parts}
        return loss, parts | self._to_measure(outputs)

    def _to_measure(self, outputs: Tensor | None) -> Parts:
        return {} if self.metrics is None or outputs is None else {OUTPUTS: outputs}

    def observe(self, y: Tensor, outputs: Tensor | None) -> None:
        """Called after the loss of every batch, for what a client gathers while it trains.

        ``outputs`` is what the objective reported by that name, detached; None if it did not.
        """

    def teach(self, x: Tensor) -> Tensor | None:
        """What frozen teachers say of a batch, one row a sample; None without a teacher.

        Must depend on the inputs alone: where they repeat, it is called once per sample and round.
        """
        return None

    def compile_steps(self, batch_size: int) -> None:
        """Compiles teacher, student and loss as one, for full batches; others run as they are.

        A ragged last batch would mean new code for every client's number of samples.
        """
        self._full_batch = batch_size
        # Vote compiles once for every number of teachers on the way to M; torch gives up after 8
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, 64)
        # the random numbers of dropout and of generators stay those of the uncompiled net
        self._compiled = torch.compile(self._whole, options={"fallback_random": True})

    def _whole(self, x: Tensor, y: Tensor, teacher_output: Tensor | None = None) -> Objective:
        return self.objective(x, y, self.teach(x) if teacher_output is None else teacher_output)

    def as_tensor(self, numbers: Sequence[float]) -> Tensor:
        """Numbers that change with the round, which compiled code must not take for constant."""
        like = next(self.net.parameters())
        return torch.tensor(numbers, dtype=like.dtype, device=like.device)

    def begin(self, task: Task | None) -> None:
        """Called before :meth:`receive`: what the next client learns, where its data has tasks."""
        self.task = task
        if self.view is not None and task is not None:
            self.view.show(task.classes, self.num_classes, self.device)

    def trained(self) -> Iterable[nn.Parameter]:
        """What the optimizer moves: the net, to which a method may add parameters of its own."""
        return self.net.parameters()

    def receive(self, message: Message, state: State) -> None:
        """Starts from w_t; ``state`` is what this client kept, empty in its first round."""
        self.net.load_state_dict(message.models["global"])
        for name, buffer in self.net.named_buffers():
            if name in self._stays:  # what one client left in it must not reach the next
                buffer.copy_(self._stays[name])
        self._forget()
        self._lr_factor = message.numbers.get(LR_FACTOR, 1.0)
        self.correction = None
        self.teacher_seconds = 0.0

    def reply(self) -> ClientUpdate:
        """The trained model and the report; a method adds ``extra`` and ``state``."""
        weights = {name: t.detach().cpu().clone() for name, t in self.net.state_dict().items()}
        metrics = {name: float(total) / self._seen for name, total in self._sums.items()}
        if self.recorder is not None:
            if TASK not in metrics:
                raise RuntimeError(f"{type(self).__name__}.objective does not use task_loss")
            metrics = self.recorder.values() | metrics
        for name, metric in () if self.metrics is None else self.metrics.items():
            value = float(cast(Metric, metric).compute())
            if math.isfinite(value):  # of an area under a curve, a class may be missing
                metrics[name] = value
        return ClientUpdate(client=-1, num_samples=0, weights=weights, metrics=metrics)

    def configure_optimizers(self) -> Any:
        """A new optimizer: no momentum passes from client to client."""
        if self.optimizer is None:
            return self._of_module()
        optimizer = self.optimizer(self.trained())
        self._scale(optimizer)
        # a fused step takes neither sparse gradients nor ones of another layout than the weights',
        # which only a hook of a method's own can make
        sparse = any(getattr(module, "sparse", False) for module in self.net.modules())
        own = any(is_overridden(hook, self, FederatedClient) for hook in GRADIENT_HOOKS)
        if not sparse and not own:
            optimizer = fused(optimizer)
        if self.scheduler is None:
            return optimizer
        return [optimizer], [self.scheduler(optimizer)]

    def _of_module(self) -> Any:
        """As the module configures them; ``scheduler``, if given, takes the place of its own."""
        configured = cast(LightningModule, self.net).configure_optimizers()
        optimizer = first_optimizer(configured)
        self._scale(optimizer)
        return configured if self.scheduler is None else ([optimizer], [self.scheduler(optimizer)])

    def _scale(self, optimizer: Optimizer) -> None:
        if self._lr_factor != 1:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self._lr_factor

    def on_train_start(self) -> None:
        """Counts labels for the loss; asks teachers ahead where all epochs have the same inputs."""
        batches = self.trainer.train_dataloader
        if self.local_loss.needs_counts:
            wide = torch.promote_types(next(self.net.parameters()).dtype, torch.float32)
            labels = batches.examples.targets  # type: ignore[union-attr]
            self._counts = torch.bincount(labels, minlength=self.num_classes).to(wide)
        ours = type(self).training_step is FederatedClient.training_step  # which uses the answers
        if ours and isinstance(batches, Batches) and batches.examples.repeat:
            epochs, steps = self.trainer.max_epochs or 1, self.trainer.max_steps
            if epochs > 1 or steps > len(batches):
                start = time.perf_counter()
                batches.teacher_output = self._teach_all(batches)
                self.teacher_seconds += time.perf_counter() - start

    @torch.no_grad()
    def _teach_all(self, batches: Batches) -> Tensor | None:
        rows = []
        precision = self.trainer.precision_plugin
        with precision.train_step_context():
            for x, _ in Batches(batches.examples, max(batches.batch_size, TEACHER_BATCH)):
                teacher_output = self.teach(precision.convert_input(x))
                if teacher_output is None:
                    return None
                rows.append(teacher_output)
        return torch.cat(rows)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The objective of a batch, which may hold the teachers' output, reported."""
        x, y, *given = batch
        self._batch_idx = batch_idx
        if self._channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        if self._compiled is not None and len(y) == self._full_batch:
            loss, parts = self._compiled(x, y, *given)
        else:
            start = time.perf_counter()
            teacher_output = given[0] if given else self.teach(x)
            self.teacher_seconds += time.perf_counter() - start
            loss, parts = self.objective(x, y, teacher_output)
        outputs = parts.pop(OUTPUTS, None)
        outputs = None if outputs is None else outputs.detach()
        self.observe(y, outputs)
        if self.metrics is not None and outputs is not None:
            for metric in self.metrics.values():
                cast(Metric, metric).update(outputs, self.local_loss.for_metrics(y))
        self.report(y, loss=loss, **parts)
        return loss

    def on_train_epoch_start(self) -> None:
        """The report is of the last local epoch."""
        self._forget()

    def _forget(self) -> None:
        self._sums, self._seen = {}, 0
        if self.recorder is not None:
            self.recorder.reset()
        for metric in () if self.metrics is None else self.metrics.values():
            cast(Metric, metric).reset()

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """A batch of one has no statistics."""
        self._norms.expect(len(batch[1]))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Corrects the gradient, which is unscaled by now and clipped next; counts the step."""
        if self.correction is not None:
            parameters = self.net.parameters()
            for parameter, shift in zip(parameters, self.correction, strict=True):
                if parameter.grad is not None:
                    parameter.grad.add_(shift)
        if self.unit_steps is not None:
            self.unit_steps.step(optimizer)

    def report(self, y: Tensor, **parts: Tensor) -> None:
        """Adds means over a batch to the client's report; cheaper than ``self.log``."""
        self._seen += len(y)
        for name, value in parts.items():
            total = value.detach() * len(y)
            self._sums[name] = self._sums[name] + total if name in self._sums else total


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """The share of a batch that is right."""
    return (logits.argmax(1) == y).float().mean()
