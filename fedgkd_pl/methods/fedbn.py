"""FedBN: each client keeps its normalization layers for itself.

Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.
As FedPer, with Π all of the norms: weights, biases and statistics; by their type, not by names.
"""

from typing import Any

from fedgkd_pl.federation.exchange import Exchange
from fedgkd_pl.methods.fedavg import FedAvg, Weighting
from torch import nn


class FedBN(FedAvg):
    """FedBN: each client keeps its normalization layers, statistics included, for itself.

    Args:
        net: the model to learn; of one without norms, this is FedAvg.
        weighting: of the clients in their mean: ``uniform`` (authors), or by their ``samples``.
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedBN"
    citation = "Li et al., ICLR 2021"
    colour = 26

    def __init__(
        self, net: nn.Module | None = None, weighting: Weighting = "uniform", **kwargs: Any
    ) -> None:
        super().__init__(net, weighting=weighting, exchange=Exchange(personal="norms"), **kwargs)
