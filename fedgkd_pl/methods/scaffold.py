"""SCAFFOLD: control variates take the clients' drift out of their gradients.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020,
option II. With c_k the control variate of client k, zero before its first round:

    client k:  w ← w − η ( ∇CE(w) − c_k + c ),  K steps
               c_k⁺ = c_k − c + (w_t − w_k) / A
    server:    c ← c + 1/N Σ_{k in cohort} (c_k⁺ − c_k)     N: all clients

A is how far the same steps go with a gradient of 1: ηK and, with momentum, more: dividing by ηK
would make c_k ten times too large at momentum 0.9. Gradients are clipped after the correction.
"""

from typing import Any

import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.federation.message import ClientUpdate, Message, Specs, State
from fedgkd_pl.federation.optimizer import UnitGradient, check_countable
from fedgkd_pl.methods.fedavg import FedAvg, FedAvgClient
from torch import nn


class SCAFFOLDClient(FedAvgClient):
    """The client module of SCAFFOLD; its control variate is its state."""

    def receive(self, message: Message, state: State) -> None:
        """Loads w_t; the correction of the gradient is c − c_k."""
        super().receive(message, state)
        self.unit_steps = UnitGradient()
        self.start = [parameter.detach().clone() for _, parameter in self.corrected]
        self.control = message.tensors["control"]
        self.own = state or {name: torch.zeros_like(c) for name, c in self.control.items()}
        self.correction = [
            (self.control[name] - self.own[name]).to(self.device) for name, _ in self.corrected
        ]

    def reply(self) -> ClientUpdate:
        """Sends c_k⁺ − c_k and keeps c_k⁺."""
        update = super().reply()
        assert self.unit_steps is not None
        for (name, _), start in zip(self.corrected, self.start, strict=True):
            gradient = (start.cpu() - update.weights[name]) / self.unit_steps.moved
            update.extra[name] = gradient - self.control[name]
            update.state[name] = self.own[name] + update.extra[name]
        return update


class SCAFFOLD(FedAvg):
    """SCAFFOLD: FedAvg whose clients correct their gradients by control variates.

    Clients need torch.optim.SGD; what they send and get is twice a model.

    Args:
        net: the model to learn; any module from inputs to logits.
        kwargs: those of :class:`FedAvg`.
    """

    title = "SCAFFOLD"
    citation = "Karimireddy et al., ICML 2020"
    colour = 9
    client_class = SCAFFOLDClient
    keeps = ("control",)

    def __init__(self, net: nn.Module | None = None, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.reset()

    def reset(self) -> None:
        """Starts with control variates of zero."""
        super().reset()
        self.control: State = {
            name: torch.zeros(parameter.shape, dtype=torch.float64)
            for name, parameter in self.shared_parameters()
        }

    def check(self, data: FederatedDataModule) -> None:
        """Asks for an optimizer whose steps can be counted."""
        super().check(data)
        check_countable(self.client(), "SCAFFOLD")

    def broadcast(self) -> Message:
        """w_t and c."""
        message = super().broadcast()
        message.tensors["control"] = {
            name: self.control[name].to(parameter.dtype)
            for name, parameter in self.shared_parameters()
        }
        return message

    def on_update(self, update: ClientUpdate) -> None:
        """Adds c_k⁺ − c_k up."""
        for name, change in update.extra.items():
            self.sums[name] += change.double()

    def server_step(self, mean: State) -> None:
        """As FedAvg; c moves by the mean change over all clients."""
        super().server_step(mean)
        for name, change in self.sums.items():
            self.control[name] += change / self.datamodule.num_clients

    def client_extra(self) -> Specs:
        """The change of a client's control variate."""
        return self.parameter_specs()

    def client_state(self, number: int = 0) -> Specs:
        """A client's control variate."""
        return self.parameter_specs()
