"""MOON: clients keep their features near the global model's and far from their own last ones.

Li et al., Model-Contrastive Federated Learning, CVPR 2021. The local objective, with z the
projection of a sample by the model being trained, by w_t and by the client's previous model:

    CE(w) − μ · log( e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ}) )

A client that has never trained has no previous model: the term is 0 for it.
"""

from typing import Any

import torch
from fedgkd_pl.data.resident import Batch
from fedgkd_pl.errors import require
from fedgkd_pl.federation.message import ClientUpdate, Message, State
from fedgkd_pl.federation.teachers import FrozenNet
from fedgkd_pl.methods.fedavg import FedAvg, FedAvgClient
from fedgkd_pl.models.heads import require_classifier, require_projection
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy


class MOON(FedAvg):
    """MOON: model-contrastive federated learning.

    Args:
        net: a net with a projection head, such as ``ResNet8(projection=256)``.
        mu: μ, the weight of the contrast (paper: 5 on CIFAR, 1 on Tiny-ImageNet, 0.1 on text).
        tau: τ, its temperature.
        kwargs: those of :class:`FedAvg`.
    """

    def __init__(self, net: nn.Module, mu: float = 5.0, tau: float = 0.5, **kwargs: Any) -> None:
        require_projection(net, "MOON")
        require_classifier(net, "MOON")
        super().__init__(net, **kwargs)
        require(0 <= mu < float("inf"), "mu", "must not be negative", mu)
        require(0 < tau < float("inf"), "tau", "must be positive", tau)
        self.mu = mu
        self.tau = tau

    def client(self) -> "MOONClient":
        """The client half."""
        return MOONClient(self.net, self.optimizer, self.scheduler, mu=self.mu, tau=self.tau)


class MOONClient(FedAvgClient):
    """The client half of MOON; its previous model is its state."""

    mu: float
    tau: float

    def __init__(self, net: nn.Module, *args: Any, **settings: Any) -> None:
        super().__init__(net, *args, **settings)
        self.anchor, self.previous = FrozenNet(net), FrozenNet(net)
        self.contrasts = False

    def receive(self, message: Message, state: State) -> None:
        """Loads w_t and, where there is one, this client's previous model."""
        super().receive(message, state)
        self.contrasts = bool(state) and self.mu > 0
        if self.contrasts:
            self.anchor.load(message.models["global"])
            self.previous.load(state)

    def reply(self) -> ClientUpdate:
        """Keeps the trained model for the client's next round."""
        update = super().reply()
        update.state = update.weights
        return update

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """CE(w) + μ · contrast(z; z_glob, z_prev)."""
        if not self.contrasts:
            return super().training_step(batch, batch_idx)
        x, y = batch
        z: Tensor = self.net.features(x)  # type: ignore[operator]
        logits: Tensor = self.net.classifier(z)  # type: ignore[operator]
        term = contrast(z, self.anchor.features(x), self.previous.features(x), self.tau)
        loss = cross_entropy(logits, y) + self.mu * term
        self.report(len(y), loss=loss, acc=(logits.argmax(1) == y).float().mean(), contrast=term)
        return loss


def contrast(z: Tensor, positive: Tensor, negative: Tensor, tau: float) -> Tensor:
    """−log of the positive's share, a mean over the batch.

    Args:
        z: projections with a gradient.
        positive: those of the global model.
        negative: those of the client's previous model.
        tau: the temperature.
    """
    similarity = torch.stack(
        [cosine_similarity(z, positive, dim=1), cosine_similarity(z, negative, dim=1)], dim=1
    )
    first = torch.zeros(len(z), dtype=torch.int64, device=z.device)
    return cross_entropy(similarity / tau, first)
