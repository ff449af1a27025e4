"""Public data: inputs that the server and every client may see, mostly without labels."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from fedgkd_pl.data.examples import Examples
from fedgkd_pl.data.partition import stratified
from fedgkd_pl.errors import at_least, require
from fedgkd_pl.storage.recorded import Recorded
from torch import Tensor
from typing_extensions import override

if TYPE_CHECKING:
    from fedgkd_pl.data.datamodule import FederatedDataModule


class PublicData(Recorded, ABC):
    """A source of public data."""

    from_training = False  # whether it is cut from what the clients would share
    labelled = False  # whether its labels are public, too; they are all 0 otherwise

    @abstractmethod
    def take(
        self, train: Examples, num_classes: int, generator: np.random.Generator
    ) -> tuple[Tensor, Examples]:
        """The rows of ``train`` that are left to the clients, and the public examples."""


class HeldOut(PublicData):
    """A random part of the training data, which the clients then do not have.

    It has the distribution of the clients' data, which makes distillation easier than with the data
    of another source.

    Args:
        fraction: of the training data that validation leaves.
        labelled: whether its labels are public, too, for methods that begin with them (FedMD).
    """

    from_training = True

    def __init__(self, fraction: float = 0.2, labelled: bool = False) -> None:
        require(0 < fraction < 1, "fraction", "must be in (0, 1)", fraction)
        self.fraction = fraction
        self.labelled = labelled

    @override
    def take(
        self, train: Examples, num_classes: int, generator: np.random.Generator
    ) -> tuple[Tensor, Examples]:
        size = round(self.fraction * len(train))
        require(0 < size < len(train), "fraction", f"leaves {size} of {len(train)}", self.fraction)
        drawn = torch.from_numpy(generator.permutation(len(train)))
        return drawn[size:].sort().values, train.portable(drawn[:size].sort().values)


class OtherData(PublicData):
    """The training inputs of another dataset, read as the clients' own are.

    Args:
        data: the dataset; how it would be cut into clients does not matter.
        samples: take this many at random; by default all.
        labelled: whether its labels, which must be classes of the clients' data, are public, too,
            for methods that begin with them (FedMD).
    """

    def __init__(
        self, data: "FederatedDataModule", samples: int | None = None, labelled: bool = False
    ) -> None:
        at_least(1, samples=1 if samples is None else samples)
        self.data = data
        self.samples = samples
        self.labelled = labelled

    @override
    def take(
        self, train: Examples, num_classes: int, generator: np.random.Generator
    ) -> tuple[Tensor, Examples]:
        other = self.data.load().train
        ours, theirs = (
            f"{tuple(each.inputs.shape[1:])} of {each.inputs.dtype}" for each in (train, other)
        )
        reason = f"the inputs of {self.data.name} are {theirs}, the clients' are {ours}"
        require(ours == theirs, "public", reason)
        classes = self.data.num_classes
        reason = f"{self.data.name} has {classes} classes, the clients' data {num_classes}"
        require(not self.labelled or 0 < classes <= num_classes, "labelled", reason, True)
        if self.samples is not None:
            reason = f"must be at most {len(other)}, the samples of {self.data.name}"
            require(self.samples <= len(other), "samples", reason, self.samples)
            rows = np.sort(generator.permutation(len(other))[: self.samples])
            other = other.portable(torch.from_numpy(rows))
        return torch.arange(len(train)), replace(other, transform=train.transform)


def unlabelled(examples: Examples) -> Examples:
    """The same inputs; every label is 0."""
    return replace(examples, targets=torch.zeros_like(examples.targets))


def sampled_rows(public: Examples, samples: int, labelled: bool, seed: int) -> Tensor:
    """So many rows of public data, or all, by a seed; of every class its share, if labelled."""
    if samples >= len(public):
        return torch.arange(len(public))
    rng = np.random.default_rng(seed)
    if labelled:
        return torch.from_numpy(stratified(public.labels.cpu().numpy(), samples, rng, leave=0))
    return torch.from_numpy(rng.choice(len(public), samples, replace=False)).sort().values
