"""The optimizers of clients: made anew for each, with the round's learning rate."""

from typing import TYPE_CHECKING, Any, cast

import torch
from fedgkd_pl.errors import require
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import SGD, Adam, AdamW, Optimizer

if TYPE_CHECKING:
    from fedgkd_pl.federation.client import FederatedClient

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
    optimizer = first_optimizer(configured)
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
