"""The base of all federated datasets."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from fedgkd_pl.checkpoint import load_newest
from fedgkd_pl.data.heterogeneity import heterogeneity
from fedgkd_pl.data.partition import IID, Partition
from fedgkd_pl.data.resident import Batches, ClientData, Examples, Splits, digest
from fedgkd_pl.data.validate import check_splits
from fedgkd_pl.errors import require
from fedgkd_pl.federation.seeds import default_seed, derive
from lightning.pytorch import LightningDataModule
from torch import nn


class CohortSampler:
    """The clients of a round, drawn uniformly without replacement.

    Lightning calls :meth:`set_epoch` before every epoch, on resume too: the cohort is a function
    of (seed, round) and needs no state.

    Args:
        clients: the ids to draw from.
        size: how many take part in a round.
        seed: the seed of the run.
    """

    def __init__(self, clients: Sequence[int], size: int, seed: int) -> None:
        self.clients = clients
        self.size = size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Moves to a round.

        Args:
            epoch: the number of rounds done.
        """
        self.epoch = epoch

    def cohort(self) -> list[int]:
        """The ids of this round's clients, ascending."""
        rng = np.random.default_rng(derive(self.seed, "cohort", self.epoch + 1))
        drawn = rng.choice(len(self.clients), self.size, replace=False)
        return sorted(self.clients[place] for place in drawn.tolist())


class CohortLoader:
    """An epoch of the server's Trainer: one batch, which is one cohort.

    Args:
        sampler: draws the cohort; Lightning finds it under this name and advances it.
    """

    def __init__(self, sampler: CohortSampler) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[list[int]]:
        yield self.sampler.cohort()


class FederatedDataModule(LightningDataModule):
    """Training data cut into clients; validation and test data held by the server.

    A dataset is a subclass with :meth:`load`, ``name`` and ``num_classes``.

    Args:
        num_clients: how many clients share the training data (N).
        partition: how it is cut, such as ``Dirichlet(alpha=0.1, balanced=True)``.
        participation: the fraction of clients in a round (C).
        batch_size: of the clients' local training.
        val_fraction: the part of the training data that the server keeps for validation,
            its last samples; 0 for none. Not used where the dataset has a validation set.
        eval_batch_size: of validation and test; speed only.
        unseen_clients: this many clients, the last ones, are never drawn.
        seed: of the partition, the cohorts and the clients' randomness; by default that of
            ``seed_everything``, or 0.
        partition_seed: to change the seed and keep the partition; by default ``seed``.
    """

    name: str
    num_classes: int

    def __init__(
        self,
        num_clients: int = 20,
        partition: Partition = IID(),  # noqa: B008
        participation: float = 1.0,
        batch_size: int = 64,
        val_fraction: float = 0.1,
        eval_batch_size: int = 500,
        unseen_clients: int = 0,
        seed: int | None = None,
        partition_seed: int | None = None,
    ) -> None:
        super().__init__()
        require(num_clients >= 1, "num_clients", "must be at least 1", num_clients)
        require(0 < participation <= 1, "participation", "must be in (0, 1]", participation)
        require(
            0 <= unseen_clients < num_clients,
            "unseen_clients",
            f"must leave some of {num_clients} clients",
            unseen_clients,
        )
        self.cohort_size = round(participation * (num_clients - unseen_clients))
        require(
            self.cohort_size >= 1,
            "participation",
            f"leaves no client of {num_clients - unseen_clients} in a round",
            participation,
        )
        require(batch_size >= 1, "batch_size", "must be at least 1", batch_size)
        require(eval_batch_size >= 1, "eval_batch_size", "must be at least 1", eval_batch_size)
        require(0 <= val_fraction < 1, "val_fraction", "must be in [0, 1)", val_fraction)
        for key, value in ("seed", seed), ("partition_seed", partition_seed):
            require(value is None or value >= 0, key, "must not be negative", value)
        self.num_clients = num_clients
        self.partition = partition
        self.unseen_clients = unseen_clients
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.eval_batch_size = eval_batch_size
        self.seed = default_seed() if seed is None else seed
        self.partition_seed = self.seed if partition_seed is None else partition_seed
        self.clients: ClientData | None = None
        self._fingerprint: str | None = None

    @abstractmethod
    def load(self) -> Splits:
        """Reads the data into memory; what is damaged is refused here, with the file's name.

        What it gives is checked by :meth:`setup`: lengths, types, labels, NaN.
        """

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """The data of a run; Lightning's own reads pickles.

        Args:
            checkpoint_path: the file, which keeps none of the arguments.
            args: Lightning's, unused.
            kwargs: those of the class.
        """
        checkpoint = load_newest(Path(checkpoint_path))[0]
        data = cls(**kwargs)
        data.load_state_dict(checkpoint.get(cls.__qualname__, {}))
        return data

    def check_net(self, net: nn.Module) -> None:
        """Raises a clear error where a net cannot take this data though its shapes fit.

        Args:
            net: the model to be trained.
        """

    def setup(self, stage: str | None = None) -> None:
        """Loads and cuts the data, once.

        Args:
            stage: Lightning's; all stages need the same.
        """
        if self.clients is not None:
            return
        splits = self.load()
        check_splits(splits, getattr(self, "num_classes", 0))
        owned, self.test = splits.train, splits.test
        self._everything = splits.train
        if splits.val is None:
            kept = len(owned) - round(self.val_fraction * len(owned))
            owned, self.val = owned[:kept], owned[kept:]
        else:
            self.val = splits.val
        keys = None if splits.keys is None else splits.keys[: len(owned)]
        rng = np.random.default_rng(derive(self.partition_seed, "partition"))
        index = self.partition(owned.targets.numpy(), self.num_clients, rng, keys)
        seen = index.sizes[: self.num_clients - self.unseen_clients]
        self.eligible = np.flatnonzero(seen).tolist()
        require(
            len(self.eligible) >= self.cohort_size,
            "participation",
            f"only {len(self.eligible)} clients have data, a round needs {self.cohort_size}",
        )
        self.clients = ClientData(owned, index, self.batch_size, self.seed)

    @property
    def client_data(self) -> ClientData:
        """The clients' data; :meth:`setup` must have run."""
        if self.clients is None:
            self.setup()
        assert self.clients is not None
        return self.clients

    def all_training_examples(self) -> Examples:
        """What clients share and, where it was cut off, what is kept for validation."""
        self.client_data  # noqa: B018  (loads it)
        return self._everything

    def fingerprint(self) -> str:
        """The SHA-256 of all samples, labels and of who owns which: other data, another number.

        It does not depend on where the data lies, nor on the machine. A run can be resumed only
        where it is the same.
        """
        if self._fingerprint is None:
            data = self.client_data
            splits = (data.examples, self.val, self.test)
            tensors = [t for split in splits for t in (split.inputs, split.targets)]
            index = [torch.from_numpy(part) for part in (data.index.offsets, data.index.samples)]
            self._fingerprint = digest(*tensors, *index)
        return self._fingerprint

    def summary(self) -> dict[str, Any]:
        """Who holds how much of what, for ``partition.json``."""
        data = self.client_data
        counts = data.index.label_counts(data.examples.targets.numpy(), self.num_classes)
        return {
            "dataset": self.name,
            "num_clients": self.num_clients,
            "num_classes": self.num_classes,
            "num_val": len(self.val),
            "num_test": len(self.test),
            "heterogeneity": heterogeneity(counts),
            "counts": counts,
        }

    def train_dataloader(self) -> CohortLoader:
        """One cohort per epoch."""
        return CohortLoader(CohortSampler(self.eligible, self.cohort_size, self.seed))

    def eval_splits(self) -> list[str]:
        """The names of what :meth:`val_dataloader` gives: within ``fit`` the test set too."""
        fitting = self.trainer is not None and self.trainer.state.fn == "fit"
        splits = ["val"] if len(self.val) else []
        return [*splits, "test"] if fitting or not splits else splits

    def val_dataloader(self) -> list[Batches]:
        """The server's validation set, and beside it the test set that curves are drawn from."""
        return [self._eval(getattr(self, split)) for split in self.eval_splits()]

    def test_dataloader(self) -> Batches:
        """The official test set."""
        return self._eval(self.test)

    def predict_dataloader(self) -> Batches:
        """The official test set."""
        return self._eval(self.test)

    def _eval(self, examples: Examples) -> Batches:
        device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
        return Batches(examples.to(device), self.eval_batch_size)
