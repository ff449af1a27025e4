"""Tasks: clients learn one group of classes after the other, each in an order of its own.

A task is known by its number, in training and in evaluation: outputs of classes that are not in it
are set far below all others. With one row of the last layer per class, that is a head per task.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from fedgkd_pl.data.partition import ClientIndex, Labels
from fedgkd_pl.errors import at_least, require
from fedgkd_pl.seeds import derive
from fedgkd_pl.storage.recorded import Recorded
from torch import Tensor

# What a hidden class has for a logit: its probability is 0 in every precision, and unlike with
# minus infinity the divergence of two such outputs is a number.
FAR = -1e4


@dataclass(frozen=True)
class Task:
    """The task of a client in a round.

    Attributes:
        place: its place in the client's sequence, from 0.
        number: which of all tasks it is, from 0.
        classes: whose samples it is made of.
        ends: whether the round is its last one.
    """

    place: int
    number: int
    classes: tuple[int, ...]
    ends: bool


class ClassTasks(Recorded):
    """Every client goes through all tasks, which are groups of classes, for some rounds each.

    The classes are cut into groups of equal size in the order of their numbers: with five tasks of
    ten classes 0, 1 | 2, 3 | …. In a round all clients are at the same place of their sequences.

    Args:
        tasks: into how many groups the classes are cut.
        rounds_per_task: after how many rounds the next task begins.
        order: ``own``: every client has an order of its own, by the partition's seed; ``same``: all
            begin with the first group and end with the last.
    """

    def __init__(
        self, tasks: int = 5, rounds_per_task: int = 10, order: Literal["own", "same"] = "own"
    ) -> None:
        at_least(1, tasks=tasks, rounds_per_task=rounds_per_task)
        require(order in ("own", "same"), "order", "must be own or same", order)
        self.tasks = tasks
        self.rounds_per_task = rounds_per_task
        self.order = order

    @property
    def rounds(self) -> int:
        """The rounds of all tasks together."""
        return self.tasks * self.rounds_per_task

    def sequences(self, num_classes: int, seed: int) -> "TaskSequences":
        """The tasks of some classes; ``seed`` is that of the clients' orders."""
        text = f"must divide the {num_classes} classes into groups of equal size"
        require(num_classes > 0 and num_classes % self.tasks == 0, "tasks", text, self.tasks)
        groups = np.arange(num_classes).reshape(self.tasks, -1).tolist()
        own = seed if self.order == "own" else None
        return TaskSequences(tuple(map(tuple, groups)), self.rounds_per_task, own)


@dataclass(frozen=True)
class TaskSequences:
    """The task of every client in every round.

    Attributes:
        groups: the classes of every task.
        seed: of the clients' orders; None if all have the same.
    """

    groups: tuple[tuple[int, ...], ...]
    rounds_per_task: int
    seed: int | None = None

    def order(self, client: int) -> list[int]:
        """A client's tasks by their numbers, the first one first."""
        if self.seed is None:
            return list(range(len(self.groups)))
        rng = np.random.default_rng(derive(self.seed, "tasks", client=client))
        order: list[int] = rng.permutation(len(self.groups)).tolist()
        return order

    def place(self, round: int) -> int:
        """At which place of their sequences all clients are in a round."""
        return (round - 1) // self.rounds_per_task

    def ends(self, round: int) -> bool:
        """Whether a round is the last one of a task."""
        return round % self.rounds_per_task == 0

    def at(self, client: int, round: int) -> Task:
        """The task of a client in a round."""
        place = self.place(round)
        number = self.order(client)[place]
        return Task(place, number, self.groups[number], self.ends(round))

    def known(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Outputs for samples whose task is known: that which their label belongs to."""
        per_class = [number for number, classes in enumerate(self.groups) for _ in classes]
        task_of = torch.tensor(per_class, device=outputs.device)
        return outputs.masked_fill(task_of[y][:, None] != task_of[None, :], FAR)

    def check_clients(self, index: ClientIndex, labels: Labels, clients: list[int]) -> None:
        """Raises a clear error if a client has no sample of a task."""
        counts = np.array(index.label_counts(labels, sum(map(len, self.groups))))
        for number, classes in enumerate(self.groups):
            none = [client for client in clients if not counts[client, list(classes)].any()]
            text = (
                f"every client goes through all tasks, and client {none[:1]} has no sample of "
                f"classes {list(classes)}: take fewer clients, or a partition such as IID"
            )
            require(not none, "tasks", text, number)
