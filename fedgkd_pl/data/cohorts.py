"""Who takes part in a round: one class per way to draw.

A draw is a function of the round and the population, without state of its own, so a resumed run
draws the clients that it would have drawn. A class of one's own::

    class Largest(Cohorts):
        def draw(self, round, population):
            order = sorted(population.clients, key=lambda k: -population.sizes[k])
            return order[: population.size]

A method may change what was drawn: :meth:`FederatedServer.choose_clients`.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fedgkd_pl.data.partition import Partition
from fedgkd_pl.data.published import AuthorsDirichlet, read_bounded
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.seeds import derive
from fedgkd_pl.storage.recorded import Recorded


@dataclass(frozen=True)
class Population:
    """Whom a cohort is drawn from.

    Attributes:
        clients: the ids that may be drawn, ascending.
        sizes: the number of samples of each client of the partition, by id.
        size: how many clients a round is to have (C·N, rounded).
    """

    clients: Sequence[int]
    sizes: Mapping[int, int]
    size: int
    seed: int
    partition: Partition

    def random(self, round: int) -> np.random.Generator:
        """The generator of a round's draw, always the same; round 0 is for one draw for all."""
        return np.random.default_rng(derive(self.seed, "cohort", round))


Choose = Callable[[list[int], Population], Sequence[int]]


class Cohorts(Recorded, ABC):
    """How the clients of a round are drawn."""

    rounds: int | None = None  # how many rounds it knows; None for any number

    def check(self, population: Population) -> None:
        """Raises a clear error if it cannot draw from this population."""

    @abstractmethod
    def draw(self, round: int, population: Population) -> Sequence[int]:
        """The ids of the clients of a round (from 1), at least one, each once, in any order."""


class UniformCohorts(Cohorts):
    """As many as the participation says, uniformly and without replacement: the default."""

    def draw(self, round: int, population: Population) -> Sequence[int]:
        """See :meth:`Cohorts.draw`."""
        slots = population.random(round).choice(
            len(population.clients), population.size, replace=False
        )
        return [population.clients[slot] for slot in slots.tolist()]


class WeightedCohorts(Cohorts):
    """Without replacement; a client with twice the samples is twice as likely to come next."""

    def draw(self, round: int, population: Population) -> Sequence[int]:
        """See :meth:`Cohorts.draw`."""
        sizes = np.array([population.sizes[client] for client in population.clients], dtype=float)
        slots = population.random(round).choice(
            len(sizes), population.size, replace=False, p=sizes / sizes.sum()
        )
        return [population.clients[slot] for slot in slots.tolist()]


class CyclicCohorts(Cohorts):
    """Clients take turns: nobody comes twice before everybody has come once.

    Args:
        shuffle: in an order drawn once for the run; otherwise by id.
    """

    def __init__(self, shuffle: bool = True) -> None:
        self.shuffle = shuffle

    def draw(self, round: int, population: Population) -> Sequence[int]:
        """See :meth:`Cohorts.draw`."""
        order = np.array(population.clients)
        order = population.random(0).permutation(order) if self.shuffle else order
        first = (round - 1) * population.size
        turns = np.arange(first, first + population.size) % len(order)
        return [int(client) for client in order[turns]]


class BernoulliCohorts(Cohorts):
    """Each client comes by chance, with the participation as its probability: sizes vary.

    A round that nobody would come to is drawn again.
    """

    def draw(self, round: int, population: Population) -> Sequence[int]:
        """See :meth:`Cohorts.draw`."""
        chance = population.size / len(population.clients)
        random = population.random(round)
        while not (comes := random.random(len(population.clients)) < chance).any():
            pass
        return [client for client, now in zip(population.clients, comes, strict=True) if now]


class CohortsFromFile(Cohorts):
    """Cohorts that are read from a file.

    Args:
        path: a JSON file: a list of rounds, each a list of client ids from 0, or a mapping with
            that list as ``cohorts``.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            content = json.loads(read_bounded(Path(path)))
        except (ValueError, RecursionError) as error:
            raise SettingError("path", "not a JSON file of cohorts", path) from error
        cohorts = content.get("cohorts") if isinstance(content, dict) else content
        well_formed = isinstance(cohorts, list) and all(
            isinstance(cohort, list) and all(type(client) is int for client in cohort)
            for cohort in cohorts
        )
        if not well_formed or not cohorts:
            raise SettingError("path", "must hold a list of lists of ids", path)
        self.cohorts: list[list[int]] = cohorts
        self.rounds = len(self.cohorts)

    def check(self, population: Population) -> None:
        """Every id must be that of a client that may be drawn, once a round."""
        known = set(population.clients)
        for number, cohort in enumerate(self.cohorts, start=1):
            fits = bool(cohort) and len(set(cohort)) == len(cohort) and set(cohort) <= known
            reason = f"round {number} of {self.path} must name clients that can be drawn, each once"
            require(fits, "cohorts", reason, cohort)

    def draw(self, round: int, population: Population) -> Sequence[int]:
        """See :meth:`Cohorts.draw`."""
        return self.cohorts[round - 1]


class AuthorsCohorts(Cohorts):
    """The cohorts of the FedGKD paper's runs, which follow :class:`AuthorsDirichlet`'s draws."""

    def check(self, population: Population) -> None:
        """The same random numbers cut the data, for all clients there are."""
        if not isinstance(population.partition, AuthorsDirichlet):
            name = type(population.partition).__name__
            raise SettingError("cohorts", "AuthorsCohorts needs partition AuthorsDirichlet", name)
        clients = list(population.clients)
        reason = "AuthorsCohorts needs all clients: unseen_clients must be 0"
        require(clients == list(range(len(population.sizes))), "cohorts", reason)

    def draw(self, round: int, population: Population) -> Sequence[int]:
        """See :meth:`Cohorts.draw`."""
        assert isinstance(population.partition, AuthorsDirichlet)
        return population.partition.cohort(round, len(population.clients), population.size)


class CohortSampler:
    """The cohort of the current round, as drawn and then changed by ``choose`` (the method's).

    Lightning calls :meth:`set_epoch` before every epoch, on resume too, so this needs no state.
    """

    def __init__(self, cohorts: Cohorts, population: Population, choose: Choose | None) -> None:
        self.cohorts = cohorts
        self.population = population
        self.choose = choose
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Moves to the round after ``epoch`` finished ones."""
        self.epoch = epoch

    def cohort(self) -> list[int]:
        """The ids of this round's clients, ascending."""
        drawn = sorted(self.cohorts.draw(self.epoch + 1, self.population))
        if self.choose is not None:
            drawn = sorted(self.choose(drawn, self.population))
        fits = bool(drawn) and len(set(drawn)) == len(drawn)
        fits = fits and set(drawn) <= set(self.population.clients)
        who = type(self.cohorts).__name__ if self.choose is None else "the method"
        require(fits, "cohorts", f"{who} must name clients that can be drawn, each once", drawn)
        return drawn


class CohortLoader:
    """An epoch of the server's Trainer: one batch, which is one cohort."""

    def __init__(self, sampler: CohortSampler) -> None:
        self.sampler = sampler  # Lightning looks for this name, to call set_epoch

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[list[int]]:
        yield self.sampler.cohort()
