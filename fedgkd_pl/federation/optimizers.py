"""Server optimizers that torch does not have."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from fedgkd_pl.errors import require
from torch import Tensor
from torch.optim import Optimizer

Rule = Literal["adam", "yogi", "adagrad"]


class Adaptive(Optimizer):
    """FedAdagrad, FedYogi and FedAdam: Algorithm 2 of Adaptive Federated Optimization.

    Reddi et al., ICLR 2021. With Δ = −gradient; unlike torch's Adam it corrects no bias, and v
    starts at τ²:

        m ← β₁ m + (1 − β₁) Δ
        v ← v + Δ²                                  adagrad
            v − (1 − β₂) Δ² sign(v − Δ²)            yogi
            β₂ v + (1 − β₂) Δ²                      adam
        w ← w + η m / (√v + τ)

    Args:
        params: of the global model.
        rule: how v is made.
        lr: η.
        betas: β₁ and β₂.
        tau: τ, how little it adapts.
    """

    def __init__(
        self,
        params: Iterable[Any],
        rule: Rule = "adam",
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.99),
        tau: float = 1e-3,
    ) -> None:
        require(rule in ("adam", "yogi", "adagrad"), "rule", "must be adam, yogi or adagrad", rule)
        require(lr > 0, "lr", "must be positive", lr)
        require(all(0 <= beta < 1 for beta in betas), "betas", "must be in [0, 1)", betas)
        require(tau > 0, "tau", "must be positive", tau)
        super().__init__(params, {"rule": rule, "lr": lr, "betas": betas, "tau": tau})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, computed in double precision."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        return loss

    def _move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        delta, tau = -parameter.grad.cpu().double(), group["tau"]  # type: ignore[union-attr]
        state = self.state[parameter]
        mean, square = torch.zeros_like(delta), torch.full_like(delta, tau**2)
        if state:
            mean, square = (state[name].cpu().double() for name in ("mean", "square"))
        first, second = group["betas"]
        mean = first * mean + (1 - first) * delta
        new = delta.square()
        if group["rule"] == "adagrad":
            square = square + new
        elif group["rule"] == "yogi":
            square = square - (1 - second) * new * (square - new).sign()
        else:
            square = second * square + (1 - second) * new
        # kept in the model's type, which torch gives to what it loads from a checkpoint
        state["mean"], state["square"] = mean.to(parameter), square.to(parameter)
        parameter.add_((group["lr"] * mean / (square.sqrt() + tau)).to(parameter))
