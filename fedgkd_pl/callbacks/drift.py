"""Distance and direction of the clients' updates."""

from typing import Any

import torch
from fedgkd_pl.federation.callback import FederatedCallback
from fedgkd_pl.federation.message import ClientUpdate, Message, State
from fedgkd_pl.federation.server import FederatedServer
from lightning.pytorch import Trainer
from torch import Tensor
from typing_extensions import override


class ClientDrift(FederatedCallback):
    """Logs how the clients' models of a round differ from the one they started from.

    With Δ_k = w_k − w_t, a vector of all parameters and floating-point buffers, over the K clients
    that answered (each counts once, whatever its samples):

    * ``drift/norm_mean`` and ``drift/norm_max``: of ‖Δ_k‖₂;
    * ``drift/cosine``: the mean cosine over all pairs of different clients; 1 where all move in one
      direction, near 0 or below where they pull apart. From the sum of the unit vectors u_k:
      (‖Σ u_k‖² − K) / (K (K − 1)). A client that did not move has no direction and is left out
      here; with fewer than two others there is no value;
    * ``drift/diversity``: Σ ‖Δ_k‖² / ‖Σ Δ_k‖², the gradient diversity of Yin et al. (Gradient
      Diversity: a Key Ingredient for Scalable Distributed Learning, AISTATS 2018); 1/K where all
      are equal, 1 where they are orthogonal. No value where the sum is zero.

    Sums are in float64, and of no client more than the sums is kept. A method that sends no global
    model (FedDistill) has no w_t that its clients start from: nothing is logged for it.
    """

    def __init__(self) -> None:
        self.start: Tensor | None = None  # w_t
        self.norms: list[float] = []

    @override
    def on_broadcast(
        self, trainer: Trainer, pl_module: FederatedServer, message: Message, cohort: Any
    ) -> None:
        """Takes w_t."""
        self.norms, self.start = [], None
        if state := message.models.get("global"):
            self.names = [name for name, tensor in state.items() if tensor.is_floating_point()]
            self.start = self._vector(state)
            self.sum = torch.zeros_like(self.start)
            self.unit_sum = torch.zeros_like(self.start)

    @override
    def on_client_end(
        self, trainer: Trainer, pl_module: FederatedServer, update: ClientUpdate, cohort_size: int
    ) -> None:
        """Adds a client's Δ_k to the sums."""
        if self.start is None:
            return
        delta = self._vector(update.weights) - self.start
        norm = float(delta.norm())
        self.norms.append(norm)
        self.sum += delta
        if norm > 0:
            self.unit_sum += delta / norm

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Logs the round."""
        if not self.norms:
            return
        moved = sum(norm > 0 for norm in self.norms)
        values = {"norm_mean": sum(self.norms) / len(self.norms), "norm_max": max(self.norms)}
        if moved >= 2:
            squared = float(self.unit_sum.dot(self.unit_sum))
            values["cosine"] = (squared - moved) / (moved * (moved - 1))
        if squared := float(self.sum.dot(self.sum)):
            values["diversity"] = sum(norm**2 for norm in self.norms) / squared
        pl_module.log_round({f"drift/{name}": value for name, value in values.items()})

    def _vector(self, state: State) -> Tensor:
        """A new one; on the CPU, as some devices have no doubles."""
        parts = [state[name].detach().cpu().double().flatten() for name in self.names]
        return torch.cat(parts)
