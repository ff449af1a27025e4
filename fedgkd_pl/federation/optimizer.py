"""The optimizers of clients: made anew for each, with the round's rate; what they remember.

A state that a client keeps is tensors by name: the weight's and torch's, ``layer.weight/exp_avg``.
Counts of steps are floats.
"""

from collections.abc import Iterator, Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

import torch
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.federation.message import State
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

if TYPE_CHECKING:
    from fedgkd_pl.federation.client import FederatedClient

Named = Mapping[str, nn.Parameter]
HALF = (torch.float16, torch.bfloat16)
GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")


def client_optimizer(client: "FederatedClient", base: type) -> Any:
    """A client's optimizer, with its scheduler if it has one; a LightningModule may bring its own.

    Args:
        base: the class whose gradient hooks leave gradients in the layout of the weights.
    """
    if client.optimizer is None:
        configured = cast(LightningModule, client.net).configure_optimizers()
    else:
        configured = client.optimizer(client.trained())
    optimizer: Any = first_optimizer(configured)
    # else Lightning refuses to clip for a fused one; the scaler unscales gradients before it
    optimizer._step_supports_amp_scaling = False
    if client.lr_factor != 1:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * client.lr_factor
    # a fused step takes neither sparse gradients nor ones of another layout than the weights'
    sparse = any(getattr(module, "sparse", False) for module in client.net.modules())
    hooked = any(is_overridden(hook, client, base) for hook in GRADIENT_HOOKS)
    if client.optimizer is not None and not sparse and not hooked:
        fuse(optimizer)
    return configured if client.scheduler is None else ([optimizer], [client.scheduler(optimizer)])


def first_optimizer(configured: Any) -> Optimizer:
    """The optimizer among what ``configure_optimizers`` gave, in any of Lightning's forms."""
    while isinstance(configured, list | tuple) and configured:
        configured = configured[0]
    if isinstance(configured, dict):
        configured = configured.get("optimizer")
    text = "configure_optimizers() must give one optimizer"
    require(isinstance(configured, Optimizer), "optimizer", text, type(configured).__name__)
    return cast(Optimizer, configured)


def fuse(optimizer: Optimizer) -> None:
    """Lets torch's own optimizers take float32 steps in one kernel, unless the user chose how."""
    if type(optimizer) not in (SGD, Adam, AdamW):
        return
    for group in optimizer.param_groups:
        half = any(p.dtype in HALF and p.device.type == "cpu" for p in group["params"])
        text = "must not be set for half-precision weights on a CPU: torch's kernel is wrong there"
        require(not (half and group["fused"]), "fused", text)
        unset = group["fused"] is None and group["foreach"] is None
        other = group.get("differentiable") or group.get("capturable")
        plain = all(p.dtype == torch.float32 and not p.is_sparse for p in group["params"])
        known = all(p.device.type in ("cpu", "cuda", "mps") for p in group["params"])
        if unset and not other and plain and known:
            group["fused"] = True


def as_text(optimizer: Optimizer) -> str:
    """``SGD(lr=0.05, momentum=0.9)``: the rate, and what is not the class's default."""
    arguments, used = signature(type(optimizer)).parameters, optimizer.param_groups[0]
    names = [name for name in arguments if name in used and name not in ("params", "fused")]
    given = [n for n in names if n == "lr" or used[n] != arguments[n].default]
    return f"{type(optimizer).__name__}({', '.join(f'{name}={used[name]}' for name in given)})"


class UnitGradient:
    """How far SGD has moved a weight down whose gradient is 1 in every step.

    K steps at rate η without momentum: ηK; with momentum m: η(K − m(1−m^K)/(1−m))/(1−m). It follows
    the optimizer's own settings, so rates may change on the way.

    Args:
        mu: weight of a proximal term μ/2‖w − w_t‖², which pulls the weight back.
    """

    def __init__(self, mu: float = 0.0) -> None:
        self.mu = mu
        self.moved = 0.0
        self._velocity: float | None = None

    def step(self, optimizer: Any) -> None:
        """To be called before every step of the optimizer."""
        group = optimizer.param_groups[0]
        gradient, momentum = 1.0 - self.mu * self.moved, group["momentum"]
        if momentum:
            if self._velocity is None:
                self._velocity = gradient
            else:
                kept = 1 - group["dampening"]
                self._velocity = momentum * self._velocity + kept * gradient
            nesterov = group["nesterov"]
            gradient = gradient + momentum * self._velocity if nesterov else self._velocity
        self.moved += group["lr"] * gradient


def check_countable(client: "FederatedClient", method: str) -> None:
    """Raises a clear error if a client's optimizer is not plain SGD with one rate."""
    optimizer = first_optimizer(client.configure_optimizers())
    plain = type(optimizer) is SGD and len(optimizer.param_groups) == 1
    plain = plain and not optimizer.param_groups[0]["maximize"]
    text = f"{method} counts the steps of torch.optim.SGD with one rate for all weights"
    require(plain, "optimizer", text, type(optimizer).__name__)


def check_scheduler(optimizers: Any, key: str = "scheduler") -> None:
    """Raises a clear error if ``configure_optimizers`` gave a scheduler that no client can step."""
    schedulers = optimizers[1] if isinstance(optimizers, tuple) else []
    unit = "round" if key == "round_scheduler" else "epoch"
    for scheduler in schedulers:
        require(
            not isinstance(scheduler, ReduceLROnPlateau),
            key,
            f"needs a score of every {unit}, which nobody has: take one that counts {unit}s",
            type(scheduler).__name__,
        )


class RoundSchedule:
    """A scheduler of torch's that counts rounds; clients multiply their rates by what it gives.

    Args:
        scheduler: gets an optimizer with the clients' rate.
        lr: that rate.
    """

    def __init__(self, scheduler: LRSchedulerCallable, lr: float) -> None:
        self.build = scheduler
        self.lr = lr
        self.reset()

    def reset(self) -> None:
        """Starts with round 1 again."""
        self.rounds = 0  # that are over, as far as it knows
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=self.lr)
        self.scheduler: Any = self.build(self.optimizer)
        check_scheduler(([], [self.scheduler]), "round_scheduler")

    @property
    def factor(self) -> float:
        """What the rates of this round are multiplied by."""
        return float(self.optimizer.param_groups[0]["lr"]) / self.lr

    def begin(self, round: int) -> None:
        """Takes the steps of the rounds before.

        So a checkpoint may be written at any time after a round: it needs no step of that round.
        """
        while self.rounds < round - 1:
            self.optimizer.step()  # which has no gradient; torch warns without it
            self.scheduler.step()
            self.rounds += 1

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state and the rate."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "factor": self.factor,
            "rounds": self.rounds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.scheduler.load_state_dict(state["scheduler"])
        self.rounds = state["rounds"]
        self.optimizer.param_groups[0]["lr"] = state["factor"] * self.lr


def empty_state(build: OptimizerCallable | None, named: Named) -> State:
    """The state of an optimizer of such weights, all zeros; found by a step of copies."""
    assert build is not None  # which only modules do without
    copies = {n: nn.Parameter(torch.zeros_like(w), w.requires_grad) for n, w in named.items()}
    optimizer = first_optimizer(build(copies.values()))
    for copy in copies.values():
        copy.grad = torch.zeros_like(copy) if copy.requires_grad else None
    try:
        optimizer.step()
    except Exception as error:  # such as of one that asks for the loss again
        text = "must take plain steps, so that its state can be kept"
        raise SettingError("optimizer", text, type(optimizer).__name__) from error
    held = [value for values in optimizer.state.values() for value in values.values()]
    plain = all(value is None or isinstance(value, Tensor) for value in held)
    require(plain, "optimizer", "must keep nothing but tensors", type(optimizer).__name__)
    return {name: torch.zeros_like(t) for name, t in state_of(optimizer, {}, copies).items()}


def state_of(optimizer: Optimizer, empty: State, named: Named) -> State:
    """The state of an optimizer; of weights that it has never moved what ``empty`` has."""
    state = dict(empty)
    for prefix, weight in _weights(optimizer, named):
        for name, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, Tensor):
                state[f"{prefix}/{name}"] = _kept(value, weight)
    return state


def load_state(optimizer: Optimizer, state: State, named: Named) -> None:
    """Gives a new optimizer a state; weights whose part of it is all zeros stay new."""
    parts: dict[str, State] = {}
    for name, tensor in state.items():
        weight_name, _, key = name.rpartition("/")
        parts.setdefault(weight_name, {})[key] = tensor
    weights = list(_weights(optimizer, named))
    used = {
        number: {key: _laid_out(tensor, weight) for key, tensor in parts[name].items()}
        for number, (name, weight) in enumerate(weights)
        if any(tensor.any() for tensor in parts.get(name, {}).values())
    }
    if used:
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": used, "param_groups": groups})
    for number, part in used.items():  # torch gives numbers the weight's type
        weight = weights[number][1]
        held = optimizer.state[weight]
        numbers = {n: t for n, t in part.items() if not t.dim() and weight.dim()}
        held |= {n: t.to(held[n].device) for n, t in numbers.items()}


def _weights(optimizer: Optimizer, named: Named) -> Iterator[tuple[str, nn.Parameter]]:
    """In the order of ``state_dict``, each with its name."""
    names = {weight: name for name, weight in named.items()}
    for group in optimizer.param_groups:
        yield from ((names[weight], weight) for weight in group["params"])


def _kept(value: Tensor, weight: Tensor) -> Tensor:
    """A copy; counts have one type, whatever torch counts in."""
    value = value.detach().cpu().clone()
    if value.dim():
        return value
    return (
        value.float()
        if weight.dim()
        else value.to(torch.promote_types(torch.float32, weight.dtype))
    )


def _laid_out(tensor: Tensor, weight: Tensor) -> Tensor:
    """A copy, in memory as the weight is: files and messages lose that."""
    like = weight.detach() if tensor.shape == weight.shape else tensor
    return torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
