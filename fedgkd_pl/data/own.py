"""The part of its own samples that a client tests on; nobody trains on it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from fedgkd_pl.data.examples import Examples
from fedgkd_pl.data.partition import ClientIndex, Indices, stratified
from fedgkd_pl.errors import require
from fedgkd_pl.seeds import Purpose, derive

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
        clients: list[int] = np.flatnonzero(self.index.sizes).tolist()
        return clients

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
