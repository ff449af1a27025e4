"""FedBABU: the last layer is never trained, and fine-tuned at the end.

Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022.
FedAvg of all layers but the last, which stays with everybody as it is in w_0. After the last round
clients fine-tune the whole net, which ``fedgkd-pl personalize`` does.
"""

from copy import deepcopy
from typing import Any

from fedgkd_pl.federation.exchange import Exchange, last_layer
from fedgkd_pl.federation.own_module import one_of
from fedgkd_pl.methods.fedavg import FedAvg, Weighting
from torch import nn
from typing_extensions import override


class FedBABU(FedAvg):
    """FedBABU: the last layer is never trained; clients fine-tune all layers afterwards.

    Args:
        net: the model to learn; any module from inputs to logits. Its last layer is frozen.
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
