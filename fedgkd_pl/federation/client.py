"""The client module: weights in, weights and a report out. The loss is a method's."""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

import torch
from fedgkd_pl.data.examples import FAR, Batch, Batches, Examples, Task
from fedgkd_pl.federation.exchange import PERSONAL, Split
from fedgkd_pl.federation.hardware import is_channels_last
from fedgkd_pl.federation.losses import CrossEntropy, LocalLoss
from fedgkd_pl.federation.message import LR_FACTOR, ClientUpdate, Message, State, joined
from fedgkd_pl.federation.optimizer import UnitGradient, client_optimizer
from fedgkd_pl.federation.own_module import Recorder, is_own_module, training_loss
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric
from typing_extensions import override


class TaskView:
    """Hides the outputs of all classes that the task at hand does not have.

    It is a forward hook of the net that a client half is made with, and so of all copies of it,
    student and teachers. They share it: a copy of a hook is the hook. So losses and distillation
    see a head per task, and no method has to know of tasks.
    """

    def __init__(self) -> None:
        self.hidden: Tensor | None = None

    def __deepcopy__(self, memo: Any) -> "TaskView":
        return self

    def __call__(self, module: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
        """As a forward hook."""
        return self.only(outputs)

    def only(self, outputs: Tensor) -> Tensor:
        """The outputs, those of other classes far below all."""
        return outputs if self.hidden is None else outputs.masked_fill(self.hidden, FAR)

    def show(self, classes: Sequence[int], num_classes: int, device: torch.device) -> None:
        """From now on, these classes are seen."""
        hidden = torch.ones(num_classes, dtype=torch.bool)
        hidden[list(classes)] = False
        self.hidden = hidden.to(device)

    @contextmanager
    def on(self, net: nn.Module) -> Iterator[None]:
        """Copies of the net that are made inside have this view; the net itself does not keep it.

        What the server evaluates is seen through the task of each sample instead.
        """
        handle = net.register_forward_hook(self)
        try:
            yield
        finally:
            handle.remove()


Parts = dict[str, Tensor]
# a loss, and by name what to report beside it: batch means, and "outputs" for observe()
Objective = tuple[Tensor, Parts]
TASK = "task"  # the name under which a LightningModule's own loss is reported
OUTPUTS = "outputs"
TEACHER_BATCH = 256  # rows at a time where teachers are asked ahead of training


class Report:
    """Sums of what a client measures batch by batch; cheaper than ``self.log``.

    Args:
        recorder: of what a LightningModule logs itself; None for a plain net.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder
        self.metrics: dict[str, Metric] = {}  # the server's
        self.reset()

    def reset(self) -> None:
        """Starts a new epoch."""
        self._sums: dict[str, Tensor] = {}
        self._seen = 0
        if self.recorder is not None:
            self.recorder.reset()
        for metric in self.metrics.values():
            metric.reset()

    def add(self, size: int, parts: dict[str, Tensor]) -> None:
        """Adds means over a batch of some size."""
        self._seen += size
        for name, value in parts.items():
            total = value.detach() * size
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    def measure(self, outputs: Tensor, targets: Tensor) -> None:
        """Updates the metrics with a batch."""
        for metric in self.metrics.values():
            metric.update(outputs, targets)

    def values(self) -> dict[str, float]:
        """The means so far, and the metrics that are finite."""
        values = {name: float(total) / self._seen for name, total in self._sums.items()}
        if self.recorder is not None:
            if TASK not in values:
                raise RuntimeError("the client's objective does not use task_loss")
            values = self.recorder.values() | values
        computed = {name: float(metric.compute()) for name, metric in self.metrics.items()}
        # of an area under a curve, a class may be missing
        return values | {name: value for name, value in computed.items() if math.isfinite(value)}


class BatchNorms:
    """The BatchNorm layers of a net that are in training mode; not those that a user has frozen."""

    def __init__(self, net: nn.Module) -> None:
        self.layers = [m for m in net.modules() if isinstance(m, _BatchNorm) and m.training]

    def expect(self, samples: int = 2) -> None:
        """Prepares for a batch: one sample has no statistics, so layers use what they have."""
        for layer in self.layers:
            layer.train(samples > 1)


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
        settings: the method's ``client_settings``, which become attributes of the same names.
    """

    num_classes: int  # of the data, like the following set for a run
    run_seed: int
    needs_outputs = False  # whether a module's outputs cost another pass where no step shows them
    uses_public = False  # whether :attr:`public` is needed
    public: Examples | None = None
    local_loss: LocalLoss = CrossEntropy()  # the server's
    # what is added to a shared parameter's gradient in every step, before it is clipped
    correction: list[Tensor] | None = None
    unit_steps: UnitGradient | None = None  # what they would do with a gradient of 1
    task: Task | None = None  # what the client at hand learns in this round; None: everything
    view: TaskView | None = None  # shared by the net and its copies, where data has tasks
    own_epochs: int | None = None  # of this client in this round, if other than the usual
    number: int  # of the client at hand
    samples: int  # n_k of the client at hand
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # the settings, which the server has typed

    def __init__(
        self,
        net: nn.Module,
        optimizer: OptimizerCallable | None,
        scheduler: LRSchedulerCallable | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        for name, value in settings.items():
            setattr(self, name, value)
        self.net = deepcopy(net).cpu()  # layers that the user froze in eval mode stay so
        self.optimizer = optimizer
        self.scheduler = scheduler
        own = is_own_module(self.net)
        self.report = Report(Recorder() if own else None)
        if self.report.recorder is not None:
            self.net.__dict__["log"] = self.report.recorder.log
        self.norms = BatchNorms(self.net)
        self._channels_last = is_channels_last(self.net)
        travels = self.net.state_dict().keys()
        self._stays = {n: b.clone() for n, b in self.net.named_buffers() if n not in travels}
        self.split: Split | None = None  # of the net's names; None where all are shared
        self.first: State = {}  # personal parts of w_0
        self.personal: State = {}  # those of the client at hand, as its round begins
        self._batch_idx = 0
        self._compiled: Callable[..., Objective] | None = None
        self._full_batch = 0
        self._counts: Tensor | None = None
        self.lr_factor = 1.0
        self.teacher_seconds = 0.0

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":  # which Lightning sets 28 times a step: a fast path
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

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
        if self.report.recorder is not None:
            module, recorder = cast(LightningModule, self.net), self.report.recorder
            batch, needed = (x, y), self.needs_outputs
            loss, known = training_loss(module, batch, self._batch_idx, recorder, needed)
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
        return {OUTPUTS: outputs} if self.report.metrics and outputs is not None else {}

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

    def divide(self, split: Split | None) -> None:
        """Sets what of the net travels, before the first client."""
        self.split = split
        if split is not None:
            state = self.net.state_dict()
            self.first = {name: state[name].clone() for name in split.personal}

    def begin(
        self, client: int, samples: int, task: Task | None, personal: State | None = None
    ) -> None:
        """Prepares for a client, before :meth:`receive`; ``task`` where its data has tasks.

        ``personal`` are its own parts of the model, empty in its first round.
        """
        self.personal = personal or self.first
        self.number, self.samples, self.task = client, samples, task
        if self.view is not None and task is not None:
            self.view.show(task.classes, self.num_classes, self.device)

    def trained(self) -> Iterable[nn.Parameter]:
        """What the optimizer moves: the net, to which a method may add parameters of its own."""
        return self.net.parameters()

    def receive(self, message: Message, state: State) -> None:
        """Starts from w_t; ``state`` is what this client kept, empty in its first round."""
        whole = self.whole(message.models["global"])
        self.net.load_state_dict(whole if self.split is None else self.net.state_dict() | whole)
        for name, buffer in self.net.named_buffers():
            if name in self._stays:  # what one client left in it must not reach the next
                buffer.copy_(self._stays[name])
        self.report.reset()
        self.lr_factor = message.numbers.get(LR_FACTOR, 1.0)
        self.correction = None
        self.corrected = self.shared_parameters()
        self.teacher_seconds = 0.0

    def whole(self, shared: State) -> State:
        """A model that was sent, with this client's own parts as its round began."""
        return shared | self.personal if self.personal else shared

    def shared_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that travel, by name: what a method may send, correct or hold back."""
        named = self.net.named_parameters()
        return [(n, p) for n, p in named if self.split is None or n in self.split.shared]

    def own_parts(self) -> State:
        """This client's own parts of the trained model, for its next round."""
        state = self.net.state_dict()
        own = {name: state[name].detach().cpu().clone() for name in self.first}
        return joined({PERSONAL: own})

    def reply(self) -> ClientUpdate:
        """The trained model, what of it travels, and the report; a method adds to both."""
        state = self.net.state_dict()
        shared = state if self.split is None else self.split.of(state)
        weights = {name: tensor.detach().cpu().clone() for name, tensor in shared.items()}
        return ClientUpdate(self.number, self.samples, weights, self.report.values())

    @override
    def configure_optimizers(self) -> Any:
        return client_optimizer(self, FederatedClient)  # no momentum passes from client to client

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
        if outputs is not None:
            self.report.measure(outputs, self.local_loss.for_metrics(y))
        self.report.add(len(y), {"loss": loss, **parts})
        return loss

    @override
    def on_train_epoch_start(self) -> None:
        self.report.reset()  # it is of the last local epoch

    @override
    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.norms.expect(len(batch[1]))

    @override
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.correction is not None:  # the gradient is unscaled by now, and clipped next
            for (_, parameter), shift in zip(self.corrected, self.correction, strict=True):
                if parameter.grad is not None:
                    parameter.grad.add_(shift)
        if self.unit_steps is not None:
            self.unit_steps.step(optimizer)


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """The share of a batch that is right."""
    return (logits.argmax(1) == y).float().mean()
