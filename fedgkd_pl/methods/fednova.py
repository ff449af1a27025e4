"""FedNova: the mean of normalised moves, so that clients with more steps do not pull more.

Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
NeurIPS 2020. With a_k how far client k's steps go with a gradient of 1, and p_k = n_k/n:

    w_{t+1} = w_t − (Σ_k p_k a_k) · Σ_k p_k (w_t − w_k) / a_k

Clients may have FedProx's term; it is a part of a_k.
"""

import math
from functools import reduce
from operator import add
from typing import Any

import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.errors import require
from fedgkd_pl.federation.message import ClientUpdate, State
from fedgkd_pl.federation.optimizer import UnitGradient, check_countable
from fedgkd_pl.methods.fedprox import FedProx
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

    def __init__(self, net: nn.Module | None = None, mu: float = 0.0, **kwargs: Any) -> None:
        super().__init__(net, mu, **kwargs)

    def check(self, data: FederatedDataModule) -> None:
        """Asks for an optimizer whose steps can be counted."""
        super().check(data)
        text = "FedNova counts the steps of clients: give it, also for a LightningModule"
        require(self.optimizer is not None, "optimizer", text)
        check_countable(self.client(), "FedNova")

    def on_update(self, update: ClientUpdate) -> None:
        """Adds p_k a_k and p_k (w_t − w_k) / a_k up."""
        share, work = self.weight(update), self.work(update.num_samples)
        self.answers.append((share, share * work))
        for name, move in self.move_of(update).items():
            self.sums[name] += move * (share / work)

    def server_step(self, mean: State) -> None:
        """Moves by the normalised mean; buffers are averaged."""
        weights, works = zip(*self.answers, strict=True)
        scale = reduce(add, works) / sum(weights) ** 2  # sum() of floats depends on Python
        new = {n: w + scale * self.sums[n] for n, w in self.exact_parameters().items()}
        super().server_step(mean | new)

    def work(self, samples: int) -> float:
        """a_k of a client with so many samples: worked out here, so that nobody claims it."""
        batches = math.ceil(samples / self.datamodule.client_data.batch_size)
        assert self.optimizer is not None
        optimizer = self.optimizer([nn.Parameter(torch.zeros(1))])
        if self.schedule is not None:
            optimizer.param_groups[0]["lr"] *= self.schedule.factor
        scheduler = None if self.scheduler is None else self.scheduler(optimizer)
        unit = UnitGradient(self.mu)
        for step in range(self.local_steps or self.local_epochs * batches):
            unit.step(optimizer)
            if scheduler is not None and step % batches == batches - 1:
                optimizer.step()  # which has no gradient; torch warns without it
                scheduler.step()
        return unit.moved
