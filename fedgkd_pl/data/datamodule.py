"""The base of all federated datasets, with public data and the clients' own test samples."""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from fedgkd_pl.data.cohorts import CohortLoader, Cohorts, Population, UniformCohorts
from fedgkd_pl.data.examples import Batches, ClassTasks, ClientData, Examples, Splits, digest
from fedgkd_pl.data.inputs import InputFormat
from fedgkd_pl.data.partition import (
    IID,
    ClientIndex,
    Indices,
    Partition,
    heterogeneity,
    labels_digest,
    stratified,
)
from fedgkd_pl.data.validation import check_splits, warn_of_owners
from fedgkd_pl.errors import at_least, require
from fedgkd_pl.seeds import Purpose, default_seed, derive
from fedgkd_pl.storage.checkpoint import load_newest
from fedgkd_pl.storage.files import commit
from fedgkd_pl.storage.recorded import Recorded
from lightning.pytorch import LightningDataModule
from numpy.random import Generator
from torch import Tensor, nn
from typing_extensions import override

log = logging.getLogger("fedgkd_pl")
PURPOSES: dict[str, Purpose] = {"test": "client test", "val": "client val"}


@dataclass(frozen=True)
class OwnSplit:
    """The clients' own samples of one split, those of client 0 first, then those of client 1, …."""

    examples: Examples
    index: ClientIndex

    @classmethod
    def of(cls, examples: Examples, parts: list[Indices]) -> "OwnSplit":
        """Some of the examples; ``parts`` has their numbers, by client."""
        rows = torch.from_numpy(np.concatenate(parts).astype(np.int64))
        ends = np.cumsum([len(part) for part in parts])
        return cls(examples.view(rows), ClientIndex(np.split(np.arange(len(rows)), ends[:-1])))

    @property
    def clients(self) -> list[int]:
        """Those that have samples here."""
        return np.flatnonzero(self.index.sizes).tolist()

    def rows(self, client: int) -> slice:
        """The rows of a client's samples."""
        return self.index.place(client)


OwnSplits = dict[str, OwnSplit]  # by split, where clients have one


def keep_own(
    owned: Examples, index: ClientIndex, fractions: Mapping[str, float], seed: int
) -> tuple[Examples, ClientIndex, OwnSplits]:
    """Takes the clients' own splits out of what they train on.

    Every class of a client gives its share, and none its last sample; without classes, the whole
    client does. A client's draw depends on the seed, its number and its samples alone.

    Args:
        owned: what clients have.
        index: who owns which.
        fractions: the part of each client's samples that is kept, by split.

    Returns:
        What is left to train on, who owns which of it, and what was taken.
    """
    wanted = {split: fraction for split, fraction in fractions.items() if fraction > 0}
    if not wanted:
        return owned, index, {}
    labels = owned.labels.numpy()
    taken: dict[str, list[Indices]] = {split: [] for split in wanted}
    training: list[Indices] = []
    for client, samples in enumerate(index):
        rest = samples
        for split, fraction in wanted.items():
            size = round(fraction * len(samples))
            rng = np.random.default_rng(derive(seed, PURPOSES[split], client=client))
            ordered = np.sort(rest)
            drawn = ordered[stratified(labels[ordered], size, rng)] if size else ordered[:0]
            taken[split].append(drawn)
            rest = rest[~np.isin(rest, drawn)]  # in the order that the partition gave
        training.append(rest)
    splits = {split: OwnSplit.of(owned, parts) for split, parts in taken.items()}
    clients = int(np.count_nonzero(index.sizes))
    for split, own in splits.items():
        key, small = f"client_{split}_fraction", clients - len(own.clients)
        reason = "takes nothing: no client has enough samples of a class to give one away"
        require(small < clients, key, reason, wanted[split])
        if small:
            text = "%s: %d of %d clients are too small for a %s split of their own, and not counted"
            log.warning(text, key, small, clients, split)
    rows = np.sort(np.concatenate(training))
    left = ClientIndex([np.searchsorted(rows, part) for part in training])
    return owned.view(torch.from_numpy(rows)), left, splits


def own_of_owners(test: Examples, test_keys: Indices, owners: list[list[int]]) -> OwnSplits:
    """The test samples of each client's own owners; empty where an owner has two clients.

    Args:
        test_keys: the owner of every test sample.
        owners: those of every client.
    """
    reason = "test_keys must be the owner of every test sample: correct them in load()"
    require(len(test_keys) == len(test), "data", reason)
    client_of = {owner: client for client, of_client in enumerate(owners) for owner in of_client}
    if len(client_of) < sum(map(len, owners)):
        return {}
    clients = np.array([client_of.get(owner, -1) for owner in test_keys.tolist()], dtype=np.int64)
    parts = [np.flatnonzero(clients == client) for client in range(len(owners))]
    return {"test": OwnSplit.of(test, parts)} if (clients >= 0).any() else {}


class PublicData(Recorded, ABC):
    """A source of public data."""

    from_training = False  # whether it is cut from what the clients would share
    labelled = False  # whether its labels are public, too; they are all 0 otherwise

    @abstractmethod
    def take(self, train: Examples, num_classes: int, rng: Generator) -> tuple[Tensor, Examples]:
        """The rows of ``train`` that are left to the clients, and the public examples."""


class HeldOut(PublicData):
    """A random part of the training data, which the clients then do not have.

    It has the distribution of the clients' data, which makes distillation easier than with the data
    of another source.

    Args:
        fraction: of the training data that validation leaves.
        labelled: whether its labels are public, too, for methods that begin with them (FedMD).
    """

    from_training = True

    def __init__(self, fraction: float = 0.2, labelled: bool = False) -> None:
        require(0 < fraction < 1, "fraction", "must be in (0, 1)", fraction)
        self.fraction = fraction
        self.labelled = labelled

    @override
    def take(self, train: Examples, num_classes: int, rng: Generator) -> tuple[Tensor, Examples]:
        size = round(self.fraction * len(train))
        require(0 < size < len(train), "fraction", f"leaves {size} of {len(train)}", self.fraction)
        drawn = torch.from_numpy(rng.permutation(len(train)))
        return drawn[size:].sort().values, train.portable(drawn[:size].sort().values)


class OtherData(PublicData):
    """The training inputs of another dataset, read as the clients' own are.

    Args:
        data: the dataset; how it would be cut into clients does not matter.
        samples: take this many at random; by default all.
        labelled: whether its labels, which must be classes of the clients' data, are public, too,
            for methods that begin with them (FedMD).
    """

    def __init__(
        self, data: "FederatedDataModule", samples: int | None = None, labelled: bool = False
    ) -> None:
        at_least(1, samples=1 if samples is None else samples)
        self.data = data
        self.samples = samples
        self.labelled = labelled

    @override
    def take(self, train: Examples, num_classes: int, rng: Generator) -> tuple[Tensor, Examples]:
        other = self.data.load().train
        ours, theirs = (
            f"{tuple(each.inputs.shape[1:])} of {each.inputs.dtype}" for each in (train, other)
        )
        reason = f"the inputs of {self.data.name} are {theirs}, the clients' are {ours}"
        require(ours == theirs, "public", reason)
        classes = self.data.num_classes
        reason = f"{self.data.name} has {classes} classes, the clients' data {num_classes}"
        require(not self.labelled or 0 < classes <= num_classes, "labelled", reason, True)
        if self.samples is not None:
            reason = f"must be at most {len(other)}, the samples of {self.data.name}"
            require(self.samples <= len(other), "samples", reason, self.samples)
            rows = np.sort(rng.permutation(len(other))[: self.samples])
            other = other.portable(torch.from_numpy(rows))
        return torch.arange(len(train)), replace(other, transform=train.transform)


def unlabelled(examples: Examples) -> Examples:
    """The same inputs; every label is 0."""
    return replace(examples, targets=torch.zeros_like(examples.targets))


def sampled_rows(public: Examples, samples: int, labelled: bool, seed: int) -> Tensor:
    """So many rows of public data, or all, by a seed; of every class its share, if labelled."""
    if samples >= len(public):
        return torch.arange(len(public))
    rng = np.random.default_rng(seed)
    if labelled:
        return torch.from_numpy(stratified(public.labels.cpu().numpy(), samples, rng, leave=0))
    return torch.from_numpy(rng.choice(len(public), samples, replace=False)).sort().values


class FederatedDataModule(LightningDataModule, Recorded):
    """Training data cut into clients; validation and test data held by the server.

    A dataset is a subclass with :meth:`load`, ``name`` and ``num_classes``.

    Args:
        num_clients: how many clients share the training data (N).
        partition: how it is cut, such as ``Dirichlet(alpha=0.1, balanced=True)``.
        participation: the fraction of clients in a round (C).
        batch_size: of the clients' local training.
        val_fraction: the part of the training data that the server keeps for validation, by default
            of every class alike; 0 for none. Not used where the dataset has a validation set.
        eval_batch_size: of validation and test; speed only.
        unseen_clients: this many clients, the last ones, are never drawn.
        seed: of the partition, the cohorts and the clients' randomness; by default that of
            ``seed_everything``, or 0.
        partition_seed: to change the seed and keep the partition; by default ``seed``.
        cohorts: how the clients of a round are drawn; by default uniformly.
        public: unlabelled data that everybody may see, for the methods that need it.
        client_test_fraction: the part of every client's samples that it does not train on and is
            tested on itself, from each of its classes alike; 0 for none.
        client_val_fraction: another such part, to choose by.
        tasks: groups of classes that clients learn one after the other; by default all at once.
    """

    name: str
    num_classes: int  # 0 where targets are numbers
    class_names: Sequence[str] = ()  # in the order of the labels; empty: they have only numbers
    owner_names: Sequence[str] = ()  # in the order of their numbers in Splits.keys, where known
    reading: InputFormat | None = None  # how samples lie in files; None: as arrays, like in memory
    # how the validation part is taken where load() gives none: "stratified", drawn by the seed from
    # every class alike (from every owner where they are the clients), or "last", the last samples
    val_split: Literal["stratified", "last"] = "stratified"

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
        cohorts: Cohorts | None = None,
        public: PublicData | None = None,
        client_test_fraction: float = 0,
        client_val_fraction: float = 0,
        tasks: ClassTasks | None = None,
    ) -> None:
        super().__init__()
        self.client_fractions = {"test": client_test_fraction, "val": client_val_fraction}
        at_least(1, num_clients=num_clients, batch_size=batch_size, eval_batch_size=eval_batch_size)
        at_least(0, seed=seed or 0, partition_seed=partition_seed or 0)
        own = {f"client_{name}_fraction": part for name, part in self.client_fractions.items()}
        for key, fraction in (own | {"val_fraction": val_fraction}).items():
            require(0 <= fraction < 1, key, "must be in [0, 1)", fraction)
        reason = "must leave something to train on beside client_test_fraction"
        require(sum(own.values()) < 1, "client_val_fraction", reason)
        reason = f"must leave some of {num_clients} clients"
        require(0 <= unseen_clients < num_clients, "unseen_clients", reason, unseen_clients)
        require(0 < participation <= 1, "participation", "must be in (0, 1]", participation)
        self.cohort_size = round(participation * (num_clients - unseen_clients))
        reason = f"leaves no client of {num_clients - unseen_clients} in a round"
        require(self.cohort_size >= 1, "participation", reason, participation)
        self.num_clients = num_clients
        self.partition = partition
        self.unseen_clients = unseen_clients
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.eval_batch_size = eval_batch_size
        self.seed = default_seed() if seed is None else seed
        self.partition_seed = self.seed if partition_seed is None else partition_seed
        self.cohorts = cohorts or UniformCohorts()
        self.public_source = public
        self.tasks = tasks
        self.public: Examples | None = None  # once it is loaded
        self.clients: ClientData | None = None
        self.owners_of: list[list[int]] = []  # by client, where clients are made of owners
        self.client_splits: OwnSplits = {}  # what clients keep of their own, once it is loaded
        self.rows: dict[str, Indices] = {}  # whose are which rows of all training data
        self._fingerprint: str | None = None

    @abstractmethod
    def load(self) -> Splits:
        """Reads the data into memory; what is damaged is refused here, with the file's name.

        What it gives is checked by :meth:`setup`: lengths, types, labels, NaN.
        """

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """The data of a run, made with ``kwargs``, which no checkpoint keeps; reads no pickles."""
        data = cls(**kwargs)
        data.load_state_dict(load_newest(Path(checkpoint_path))[0].get(cls.__qualname__, {}))
        return data

    def check_net(self, net: nn.Module) -> None:
        """Raises a clear error where a net cannot take this data though its shapes fit."""

    @override
    def setup(self, stage: str | None = None) -> None:
        """Loads, checks and cuts the data, once and for all stages."""
        if self.clients is not None:
            return
        splits = self.load()
        self._check(splits)
        owned, rows = self._keep_validation(splits)
        owned, rows = self._take_public(owned, rows)
        index = self._cut(owned, rows, splits)
        owned, index, self._kept = keep_own(
            owned, index, self.client_fractions, self.partition_seed
        )
        self.client_splits |= self._kept
        seen = index.sizes[: self.num_clients - self.unseen_clients]
        self.eligible = np.flatnonzero(seen).tolist()
        reason = f"only {len(self.eligible)} clients have data, a round needs {self.cohort_size}"
        require(len(self.eligible) >= self.cohort_size, "participation", reason)
        sizes = dict(enumerate(index.sizes.tolist()))
        known = self.eligible, sizes, self.cohort_size, self.seed, self.partition
        self.population = Population(*known)
        self.cohorts.check(self.population)
        sequences = None
        if self.tasks is not None:
            sequences = self.tasks.sequences(self.num_classes, self.partition_seed)
            sequences.check_clients(index, owned.labels.numpy(), self.eligible)
        self.clients = ClientData(owned, index, self.batch_size, self.seed, sequences)

    def _check(self, splits: Splits) -> None:
        check_splits(splits, getattr(self, "num_classes", None), self.class_names)
        warn_of_owners(splits.keys, self.partition)
        # all training samples, with the validation and public parts taken from them
        self.everything, self.test = splits.train, splits.test
        own = splits.val is not None and self.partition.validation is not None
        reason = f"{self.name} has its own validation set: the file must name none"
        require(not own, "partition", reason)
        by_label = splits.train.targets.ndim == 1 and bool(self.num_classes)
        reason = f"cuts by class, which {self.name} does not have; use IID, QuantitySkew or ByKey"
        name = type(self.partition).__name__
        require(by_label or not self.partition.by_label, "partition", reason, name)
        reason = f"{self.name} has no classes to make groups of"
        require(by_label or self.tasks is None, "tasks", reason)

    def _keep_validation(self, splits: Splits) -> tuple[Examples, Tensor]:
        """Sets the validation data; what it leaves to the clients, and its rows of all."""
        owned, rows = splits.train, torch.arange(len(splits.train))
        if splits.val is None:
            kept, held = self._hold_out(owned, splits.keys)
            self.rows["validation"] = rows[held].numpy()
            owned, self.val, rows = owned.view(kept), owned.view(held), rows[kept]
        else:
            self.val = splits.val
        return owned, rows

    def _take_public(self, owned: Examples, rows: Tensor) -> tuple[Examples, Tensor]:
        """Sets the public data; what it leaves to the clients, and its rows of all."""
        if self.public_source is None:
            return owned, rows
        rng = np.random.default_rng(derive(self.partition_seed, "public"))
        kept, public = self.public_source.take(owned, self.num_classes, rng)
        self.public = public if self.public_source.labelled else unlabelled(public)
        self.rows["public"] = np.setdiff1d(rows.numpy(), rows[kept].numpy())
        return (owned if len(kept) == len(owned) else owned.view(kept)), rows[kept]

    def _cut(self, owned: Examples, rows: Tensor, splits: Splits) -> ClientIndex:
        """Shares out the samples that are left to the clients, ``rows`` of all."""
        self.rows["clients"] = rows.numpy()
        keys = None if splits.keys is None else splits.keys[rows.numpy()]
        rng = np.random.default_rng(derive(self.partition_seed, "partition"))
        if self.partition.of_all:
            labels = splits.train.labels.numpy()
            index = self.partition(labels, self.num_clients, rng, splits.keys).among(rows.numpy())
            reason = "has a public part that data.public does not draw; use its partition_seed"
            require(len(index.samples) == len(rows), "partition", reason, self.partition)
        else:
            index = self.partition(owned.labels.numpy(), self.num_clients, rng, keys)
        if keys is not None and self.partition.by_owner:
            self.owners_of = [np.unique(keys[samples]).tolist() for samples in index]
            if splits.test_keys is not None:
                self.client_splits = own_of_owners(self.test, splits.test_keys, self.owners_of)
        return index

    def _hold_out(self, owned: Examples, keys: Any) -> tuple[Any, Any]:
        """The clients' part and the server's, as slices or row numbers."""
        held = self.partition.validation
        if held is None:
            size = round(self.val_fraction * len(owned))
            if self.val_split == "last" or not size:
                return slice(len(owned) - size), slice(len(owned) - size, None)
            rng = np.random.default_rng(derive(self.partition_seed, "validation"))
            return self._draw(owned, keys, size, rng)
        rest = np.setdiff1d(np.arange(len(owned)), held)
        reason = f"the validation part must be some of {len(owned)} training samples"
        require(0 < len(rest) == len(owned) - len(held), "partition", reason, self.partition)
        return torch.from_numpy(rest), torch.from_numpy(held)

    def _draw(self, owned: Examples, keys: Any, size: int, rng: Generator) -> tuple[Tensor, Tensor]:
        """The rows that stay and about ``size`` that are taken, from every class or owner alike."""
        by_owner = keys is not None and self.partition.by_owner
        rows = stratified(keys if by_owner else owned.labels.numpy(), size, rng)
        return torch.from_numpy(np.setdiff1d(np.arange(len(owned)), rows)), torch.from_numpy(rows)

    @override
    def teardown(self, stage: str) -> None:
        if self.clients is not None:
            for examples in (self.clients.examples, self.val, self.test, self.public):
                if examples is not None:
                    examples.close()

    def check_rounds(self, rounds: int) -> None:
        """Raises a clear error if the cohorts or the tasks are not known for so many rounds."""
        for known in (self.cohorts.rounds, None if self.tasks is None else self.tasks.rounds):
            reason = f"must be at most {known}, the rounds of its cohorts or tasks"
            require(known is None or rounds <= known, "rounds", reason, rounds)

    @property
    def client_data(self) -> ClientData:
        """The clients' data, which :meth:`setup` loads."""
        self.setup()
        assert self.clients is not None
        return self.clients

    def export_partition(self, path: str | Path) -> None:
        """Writes who owns which sample to a JSON file, for :class:`FromFile`."""
        self.setup()
        content: dict[str, Any] = {name: rows for name, rows in self.rows.items() if len(rows)}
        content["labels_sha256"] = labels_digest(self.everything.labels.numpy())
        content["clients"] = [self.rows["clients"][part] for part in self.client_data.index]
        commit(Path(path), [json.dumps(content, default=np.ndarray.tolist).encode()])

    def fingerprint(self) -> str:
        """The SHA-256 of all samples, labels and of who owns which, the same on every machine.

        A run can be resumed only where it is the same.
        """
        if self._fingerprint is None:
            data = self.client_data
            splits = [data.examples, self.val, self.test]
            splits += [] if self.public is None else [self.public]
            splits += [own.examples for own in self._kept.values()]
            index: list[Any] = [data.index.offsets, data.index.samples]
            index += [own.index.offsets for own in self._kept.values()]
            if data.tasks is not None:
                orders = [data.tasks.order(client) for client in range(self.num_clients)]
                index += [[data.tasks.rounds_per_task], orders]
            self._fingerprint = digest(*splits, *map(torch.as_tensor, index))
        return self._fingerprint

    def summary(self) -> dict[str, Any]:
        """The content of ``partition.json``: the samples of each class of every client."""
        data = self.client_data
        dealt = self.num_classes if data.examples.targets.ndim == 1 else 0
        counts = data.index.label_counts(data.examples.labels.numpy(), dealt or 1)
        return {
            "dataset": self.name,
            "num_clients": self.num_clients,
            "num_classes": dealt,
            **({"class_names": list(self.class_names)} if self.class_names else {}),
            "num_val": len(self.val),
            "num_test": len(self.test),
            **({} if self.public is None else {"num_public": len(self.public)}),
            **{f"num_client_{name}": len(own.examples) for name, own in self._kept.items()},
            "heterogeneity": heterogeneity(counts),
            "counts": counts,
        }

    @override
    def train_dataloader(self) -> CohortLoader:
        """One cohort per epoch."""
        module = self.trainer.lightning_module if self.trainer else None
        if self.trainer and self.trainer.max_epochs:
            self.check_rounds(self.trainer.max_epochs)
        return CohortLoader(self.cohorts, self.population, getattr(module, "choose_clients", None))

    def eval_splits(self) -> list[str]:
        """The names of what :meth:`val_dataloader` gives: within ``fit`` the test set too."""
        fitting = self.trainer is not None and self.trainer.state.fn == "fit"
        splits = ["val"] if len(self.val) else []
        return [*splits, "test"] if fitting or not splits else splits

    @override
    def val_dataloader(self) -> list[Batches]:
        """The server's validation set, and beside it the test set that curves are drawn from."""
        return [self._eval(getattr(self, split)) for split in self.eval_splits()]

    @override
    def test_dataloader(self) -> Batches:
        """The official test set."""
        return self._eval(self.test)

    predict_dataloader = test_dataloader

    def _eval(self, examples: Examples) -> Batches:
        device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
        return Batches(examples.to(device), self.eval_batch_size)
