"""Small datasets that need no file: handwritten digits, and the paper's two-dimensional toy."""

from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.examples import Examples, Scale, Splits
from fedgkd_pl.data.inputs import ImageInputs
from fedgkd_pl.data.partition import ByKey, Partition
from fedgkd_pl.errors import at_least
from numpy.typing import NDArray
from typing_extensions import override


class Digits(FederatedDataModule):
    """Handwritten digits, 8 × 8, embedded in scikit-learn: nothing to download.

    Every fifth image of a fixed shuffle is the test set (360); the rest is training data.

    Args:
        flat: vectors of 64 numbers for an MLP; otherwise images of 1 × 8 × 8.
        kwargs: those of :class:`FederatedDataModule`.
    """

    name = "digits"
    num_classes = 10
    class_names = tuple("0123456789")
    reading = ImageInputs((1, 8, 8), largest=16)
    val_split = "last"

    def __init__(self, flat: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.flat = flat

    @override
    def load(self) -> Splits:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
        inputs = torch.from_numpy(pixels.astype(np.uint8))[order]
        inputs = inputs if self.flat else inputs.view(-1, 1, 8, 8)
        all_ = Examples(inputs, torch.from_numpy(labels.astype(np.int64))[order], Scale(16))
        test = torch.arange(len(labels)) % 5 == 0
        return Splits(all_[~test], all_[test])


class Toy2D(FederatedDataModule):
    """Points of (−4, 4)² whose class is their quadrant; every client sees one sector of the plane.

    The sectors start on a diagonal, so with four clients each sees parts of two classes and none
    of the others: what a client learns of them it can only keep from the global model.

    Args:
        num_clients: how many sectors, each a client.
        num_samples: points that the clients share.
        partition: by sector; any other works too.
        kwargs: those of :class:`FederatedDataModule`.
    """

    name = "toy2d"
    num_classes = 4

    def __init__(
        self,
        num_clients: int = 4,
        num_samples: int = 800,
        partition: Partition = ByKey(),  # noqa: B008
        **kwargs: Any,
    ) -> None:
        super().__init__(num_clients=num_clients, partition=partition, **kwargs)
        at_least(1, num_samples=num_samples)
        self.num_samples = num_samples

    @override
    def load(self) -> Splits:
        rng = np.random.default_rng(0)  # the same points whatever the seed
        train, val, test = (rng.uniform(-4, 4, (n, 2)) for n in (self.num_samples, 400, 2000))
        owners = sector(train, self.num_clients)
        return Splits(_examples(train), _examples(test), _examples(val), owners)


def sector(points: NDArray[np.floating], num_clients: int) -> NDArray[np.int64]:
    """The client whose part of the plane each point lies in; ``points`` is points × 2."""
    turned = (np.arctan2(points[:, 1], points[:, 0]) - np.pi / 4) % (2 * np.pi)
    return (turned / (2 * np.pi) * num_clients).astype(np.int64)  # type: ignore[no-any-return]


def _examples(points: NDArray[np.float64]) -> Examples:
    quadrant = (points[:, 0] < 0) + 2 * (points[:, 1] < 0)
    inputs = torch.from_numpy(points.astype(np.float32))
    return Examples(inputs, torch.from_numpy(quadrant.astype(np.int64)), Scale(1))
