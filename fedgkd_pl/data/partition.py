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
from fedgkd_pl.errors import SettingError, at_least, not_negative, positive, require
from fedgkd_pl.storage.recorded import Recorded
from numpy.random import Generator, RandomState
from typing_extensions import override

GROUP = 10  # clients that share a draw of the authors' procedure


class Partition(Recorded, ABC):
    """Cuts a labelled dataset into clients; every sample goes to exactly one of them."""

    by_owner = False  # whether ``split`` is given the samples' owners instead of their labels
    by_label = False  # whether it can only cut data that has a class for every sample
    ordered = False  # whether the order within a client is part of the partition
    # whether it numbers all training samples, whoever holds them: those of the server's validation
    # part and of held-out public data are then taken from the clients that it gives them to
    of_all = False
    validation: Indices | None = None  # of ``of_all``: the server's part, where it says which

    def take_source(self, training: Indices, names: Sequence[str]) -> None:
        """Takes the names of the samples before the data is cut, for partitions that use them.

        Args:
            training: which of all samples are the training samples, in their order.
            names: the file of each of all samples, with those drawn as the test set; may be empty.
        """

    def __call__(
        self, labels: Labels, num_clients: int, generator: Generator, keys: Labels | None = None
    ) -> ClientIndex:
        """The samples of every client.

        Args:
            generator: the only source of randomness.
            keys: the natural owner of every sample, where the data knows it; for :class:`ByKey`.
        """
        reason = f"must be 1 to {len(labels)}, the training samples to share"
        require(1 <= num_clients <= len(labels), "num_clients", reason, num_clients)
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

    def __init__(
        self, alpha: float = 0.5, balanced: bool = False, min_size: int = 10, max_tries: int = 10000
    ) -> None:
        positive(alpha=alpha)
        not_negative(min_size=min_size)
        at_least(1, max_tries=max_tries)
        self.alpha = alpha
        self.balanced = balanced
        self.min_size = min_size
        self.max_tries = max_tries

    @override
    def split(self, labels: Labels, num_clients: int, generator: Generator) -> Iterator[Indices]:
        def draw(samples: Indices, clients: int, least: int) -> list[Indices]:
            own = labels[samples]
            classes = [samples[own == label] for label in np.unique(own)]
            return share_classes(classes, clients, self.alpha, least, self.max_tries, generator)

        if not self.balanced:
            reason = f"{num_clients} clients cannot hold that many of {len(labels)} samples each"
            require(self.min_size * num_clients <= len(labels), "min_size", reason, self.min_size)
            yield from draw(np.arange(len(labels)), num_clients, self.min_size)
            return
        shuffled = generator.permutation(len(labels))
        bounds = np.linspace(0, len(labels), num_clients + 1).astype(int)
        owned: list[Indices] = []
        for first in range(0, num_clients, GROUP):
            last = min(first + GROUP, num_clients)
            samples = shuffled[bounds[first] : bounds[last]]
            owned += draw(samples, last - first, len(samples) // (2 * (last - first)))
        yield from np.split(np.concatenate(owned), bounds[1:-1])


def share_classes(
    classes: Sequence[Indices],
    num_clients: int,
    alpha: float,
    least: float,
    max_tries: int,
    random: Generator | RandomState,
    mix: bool = True,
) -> list[Indices]:
    """Shares out samples by classes, again until each client has at least ``least``.

    Args:
        classes: the samples of every class.
        mix: whether the samples of a class are shuffled before each draw.
    """
    total = sum(map(len, classes))
    for _ in range(max_tries):
        parts: list[list[Indices]] = [[] for _ in range(num_clients)]
        sizes = np.zeros(num_clients, dtype=np.int64)
        for members in classes:
            p = random.dirichlet(np.full(num_clients, alpha)) * (sizes < total / num_clients)
            if not p.sum() > 0:  # all of it went to clients that are full, or α underflowed
                break
            cuts = (np.cumsum(p / p.sum())[:-1] * len(members)).astype(int)
            mixed = random.permutation(members) if mix else members
            for client, piece in enumerate(np.split(mixed, cuts)):
                parts[client].append(piece)
                sizes[client] += len(piece)
        else:
            if sizes.min() >= least:
                return [np.concatenate(pieces) for pieces in parts]
    raise gave_up("alpha", alpha, max_tries, least)


def gave_up(key: str, value: float, max_tries: int, least: float) -> SettingError:
    """The error of a partition that draws by chance."""
    reason = f"no draw of {max_tries} gave each client at least {least:g} samples: raise {key}"
    return SettingError(key, f"{reason}, lower min_size or take fewer clients", value)


class Pathological(Partition):
    """Every client holds the same number of classes, no more (McMahan et al., 2017).

    The samples of a class are shared evenly by the clients that hold it.

    Args:
        classes_per_client: how many classes each client holds.
    """

    by_label = True

    def __init__(self, classes_per_client: int = 2) -> None:
        at_least(1, classes_per_client=classes_per_client)
        self.classes_per_client = classes_per_client

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
        at_least(1, shards_per_client=shards_per_client)
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
        positive(beta=beta)
        not_negative(min_size=min_size)
        at_least(1, max_tries=max_tries)
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
        raise gave_up("beta", self.beta, self.max_tries, self.min_size)


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
