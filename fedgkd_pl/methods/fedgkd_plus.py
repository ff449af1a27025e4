"""FedGKD+: FedGKD on a net with a projection head.

Yao et al., Local-Global Knowledge Distillation in Heterogeneous Federated Learning with Non-IID
Data: MOON's head is added for a fair comparison; the objective is FedGKD's.
"""

from typing import Any

from fedgkd_pl.methods.fedgkd import FedGKD
from fedgkd_pl.models.heads import require_projection
from torch import nn


class FedGKDPlus(FedGKD):
    """FedGKD+: FedGKD on a net with a projection head.

    Args:
        net: a net with a projection head, such as ``ResNet8(projection=256)``.
        kwargs: those of :class:`FedGKD`.
    """

    title = "FedGKD+"
    citation = "Yao et al."
    colour = 8

    def __init__(self, net: nn.Module | None = None, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        require_projection(self.net, "FedGKD+")
