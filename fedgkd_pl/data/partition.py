"""The owners of the samples: one class per way to cut.

A partition is a function of (labels, number of clients, generator) and can be used without the
rest of the package::

    split = Dirichlet(alpha=0.1, balanced=True)(labels, 20, np.random.default_rng(0))
    split[3]        # the sample numbers of client 3
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from fedgkd_pl.errors import SettingError, at_least, not_negative, positive, require
from fedgkd_pl.storage.files import MB, read_json
from fedgkd_pl.storage.recorded import Recorded
from numpy.random import Generator, RandomState
from numpy.typing import NDArray
from typing_extensions import override

Labels = NDArray[np.int64]
Indices = NDArray[np.int64]
GROUP = 10  # clients that share a draw of the authors' procedure
MAX_TRIES = 10_000  # draws by chance, before a clear error
LARGEST = 1000 * MB
OTHERS = ("validation", "public")  # whose samples no client of a file owns


class ClientIndex(Sequence[Indices]):
    """The sample numbers of every client, as one array with offsets.

    Lists of Python integers take ten times the memory at 100,000 clients.

    Args:
        parts: the sample numbers of one client after the other.
        first: the number of the first client; no other than these is known.
    """

    def __init__(self, parts: Sequence[Indices], first: int = 0) -> None:
        self.first = first
        self.offsets = np.concatenate([[0], np.cumsum([len(p) for p in parts])]).astype(np.int64)
        self.samples = np.concatenate(parts).astype(np.int32)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Indices:  # type: ignore[override]
        return self.samples[self.place(client)].astype(np.int64)

    def place(self, client: int) -> slice:
        """Where the samples of one client are among all."""
        number = client - self.first
        if not 0 <= number < len(self):
            raise IndexError(client)
        return slice(*self.offsets[number : number + 2].tolist())

    def size(self, client: int) -> int:
        """The number of samples of one client."""
        return len(self[client])

    @property
    def sizes(self) -> Indices:
        """The number of samples of every client."""
        return np.diff(self.offsets)

    def among(self, rows: Indices) -> "ClientIndex":
        """The same owners of some samples alone, which count from 0 in the order of ``rows``."""
        place = np.full(max(self.samples.max(initial=0), rows.max(initial=0)) + 1, -1)
        place[rows] = np.arange(len(rows))
        return ClientIndex([own[own >= 0] for own in (place[part] for part in self)])

    def label_counts(self, labels: Labels, num_classes: int) -> list[list[int]]:
        """The samples of each class of every client; ``labels`` has one per sample."""
        owners = np.repeat(np.arange(len(self)), self.sizes)
        counts = np.zeros((len(self), num_classes), dtype=np.int64)
        np.add.at(counts, (owners, labels[self.samples]), 1)
        return counts.tolist()


def largest_first(index: ClientIndex, cohort: Sequence[int]) -> list[int]:
    """The order of a round: the largest client first, so that no long one starts last."""
    return sorted(cohort, key=lambda client: (-index.size(client), client))


def stratified(groups: Labels, size: int, generator: Generator, leave: int = 1) -> Indices:
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
    take[np.argsort(take - exact, kind="stable")[: size - int(take.sum())]] += 1
    take = np.minimum(take, sizes - leave)
    drawn = [
        generator.permutation(np.flatnonzero(groups == name))[:count]
        for name, count in zip(names, take, strict=True)
    ]
    return np.sort(np.concatenate(drawn))


class Partition(Recorded, ABC):
    """Cuts a labelled dataset into clients; every sample goes to exactly one of them."""

    by_owner = False  # whether ``split`` is given the samples' owners instead of their labels
    by_label = False  # whether it can only cut data that has a class for every sample
    ordered = False  # whether the order within a client is part of the partition
    # whether it numbers all training samples, whoever holds them: those of the server's validation
    # part and of held-out public data are then taken from the clients that it gives them to
    of_all = False
    validation: Indices | None = None  # of ``of_all``: the server's part, where it says which

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
    """

    by_label = True

    def __init__(self, alpha: float = 0.5, balanced: bool = False, min_size: int = 10) -> None:
        positive(alpha=alpha)
        not_negative(min_size=min_size)
        self.alpha = alpha
        self.balanced = balanced
        self.min_size = min_size

    @override
    def split(self, labels: Labels, num_clients: int, generator: Generator) -> Iterator[Indices]:
        def draw(samples: Indices, clients: int, least: int) -> list[Indices]:
            own = labels[samples]
            classes = [samples[own == label] for label in np.unique(own)]
            return share_classes(classes, clients, self.alpha, least, generator)

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
    random: Generator | RandomState,
    mix: bool = True,
) -> list[Indices]:
    """Shares out samples by classes, again until each client has at least ``least``.

    Args:
        classes: the samples of every class.
        mix: whether the samples of a class are shuffled before each draw.
    """
    total = sum(map(len, classes))
    for _ in range(MAX_TRIES):
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
    raise gave_up("alpha", alpha, least)


def gave_up(key: str, value: float, least: float) -> SettingError:
    """The error of a partition that draws by chance."""
    reason = f"no draw of {MAX_TRIES} gave each client at least {least:g} samples: raise {key}"
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
        shards = np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], count)
        for hand in generator.permutation(count).reshape(num_clients, -1):
            yield np.concatenate([shards[number] for number in hand])


class QuantitySkew(Partition):
    """The same distribution of labels everywhere, but sizes in proportions ~ Dir(β).

    Args:
        beta: concentration β > 0; the smaller, the more the sizes differ.
        min_size: the fewest samples a client may hold.
    """

    def __init__(self, beta: float = 0.5, min_size: int = 1) -> None:
        positive(beta=beta)
        not_negative(min_size=min_size)
        self.beta = beta
        self.min_size = min_size

    @override
    def split(self, labels: Labels, num_clients: int, generator: Generator) -> Iterator[Indices]:
        for _ in range(MAX_TRIES):
            p = generator.dirichlet(np.full(num_clients, self.beta))
            cuts = (np.cumsum(p)[:-1] * len(labels)).astype(int)
            sizes = np.diff(np.concatenate([[0], cuts, [len(labels)]]))
            if sizes.min() >= self.min_size and np.isfinite(p).all():
                yield from np.split(generator.permutation(len(labels)), cuts)
                return
        raise gave_up("beta", self.beta, self.min_size)


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


class AuthorsDirichlet(Partition):
    """The split of the FedGKD paper's runs, reproduced draw by draw.

    One ``numpy.random.RandomState`` cuts the data and then draws a cohort a round
    (:class:`AuthorsCohorts`): the samples are shuffled; groups of ten clients take each class by
    proportions p ~ Dir(α), without those that hold a fair share already; a group is drawn again
    until its smallest client has half a fair share; then all is cut into slices of equal size. The
    paper's three trials share one such split and one sequence of cohorts (docs/paper-numbers.md).

    ``Dirichlet(alpha, balanced=True)`` cuts in the same way with the run's own seed.

    Args:
        alpha: concentration α > 0.
        seed: the authors' ``--manual_seed``.
    """

    by_label = True
    ordered = True

    def __init__(self, alpha: float = 0.1, seed: int = 7) -> None:
        positive(alpha=alpha)
        require(0 <= seed < 2**32 // 1000, "seed", "must be from 0 to 4294966", seed)
        self.alpha = alpha
        self.seed = seed
        self._after_split: Any = None

    @override
    def split(self, labels: Labels, num_clients: int, generator: Generator) -> Iterator[Indices]:
        reason = "must be a multiple of ten: the authors cut groups of ten"
        require(num_clients % GROUP == 0, "num_clients", reason, num_clients)
        random = RandomState(1000 * self.seed)
        order = np.arange(len(labels))
        random.shuffle(order)
        owned: list[Indices] = []
        for group in np.array_split(order, num_clients // GROUP):
            classes = [group[labels[group] == label] for label in np.unique(labels)]
            limits = GROUP, self.alpha, len(group) / GROUP / 2
            owned += share_classes(classes, *limits, random, mix=False)
        self._after_split = random.get_state()
        yield from np.array_split(np.concatenate(owned), num_clients)

    def cohort(self, round: int, num_clients: int, size: int) -> list[int]:
        """The ids of the clients of a round (from 1), in the authors' order; after :meth:`split`.

        ``size``, the clients of a round, must always be the same.
        """
        random = RandomState()
        random.set_state(self._after_split)
        for _ in range(round):
            cohort = random.choice(num_clients, size, replace=False)
        return cohort.tolist()  # type: ignore[no-any-return]


class FromFile(Partition):
    """A partition read from a file, such as ``fedgkd-pl partition --export`` writes.

    Args:
        path: a JSON file: a list of clients, each a list of sample numbers, or a mapping with that
            list as ``clients`` and perhaps the server's samples as ``validation``. Sample numbers
            count the whole training data from 0, without what ``test_fraction`` takes; each must
            occur once. Where the file names no validation part, it is drawn as always, and clients
            do not have those samples.
    """

    ordered = True
    of_all = True

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            content = read_json(path, LARGEST)
            content = content if isinstance(content, dict) else {"clients": content}
            self._clients = [_numbers(samples) for samples in content["clients"]]
            others = {name: _numbers(content[name]) for name in OTHERS if name in content}
            self._owned = np.concatenate([*self._clients, *others.values()])
        except Exception as error:  # a damaged file fails in any way
            raise SettingError("path", f"not a partition: {error!s:.120}", path) from error
        self.validation = others.get("validation")
        self._labels = content.get("labels_sha256")

    @override
    def split(self, labels: Labels, num_clients: int, generator: Generator) -> Iterator[Indices]:
        count = len(self._clients)
        require(count == num_clients, "num_clients", f"{self.path} has {count}", num_clients)
        reason = f"{self.path} must name each of {len(labels)} training samples once, those of "
        reason += "the validation part too, not of test_fraction's"
        fits = np.array_equal(np.sort(self._owned), np.arange(len(labels)))
        require(fits, "partition", reason, f"{len(self._owned)} samples")
        reason = f"{self.path} was made for other data: the labels differ"
        require(self._labels in (None, labels_digest(labels)), "partition", reason)
        yield from self._clients


def _numbers(samples: Any) -> Indices:
    rows = np.asarray(samples)
    if rows.ndim != 1 or not (rows.dtype.kind in "iu" or rows.size == 0):
        raise ValueError('expected {"clients": [[0, 2, 5], [1, 3]], "validation": [4]}')
    return rows.astype(np.int64)


def labels_digest(labels: Labels) -> str:
    """The SHA-256 of all labels, by which a partition knows its data."""
    return hashlib.sha256(labels.astype("<i8").tobytes()).hexdigest()


Counts = Sequence[Sequence[int]]  # samples of each class, for every client


def effective_classes(counts: Counts) -> list[float]:
    """For every client with data exp(label entropy): 1 for one class, C for C equal ones."""
    p = _shares(counts)
    entropy = -np.sum(p * np.log(np.where(p > 0, p, 1)), axis=1)
    return np.exp(entropy).tolist()  # type: ignore[no-any-return]


def heterogeneity(counts: Counts) -> dict[str, float]:
    """The figures of a partition.

    Returns:
        ``effective_classes``: mean over clients of the exponential of the label entropy.
        ``total_variation``: mean distance of a client's label distribution to that of all, in
        [0, 1]. ``size_min``, ``size_max``, ``size_std``: of the clients' sizes.
    """
    table = np.asarray(counts, dtype=float)
    sizes = table.sum(axis=1)
    everyone = table.sum(axis=0) / table.sum()
    distance = np.abs(_shares(counts) - everyone).sum(axis=1) / 2
    return {
        "effective_classes": float(np.mean(effective_classes(counts))),
        "total_variation": float(distance.mean()),
        "size_min": float(sizes.min()),
        "size_max": float(sizes.max()),
        "size_std": float(sizes.std()),
    }


def _shares(counts: Counts) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    table = np.asarray(counts, dtype=float)
    table = table[table.sum(axis=1) > 0]
    return table / table.sum(axis=1, keepdims=True)  # type: ignore[no-any-return]
