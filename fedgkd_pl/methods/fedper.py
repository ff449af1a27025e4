"""FedPer, FedBN and FedBABU: FedAvg of a part of the model.

The names of the model are split into Π, which each client k keeps for itself, and the rest ω:

    client k:  (ω, Π_k) ← SGD on CE from (ω_t, Π_k);  Π_k is that of w_0 before its first round
    server:    ω_{t+1} ← Σ_k n_k/n ω_k

- FedPer (Arivazhagan et al., Federated Learning with Personalization Layers, 2019): Π is the last
  layer.
- FedBN (Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization,
  ICLR 2021): Π is all of the norms, statistics included; by their type, not by their names.
- FedBABU (Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification,
  ICLR 2022): the last layer stays as it is in w_0 with everybody; clients fine-tune the whole net
  after the last round, which ``fedgkd-pl personalize`` does.
"""

from copy import deepcopy
from typing import Any

from fedgkd_pl.federation.exchange import Exchange, Personal, last_layer
from fedgkd_pl.federation.own_module import one_of
from fedgkd_pl.methods.fedavg import FedAvg, Weighting
from torch import nn
from typing_extensions import override


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


class FedBABU(FedAvg):
    """FedBABU: the last layer is never trained; clients fine-tune all layers afterwards.

    Args:
        net: the model to learn; any module from inputs to logits.
        weighting: of the clients in their mean: ``uniform`` (authors), or by their ``samples``.
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedBABU"
    citation = "Oh et al., ICLR 2022"
    colour = 28

    def __init__(
        self, net: nn.Module | None = None, weighting: Weighting = "uniform", **kwargs: Any
    ) -> None:
        last_layer(one_of(net, kwargs.get("module"))).requires_grad_(False)
        super().__init__(net, weighting=weighting, exchange=Exchange(share="trainable"), **kwargs)

    @override
    def net_to_tune(self) -> nn.Module:
        net = deepcopy(self.net)
        last_layer(net).requires_grad_(True)
        return net
