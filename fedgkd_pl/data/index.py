"""The samples of every client, by their numbers."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Labels = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64]


class ClientIndex(Sequence[Indices]):
    """The sample numbers of every client, as one array with offsets.

    Lists of Python integers take ten times the memory at 100,000 clients.
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

    def size(self, client: int) -> int:
        """The number of samples of one client."""
        return int(self.offsets[client + 1] - self.offsets[client])

    @property
    def sizes(self) -> Indices:
        """The number of samples of every client."""
        return np.diff(self.offsets)

    def among(self, rows: Indices) -> "ClientIndex":
        """The same owners of some samples alone, which count from 0 in the order of ``rows``."""
        place = np.full(max(self.samples.max(initial=0), rows.max(initial=0)) + 1, -1)
        place[rows] = np.arange(len(rows))
        parts = [place[part] for part in self]
        return ClientIndex([part[part >= 0] for part in parts])

    def label_counts(self, labels: Labels, num_classes: int) -> list[list[int]]:
        """The samples of each class of every client; ``labels`` has one per sample."""
        owners = np.repeat(np.arange(len(self)), self.sizes)
        counts = np.zeros((len(self), num_classes), dtype=np.int64)
        np.add.at(counts, (owners, labels[self.samples]), 1)
        return counts.tolist()


class SingleClientIndex(ClientIndex):
    """One client, which owns all samples, and no other."""

    def __init__(self, client: int, size: int) -> None:
        self.client = client
        super().__init__([np.arange(size)])

    def __getitem__(self, client: int) -> Indices:  # type: ignore[override]
        if client != self.client:
            raise IndexError(client)
        return super().__getitem__(0)

    def size(self, client: int) -> int:
        """The number of samples of one client."""
        return len(self[client])


def largest_first(index: ClientIndex, cohort: Sequence[int]) -> list[int]:
    """The order of a round: the largest client first, so that no long one starts last."""
    return sorted(cohort, key=lambda client: (-index.size(client), client))


def stratified(
    groups: Labels, size: int, generator: np.random.Generator, leave: int = 1
) -> Indices:
    """A sample in which every group has its share.

    Args:
        groups: the group of every sample: its label or its owner.
        size: how many samples to take; fewer where a group would be used up.
        leave: how many samples of a group stay, at least.

    Returns:
        Sample numbers, ascending.
    """
    names, sizes = np.unique(groups, return_counts=True)
    exact = sizes * (size / len(groups))
    take = np.floor(exact).astype(int)
    largest = np.argsort(-(exact - take), kind="stable")
    take[largest[: size - int(take.sum())]] += 1
    take = np.minimum(take, sizes - leave)
    drawn = [
        generator.permutation(np.flatnonzero(groups == name))[:count]
        for name, count in zip(names, take, strict=True)
    ]
    return np.sort(np.concatenate(drawn))
