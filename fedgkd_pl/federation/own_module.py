"""A LightningModule of the user's as the net: its steps, logs and hooks, where clients train."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from fedgkd_pl.data.examples import Batch
from fedgkd_pl.errors import require
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

if TYPE_CHECKING:
    from fedgkd_pl.data.datamodule import FederatedDataModule
    from fedgkd_pl.federation.server import FederatedServer

# what a module may redefine in Lightning that would change a client's numbers, and is not called
REFUSED = (
    *("backward", "configure_gradient_clipping", "lr_scheduler_step", "optimizer_step"),
    *("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"),
    *("configure_model", "optimizer_zero_grad"),
)
TRAINING = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *("on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_fit_end"),
)
PREFIX = re.compile(r"(train(ing)?|val|valid|validation|test|eval)[_/]")
NEEDS = "forward(x) or logits(x) that gives the logits of its inputs"


def is_own_module(net: nn.Module) -> TypeGuard[LightningModule]:
    """Whether a net brings its own training step."""
    return isinstance(net, LightningModule) and is_overridden("training_step", net)


def one_of(net: nn.Module | None, module: LightningModule | None = None) -> nn.Module:
    """The net of a method, which is given as one or the other."""
    require(net is None or module is None, "module", "takes the place of net; give one of them")
    given = module if net is None else net
    text = "missing or not an nn.Module: pass a net or a LightningModule (net: nn.Module)"
    require(isinstance(given, nn.Module), "net", text, type(given).__name__)
    if module is not None:
        text = "must have a training_step; pass a plain net as net"
        require(is_own_module(module), "module", text, type(module).__name__)
    assert given is not None
    lazy = any(map(is_lazy, (*given.parameters(), *given.buffers())))
    text = "has lazy layers, whose weights nobody has drawn; give their sizes"
    require(not lazy, "net" if module is None else "module", text)
    return given


def has_outputs(net: nn.Module) -> bool:
    """Whether a net says how to get its outputs: by ``logits(x)`` or ``forward(x)``."""
    own_forward = type(net).forward is not LightningModule.forward
    return not is_own_module(net) or callable(getattr(net, "logits", None)) or own_forward


def outputs_of(net: nn.Module, x: Tensor) -> Tensor:
    """The outputs of a net, a module's from its ``logits`` if it has that method."""
    logits = getattr(net, "logits", None) if is_own_module(net) else None
    outputs: Tensor = logits(x) if callable(logits) else net(x)
    return outputs


class Recorder:
    """What a module logs: means over samples, and metrics, which are computed when read."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[Tensor, int]] = {}
        self.metrics: dict[str, Metric] = {}
        self.size = 1  # of the batch at hand

    def log(self, name: str, value: Any, *_: Any, **options: Any) -> None:
        """Takes the place of ``LightningModule.log``; progress bars and steps are ignored."""
        reduction = options.get("reduce_fx", "mean")
        mean = reduction in ("mean", torch.mean)
        require(mean, "module", f"log({name!r}) by {reduction}: only means are kept")
        if isinstance(value, Metric):
            self.metrics[name] = value
            return
        size = options.get("batch_size") or self.size
        total, seen = self.sums.get(name, (torch.zeros(()), 0))
        given = torch.as_tensor(value).detach().cpu().double().mean()
        self.sums[name] = (total + given * size, seen + size)

    def values(self) -> dict[str, float]:
        """By the names without their ``train_``, ``val_`` or ``test_``; starts anew."""
        values = {name: float(total) / seen for name, (total, seen) in self.sums.items() if seen}
        for name, metric in self.metrics.items():
            found = metric.compute()
            one = isinstance(found, Tensor) and found.numel() == 1
            require(one, "module", f"log({name!r}): must be one number")
            values[name] = float(found)
        self.reset()
        return {plain(name): value for name, value in values.items()}

    def reset(self) -> None:
        """Drops everything; metrics start anew."""
        for metric in self.metrics.values():
            metric.reset()
        self.sums, self.metrics = {}, {}


def plain(name: str) -> str:
    """The name of a score: ``val_acc`` and ``val/acc`` are ``acc``."""
    return re.sub(r"\W", "_", PREFIX.sub("", name, count=1))


@contextmanager
def recording(module: LightningModule, recorder: Recorder) -> Iterator[None]:
    """Has ``module.log`` record instead of asking a Trainer, whose module is another."""
    module.__dict__["log"] = recorder.log
    try:
        yield
    finally:
        module.__dict__.pop("log", None)


def run_step(
    module: LightningModule, step: Callable[..., Any], batch: Batch, batch_idx: int
) -> tuple[Tensor | None, Tensor | None]:
    """The loss that a step returns, if any, and the outputs that it computed, if they are known.

    A step that asks the module itself, or its ``logits``, shows them on the way; another costs one
    more pass, where the outputs can be had at all.
    """
    seen: list[Tensor] = []
    name = "logits" if callable(getattr(module, "logits", None)) else "forward"
    original = getattr(module, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(original(*args, **kwargs))
        return seen[-1]

    module.__dict__[name] = watched
    try:
        result = step(batch, batch_idx)
    finally:
        del module.__dict__[name]
    loss = result.get("loss") if isinstance(result, dict) else result
    fits = [o for o in seen if isinstance(o, Tensor) and o.ndim and len(o) == len(batch[0])]
    outputs = fits[-1] if fits else None
    return (loss if isinstance(loss, Tensor) else None), outputs


def training_loss(
    module: LightningModule, batch: Batch, batch_idx: int, recorder: Recorder, needs_outputs: bool
) -> tuple[Tensor, Tensor | None]:
    """The loss of the module's own training step, and its outputs where they are needed or seen."""
    recorder.size = len(batch[0])
    loss, outputs = run_step(module, module.training_step, batch, batch_idx)
    if loss is None or loss.numel() != 1:
        raise ValueError("training_step must return a loss, or a dict that has one")
    if outputs is None and needs_outputs and has_outputs(module):
        outputs = outputs_of(module, batch[0])
    return loss.squeeze(), outputs


class ModuleHooks(Callback):
    """Calls a module's own hooks, which Lightning calls for the client around it only."""

    def __init__(self, module: LightningModule) -> None:
        def forwarding(name: str) -> Callable[..., Any]:
            return lambda trainer, client, *args, **_: getattr(client.net, name)(*args)

        for name in TRAINING:
            if is_overridden(name, module):
                setattr(self, name, forwarding(name))


def check_module(server: "FederatedServer") -> None:
    """Raises a clear error for a module whose step cannot be a client's."""
    module, name = server.net, type(server).__name__
    if not is_own_module(module):
        return
    cls = type(module).__name__
    text = f"{name} uses parts of a net, which it does not find in {cls}: give it a net"
    require(server.takes_modules, "module", text)
    text = f"{cls} optimizes by hand: a client needs automatic_optimization"
    require(module.automatic_optimization, "module", text)
    for hook in REFUSED:
        text = f"{cls}.{hook} has no place in a client's step: leave it out"
        require(not is_overridden(hook, module), "module", text)
    require(not server.compiles, "compile", "is for nets: the step of a module is not compiled")
    own_data = is_overridden("train_dataloader", module)
    text = f"{cls}.setup is not called: do in __init__ what is not about its data"
    require(own_data or not is_overridden("setup", module), "module", text)
    if server.needs_outputs:
        text = f"{name} distils logits, and {cls} does not say what they are: give it {NEEDS}"
        require(has_outputs(module), "module", text)


def check_outputs(server: "FederatedServer", outputs: Tensor, data: "FederatedDataModule") -> None:
    """Refuses outputs that are no logits: an embedding, or probabilities."""
    cls, shape = type(server.net).__name__, tuple(outputs.shape)
    if not server.distils_classes:
        return
    text = f"the outputs of {cls} are {shape}, not logits of {data.num_classes} classes"
    fits = len(shape) >= 2 and shape[1] == data.num_classes
    require(fits, "module", f"{text}: give it logits(x)")
    sums = outputs.float().sum(1)
    shares = bool((outputs >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-3)
    text = f"the outputs of {cls} are probabilities already: give it logits(x) without softmax"
    require(not shares or data.num_classes == 1, "module", text)
