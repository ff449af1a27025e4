"""FedAvgM, FedAdam, FedYogi and FedAdagrad: FedAvg with another server optimizer.

Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019; Reddi et al., Adaptive Federated Optimization, ICLR 2021. Clients train as in
FedAvg; Δ = Σ_k n_k/n w_k − w_t takes the place of a gradient's opposite:

    FedAvgM    v ← β v + Δ,    w ← w + η v
    others     see :class:`~fedgkd_pl.federation.optimizers.Adaptive`
"""

from functools import partial
from typing import Any

from fedgkd_pl.federation.optimizers import Adaptive, Rule
from fedgkd_pl.methods.fedavg import FedAvg
from torch import nn
from torch.optim import SGD


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
