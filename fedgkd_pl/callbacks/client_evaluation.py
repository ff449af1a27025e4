"""Models evaluated on the clients' own samples."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from fedgkd_pl.callbacks.evaluate import Split, SplitCallback, SplitRunner
from fedgkd_pl.callbacks.rows import RowsFile
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.own import OwnSplit
from fedgkd_pl.errors import require
from fedgkd_pl.federation.checks import require_classes
from fedgkd_pl.federation.message import ClientUpdate, Message, State
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.runs.folder import CLIENTS
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import Precision
from torch import nn
from typing_extensions import override

COLUMNS = ["round", "client", "samples", "global_acc", "global_loss", "local_acc", "local_loss"]


class Score(NamedTuple):
    """Of one client."""

    acc: float
    loss: float


class OwnRunner(SplitRunner):
    """Runs models over the clients' own samples."""

    def __init__(
        self,
        net: nn.Module,
        own: OwnSplit,
        batch_size: int,
        device: torch.device,
        precision: Precision,
        server: FederatedServer | None = None,
    ) -> None:
        super().__init__(net, own.examples, batch_size, device, precision, server)
        self.split = own

    def everyone(self, model: State) -> dict[int, Score]:
        """The scores of one model for every client, in one pass over the samples of all."""
        logits = self.logits(model)
        scores = {}
        for client in self.split.clients:
            rows = self.split.rows(client)
            scores[client] = Score(*self.score(logits[rows], self.targets[rows]))
        return scores

    def one(self, model: State, client: int) -> Score | None:
        """The scores of a client's model; None if the client has no samples of its own."""
        rows = self.split.rows(client)
        if rows.start == rows.stop:
            return None
        return Score(*self.score(self.logits(model, rows, client), self.targets[rows]))


def spread(scores: Sequence[Score]) -> dict[str, float]:
    """The spread of the clients' scores; each client counts once."""
    from fedgkd_pl.plots.per_client import worst_tenth

    accs = [score.acc for score in scores]
    return {
        "acc_mean": float(np.mean(accs)),
        "acc_std": float(np.std(accs)),
        "acc_worst10": worst_tenth(accs),
        "acc_min": min(accs),
        "loss_mean": float(np.mean([score.loss for score in scores])),
    }


class ClientEvaluation(RowsFile, SplitCallback):
    """Evaluates models on every client's own samples, which nobody trains on.

    After a round the global model is evaluated for every client, drawn or not, and each model that
    a client returned for that client. Logs ``clients/global_acc_mean``, ``_std`` (how far clients
    are apart), ``_worst10`` (the mean of the worst tenth of the clients, of one at least) and
    ``_min``, and ``clients/global_loss_mean``; the same as ``clients/local_…`` over the clients
    that answered. Each client counts once; one without a split of its own is left out.

    ``clients.csv`` beside ``metrics.csv`` has a row for every round and client: its samples in the
    split, accuracy and loss of the global model and, if it trained in that round, of its own. With
    very many clients take a larger ``every_n_rounds``: all rows are in every checkpoint.

    Args:
        every_n_rounds: evaluates in rounds n, 2n, ….
        split: ``test`` or ``val``; needs ``client_test_fraction`` or ``client_val_fraction``.
        local: whether to evaluate the models that clients return.
    """

    file = CLIENTS
    columns = COLUMNS

    def __init__(self, every_n_rounds: int = 1, split: Split = "test", local: bool = True) -> None:
        super().__init__(every_n_rounds, split, None)
        self.local = local
        self.rows: list[dict[str, float]] = []
        self.returned: dict[int, Score] = {}  # of this round, until it is done

    @override
    def check(self, model: FederatedServer, data: FederatedDataModule) -> None:
        """Refuses data without classes, without the clients' own samples, or out of reach."""
        reason = "ClientEvaluation needs the clients' data, and theirs is not here (max_samples)"
        require(model.engine.max_samples is None, "callbacks", reason)
        require_classes(model, data, self)
        reason = "ClientEvaluation needs samples that no client trains on: 0.2 keeps a fifth"
        require(self.split in data.client_splits, f"client_{self.split}_fraction", reason)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Copies the net, once for all rounds."""
        data = pl_module.datamodule
        parts = (data.eval_batch_size, pl_module.device, trainer.precision_plugin)
        self.runner = OwnRunner(pl_module.net, data.client_splits[self.split], *parts, pl_module)

    @override
    def on_broadcast(
        self, trainer: Trainer, pl_module: FederatedServer, message: Message, cohort: Any
    ) -> None:
        """Starts the round."""
        self.returned = {}

    @override
    def on_client_end(
        self, trainer: Trainer, pl_module: FederatedServer, update: ClientUpdate, cohort_size: int
    ) -> None:
        """Evaluates a client's model for that client."""
        runner = self.runner_of(pl_module)
        if self.local and update.weights and isinstance(runner, OwnRunner):
            score = runner.one(update.weights, update.client)
            self.returned |= {} if score is None else {update.client: score}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Evaluates the new global model for everybody, and logs the round."""
        runner = self.runner_of(pl_module)
        if not isinstance(runner, OwnRunner):
            return
        found = {"global": runner.everyone(pl_module.global_state()), "local": self.returned}
        self.returned = {}
        for kind, scores in found.items():
            values = spread(list(scores.values())) if scores else {}
            pl_module.log_round({f"clients/{kind}_{name}": v for name, v in values.items()})
        for client in found["global"]:
            samples = runner.split.index.size(client)
            row: dict[str, float] = {"round": pl_module.round, "client": client, "samples": samples}
            for kind, scores in found.items():
                if client in scores:
                    acc, loss = scores[client]
                    row |= {f"{kind}_acc": acc, f"{kind}_loss": loss}
            self.rows.append(row)
