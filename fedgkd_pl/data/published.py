"""Partitions made by others: the FedGKD authors' own draws, and any that is in a file."""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fedgkd_pl.data.index import ClientIndex, Indices, Labels
from fedgkd_pl.data.partition import Partition
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.storage.reading import MB, printable, read_bytes
from numpy.random import Generator, RandomState

LARGEST_FILE = 1000 * MB
GROUP = 10  # clients that share a draw
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
        require(0 < alpha < float("inf"), "alpha", "must be a positive number", alpha)
        require(0 <= seed < 2**32 // 1000, "seed", "must be from 0 to 4294966", seed)
        require(max_tries >= 1, "max_tries", "must be at least 1", max_tries)
        self.alpha = alpha
        self.seed = seed
        self.max_tries = max_tries
        self._after_split: Any = None
        self._cohorts: list[list[int]] = []

    def split(self, labels: Labels, num_clients: int, generator: Generator) -> Iterator[Indices]:
        """See :meth:`Partition.split`; the generator is not used."""
        reason = "must be a multiple of ten: the authors cut groups of ten"
        require(num_clients % GROUP == 0, "num_clients", reason, num_clients)
        random = RandomState(1000 * self.seed)
        order = np.arange(len(labels))
        random.shuffle(order)
        owned: list[Indices] = []
        for group in np.array_split(order, num_clients // GROUP):
            owned += self._draw(group, labels, random)
        self._after_split, self._cohorts = random.get_state(), []
        yield from np.array_split(np.concatenate(owned), num_clients)

    def _draw(self, samples: Indices, labels: Labels, random: RandomState) -> list[Indices]:
        fair = len(samples) / GROUP
        classes = [samples[labels[samples] == label] for label in np.unique(labels)]
        for _ in range(self.max_tries):
            parts: list[list[Indices]] = [[] for _ in range(GROUP)]
            sizes = np.zeros(GROUP, dtype=np.int64)
            for members in classes:
                p = random.dirichlet(np.repeat(self.alpha, GROUP)) * (sizes < fair)
                if not p.sum() > 0:
                    break
                cuts = (np.cumsum(p / p.sum()) * len(members)).astype(int)[:-1]
                for client, piece in enumerate(np.split(members, cuts)):
                    parts[client].append(piece)
                    sizes[client] += len(piece)
            else:
                if sizes.min() >= fair / 2:
                    return [np.concatenate(pieces) for pieces in parts]
        reason = f"no draw of {self.max_tries} gave each client half a fair share: raise alpha"
        raise SettingError("alpha", reason, self.alpha)

    def cohort(self, round: int, num_clients: int, size: int) -> list[int]:
        """The ids of the clients of a round (from 1), in the authors' order; after :meth:`split`.

        ``size``, the clients of a round, must always be the same.
        """
        if len(self._cohorts) < round:
            random = RandomState()
            random.set_state(self._after_split)
            self._cohorts = [
                random.choice(num_clients, size, replace=False).tolist()
                for _ in range(max(100, 2 * round))
            ]
        return self._cohorts[round - 1]


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
        self._written, self._labels = _read(Path(path))
        self._by_name = any(part.dtype.kind == "U" for part in self._written.all())
        self._numbered = None if self._by_name else self._written
        self._names: list[str] = []  # of the training samples
        self._hint = ""
        self.validation = None if self._by_name else self._written.others.get("validation")

    def take_source(self, samples: int, training: Indices, names: Sequence[str] = ()) -> None:
        """See :meth:`Partition.take_source`: a file's names become numbers here."""
        self._names = [names[row] for row in training] if names else []
        if self._by_name:
            numbers = dict.fromkeys(names, -1) | {name: n for n, name in enumerate(self._names)}
            self._numbered = self._written.numbered(numbers, self.path) if names else None
            self.validation = self._numbered.others.get("validation") if self._numbered else None
        elif drawn := samples - len(training):
            text = f"; {drawn} of all {samples} samples are the test set (test_fraction) and not "
            ways = "name files, " if names else ""
            ways += "give a test set of your own, or begin with fedgkd-pl partition --export"
            self._hint = f"{text}counted: {ways}"

    def split(self, labels: Labels, num_clients: int, generator: Generator) -> Iterator[Indices]:
        """See :meth:`Partition.split`; nothing is drawn."""
        reason = f"{self.path} names files, and this data has none to each sample: give numbers"
        require(self._numbered is not None, "partition", reason)
        assert self._numbered is not None
        count = len(self._numbered.clients)
        require(count == num_clients, "num_clients", f"{self.path} has {count}", num_clients)
        if wrong := self._wrong(np.concatenate(self._numbered.all()), len(labels)):
            reason = f"{self.path} must name each of {len(labels)} training samples once, those of "
            raise SettingError("partition", f"{reason}the validation part too: {wrong}{self._hint}")
        reason = f"{self.path} was made for other data: the labels differ"
        require(self._labels in ("", labels_digest(labels)), "partition", reason)
        yield from self._numbered.clients

    def _wrong(self, samples: Indices, count: int) -> str:
        """Which samples are at fault, and how; empty where each is there once."""
        inside = (samples >= 0) & (samples < count)
        times = np.bincount(samples[inside], minlength=count)
        faults = {
            f"not among 0 to {count - 1}": samples[~inside],
            "named twice": np.flatnonzero(times > 1),
            "missing": np.flatnonzero(times == 0),
        }
        for fault, rows in faults.items():
            if len(rows):
                first = [printable(self._names[row] if self._by_name else row) for row in rows[:3]]
                more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
                some = f"samples {', '.join(first)}{more} are" if len(rows) > 1 else ""
                return f"{some or f'sample {first[0]} is'} {fault}"
        return ""


def export(
    index: ClientIndex, labels: Labels, path: Path, others: Mapping[str, Indices] | None = None
) -> None:
    """Writes who owns which sample, and the labels' SHA-256, to a .json or .npz for FromFile.

    Args:
        labels: of all training samples, which the index counts.
        others: samples that no client owns: ``validation``, ``public``.
    """
    from fedgkd_pl.storage.files import commit

    made_for = labels_digest(labels)
    rest = {name: rows for name, rows in (others or {}).items() if len(rows)}
    if path.suffix == ".npz":
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {"samples": index.samples, "offsets": index.offsets, **rest}
        np.savez_compressed(buffer, **arrays, labels_sha256=np.array(made_for))
        commit(path, [buffer.getvalue()])
    else:
        content = {"labels_sha256": made_for, "clients": [part.tolist() for part in index]}
        content |= {name: rows.tolist() for name, rows in rest.items()}
        commit(path, [json.dumps(content).encode()])


def labels_digest(labels: Labels) -> str:
    """The SHA-256 of all labels, by which a partition knows its data."""
    return hashlib.sha256(labels.astype("<i8").tobytes()).hexdigest()


def read_bounded(path: Path) -> bytes:
    """The bytes of a file that a setting names."""
    require(path.exists(), "path", "no such file", str(path))
    try:
        return read_bytes(path, LARGEST_FILE)
    except OSError as error:
        raise SettingError("path", str(error.strerror), str(path)) from error


@dataclass(frozen=True)
class _Written:
    """The samples of every client, and by name those of nobody: numbers, or all names of files."""

    clients: Sequence[Any]
    others: dict[str, Any]

    def all(self) -> list[Any]:
        """Every list of samples."""
        return [*self.clients, *self.others.values()]

    def numbered(self, numbers: Mapping[str, int], path: str) -> "_Written":
        """The numbers of named samples, without those that have none (below 0)."""

        def of(part: Any) -> Indices:
            for name in part.tolist():
                reason = f"{path} names {name!r:.80}, which is not there: a file is class/file"
                require(name in numbers, "partition", reason)
            rows = np.array([numbers[name] for name in part.tolist()], dtype=np.int64)
            return rows[rows >= 0]

        others = {name: of(part) for name, part in self.others.items()}
        return _Written([of(part) for part in self.clients], others)


def _read(path: Path) -> tuple[_Written, str]:
    """What a file says, and the labels' digest."""
    content = read_bounded(path)
    try:
        return _arrays(content) if path.suffix == ".npz" else _lists(json.loads(content))
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise SettingError("path", f"not a partition: {str(error)[:120]}", str(path)) from error
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise SettingError("path", "not a partition: damaged", str(path)) from error


def _arrays(content: bytes) -> tuple[_Written, str]:
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        samples, offsets = (np.asarray(arrays[n]) for n in ("samples", "offsets"))
        others = {name: np.asarray(arrays[name]) for name in OTHERS if name in arrays}
        made_for = str(arrays["labels_sha256"]) if "labels_sha256" in arrays else ""
    whole = offsets.ndim == samples.ndim == 1 and len(offsets) > 1
    whole = whole and offsets[0] == 0 and offsets[-1] == len(samples)
    if not whole or not (np.diff(offsets) >= 0).all():
        raise ValueError("offsets do not cut samples")
    if any(a.dtype.kind not in "iu" or a.ndim != 1 for a in (samples, *others.values())):
        raise ValueError("a sample is a whole number")
    others = {name: rows.astype(np.int64) for name, rows in others.items()}
    return _Written(np.split(samples.astype(np.int64), offsets[1:-1]), others), made_for


def _lists(parsed: Any) -> tuple[_Written, str]:
    if not isinstance(parsed, dict):
        parsed = {"clients": parsed}
    clients = parsed.get("clients")
    named = {name: parsed[name] for name in OTHERS if name in parsed}
    lists = [*(clients if isinstance(clients, list) else [None]), *named.values()]
    if not lists or not all(isinstance(part, list) for part in lists):
        raise ValueError('expected {"clients": [[0, 2, 5], [1, 3]], "validation": [4]}')
    kinds = {type(sample) for part in lists for sample in part}
    if not (kinds <= {int} or kinds <= {str}):
        raise ValueError("a sample is a whole number, or all are names of files")
    kind = str if str in kinds else np.int64
    others = {name: np.array(rows, dtype=kind) for name, rows in named.items()}
    made_for = str(parsed.get("labels_sha256", ""))
    return _Written([np.array(part, dtype=kind) for part in clients], others), made_for
