"""FedDyn: clients are pulled to where their own optimum and the global one agree.

Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021. In a form without a
division by α, with d_k the sum of all moves θ_k − w_t that client k has made so far:

    client k:  θ_k ≈ argmin  CE(θ) + α/2 ‖θ − (w_t − d_k)‖²,   then  d_k ← d_k + θ_k − w_t
    server:    w_{t+1} = mean_{k in cohort} θ_k + 1/N Σ_{all k} d_k      a uniform mean

The paper's h_k is −α d_k. What is evaluated is w; the authors plot the mean of all clients' last
models.
"""

from typing import Any

import torch
from fedgkd_pl.errors import not_negative
from fedgkd_pl.federation.message import ClientUpdate, Message, Specs, State
from fedgkd_pl.methods.fedavg import FedAvg, Weighting
from fedgkd_pl.methods.fedprox import FedProxClient
from torch import nn


class FedDynClient(FedProxClient):
    """The client module of FedDyn: FedProx around w_t − d_k; d_k is its state."""

    def receive(self, message: Message, state: State) -> None:
        """Loads w_t; the centre of the regulariser is w_t − d_k."""
        super().receive(message, state)
        self.sent = self.start
        self.drift = state
        if state:
            pairs = zip(self.sent, self.corrected, strict=True)
            self.start = [w_t - state[name].to(self.device) for w_t, (name, _) in pairs]

    def reply(self) -> ClientUpdate:
        """Keeps d_k + θ_k − w_t."""
        update = super().reply()
        for (name, _), w_t in zip(self.corrected, self.sent, strict=True):
            before = self.drift.get(name, torch.zeros(()))
            update.state[name] = before.to(w_t.dtype) + update.weights[name] - w_t.cpu()
        return update


class FedDyn(FedAvg):
    """FedDyn: FedAvg with a regulariser that follows every client.

    Args:
        net: the model to learn; any module from inputs to logits.
        alpha: α, the weight of the regulariser (authors: 0.01).
        server_term: add the mean of all clients' d_k to the mean of the cohort's models.
        weighting: of the clients in their mean: ``uniform`` (authors), or by their ``samples``.
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedDyn"
    citation = "Acar et al., ICLR 2021"
    colour = 10
    client_class = FedDynClient
    client_settings: tuple[str, ...] = ("mu",)
    keeps: tuple[str, ...] = ("moved",)

    def __init__(
        self,
        net: nn.Module | None = None,
        alpha: float = 0.01,
        server_term: bool = True,
        weighting: Weighting = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, weighting=weighting, **kwargs)
        not_negative(alpha=alpha)
        self.mu = alpha  # of FedProx's term, around w_t − d_k
        self.server_term = server_term
        self.moved: State = {}  # the sum of all clients' d_k

    def reset(self) -> None:
        """Starts with d_k of zero."""
        super().reset()
        self.moved = {}

    def on_update(self, update: ClientUpdate) -> None:
        """Adds θ_k − w_t up."""
        for name, move in self.move_of(update).items():
            self.sums[name] += move

    def server_step(self, mean: State) -> None:
        """Moves to the cohort's mean and the mean of all clients' d_k."""
        self.moved = {name: self.moved.get(name, 0.0) + move for name, move in self.sums.items()}
        if self.server_term:
            clients = self.datamodule.num_clients
            mean = mean | {name: mean[name] + d / clients for name, d in self.moved.items()}
        super().server_step(mean)

    def client_state(self, number: int = 0) -> Specs:
        """A client's d_k."""
        return self.parameter_specs()
