"""Accuracy of the clients on the tasks that they have learned, and on the next one."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from fedgkd_pl.callbacks.evaluate import RowsFile, Split, SplitCallback
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.errors import require
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.runs.folder import TASKS
from lightning.pytorch import Trainer
from typing_extensions import override


class TaskAccuracy(RowsFile, SplitCallback):
    """Evaluates every client on its tasks at the end of each, on the server's data.

    a_ti is a client's accuracy on the i-th task of its sequence after it has learned t of them; the
    task is known, so only its classes count. The model is the global one, or the client's own where
    a method has that (FedWeIT). Logs, as means over clients, at the end of task T:

        task/acc         the mean of a_Ti over i ≤ T
        task/forgetting  the mean over i < T of max over i ≤ t ≤ T of a_ti, minus a_Ti
        task/transfer    the mean over i ≤ T of a_ii − a_(i−1)i: what a task's own rounds have added

    and their parts ``task/acc/<i>``, ``task/forgetting/<i>`` and ``task/transfer/<i>``. All
    accuracies are in ``tasks.csv`` beside ``metrics.csv``, a row each, and in the checkpoint.

    Args:
        split: the server's data to evaluate on, ``test`` or ``val``.
    """

    file = TASKS
    columns = ("round", "learned", "client", "place", "task", "acc")

    def __init__(self, split: Split = "test") -> None:
        super().__init__(split=split)

    @override
    def check(self, model: FederatedServer, data: FederatedDataModule) -> None:
        """Refuses data without tasks, a split that lacks one, and clients' models out of reach."""
        super().check(model, data)
        tasks = data.client_data.tasks
        require(tasks is not None, "tasks", "TaskAccuracy needs data with tasks: ClassTasks")
        text = "TaskAccuracy needs clients' own models, and theirs are not here"
        require(not (model.models_differ and model.engine.states_stay), "callbacks", text)
        held = set(getattr(data, self.split).labels.tolist())
        for classes in () if tasks is None else tasks.groups:
            text = f"has no sample of classes {list(classes)}, which are a task"
            require(bool(held & set(classes)), "split", text, self.split)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Copies the net; a new run is evaluated on everybody's first task."""
        super().on_train_start(trainer, pl_module)
        data = pl_module.datamodule
        labels, groups = self.examples_of(data).labels.cpu(), data.client_data.tasks.groups
        # the rows of every task
        self.samples = [torch.isin(labels, torch.tensor(of)).nonzero()[:, 0] for of in groups]
        if trainer.current_epoch == 0:
            self._evaluate(pl_module, 0, 0)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """At the end of a task, evaluates and logs."""
        tasks = pl_module.datamodule.client_data.tasks
        if tasks.ends(pl_module.round):
            learned = tasks.place(pl_module.round) + 1
            self._evaluate(pl_module, pl_module.round, learned)
            pl_module.log_round(scores(self.rows, learned))

    def _evaluate(self, server: FederatedServer, number: int, learned: int) -> None:
        """All clients on the tasks that they have learned and on the next one."""
        runner: Any = self.runner
        tasks: Any = server.datamodule.client_data.tasks
        accs: dict[int, float] = {}  # by task
        for client in server.datamodule.eligible:
            for place, task in enumerate(tasks.order(client)[: learned + 1]):
                if task not in accs or server.models_differ:
                    model = server.model_of(client, place)
                    accs[task] = runner.score(model, self.samples[task])[0]
                self.add(number, learned, client, place + 1, task, accs[task])


def scores(rows: Sequence[Mapping[str, float]], learned: int) -> dict[str, float]:
    """The values logged when so many tasks are learned; see :class:`TaskAccuracy`."""
    accs = defaultdict[tuple[float, float], list[float]](list)  # a_ti of every client by (t, i)
    for row in rows:
        accs[row["learned"], row["place"]].append(row["acc"])
    a = {key: np.array(of_clients) for key, of_clients in accs.items()}
    places = range(1, learned + 1)
    acc = {i: a[learned, i].mean() for i in places}
    transfer = {i: (a[i, i] - a[i - 1, i]).mean() for i in places}
    best = {i: np.max([a[t, i] for t in range(i, learned + 1)], axis=0) for i in places}
    lost = {i: (best[i] - a[learned, i]).mean() for i in places[:-1]}
    values: dict[str, float] = {}
    for name, parts in ("acc", acc), ("forgetting", lost), ("transfer", transfer):
        if parts:
            values[f"task/{name}"] = float(np.mean(list(parts.values())))
            values |= {f"task/{name}/{i}": float(value) for i, value in parts.items()}
    return values
