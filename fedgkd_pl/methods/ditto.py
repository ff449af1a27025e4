"""Ditto: beside FedAvg, each client keeps a model of its own near the global one.

Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021. For every
batch of client k, in a round that starts from w_t:

    v_k ← v_k − η ( ∇CE(v_k) + λ (v_k − w_t) ),   then   w ← w − η ∇CE(w)

Before its first round, v_k is w_0. The global model is FedAvg's whatever λ is. With λη > 2 the
steps of v_k diverge.
"""

from copy import deepcopy
from typing import Any

import torch
from fedgkd_pl.errors import not_negative, require
from fedgkd_pl.federation.client import BatchNorms, Objective
from fedgkd_pl.federation.message import ClientUpdate, Message, Specs, State, like
from fedgkd_pl.methods.fedavg import FedAvg, FedAvgClient
from torch import Tensor, nn
from typing_extensions import override


class DittoClient(FedAvgClient):
    """The client module of Ditto; v_k is its state."""

    def __init__(self, net: nn.Module, *args: Any, **settings: Any) -> None:
        super().__init__(net, *args, **settings)
        self.own = [deepcopy(self.net)]  # in a list, so that it is no part of this module

    def receive(self, message: Message, state: State) -> None:
        """Loads w_t and v_k."""
        super().receive(message, state)
        own = self.own[0].to(self.device)
        own.load_state_dict(state or self.start)
        own.train(self.net.training)
        self.sent = [parameter.detach().clone() for parameter in self.net.parameters()]
        assert self.optimizer is not None
        self.own_optimizer = self.optimizer(own.parameters())
        self.own_norms = BatchNorms(own)

    def objective(self, x: Tensor, y: Tensor, teacher_output: Tensor | None) -> Objective:
        """CE(w), after a step of v_k."""
        self.step_own(x, y)
        return super().objective(x, y, teacher_output)

    def step_own(self, x: Tensor, y: Tensor) -> None:
        """Takes a step of v_k at the rate of w, clipped likewise."""
        self.own_norms.expect(len(y))
        self.own_optimizer.zero_grad()
        self.cross_entropy(self.own[0](x), y).backward()
        weights = [p for p in self.own[0].parameters() if p.grad is not None]
        for v, w_t in zip(self.own[0].parameters(), self.sent, strict=True):
            if v.grad is not None:
                v.grad.add_(v.detach() - w_t, alpha=self.lam)
        clip, way = self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm
        if clip:
            by_value = str(way).endswith("value")
            utils = torch.nn.utils
            (utils.clip_grad_value_ if by_value else utils.clip_grad_norm_)(weights, clip)
        rates = self.optimizers(use_pl_optimizer=False).param_groups  # type: ignore[union-attr]
        for ours, theirs in zip(self.own_optimizer.param_groups, rates, strict=True):
            ours["lr"] = theirs["lr"]
        self.own_optimizer.step()

    def reply(self) -> ClientUpdate:
        """Keeps v_k."""
        update = super().reply()
        own = self.own[0].state_dict().items()
        update.state = {name: tensor.detach().cpu().clone() for name, tensor in own}
        return update


class Ditto(FedAvg):
    """Ditto: each client has a model of its own, held near the global one.

    What is scored is the clients' own models.

    Args:
        net: the model to learn; any module from inputs to logits.
        lam: λ, the weight of the distance to the global model (authors: 0.1, 1 or 2).
        kwargs: those of :class:`FedAvg`.
    """

    title = "Ditto"
    citation = "Li et al., ICML 2021"
    colour = 29
    client_class = DittoClient
    client_settings = ("lam",)
    takes_modules = False
    takes_sequences = False
    exchanges = ()
    keeps = ("start",)
    is_personal = True

    def __init__(self, net: nn.Module | None = None, lam: float = 1.0, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        not_negative(lam=lam)
        require(not self.compiles, "compile", "is not for Ditto, whose clients take two steps")
        self.lam = lam

    @override
    def client_state(self, number: int = 0) -> Specs:
        return like(self.nets[number].state_dict())

    @override
    def whole(self, update: ClientUpdate) -> State:
        return update.state

    @override
    def model_of(self, client: int, place: int = 0) -> State:
        return dict(self.client_states.get(client, self.start))
