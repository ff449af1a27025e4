"""MOON: clients keep their features near the global model's and far from their own last ones.

Li et al., Model-Contrastive Federated Learning, CVPR 2021. The local objective, with z the
projection of a sample by the model being trained, by w_t and by the client's previous model:

    CE(w) − μ · log( e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ}) )

A client that has never trained has no previous model: the term is 0 for it.
"""

from typing import Any

import torch
from fedgkd_pl.errors import not_negative, positive
from fedgkd_pl.federation.client import Objective
from fedgkd_pl.federation.hardware import wide
from fedgkd_pl.federation.message import ClientUpdate, Message, Specs, State
from fedgkd_pl.federation.teachers import FrozenNet
from fedgkd_pl.methods.fedavg import FedAvg, FedAvgClient
from fedgkd_pl.models.heads import require_classifier, require_projection
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy


class MOONClient(FedAvgClient):
    """The client module of MOON; its previous model is its state."""

    def __init__(self, net: nn.Module, *args: Any, **settings: Any) -> None:
        super().__init__(net, *args, **settings)
        self.anchor, self.previous = FrozenNet(net), FrozenNet(net)
        self.contrasts = False

    def receive(self, message: Message, state: State) -> None:
        """Loads w_t and, where there is one, this client's previous model."""
        super().receive(message, state)
        self.contrasts = bool(state) and self.mu > 0
        if self.contrasts:
            self.anchor.load(self.whole(message.models["global"]), self.device)
            self.previous.load(self.whole(state), self.device)

    def reply(self) -> ClientUpdate:
        """Keeps the trained model for the client's next round."""
        update = super().reply()
        update.state = update.weights
        return update

    def teach(self, x: Tensor) -> Tensor | None:
        """The projections z_glob and z_prev, side by side."""
        if not self.contrasts:
            return None
        return torch.cat([self.anchor.features(x), self.previous.features(x)], dim=1)

    def objective(self, x: Tensor, y: Tensor, teacher_output: Tensor | None) -> Objective:
        """CE(w) + μ · contrast(z; z_glob, z_prev)."""
        if teacher_output is None:
            return super().objective(x, y, teacher_output)
        z: Tensor = self.net.features(x)  # type: ignore[operator]
        logits: Tensor = self.net.classifier(z)  # type: ignore[operator]
        z_glob, z_prev = teacher_output.chunk(2, dim=1)
        term = contrast(z, z_glob, z_prev, self.tau)
        ce, parts = self.loss_of(logits, y)
        return ce + self.mu * term, {**parts, "contrast": term}


class MOON(FedAvg):
    """MOON: model-contrastive federated learning.

    Args:
        net: a net with a projection head, such as ``ResNet8(projection=256)``.
        mu: μ, the weight of the contrast (paper: 5 on CIFAR, 1 on Tiny-ImageNet, 0.1 on text).
        tau: τ, its temperature.
        kwargs: those of :class:`FedAvg`.
    """

    title = "MOON"
    citation = "Li et al., CVPR 2021"
    colour = 2
    client_class = MOONClient
    client_settings = ("mu", "tau")
    takes_modules = False
    tasks = ("classes",)

    def __init__(self, net: nn.Module, mu: float = 5.0, tau: float = 0.5, **kwargs: Any) -> None:
        require_projection(net, "MOON")
        require_classifier(net, "MOON")
        super().__init__(net, **kwargs)
        not_negative(mu=mu)
        positive(tau=tau)
        self.mu, self.tau = mu, tau

    def client_state(self, number: int = 0) -> Specs:
        """A client's previous model."""
        return self.client_model(number)


def contrast(z: Tensor, positive: Tensor, negative: Tensor, tau: float) -> Tensor:
    """−log of the positive's share, a mean over the batch; only ``z`` has a gradient."""
    similarities = [cosine_similarity(wide(z), wide(other)) for other in (positive, negative)]
    first = torch.zeros(len(z), dtype=torch.int64, device=z.device)
    return cross_entropy(torch.stack(similarities, dim=1) / tau, first)
