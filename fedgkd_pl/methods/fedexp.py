"""FedExP: the server goes further than the mean where the clients' moves disagree.

Jhunjhunwala et al., FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023. With
Δ_k = w_k − w_t and Δ their mean:

    η_g = max( 1, Σ_k p_k ‖Δ_k‖² / (2 (‖Δ‖² + ε)) )
    w_{t+1} = w_t + η_g Δ

over the parameters; buffers are averaged. The authors test (w_t + w_{t−1})/2:
:class:`~fedgkd_pl.AveragedModel` with two models is that.
"""

from typing import Any

from fedgkd_pl.errors import not_negative
from fedgkd_pl.federation.message import ClientUpdate, State
from fedgkd_pl.methods.fedavg import FedAvg, Weighting
from torch import nn


class FedExP(FedAvg):
    """FedExP: FedAvg with a server step size that adapts to the clients.

    Args:
        net: the model to learn; any module from inputs to logits.
        epsilon: ε of the step size (authors: 0.001 on CIFAR-10).
        weighting: of the clients in their mean: ``uniform`` (paper), or by their ``samples``.
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedExP"
    citation = "Jhunjhunwala et al., ICLR 2023"
    colour = 14

    def __init__(
        self,
        net: nn.Module | None = None,
        epsilon: float = 1e-3,
        weighting: Weighting = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, weighting=weighting, **kwargs)
        not_negative(epsilon=epsilon)
        self.epsilon = epsilon

    def on_update(self, update: ClientUpdate) -> None:
        """Adds p_k ‖Δ_k‖² up."""
        share = self.weight(update)
        self.sums["weight"] += share
        for move in self.move_of(update).values():
            self.sums["squares"] += share * float(move.square().sum())

    def server_step(self, mean: State) -> None:
        """Goes η_g times as far as the mean."""
        start = self.exact_parameters()
        square = sum(float((mean[name] - w).square().sum()) for name, w in start.items())
        mean_square = self.sums["squares"] / self.sums["weight"]
        step = extrapolation(mean_square, square, self.epsilon)
        self.log_round({"server/step_size": step})
        new = {name: w + step * (mean[name] - w) for name, w in start.items()}
        super().server_step(mean | new)


def extrapolation(mean_square: float, square_of_mean: float, epsilon: float) -> float:
    """η_g, from the mean of ‖Δ_k‖² and ‖mean Δ‖²; 1 where nobody has moved."""
    divisor = 2 * (square_of_mean + epsilon)
    return max(1.0, mean_square / divisor) if divisor else 1.0
