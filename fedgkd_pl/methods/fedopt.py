"""FedAvgM, FedAdam, FedYogi and FedAdagrad: FedAvg with another server optimizer.

Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019; Reddi et al., Adaptive Federated Optimization, ICLR 2021. Clients train as in
FedAvg; Δ = Σ_k n_k/n w_k − w_t takes the place of a gradient's opposite:

    FedAvgM    v ← β v + Δ,    w ← w + η v
    others     see :class:`Adaptive`
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from fedgkd_pl.errors import positive, require
from fedgkd_pl.methods.fedavg import FedAvg
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

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
        positive(lr=lr)
        require(all(0 <= beta < 1 for beta in betas), "betas", "must be in [0, 1)", betas)
        positive(tau=tau)
        super().__init__(params, {"rule": rule, "lr": lr, "betas": betas, "tau": tau})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, computed in double precision."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        return loss

    @torch.no_grad()
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


class FedAvgM(FedAvg):
    """FedAvgM: momentum on the server.

    Args:
        net: the model to learn; any module from inputs to logits.
        server_lr: η of the server.
        server_momentum: β.
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedAvgM"
    citation = "Hsu et al., 2019"
    colour = 15

    def __init__(
        self,
        net: nn.Module | None = None,
        server_lr: float = 1.0,
        server_momentum: float = 0.9,
        **kwargs: Any,
    ) -> None:
        optimizer = partial(SGD, lr=server_lr, momentum=server_momentum)
        super().__init__(net, server_optimizer=optimizer, **kwargs)


class FedAdam(FedAvg):
    """FedAdam: Adam on the server.

    Args:
        net: the model to learn; any module from inputs to logits.
        server_lr: η of the server.
        server_betas: β₁ and β₂.
        server_tau: τ, how little it adapts.
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedAdam"
    citation = "Reddi et al., ICLR 2021"
    colour = 16
    rule: Rule = "adam"

    def __init__(
        self,
        net: nn.Module | None = None,
        server_lr: float = 0.03,
        server_betas: tuple[float, float] = (0.9, 0.99),
        server_tau: float = 1e-3,
        **kwargs: Any,
    ) -> None:
        optimizer = partial(
            Adaptive, rule=self.rule, lr=server_lr, betas=server_betas, tau=server_tau
        )
        super().__init__(net, server_optimizer=optimizer, **kwargs)


class FedYogi(FedAdam):
    """FedYogi: Yogi on the server.

    Args:
        net: the model to learn; any module from inputs to logits.
        server_lr: η of the server.
        server_betas: β₁ and β₂.
        server_tau: τ, how little it adapts.
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedYogi"
    citation = "Reddi et al., ICLR 2021"
    colour = 17
    rule = "yogi"


class FedAdagrad(FedAvg):
    """FedAdagrad: Adagrad on the server.

    Args:
        net: the model to learn; any module from inputs to logits.
        server_lr: η of the server.
        server_momentum: β₁; the paper's is 0.
        server_tau: τ, how little it adapts.
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedAdagrad"
    citation = "Reddi et al., ICLR 2021"
    colour = 18

    def __init__(
        self,
        net: nn.Module | None = None,
        server_lr: float = 0.1,
        server_momentum: float = 0.0,
        server_tau: float = 1e-3,
        **kwargs: Any,
    ) -> None:
        optimizer = partial(
            Adaptive, rule="adagrad", lr=server_lr, betas=(server_momentum, 0.0), tau=server_tau
        )
        super().__init__(net, server_optimizer=optimizer, **kwargs)
