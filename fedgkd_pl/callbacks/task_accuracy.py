"""Accuracy of the clients on the tasks that they have learned, and on the next one."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from fedgkd_pl.callbacks.evaluate import Split, SplitRunner
from fedgkd_pl.callbacks.rows import RowsFile
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.errors import require
from fedgkd_pl.federation.checks import require_classes
from fedgkd_pl.federation.message import State
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.runs.folder import TASKS
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

COLUMNS = ["round", "learned", "client", "place", "task", "acc"]
Table = Mapping[tuple[int, int], Sequence[float]]  # (learned, place) → an accuracy a client


class TaskAccuracy(RowsFile):
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
    columns = COLUMNS

    def __init__(self, split: Split = "test") -> None:
        require(split in ("val", "test"), "split", "must be val or test", split)
        self.split: Split = split
        self.rows: list[dict[str, float]] = []
        self.runner: SplitRunner | None = None
        self.parts: list[slice] = []  # the rows of every task

    @override
    def check(self, model: FederatedServer, data: FederatedDataModule) -> None:
        """Refuses data without tasks, a split that lacks one, and clients' models out of reach."""
        require_classes(model, data, self)
        tasks = data.client_data.tasks
        require(tasks is not None, "tasks", "TaskAccuracy needs data with tasks: ClassTasks")
        text = "TaskAccuracy needs clients' own models, and theirs are not here"
        require(not (model.models_differ and model.engine.states_stay), "callbacks", text)
        held = set(getattr(data, self.split).labels.tolist())
        for classes in () if tasks is None else tasks.groups:
            text = f"has no sample of classes {list(classes)}, which are a task"
            require(bool(held & set(classes)), "split", text, self.split)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Copies the net; a new run is evaluated on everybody's first task."""
        data = pl_module.datamodule
        tasks, examples = data.client_data.tasks, getattr(data, self.split)
        labels = examples.labels.cpu()
        found = [
            torch.isin(labels, torch.tensor(classes)).nonzero()[:, 0] for classes in tasks.groups
        ]
        ends = np.cumsum([len(rows) for rows in found]).tolist()
        self.parts = [slice(e - len(rows), e) for rows, e in zip(found, ends, strict=True)]
        settings = (data.eval_batch_size, pl_module.device, trainer.precision_plugin, pl_module)
        self.runner = SplitRunner(pl_module.net, examples.view(torch.cat(found)), *settings)
        if trainer.current_epoch == 0:
            self._evaluate(pl_module, 0, 0)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """At the end of a task, evaluates and logs."""
        tasks = pl_module.datamodule.client_data.tasks
        if tasks.ends(pl_module.round):
            learned = tasks.place(pl_module.round) + 1
            self._evaluate(pl_module, pl_module.round, learned)
            pl_module.log_round(scores(table_of(self.rows), learned))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives its memory back."""
        self.runner = None

    def _evaluate(self, server: FederatedServer, number: int, learned: int) -> None:
        """All clients on the tasks that they have learned and on the next one."""
        data = server.datamodule
        tasks = data.client_data.tasks
        assert tasks is not None
        of_all = {} if server.models_differ else self._each(server.global_state(), self.parts)
        for client in data.eligible:
            order = tasks.order(client)
            for place, task in enumerate(order[: learned + 1]):
                acc = of_all.get(task)
                if acc is None:
                    model = server.model_of(client, place)
                    acc = self._each(model, [self.parts[task]])[0]
                values = (number, learned, client, place + 1, task, acc)
                self.rows.append(dict(zip(COLUMNS, values, strict=True)))

    def _each(self, model: State, parts: Sequence[slice]) -> dict[int, float]:
        """The accuracy of a model on some rows each."""
        assert self.runner is not None
        targets = self.runner.targets
        return {
            n: self.runner.score(self.runner.logits(model, rows), targets[rows])[0]
            for n, rows in enumerate(parts)
        }


def table_of(rows: Sequence[Mapping[str, float]]) -> dict[tuple[int, int], list[float]]:
    """a_ti by (t, i), with an accuracy for every client in the order of the rows."""
    table: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        table.setdefault((int(row["learned"]), int(row["place"])), []).append(row["acc"])
    return table


def scores(table: Table, learned: int) -> dict[str, float]:
    """The values logged when so many tasks are learned; see :class:`TaskAccuracy`."""
    a = {key: np.array(values, dtype=np.float64) for key, values in table.items()}
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
