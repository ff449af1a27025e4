"""FedProx: clients are held near the model they started from.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020. The local objective:

    CE(w) + μ/2 ‖w − w_t‖²      over the parameters
"""

from typing import Any

import torch
from fedgkd_pl.errors import not_negative
from fedgkd_pl.federation.client import Objective
from fedgkd_pl.federation.message import Message, State
from fedgkd_pl.methods.fedavg import FedAvg, FedAvgClient
from torch import Tensor, nn


class FedProxClient(FedAvgClient):
    """The client module of FedProx."""

    def receive(self, message: Message, state: State) -> None:
        """Remembers w_t."""
        super().receive(message, state)
        self.start = [parameter.detach().clone() for _, parameter in self.corrected]

    def objective(self, x: Tensor, y: Tensor, teacher_output: Tensor | None) -> Objective:
        """CE(w) + μ/2 ‖w − w_t‖²."""
        loss, parts = super().objective(x, y, teacher_output)
        if not self.mu:
            return loss, parts
        pairs = zip(self.corrected, self.start, strict=True)
        squares = torch.stack([((w - w_t) ** 2).sum() for (_, w), w_t in pairs]).sum()
        parts["proximal"] = self.mu / 2 * squares
        return loss + parts["proximal"], parts


class FedProx(FedAvg):
    """FedProx: FedAvg whose clients pay for leaving the global model.

    Args:
        net: the model to learn; any module from inputs to logits.
        mu: μ, the weight of the proximal term (paper: 0.01 on CIFAR-10, 0.001 elsewhere).
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedProx"
    citation = "Li et al., MLSys 2020"
    colour = 1
    client_class = FedProxClient
    client_settings = ("mu",)

    def __init__(self, net: nn.Module | None = None, mu: float = 0.01, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        not_negative(mu=mu)
        self.mu = mu
