"""Part of CIFAR-10, for benchmarks/nets.py; a file of its own, which a Flower app takes along."""

from typing import Any

from fedgkd_pl import CIFAR10, Splits


class SomeImages(CIFAR10):
    """The first so many training and test images, which come in no order."""

    def __init__(self, train: int, test: int, data_dir: str = "data", **kwargs: Any) -> None:
        super().__init__(data_dir, download=False, **kwargs)
        self.sizes = train, test

    def load(self) -> Splits:
        """See :meth:`FederatedDataModule.load`."""
        splits = super().load()
        train, test = self.sizes
        return Splits(splits.train[:train], splits.test[:test])
