"""Handwritten digits: 1,797 real 8 × 8 images that come with scikit-learn."""

from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.inputs import ImageInputs
from fedgkd_pl.data.transforms import Scale
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
