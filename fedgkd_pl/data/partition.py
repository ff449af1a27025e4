"""Who owns which sample: IID and Dirichlet label skew.

A partition is a function of (labels, number of clients, generator) and can be used without the
rest of the package::

    split = Dirichlet(alpha=0.1, balanced=True)(labels, 20, np.random.default_rng(0))
    split[3]        # the sample numbers of client 3
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from fedgkd_pl.errors import SettingError, require

Labels = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64]


class ClientIndex(Sequence[Indices]):
    """The samples of every client, as one array with offsets.

    Lists of Python integers take ten times the memory at 100,000 clients.

    Args:
        parts: the sample numbers of each client.
    """

    def __init__(self, parts: Sequence[Indices]) -> None:
        self.offsets = np.concatenate([[0], np.cumsum([len(p) for p in parts])]).astype(np.int64)
        self.samples = np.concatenate(parts).astype(np.int32)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Indices:  # type: ignore[override]
        if not 0 <= client < len(self):
            raise IndexError(client)
        start, stop = self.offsets[client : client + 2]
        return self.samples[start:stop].astype(np.int64)

    @property
    def sizes(self) -> Indices:
        """The number of samples of every client."""
        return np.diff(self.offsets)

    def label_counts(self, labels: Labels, num_classes: int) -> list[list[int]]:
        """How many samples of each class every client holds.

        Args:
            labels: the label of every sample.
            num_classes: the number of classes.
        """
        return [np.bincount(labels[part], minlength=num_classes).tolist() for part in self]


class Partition(ABC):
    """Cuts a labelled dataset into clients; every sample goes to exactly one of them."""

    def __call__(
        self, labels: Labels, num_clients: int, generator: np.random.Generator
    ) -> ClientIndex:
        """The samples of every client.

        Args:
            labels: the label of every sample.
            num_clients: how many clients to cut into.
            generator: the only source of randomness.
        """
        require(num_clients >= 1, "num_clients", "must be at least 1", num_clients)
        require(
            num_clients <= len(labels),
            "num_clients",
            f"there are only {len(labels)} training samples to share",
            num_clients,
        )
        parts = list(self.split(labels, num_clients, generator))
        return ClientIndex([generator.permutation(part) for part in parts])

    @abstractmethod
    def split(
        self, labels: Labels, num_clients: int, generator: np.random.Generator
    ) -> Iterator[Indices]:
        """Yields the sample numbers of each client; see :meth:`__call__`.

        Args:
            labels: the label of every sample.
            num_clients: how many clients to cut into.
            generator: the only source of randomness.
        """


class IID(Partition):
    """Equal random shares."""

    def split(
        self, labels: Labels, num_clients: int, generator: np.random.Generator
    ) -> Iterator[Indices]:
        """See :meth:`Partition.split`."""
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

    def split(
        self, labels: Labels, num_clients: int, generator: np.random.Generator
    ) -> Iterator[Indices]:
        """See :meth:`Partition.split`."""
        if not self.balanced:
            require(
                self.min_size * num_clients <= len(labels),
                "min_size",
                f"{num_clients} clients cannot hold that many of {len(labels)} samples each",
                self.min_size,
            )
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
        self,
        samples: Indices,
        labels: Labels,
        num_clients: int,
        least: int,
        generator: np.random.Generator,
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
        raise SettingError(
            "alpha",
            f"no draw of {self.max_tries} gave each of {num_clients} clients at least {least} of "
            f"{len(samples)} samples: raise alpha, lower min_size or take fewer clients",
            self.alpha,
        )
