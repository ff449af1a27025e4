"""Partitions made by others: the FedGKD authors' own draws, and any that is in a file."""

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fedgkd_pl.data.index import ClientIndex, Indices, Labels
from fedgkd_pl.data.partition import GROUP, Partition, share_classes
from fedgkd_pl.errors import SettingError, at_least, positive, require
from fedgkd_pl.storage.files import commit
from fedgkd_pl.storage.reading import MB, read_json
from numpy.random import Generator, RandomState
from typing_extensions import override

LARGEST = 1000 * MB
OTHERS = ("validation", "public")  # whose samples no client of a file owns


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
        max_tries: how many draws before giving up with a clear error.
    """

    by_label = True
    ordered = True

    def __init__(self, alpha: float = 0.1, seed: int = 7, max_tries: int = 10000) -> None:
        positive(alpha=alpha)
        require(0 <= seed < 2**32 // 1000, "seed", "must be from 0 to 4294966", seed)
        at_least(1, max_tries=max_tries)
        self.alpha = alpha
        self.seed = seed
        self.max_tries = max_tries
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
            limits = GROUP, self.alpha, len(group) / GROUP / 2, self.max_tries
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
            cohort: list[int] = random.choice(num_clients, size, replace=False).tolist()
        return cohort


class FromFile(Partition):
    """A partition read from a file, such as ``fedgkd-pl partition --export`` writes.

    Args:
        path: ``.json``: a list of clients, each a list of sample numbers, or a mapping with that
            list as ``clients`` and perhaps the server's samples as ``validation``; or ``.npz`` with
            ``samples``, ``offsets`` and perhaps ``validation``. Sample numbers count the whole
            training data from 0, without what ``test_fraction`` takes; each must occur once. Files
            of images or texts may be named instead, as ``cats/001.png``: those in the test set are
            then passed over. Where the file names no validation part, it is drawn as always, and
            clients do not have those samples.
    """

    ordered = True
    of_all = True

    def __init__(self, path: str) -> None:
        self.path = path
        self._clients, self._others, self._labels = _read(Path(path))
        parts = (*self._clients, *self._others.values())
        self._by_name = any(part.dtype.kind == "U" for part in parts)
        self._places: dict[str, int] = {}  # of the training samples by name; -1 in the test set
        self.validation = None if self._by_name else self._others.get("validation")

    @override
    def take_source(self, training: Indices, names: Sequence[str]) -> None:
        self._places = dict.fromkeys(names, -1)
        if names:
            self._places |= {names[row]: number for number, row in enumerate(training)}
            if "validation" in self._others:
                self.validation = self._numbered(self._others["validation"])

    @override
    def split(self, labels: Labels, num_clients: int, generator: Generator) -> Iterator[Indices]:
        count = len(self._clients)
        require(count == num_clients, "num_clients", f"{self.path} has {count}", num_clients)
        clients = [self._numbered(part) for part in self._clients]
        samples = np.concatenate([*clients, *map(self._numbered, self._others.values())])
        inside = (samples >= 0) & (samples < len(labels))
        times = np.bincount(samples[inside], minlength=len(labels))
        faults = {"twice": np.flatnonzero(times > 1), "missing": np.flatnonzero(times == 0)}
        names = {number: name for name, number in self._places.items()} if self._by_name else {}
        for fault, rows in ({"unknown": samples[~inside]} | faults).items():
            first = [names.get(row, row) for row in rows[:3].tolist()]
            reason = f"{self.path} must name each of {len(labels)} training samples once, those of "
            reason += f"the validation part too, not of test_fraction's; {fault}: {first}"
            require(not first, "partition", reason)
        reason = f"{self.path} was made for other data: the labels differ"
        require(self._labels in ("", labels_digest(labels)), "partition", reason)
        yield from clients

    def _numbered(self, part: Any) -> Indices:
        """The numbers of a part's training samples."""
        if self._by_name:
            unknown = [name for name in part.tolist() if name not in self._places]
            reason = f"{self.path} names files (class/file), of which this data lacks {unknown[:1]}"
            require(not unknown, "partition", reason)
            part = np.array([self._places[name] for name in part.tolist()], dtype=np.int64)
            part = part[part >= 0]
        return part.astype(np.int64)  # type: ignore[no-any-return]


def export(
    index: ClientIndex, labels: Labels, path: Path, others: Mapping[str, Indices] | None = None
) -> None:
    """Writes who owns which sample, and the labels' SHA-256, to a .json or .npz for FromFile.

    Args:
        labels: of all training samples, which the index counts.
        others: samples that no client owns: ``validation``, ``public``.
    """
    content: dict[str, Any] = {name: rows for name, rows in (others or {}).items() if len(rows)}
    content["labels_sha256"] = labels_digest(labels)
    if path.suffix == ".npz":
        buffer = io.BytesIO()
        np.savez_compressed(buffer, samples=index.samples, offsets=index.offsets, **content)
        commit(path, [buffer.getvalue()])
    else:
        content["clients"] = list(index)
        commit(path, [json.dumps(content, default=np.ndarray.tolist).encode()])


def labels_digest(labels: Labels) -> str:
    """The SHA-256 of all labels, by which a partition knows its data."""
    return hashlib.sha256(labels.astype("<i8").tobytes()).hexdigest()


def _read(path: Path) -> tuple[list[Any], dict[str, Any], str]:
    """Reads the samples of every client, those of nobody by name, and the labels' digest."""
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                content = dict(arrays)
            samples, offsets = content["samples"], content["offsets"]
            if offsets[0] != 0 or offsets[-1] != len(samples):
                raise ValueError("offsets do not cut samples")
            content["clients"] = np.split(samples, offsets[1:-1])
        else:
            content = read_json(path, LARGEST)
            content = content if isinstance(content, dict) else {"clients": content}
        clients = [_part(samples) for samples in content["clients"]]
        others = {name: _part(content[name]) for name in OTHERS if name in content}
    except Exception as error:  # a damaged file fails in any way
        raise SettingError("path", f"not a partition: {error!s:.120}", str(path)) from error
    return clients, others, str(content.get("labels_sha256", ""))


def _part(samples: Any) -> Any:
    rows = np.asarray(samples)
    if rows.ndim != 1 or not (rows.dtype.kind in "iuU" or rows.size == 0):
        raise ValueError('expected {"clients": [[0, 2, 5], [1, 3]], "validation": [4]}')
    return rows if rows.size else np.zeros(0, dtype=np.int64)
