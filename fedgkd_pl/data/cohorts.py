"""The clients of a round: one class per way to draw.

A draw is a function of the round and the population, without state of its own, so a resumed run
draws the clients that it would have drawn. A class of one's own::

    class Largest(Cohorts):
        def draw(self, round, population):
            order = sorted(population.clients, key=lambda k: -population.sizes[k])
            return order[: population.size]

A method may change what was drawn: :meth:`FederatedServer.choose_clients`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index

import numpy as np
from fedgkd_pl.data.partition import LARGEST, AuthorsDirichlet, Partition
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.seeds import derive
from fedgkd_pl.storage.files import read_json
from fedgkd_pl.storage.recorded import Recorded
from numpy.typing import NDArray
from typing_extensions import override


@dataclass(frozen=True)
class Population:
    """The clients that a cohort is drawn from.

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

    def choose(self, round: int, chances: NDArray[np.float64] | None = None) -> list[int]:
        """The ids of a round's clients, drawn without replacement; uniformly without chances."""
        slots = self.random(round).choice(len(self.clients), self.size, replace=False, p=chances)
        return [self.clients[slot] for slot in slots.tolist()]

    def require_some(self, cohort: Sequence[int], who: str) -> None:
        """Refuses a cohort, drawn by ``who``, that is not of these clients."""
        fits = len(cohort) == len(set(cohort)) > 0 and set(cohort) <= set(self.clients)
        require(fits, "cohorts", f"{who} must name clients that can be drawn, each once", cohort)


Choose = Callable[[list[int], Population], Sequence[int]]


class Cohorts(Recorded, ABC):
    """A way to draw the clients of a round."""

    rounds: int | None = None  # how many rounds it knows; None for any number

    def check(self, population: Population) -> None:
        """Raises a clear error if it cannot draw from this population."""

    @abstractmethod
    def draw(self, round: int, population: Population) -> Sequence[int]:
        """The ids of the clients of a round (from 1), at least one, each once, in any order."""


class UniformCohorts(Cohorts):
    """Uniformly and without replacement, as many as the participation says: the default."""

    @override
    def draw(self, round: int, population: Population) -> Sequence[int]:
        return population.choose(round)


class WeightedCohorts(Cohorts):
    """Without replacement; a client with twice the samples is twice as likely to come next."""

    @override
    def draw(self, round: int, population: Population) -> Sequence[int]:
        sizes = np.array([population.sizes[client] for client in population.clients], dtype=float)
        return population.choose(round, sizes / sizes.sum())


class CyclicCohorts(Cohorts):
    """Clients take turns: nobody comes twice before everybody has come once.

    Args:
        shuffle: in an order drawn once for the run; otherwise by id.
    """

    def __init__(self, shuffle: bool = True) -> None:
        self.shuffle = shuffle

    @override
    def draw(self, round: int, population: Population) -> Sequence[int]:
        order = np.array(population.clients)
        order = population.random(0).permutation(order) if self.shuffle else order
        first = (round - 1) * population.size
        turns = np.arange(first, first + population.size) % len(order)
        return order[turns].tolist()  # type: ignore[no-any-return]


class BernoulliCohorts(Cohorts):
    """Each client comes by chance, with the participation as its probability: sizes vary.

    A round that nobody would come to is drawn again.
    """

    @override
    def draw(self, round: int, population: Population) -> Sequence[int]:
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
            content = read_json(path, LARGEST)
            cohorts = content["cohorts"] if isinstance(content, dict) else content
            self.cohorts = [[index(client) for client in cohort] for cohort in cohorts]
        except (OSError, ValueError, TypeError, LookupError) as error:
            reason = getattr(error, "strerror", None) or "must hold a list of lists of ids"
            raise SettingError("path", reason, path) from error
        self.rounds = len(self.cohorts)
        require(self.rounds > 0, "path", "has no round", path)

    @override
    def check(self, population: Population) -> None:
        for number, cohort in enumerate(self.cohorts, start=1):
            population.require_some(cohort, f"round {number} of {self.path}")

    @override
    def draw(self, round: int, population: Population) -> Sequence[int]:
        return self.cohorts[round - 1]


class AuthorsCohorts(Cohorts):
    """The cohorts of the FedGKD paper's runs, which follow :class:`AuthorsDirichlet`'s draws."""

    @override
    def check(self, population: Population) -> None:
        fits = isinstance(population.partition, AuthorsDirichlet)
        reason = "AuthorsCohorts needs partition AuthorsDirichlet"
        require(fits, "cohorts", reason, population.partition)
        reason = "AuthorsCohorts needs all clients: unseen_clients must be 0"
        require(len(population.clients) == len(population.sizes), "cohorts", reason)

    @override
    def draw(self, round: int, population: Population) -> Sequence[int]:
        assert isinstance(population.partition, AuthorsDirichlet)
        return population.partition.cohort(round, len(population.clients), population.size)


class CohortLoader:
    """An epoch of the server's Trainer: one batch, which is the cohort of the round.

    It is drawn and then changed by ``choose`` (the method's). Lightning calls the sampler's
    :meth:`set_epoch` before every epoch, on resume too, so this needs no state.
    """

    def __init__(self, cohorts: Cohorts, population: Population, choose: Choose | None) -> None:
        self.cohorts = cohorts
        self.population = population
        self.choose = choose
        self.epoch = 0
        self.sampler = self  # where Lightning looks for set_epoch

    def set_epoch(self, epoch: int) -> None:
        """Moves to the round after ``epoch`` finished ones."""
        self.epoch = epoch

    def cohort(self) -> list[int]:
        """The ids of this round's clients, ascending."""
        drawn = sorted(self.cohorts.draw(self.epoch + 1, self.population))
        who = type(self.cohorts).__name__
        if self.choose is not None:
            drawn, who = sorted(self.choose(drawn, self.population)), "the method"
        self.population.require_some(drawn, who)
        return drawn

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[list[int]]:
        yield self.cohort()
