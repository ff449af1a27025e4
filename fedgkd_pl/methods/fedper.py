"""FedPer: each client keeps the last layers for itself.

Arivazhagan et al., Federated Learning with Personalization Layers, 2019. The names of the model are
split into Π, which each client k keeps, and the rest ω, which travels:

    client k:  (ω, Π_k) ← SGD on CE from (ω_t, Π_k);  Π_k is that of w_0 before its first round
    server:    ω_{t+1} ← Σ_k n_k/n ω_k
"""

from typing import Any

from fedgkd_pl.federation.exchange import Exchange, Personal
from fedgkd_pl.methods.fedavg import FedAvg
from torch import nn


class FedPer(FedAvg):
    """FedPer: each client keeps the last layer for itself.

    Args:
        net: the model to learn; any module from inputs to logits.
        personal: what a client keeps: the ``head``, or patterns of names, such as ``layer4.*``.
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedPer"
    citation = "Arivazhagan et al., 2019"
    colour = 25

    def __init__(
        self, net: nn.Module | None = None, personal: Personal = "head", **kwargs: Any
    ) -> None:
        super().__init__(net, exchange=Exchange(personal=personal), **kwargs)
