"""The n_k-weighted mean of models, one at a time."""

import torch
from fedgkd_pl.federation.message import State


class WeightedMean:
    """Σ n_k w_k / Σ n_k over whole states, streamed: its memory is one model.

    Floats are summed in double precision. Integers (such as BatchNorm's ``num_batches_tracked``)
    have no mean: the largest is kept, so a count stays a count. Where states have different names,
    the mean of each name is over those that have it.
    """

    def __init__(self) -> None:
        self.total: State = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.weights: dict[str, float] = {}  # Σ n_k of every name

    def add(self, state: State, weight: float = 1) -> None:
        """Takes a model in; ``weight`` is n_k."""
        for name, tensor in state.items():
            value = tensor.detach().cpu()
            if value.is_floating_point():
                value = value.double() * weight
                self.total[name] = self.total[name].add_(value) if name in self.total else value
            elif name in self.total:
                self.total[name] = torch.maximum(self.total[name], value)
            else:
                self.total[name] = value.clone()
            self.dtypes[name] = tensor.dtype
            self.weights[name] = self.weights.get(name, 0) + weight

    def scale(self, factor: float) -> None:
        """Makes all models taken in so far count this much less; integers stay as they are."""
        self.weights = {name: weight * factor for name, weight in self.weights.items()}
        for total in self.total.values():
            if total.is_floating_point():
                total.mul_(factor)

    def mean(self, exact: bool = False) -> State:
        """The mean so far; ``exact`` leaves floats in double precision."""
        return {
            name: self._divide(total, self.weights[name], None if exact else self.dtypes[name])
            for name, total in self.total.items()
        }

    def _divide(
        self, total: torch.Tensor, weight: float, dtype: torch.dtype | None
    ) -> torch.Tensor:
        if not total.is_floating_point():
            return total
        mean = total / weight
        return mean if dtype is None else mean.to(dtype)
