"""The base of all federated datasets."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from fedgkd_pl.data.card import card
from fedgkd_pl.data.cohorts import CohortLoader, Cohorts, CohortSampler, Population, UniformCohorts
from fedgkd_pl.data.examples import Batches, ClientData, Examples, Splits, digest
from fedgkd_pl.data.heterogeneity import heterogeneity
from fedgkd_pl.data.index import ClientIndex, Indices, stratified
from fedgkd_pl.data.own import OwnSplits, keep_own, own_of_owners
from fedgkd_pl.data.partition import IID, Partition
from fedgkd_pl.data.public import PublicData
from fedgkd_pl.data.published import export
from fedgkd_pl.data.raw import Reading
from fedgkd_pl.data.tasks import ClassTasks
from fedgkd_pl.data.validation import check_splits, warn_of_missing, warn_of_owners
from fedgkd_pl.errors import require
from fedgkd_pl.seeds import default_seed, derive
from fedgkd_pl.storage.checkpoint_io import load_newest
from fedgkd_pl.storage.recorded import Recorded
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn


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
    reading: Reading | None = None  # how samples lie in files; None: as arrays, like in memory
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
        require(num_clients >= 1, "num_clients", "must be at least 1", num_clients)
        require(0 < participation <= 1, "participation", "must be in (0, 1]", participation)
        reason = f"must leave some of {num_clients} clients"
        require(0 <= unseen_clients < num_clients, "unseen_clients", reason, unseen_clients)
        self.cohort_size = round(participation * (num_clients - unseen_clients))
        reason = f"leaves no client of {num_clients - unseen_clients} in a round"
        require(self.cohort_size >= 1, "participation", reason, participation)
        require(batch_size >= 1, "batch_size", "must be at least 1", batch_size)
        require(eval_batch_size >= 1, "eval_batch_size", "must be at least 1", eval_batch_size)
        require(0 <= val_fraction < 1, "val_fraction", "must be in [0, 1)", val_fraction)
        self.client_fractions = {"test": client_test_fraction, "val": client_val_fraction}
        for split, fraction in self.client_fractions.items():
            key = f"client_{split}_fraction"
            require(0 <= fraction < 1, key, "must be in [0, 1)", fraction)
        reason = "leaves nothing to train on beside client_test_fraction"
        require(sum(self.client_fractions.values()) < 1, "client_val_fraction", reason)
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
        self.cohorts = cohorts or UniformCohorts()
        self.public_source = public
        self.tasks = tasks
        self.public: Examples | None = None  # once it is loaded
        self.clients: ClientData | None = None
        self.owners_of: list[list[int]] = []  # by client, where clients are made of owners
        self.client_splits: OwnSplits = {}  # what clients keep of their own, once it is loaded
        self._fingerprint: str | None = None

    @abstractmethod
    def load(self) -> Splits:
        """Reads the data into memory; what is damaged is refused here, with the file's name.

        What it gives is checked by :meth:`setup`: lengths, types, labels, NaN.
        """

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """The data of a run, made with ``kwargs``, which no checkpoint keeps; reads no pickles."""
        checkpoint = load_newest(Path(checkpoint_path))[0]
        data = cls(**kwargs)
        data.load_state_dict(checkpoint.get(cls.__qualname__, {}))
        return data

    def check_net(self, net: nn.Module) -> None:
        """Raises a clear error where a net cannot take this data though its shapes fit."""

    def setup(self, stage: str | None = None) -> None:
        """Loads, checks and cuts the data, once and for all stages."""
        if self.clients is not None:
            return
        splits = self.load()
        check_splits(splits, getattr(self, "num_classes", None), self.class_names)
        owned, self.test = splits.train, splits.test
        self._everything = splits.train
        keys, rows = splits.keys, torch.arange(len(owned))
        warn_of_owners(keys, self.partition)
        if splits.val is None:
            kept, held = self._hold_out(owned, keys)
            owned, self.val = owned.view(kept), owned.view(held)
            held_rows = rows[held]
            keys, rows = None if keys is None else keys[kept], rows[kept]
        else:
            held_rows = rows[:0]
            self.val = splits.val
            reason = f"{self.name} has its own validation set: the file must name none"
            require(self.partition.validation is None, "partition", reason)
        for split, examples in ("validation", self.val), ("test", self.test):
            warn_of_missing(split, examples, owned, self.class_names)
        if self.public_source is not None:
            rng = np.random.default_rng(derive(self.partition_seed, "public"))
            kept, self.public = self.public_source.take(owned, self.num_classes, rng)
            owned = owned if len(kept) == len(owned) else owned.view(kept)
            keys, rows = None if keys is None else keys[kept], rows[kept]
        rng = np.random.default_rng(derive(self.partition_seed, "partition"))
        by_label = owned.targets.ndim == 1 and bool(self.num_classes)
        reason = f"cuts by class, which {self.name} does not have: IID, QuantitySkew or ByKey"
        name = type(self.partition).__name__
        require(by_label or not self.partition.by_label, "partition", reason, name)
        taken = {"clients": rows.numpy(), "validation": held_rows.numpy()}
        everybody = np.arange(len(splits.train))
        public = np.setdiff1d(everybody, np.concatenate(list(taken.values())))
        self.rows = taken | {"public": public}  # whose are which rows of all training data
        index = self._cut(owned, taken["clients"], rng, keys)
        if keys is not None and self.partition.by_owner:
            self.owners_of = [np.unique(keys[samples]).tolist() for samples in index]
            if splits.test_keys is not None:
                self.client_splits = own_of_owners(self.test, splits.test_keys, self.owners_of)
        owned, index, kept = keep_own(owned, index, self.client_fractions, self.partition_seed)
        self.client_splits |= kept
        seen = index.sizes[: self.num_clients - self.unseen_clients]
        self.eligible = np.flatnonzero(seen).tolist()
        reason = f"only {len(self.eligible)} clients have data, a round needs {self.cohort_size}"
        require(len(self.eligible) >= self.cohort_size, "participation", reason)
        sizes = dict(enumerate(index.sizes.tolist()))
        self.population = Population(
            self.eligible, sizes, self.cohort_size, self.seed, self.partition
        )
        self.cohorts.check(self.population)
        sequences = None
        if self.tasks is not None:
            require(by_label, "tasks", f"are groups of classes, which {self.name} does not have")
            sequences = self.tasks.sequences(self.num_classes, self.partition_seed)
            sequences.check_clients(index, owned.labels.numpy(), self.eligible)
        self.clients = ClientData(owned, index, self.batch_size, self.seed, sequences)

    def _cut(
        self, owned: Examples, rows: Indices, rng: np.random.Generator, keys: Any
    ) -> ClientIndex:
        """Who owns which of the samples that are left to the clients, ``rows`` of all."""
        if not self.partition.of_all:
            return self.partition(owned.labels.numpy(), self.num_clients, rng, keys)
        labels = self._everything.labels.numpy()
        index = self.partition(labels, self.num_clients, rng, keys).among(rows)
        reason = "has a public part that data.public does not draw here: partition_seed differs?"
        require(len(index.samples) == len(rows), "partition", reason, self.partition)
        return index

    def _hold_out(self, owned: Examples, keys: Any) -> tuple[Any, Any]:
        """The clients' part and the server's, as slices or row numbers."""
        if (rows := self.partition.validation) is not None:
            reason = f"the validation part must be some of {len(owned)} training samples"
            outside = rows[(rows < 0) | (rows >= len(owned))].tolist()
            fits = len(rows) < len(owned) and not outside
            require(fits, "partition", reason, outside[:3] or self.partition)
            rest = np.setdiff1d(np.arange(len(owned)), rows)
            return torch.from_numpy(rest), torch.from_numpy(rows)
        held = round(self.val_fraction * len(owned))
        if self.val_split == "last" or not held:
            return slice(len(owned) - held), slice(len(owned) - held, None)
        rng = np.random.default_rng(derive(self.partition_seed, "validation"))
        return self._draw(owned, keys, held, rng)

    def _draw(
        self, owned: Examples, keys: Any, size: int, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """The rows that stay and about ``size`` that are taken, from every class or owner alike."""
        by_owner = keys is not None and self.partition.by_owner
        rows = stratified(keys if by_owner else owned.labels.numpy(), size, rng)
        rest = np.setdiff1d(np.arange(len(owned)), rows)
        return torch.from_numpy(rest), torch.from_numpy(rows)

    def teardown(self, stage: str) -> None:
        """Ends what reads samples for this process; it starts again when it is needed."""
        if self.clients is not None:
            for examples in (self.clients.examples, self.val, self.test, self.public):
                if examples is not None:
                    examples.close()

    def check_rounds(self, rounds: int) -> None:
        """Raises a clear error if the cohorts or the tasks are not known for so many rounds."""
        known = self.cohorts.rounds
        reason = f"must be at most {known}, the rounds that its cohorts are known for"
        require(known is None or rounds <= known, "rounds", reason, rounds)
        if self.tasks is not None:
            each = self.tasks.rounds_per_task
            reason = f"must be at most {self.tasks.rounds}: {self.tasks.tasks} tasks of {each}"
            require(rounds <= self.tasks.rounds, "rounds", reason, rounds)

    @property
    def client_data(self) -> ClientData:
        """The clients' data; :meth:`setup` must have run."""
        if self.clients is None:
            self.setup()
        assert self.clients is not None
        return self.clients

    def all_training_examples(self) -> Examples:
        """What the clients share, with the validation part if that was taken from it."""
        self.client_data  # noqa: B018  (loads it)
        return self._everything

    def export_partition(self, path: str | Path) -> None:
        """Writes who owns which sample to a .json or .npz file, for :class:`FromFile`."""
        index = self.client_data.index
        owned, others = self.rows["clients"], {k: v for k, v in self.rows.items() if k != "clients"}
        parts = ClientIndex([owned[part] for part in index])
        export(parts, self._everything.labels.numpy(), Path(path), others)

    def fingerprint(self) -> str:
        """The SHA-256 of all samples, labels and of who owns which, the same on every machine.

        A run can be resumed only where it is the same.
        """
        if self._fingerprint is None:
            data = self.client_data
            splits = [data.examples, self.val, self.test]
            splits += [] if self.public is None else [self.public]
            index = [torch.from_numpy(part) for part in (data.index.offsets, data.index.samples)]
            for own in self._kept().values():
                splits.append(own.examples)
                index.append(torch.from_numpy(own.index.offsets))
            if data.tasks is not None:
                orders = [data.tasks.order(client) for client in range(self.num_clients)]
                index += [torch.tensor([data.tasks.rounds_per_task]), torch.tensor(orders)]
            self._fingerprint = digest(*splits, *index)
        return self._fingerprint

    def summary(self) -> dict[str, Any]:
        """How many samples of each class every client has, for ``partition.json``."""
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
            **{f"num_client_{name}": len(own.examples) for name, own in self._kept().items()},
            "heterogeneity": heterogeneity(counts),
            "counts": counts,
        }

    def _repr_html_(self) -> str:
        """For a notebook: who holds what, once that is known."""
        return card(self)

    def _kept(self) -> OwnSplits:
        """The splits that were taken out of what clients would train on."""
        wanted = [split for split, fraction in self.client_fractions.items() if fraction]
        return {split: self.client_splits[split] for split in wanted}

    def train_dataloader(self) -> CohortLoader:
        """One cohort per epoch."""
        module = self.trainer.lightning_module if self.trainer else None
        choose = getattr(module, "choose_clients", None)
        if self.trainer and self.trainer.max_epochs:
            self.check_rounds(self.trainer.max_epochs)
        return CohortLoader(CohortSampler(self.cohorts, self.population, choose))

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
