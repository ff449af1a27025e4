"""The bases of callbacks that evaluate models, a net run over a split, or that write a table."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.examples import Batches, Examples
from fedgkd_pl.errors import at_least, require
from fedgkd_pl.federation.callback import FederatedCallback
from fedgkd_pl.federation.checks import require_classes
from fedgkd_pl.federation.hardware import evaluating
from fedgkd_pl.federation.message import ClientUpdate, Message, State
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.federation.teachers import FrozenNet
from fedgkd_pl.runs.files import csv_text, run_folder
from fedgkd_pl.storage.files import write_text
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn.functional import cross_entropy
from typing_extensions import override

Split = Literal["val", "test"]
Rows = Tensor | slice
ALL = slice(None)
Score = tuple[float, float]  # accuracy and mean cross-entropy


class SplitRunner:
    """Runs models of the global net's or a client's architecture over a split.

    As the server's evaluation does, but with a copy of the net: the global one, its mode and all
    random state stay as they are.
    """

    def __init__(
        self,
        trainer: Trainer,
        server: FederatedServer,
        data: FederatedDataModule,
        examples: Examples,
    ) -> None:
        several = server.client_nets.index is not None
        self.own = [FrozenNet(net) for net in server.nets] if several else []
        self.net = FrozenNet(server.net)
        self.net_index = server.net_index
        self.tasks = data.client_data.tasks  # where there are some, that of a sample is known
        self.targets = examples.targets.cpu()
        self.device = server.device
        self.examples, self.batch_size = examples.to(self.device), data.eval_batch_size
        self.precision = trainer.precision_plugin

    def load(self, model: State, client: int | None = None) -> FrozenNet:
        """The net with a model's weights.

        Args:
            client: whose model it is; None for the global one.
        """
        net = self.own[self.net_index(client)] if self.own and client is not None else self.net
        net.load(model, self.device)
        return net

    def outputs(self, run: Callable[[Tensor], Tensor], rows: Rows = ALL) -> Tensor:
        """What a function gives for every sample, or for some, in float64 on the CPU."""
        batches = Batches(self.examples.view(rows), self.batch_size)
        with evaluating(self.precision, self.device):
            outputs = [run(self.precision.convert_input(x)) for x, _ in batches]
        return torch.cat([batch.cpu().double() for batch in outputs])

    def logits(self, model: State, rows: Rows = ALL, client: int | None = None) -> Tensor:
        """A model's logits for every sample, or for some."""
        found = self.outputs(self.load(model, client), rows)
        return found if self.tasks is None else self.tasks.known(found, self.targets[rows])

    def score(self, model: State, rows: Rows = ALL, client: int | None = None) -> Score:
        """A model's score on every sample, or on some."""
        return score_of(self.logits(model, rows, client), self.targets[rows])


def score_of(logits: Tensor, targets: Tensor) -> Score:
    """The accuracy and the mean cross-entropy."""
    return share(logits.argmax(1) == targets), float(cross_entropy(logits, targets))


def share(hits: Tensor) -> float:
    """The share of what is true."""
    return float(hits.double().mean())


def spread(scores: Collection[Score]) -> dict[str, float]:
    """The spread of the clients' scores; each client counts once."""
    accs, losses = zip(*scores, strict=True)
    return {
        "acc_mean": float(np.mean(accs)),
        "acc_std": float(np.std(accs)),
        "acc_min": min(accs),
        "loss_mean": float(np.mean(losses)),
    }


class SplitCallback(FederatedCallback):
    """Base of callbacks that evaluate models other than the global one.

    Args:
        every_n_rounds: evaluates in rounds n, 2n, ….
        split: the server's data to evaluate on.
        max_samples: this many of them at most, the same random ones in every run, whatever its
            seed; the first ones would not do: some datasets are sorted by class.
    """

    needs_whole = True

    def __init__(
        self, every_n_rounds: int = 1, split: Split = "test", max_samples: int | None = None
    ) -> None:
        at_least(1, every_n_rounds=every_n_rounds)
        require(split in ("val", "test"), "split", "must be val or test", split)
        enough = max_samples is None or max_samples >= 1
        require(enough, "max_samples", "must be at least 1, or null for all", max_samples)
        self.every_n_rounds = every_n_rounds
        self.split, self.max_samples = split, max_samples
        self.runner: SplitRunner | None = None
        self.found: dict[int, Any] = {}  # what was measured in this round, by client

    @override
    def check(self, model: FederatedServer, data: FederatedDataModule) -> None:
        """Refuses a split without samples or without classes."""
        require_classes(model, data, self)
        samples = len(getattr(data, self.split))
        require(samples > 0, "split", "the server holds no such data (val_fraction)", self.split)

    def examples_of(self, data: FederatedDataModule) -> Examples:
        """The samples to evaluate on."""
        examples: Examples = getattr(data, self.split)
        if self.max_samples is None or self.max_samples >= len(examples):
            return examples
        rows = np.random.default_rng(0).choice(len(examples), self.max_samples, replace=False)
        return examples[torch.from_numpy(np.sort(rows))]

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Copies the net, once for all rounds."""
        data = pl_module.datamodule
        self.runner = SplitRunner(trainer, pl_module, data, self.examples_of(data))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives its memory back."""
        self.runner = None

    def runner_of(self, server: FederatedServer) -> SplitRunner | None:
        """The runner, if the round is one to evaluate in."""
        return None if server.round % self.every_n_rounds else self.runner

    def measure(self, runner: SplitRunner, server: FederatedServer, update: ClientUpdate) -> Any:
        """Measures a client's model as it comes back; None where there is nothing to measure."""
        return None

    @override
    def on_broadcast(
        self, trainer: Trainer, pl_module: FederatedServer, message: Message, cohort: Any
    ) -> None:
        """Starts the round."""
        self.found = {}

    @override
    def on_client_end(
        self, trainer: Trainer, pl_module: FederatedServer, update: ClientUpdate, cohort_size: int
    ) -> None:
        """Measures a client's model, unless it stays with the client."""
        runner = self.runner_of(pl_module)
        value = None
        if runner and update.weights:
            update = replace(update, weights=pl_module.whole(update))
            value = self.measure(runner, pl_module, update)
        if value is not None:
            self.found[update.client] = value


class RowsFile(FederatedCallback):
    """Base of callbacks that write rows to a CSV file beside ``metrics.csv``.

    A resumed run's file is that of a run that was never stopped. In a run without
    :class:`~fedgkd_pl.RunFiles` no file is written.
    """

    file: str  # its name
    columns: tuple[str, ...]
    rows: list[dict[str, Any]]

    def add(self, *values: float | None) -> None:
        """Adds a row; of None the file has an empty cell."""
        self.rows.append(dict(zip(self.columns, values, strict=True)))

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From the checkpoint."""
        self.rows = list(state_dict["rows"])

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """A new run starts without rows; those of a checkpoint come after this hook."""
        if trainer.current_epoch == 0:
            self.rows = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drops the rows of rounds that were never committed from the file."""
        self._write(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the rows."""
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if folder := run_folder(trainer):
            write_text(folder / self.file, csv_text(list(self.columns), self.rows))
