"""The base of callbacks that evaluate models: a net run over a split."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.examples import Batches, Examples
from fedgkd_pl.errors import require
from fedgkd_pl.federation.callback import FederatedCallback
from fedgkd_pl.federation.checks import require_classes
from fedgkd_pl.federation.hardware import evaluating
from fedgkd_pl.federation.message import State
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.federation.teachers import FrozenNet
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typing_extensions import override

Split = Literal["val", "test"]


class SplitRunner:
    """Runs models of the global net's architecture over a split, as the server's evaluation does.

    The net is a copy: the global one, its mode and all random state stay as they are.

    Args:
        server: knows the nets of clients, where they have several.
    """

    def __init__(
        self,
        net: nn.Module,
        examples: Examples,
        batch_size: int,
        device: torch.device,
        precision: Precision,
        server: FederatedServer | None = None,
    ) -> None:
        several = server is not None and server.client_nets.index is not None
        self.own = [FrozenNet(each) for each in server.nets] if server and several else []
        self.net_index = server.net_index if server else lambda client: 0
        # where there are some, that of a sample is known
        self.tasks = server.datamodule.client_data.tasks if server else None
        self.targets = examples.targets.cpu()
        self.device = device
        self.batches = Batches(examples.to(device), batch_size)
        self.precision = precision
        self.net = FrozenNet(net)

    def logits(self, model: State, rows: slice | None = None, client: int | None = None) -> Tensor:
        """A model's logits for every sample, or for some, in float64 on the CPU.

        Args:
            client: whose model it is; None for the global one.
        """
        found = self._outputs(self._net(model, client), rows)
        targets = self.targets if rows is None else self.targets[rows]
        return found if self.tasks is None else self.tasks.known(found, targets)

    def features(
        self, model: State, rows: Tensor | None = None, client: int | None = None
    ) -> Tensor:
        """The inputs of a model's last layer, for every sample or for some, as :meth:`logits`."""
        return self._outputs(self._net(model, client).features, rows)

    def _net(self, model: State, client: int | None) -> FrozenNet:
        net = self.own[self.net_index(client)] if self.own and client is not None else self.net
        net.load(model, self.device)
        return net

    def _outputs(self, run: Callable[[Tensor], Tensor], rows: Tensor | slice | None) -> Tensor:
        batches = self.batches
        if rows is not None:
            batches = Batches(batches.examples.view(rows), batches.batch_size)
        with evaluating(self.precision, self.device):
            outputs = [run(self.precision.convert_input(x)) for x, _ in batches]
        return torch.cat([batch.cpu().double() for batch in outputs])

    def score(self, logits: Tensor, targets: Tensor | None = None) -> tuple[float, float]:
        """The accuracy and the mean cross-entropy; of all samples unless ``targets`` are given."""
        targets = self.targets if targets is None else targets
        hits = (logits.argmax(1) == targets).double()
        return float(hits.mean()), float(cross_entropy(logits, targets))


class SplitCallback(FederatedCallback):
    """Base of callbacks that evaluate models other than the global one.

    Args:
        every_n_rounds: evaluates in rounds n, 2n, ….
        split: the server's data to evaluate on.
        max_samples: this many of them at most; see :func:`part_of`.
    """

    def __init__(self, every_n_rounds: int, split: Split, max_samples: int | None) -> None:
        require(every_n_rounds >= 1, "every_n_rounds", "must be at least 1", every_n_rounds)
        require(split in ("val", "test"), "split", "must be val or test", split)
        enough = max_samples is None or max_samples >= 1
        require(enough, "max_samples", "must be at least 1, or null for all", max_samples)
        self.every_n_rounds = every_n_rounds
        self.split: Split = split
        self.max_samples = max_samples
        self.runner: SplitRunner | None = None

    @override
    def check(self, model: FederatedServer, data: FederatedDataModule) -> None:
        """Refuses a split without samples or without classes."""
        require_classes(model, data, self)
        samples = len(getattr(data, self.split))
        require(samples > 0, "split", "the server holds no such data (val_fraction)", self.split)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Copies the net, once for all rounds."""
        data = pl_module.datamodule
        examples = part_of(getattr(data, self.split), self.max_samples)
        parts = (data.eval_batch_size, pl_module.device, trainer.precision_plugin)
        self.runner = SplitRunner(pl_module.net, examples, *parts, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives its memory back."""
        self.runner = None

    def runner_of(self, server: FederatedServer) -> SplitRunner | None:
        """The runner, if the round is one to evaluate in."""
        return None if server.round % self.every_n_rounds else self.runner


def part_of(examples: Examples, max_samples: int | None) -> Examples:
    """At most so many examples, None for all: the same random ones in every run, whatever its seed.

    The first ones would not do: some datasets are sorted by class.
    """
    if max_samples is None or max_samples >= len(examples):
        return examples
    rows = np.random.default_rng(0).choice(len(examples), max_samples, replace=False)
    return examples[torch.from_numpy(np.sort(rows))]
