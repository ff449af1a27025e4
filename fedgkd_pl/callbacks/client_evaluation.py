"""The clients' models evaluated on the server's data, and all models on the clients' own."""

from typing import Any

from fedgkd_pl.callbacks.evaluate import (
    RowsFile,
    Score,
    Split,
    SplitCallback,
    SplitRunner,
    score_of,
    spread,
)
from fedgkd_pl.data.datamodule import FederatedDataModule, OwnSplit
from fedgkd_pl.data.examples import Examples
from fedgkd_pl.errors import require
from fedgkd_pl.federation.checks import require_classes
from fedgkd_pl.federation.message import ClientUpdate, State
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.runs.folder import CLIENTS, LOCAL_MODELS
from lightning.pytorch import Trainer
from typing_extensions import override


class LocalModels(RowsFile, SplitCallback):
    """Evaluates every client's model as it comes back, on the server's data.

    Logs ``local/acc_mean``, ``_std``, ``_min`` and ``_max``, and ``local/loss_mean``, over the
    clients that answered (each counts once). The models themselves are in ``local_models.csv``
    beside ``metrics.csv``, a row each: round, client, its training samples, accuracy, loss. In a
    run without :class:`~fedgkd_pl.RunFiles` no file is written. The rows travel in the checkpoint,
    so a resumed run's file is that of a run that was never stopped.

    For methods whose clients keep their models (FedDistill), these are the models that count.

    Args:
        every_n_rounds: evaluates in rounds n, 2n, ….
        split: the server's data to evaluate on, ``test`` or ``val``.
        max_samples: this many of them at most, the same random ones in every run; null for all.
    """

    file = LOCAL_MODELS
    columns = ("round", "client", "samples", "acc", "loss")

    @override
    def measure(
        self, runner: SplitRunner, server: FederatedServer, update: ClientUpdate
    ) -> tuple[int, Score]:
        return update.num_samples, runner.score(update.weights, client=update.client)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Logs the round."""
        if not self.found:
            return
        scores = [score for _, score in self.found.values()]
        values = spread(scores) | {"acc_max": max(acc for acc, _ in scores)}
        pl_module.log_round({f"local/{name}": value for name, value in values.items()})
        for client, (samples, score) in sorted(self.found.items()):
            self.add(pl_module.round, client, samples, *score)


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

    Where clients have parts of their own, the global model of a client has these.

    Args:
        every_n_rounds: evaluates in rounds n, 2n, ….
        split: ``test`` or ``val``; needs ``client_test_fraction`` or ``client_val_fraction``.
        local: whether to evaluate the models that clients return.
    """

    needs_whole = False
    file = CLIENTS
    columns = ("round", "client", "samples", "global_acc", "global_loss", "local_acc", "local_loss")

    def __init__(self, every_n_rounds: int = 1, split: Split = "test", local: bool = True) -> None:
        super().__init__(every_n_rounds, split)
        self.local = local

    @override
    def check(self, model: FederatedServer, data: FederatedDataModule) -> None:
        """Refuses data without classes, without the clients' own samples, or out of reach."""
        reason = "ClientEvaluation needs the clients' data, and theirs is not here (max_samples)"
        require(model.engine.max_samples is None, "callbacks", reason)
        reason = "ClientEvaluation needs the clients' own parts, which stay on their nodes"
        require(not (model.is_personal and model.engine.states_stay), "callbacks", reason)
        require_classes(model, data, self)
        reason = "ClientEvaluation needs samples that no client trains on: 0.2 keeps a fifth"
        require(self.split in data.client_splits, f"client_{self.split}_fraction", reason)

    @override
    def examples_of(self, data: FederatedDataModule) -> Examples:
        return data.client_splits[self.split].examples

    @override
    def measure(
        self, runner: SplitRunner, server: FederatedServer, update: ClientUpdate
    ) -> Score | None:
        own = server.datamodule.client_splits[self.split]
        if not self.local or not own.index.size(update.client):
            return None
        return runner.score(update.weights, own.rows(update.client), update.client)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Evaluates the new global model for everybody, and logs the round."""
        from fedgkd_pl.plots.figures import worst_tenth

        runner = self.runner_of(pl_module)
        if runner is None:
            return
        own = pl_module.datamodule.client_splits[self.split]
        if pl_module.is_personal:
            of_global = {
                client: runner.score(pl_module.model_of(client), own.rows(client))
                for client in own.clients
            }
        else:
            of_global = scores_of_all(runner, own, pl_module.global_state())
        for kind, scores in ("global", of_global), ("local", self.found):
            if scores:
                values = spread(scores.values())
                values["acc_worst10"] = worst_tenth([acc for acc, _ in scores.values()])
                pl_module.log_round({f"clients/{kind}_{name}": v for name, v in values.items()})
        for client, score in of_global.items():
            samples, local = own.index.size(client), self.found.get(client, (None, None))
            self.add(pl_module.round, client, samples, *score, *local)


def scores_of_all(runner: SplitRunner, own: OwnSplit, model: State) -> dict[int, Score]:
    """The scores of one model for every client, in one pass over the samples of all."""
    logits = runner.logits(model)
    rows = {client: own.rows(client) for client in own.clients}
    return {client: score_of(logits[r], runner.targets[r]) for client, r in rows.items()}
