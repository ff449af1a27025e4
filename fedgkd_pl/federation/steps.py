"""The effective number of local steps, for FedNova and SCAFFOLD."""

from typing import TYPE_CHECKING, Any

from fedgkd_pl.errors import require
from fedgkd_pl.federation.optimizer import first_optimizer
from torch.optim import SGD

if TYPE_CHECKING:
    from fedgkd_pl.federation.client import FederatedClient


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
