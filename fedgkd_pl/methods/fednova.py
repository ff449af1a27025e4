"""FedNova: the mean of normalised moves, so that clients with more steps do not pull more.

Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
NeurIPS 2020. With a_k how far client k's steps go with a gradient of 1, and p_k = n_k/n:

    w_{t+1} = w_t − (Σ_k p_k a_k) · Σ_k p_k (w_t − w_k) / a_k

Clients may have FedProx's term; it is a part of a_k.
"""

from typing import Any

import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.federation.answers import Spec, Specs
from fedgkd_pl.federation.message import ClientUpdate, Message, State
from fedgkd_pl.federation.steps import UnitGradient, check_countable
from fedgkd_pl.methods.fedprox import FedProx, FedProxClient
from torch import nn


class FedNova(FedProx):
    """FedNova: FedAvg of moves per unit of local work. Clients need torch.optim.SGD.

    Args:
        net: the model to learn; any module from inputs to logits.
        mu: μ, the weight of FedProx's term.
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedNova"
    citation = "Wang et al., NeurIPS 2020"
    colour = 13
    client_metrics = ("loss", "acc", "ce", "proximal")

    def __init__(self, net: nn.Module, mu: float = 0.0, **kwargs: Any) -> None:
        super().__init__(net, mu, **kwargs)
        self._work = self._weight = 0.0
        self._moves: State = {}

    def check(self, data: FederatedDataModule) -> None:
        """Asks for an optimizer whose steps can be counted."""
        super().check(data)
        check_countable(self.client(), "FedNova")

    def broadcast(self) -> Message:
        """w_t."""
        self._work = self._weight = 0.0
        self._moves = {}
        return super().broadcast()

    def take(self, update: ClientUpdate) -> None:
        """Adds p_k a_k and p_k (w_t − w_k) / a_k up."""
        share, work = self.weight(update), float(update.extra["work"])
        self._weight += share
        self._work += share * work
        for name, parameter in self.net.named_parameters():
            move = parameter.detach().cpu().double() - update.weights[name].double()
            move *= share / work
            self._moves[name] = self._moves[name] + move if name in self._moves else move

    def server_step(self, mean: State) -> None:
        """Moves by the normalised mean; buffers are averaged."""
        scale = self._work / self._weight**2
        new = {
            name: parameter.detach().cpu().double() - scale * self._moves[name]
            for name, parameter in self.net.named_parameters()
        }
        super().server_step(mean | new)

    def client_extra(self) -> Specs:
        """How far a client's steps go with a gradient of 1."""
        return {"work": Spec((), torch.float64, 1e-30, 1e30)}

    def client(self) -> "FedNovaClient":
        """The client half."""
        return FedNovaClient(self.net, self.optimizer, self.scheduler, mu=self.mu)


class FedNovaClient(FedProxClient):
    """The client half of FedNova."""

    def receive(self, message: Message, state: State) -> None:
        """Starts to count."""
        super().receive(message, state)
        self.unit_steps = UnitGradient(self.mu)

    def reply(self) -> ClientUpdate:
        """Sends a_k."""
        update = super().reply()
        assert self.unit_steps is not None
        update.extra = {"work": torch.tensor(self.unit_steps.moved, dtype=torch.float64)}
        return update
