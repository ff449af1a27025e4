"""The owners of the samples: one class per way to cut.

A partition is a function of (labels, number of clients, generator) and can be used without the
rest of the package::

    split = Dirichlet(alpha=0.1, balanced=True)(labels, 20, np.random.default_rng(0))
    split[3]        # the sample numbers of client 3
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
from fedgkd_pl.data.index import ClientIndex, Indices, Labels
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.storage.recorded import Recorded
from numpy.random import Generator
from typing_extensions import override


class Partition(Recorded, ABC):
    """Cuts a labelled dataset into clients; every sample goes to exactly one of them."""

    by_owner = False  # whether ``split`` is given the samples' owners instead of their labels
    by_label = False  # whether it can only cut data that has a class for every sample
    ordered = False  # whether the order within a client is part of the partition
    # whether it numbers all training samples, whoever holds them: those of the server's validation
    # part and of held-out public data are then taken from the clients that it gives them to
    of_all = False
    validation: Indices | None = None  # of ``of_all``: the server's part, where it says which

    def take_source(self, samples: int, training: Indices, names: Sequence[str] = ()) -> None:
        """Takes the names of the samples before the data is cut, for partitions that use them.

        Args:
            samples: how many there are, with those that were drawn as the test set.
            training: which of them are the training samples, in their order.
            names: the file of each of the samples, where each has one.
        """

    def __call__(
        self, labels: Labels, num_clients: int, generator: Generator, keys: Labels | None = None
    ) -> ClientIndex:
        """The samples of every client.

        Args:
            generator: the only source of randomness.
            keys: the natural owner of every sample, where the data knows it; for :class:`ByKey`.
        """
        require(num_clients >= 1, "num_clients", "must be at least 1", num_clients)
        reason = f"there are only {len(labels)} training samples to share"
        require(num_clients <= len(labels), "num_clients", reason, num_clients)
        if self.by_owner:
            if keys is None:
                reason = "this dataset names no owners to cut by; ClientFiles has a folder for each"
                raise SettingError("partition", reason)
            labels = keys
        parts = list(self.split(labels, num_clients, generator))
        return ClientIndex(parts if self.ordered else [generator.permutation(p) for p in parts])

    @abstractmethod
    def split(self, labels: Labels, num_clients: int, generator: Generator) -> Iterator[Indices]:
        """Yields the sample numbers of each client; see :meth:`__call__`."""


class IID(Partition):
    """Equal random shares."""

    @override
    def split(self, labels: Labels, num_clients: int, generator: Generator) -> Iterator[Indices]:
        yield from np.array_split(generator.permutation(len(labels)), num_clients)


class Dirichlet(Partition):
    """Label skew: each class is shared out by proportions p ~ Dir(α).

    A client that already holds its fair share gets nothing more of the classes that follow, and
    the whole is drawn again until the smallest client is large enough.

    Args:
        alpha: concentration α > 0; the smaller, the fewer classes a client holds.
        balanced: as the FedGKD authors cut it: clients in groups of ten, the smallest with at
            least half a fair share, then re-cut into slices of equal size (2,250 on CIFAR).
            Otherwise one draw over all clients, with unequal sizes.
        min_size: the fewest samples a client may hold (unbalanced only; halved shares otherwise).
        max_tries: how many draws before giving up with a clear error.
    """

    by_label = True
    GROUP = 10

    def __init__(
        self, alpha: float = 0.5, balanced: bool = False, min_size: int = 10, max_tries: int = 10000
    ) -> None:
        require(0 < alpha < float("inf"), "alpha", "must be a positive number", alpha)
        require(min_size >= 0, "min_size", "must not be negative", min_size)
        require(max_tries >= 1, "max_tries", "must be at least 1", max_tries)
        self.alpha = alpha
        self.balanced = balanced
        self.min_size = min_size
        self.max_tries = max_tries

    @override
    def split(self, labels: Labels, num_clients: int, generator: Generator) -> Iterator[Indices]:
        if not self.balanced:
            reason = f"{num_clients} clients cannot hold that many of {len(labels)} samples each"
            require(self.min_size * num_clients <= len(labels), "min_size", reason, self.min_size)
            samples = np.arange(len(labels))
            yield from self._draw(samples, labels, num_clients, self.min_size, generator)
            return
        shuffled = generator.permutation(len(labels))
        bounds = np.linspace(0, len(labels), num_clients + 1).astype(int)
        owned: list[Indices] = []
        for first in range(0, num_clients, self.GROUP):
            last = min(first + self.GROUP, num_clients)
            samples = shuffled[bounds[first] : bounds[last]]
            least = len(samples) // (2 * (last - first))
            owned += self._draw(samples, labels, last - first, least, generator)
        yield from np.split(np.concatenate(owned), bounds[1:-1])

    def _draw(
        self, samples: Indices, labels: Labels, num_clients: int, least: int, generator: Generator
    ) -> list[Indices]:
        fair = len(samples) / num_clients
        own = labels[samples]
        classes = [samples[own == label] for label in np.unique(own)]
        for _ in range(self.max_tries):
            parts: list[list[Indices]] = [[] for _ in range(num_clients)]
            sizes = np.zeros(num_clients, dtype=np.int64)
            for members in classes:
                p = generator.dirichlet(np.full(num_clients, self.alpha)) * (sizes < fair)
                if not p.sum() > 0:  # all of it went to clients that are full, or α underflowed
                    break
                cuts = (np.cumsum(p / p.sum())[:-1] * len(members)).astype(int)
                for client, piece in enumerate(np.split(generator.permutation(members), cuts)):
                    parts[client].append(piece)
                    sizes[client] += len(piece)
            else:
                if sizes.min() >= least:
                    return [np.concatenate(pieces) for pieces in parts]
        each = f"each of {num_clients} clients at least {least} of {len(samples)} samples"
        hint = "raise alpha, lower min_size or take fewer clients"
        raise SettingError("alpha", f"no draw of {self.max_tries} gave {each}: {hint}", self.alpha)


class Pathological(Partition):
    """Every client holds the same number of classes, no more (McMahan et al., 2017).

    The samples of a class are shared evenly by the clients that hold it.

    Args:
        classes_per_client: how many classes each client holds.
    """

    by_label = True

    def __init__(self, classes_per_client: int = 2) -> None:
        self.classes_per_client = classes_per_client
        require(
            classes_per_client >= 1, "classes_per_client", "must be at least 1", classes_per_client
        )

    @override
    def split(self, labels: Labels, num_clients: int, generator: Generator) -> Iterator[Indices]:
        classes = generator.permutation(np.unique(labels))
        each = self.classes_per_client
        reason = f"there are {len(classes)} classes"
        require(each <= len(classes), "classes_per_client", reason, each)
        reason = f"{num_clients} clients would leave some of the {len(classes)} classes to nobody"
        require(each * num_clients >= len(classes), "classes_per_client", reason, each)
        # Dealt in turns: distinct within a client, and every class as often as any other.
        slots = classes[np.arange(each * num_clients) % len(classes)].reshape(num_clients, each)
        slots = generator.permutation(slots)
        parts: list[list[Indices]] = [[] for _ in range(num_clients)]
        for label in classes:
            owners = np.flatnonzero((slots == label).any(axis=1))
            members = generator.permutation(np.flatnonzero(labels == label))
            reason = f"class {label} has {len(members)} samples for {len(owners)} clients"
            require(len(members) >= len(owners), "num_clients", reason, num_clients)
            for owner, piece in zip(owners, np.array_split(members, len(owners)), strict=True):
                parts[owner].append(piece)
        yield from map(np.concatenate, parts)


class Shards(Partition):
    """Samples sorted by label, cut into shards, some of them dealt to each client.

    Args:
        shards_per_client: how many shards each client gets.
    """

    by_label = True

    def __init__(self, shards_per_client: int = 2) -> None:
        require(
            shards_per_client >= 1, "shards_per_client", "must be at least 1", shards_per_client
        )
        self.shards_per_client = shards_per_client

    @override
    def split(self, labels: Labels, num_clients: int, generator: Generator) -> Iterator[Indices]:
        count = num_clients * self.shards_per_client
        reason = f"{num_clients} clients would need {count} shards of {len(labels)} samples"
        require(count <= len(labels), "shards_per_client", reason, self.shards_per_client)
        shuffled = generator.permutation(len(labels))
        by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
        shards = np.array_split(by_label, count)
        for hand in generator.permutation(count).reshape(num_clients, -1):
            yield np.concatenate([shards[number] for number in hand])


class QuantitySkew(Partition):
    """The same distribution of labels everywhere, but sizes in proportions ~ Dir(β).

    Args:
        beta: concentration β > 0; the smaller, the more the sizes differ.
        min_size: the fewest samples a client may hold.
        max_tries: how many draws before giving up with a clear error.
    """

    def __init__(self, beta: float = 0.5, min_size: int = 1, max_tries: int = 10000) -> None:
        require(0 < beta < float("inf"), "beta", "must be a positive number", beta)
        require(min_size >= 0, "min_size", "must not be negative", min_size)
        require(max_tries >= 1, "max_tries", "must be at least 1", max_tries)
        self.beta = beta
        self.min_size = min_size
        self.max_tries = max_tries

    @override
    def split(self, labels: Labels, num_clients: int, generator: Generator) -> Iterator[Indices]:
        reason = f"{num_clients} clients cannot each have this many of {len(labels)} samples"
        require(self.min_size * num_clients <= len(labels), "min_size", reason, self.min_size)
        for _ in range(self.max_tries):
            p = generator.dirichlet(np.full(num_clients, self.beta))
            cuts = (np.cumsum(p)[:-1] * len(labels)).astype(int)
            sizes = np.diff(np.concatenate([[0], cuts, [len(labels)]]))
            if sizes.min() >= self.min_size and np.isfinite(p).all():
                yield from np.split(generator.permutation(len(labels)), cuts)
                return
        each = f"each of {num_clients} clients {self.min_size} of {len(labels)} samples"
        hint = "raise beta, lower min_size or take fewer clients"
        raise SettingError("beta", f"no draw of {self.max_tries} gave {each}: {hint}", self.beta)


class ByKey(Partition):
    """The owners that the data itself names: writers, users, regions.

    With more owners than clients, each client gets several, the largest owners dealt first and
    always to the client that has least.
    """

    by_owner = True

    @override
    def split(self, labels: Labels, num_clients: int, generator: Generator) -> Iterator[Indices]:
        owners, where, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        reason = f"the data has {len(owners)} owners"
        require(num_clients <= len(owners), "num_clients", reason, num_clients)
        client_of = np.arange(len(owners))
        if num_clients < len(owners):
            held = np.zeros(num_clients, dtype=np.int64)
            for owner in np.argsort(-sizes, kind="stable"):
                client_of[owner] = held.argmin()
                held[client_of[owner]] += sizes[owner]
        for client in range(num_clients):
            yield np.flatnonzero(client_of[where] == client)
