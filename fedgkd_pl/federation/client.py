"""The client's plumbing: weights in, weights and a report out. No loss."""

from copy import deepcopy
from typing import Any

from fedgkd_pl.data.resident import Batch
from fedgkd_pl.federation.message import ClientUpdate, Message, State
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class FederatedClient(LightningModule):
    """A LightningModule whose ``fit`` is one client's local update.

    One instance serves all clients of a worker, so :meth:`receive` must set everything that a
    method keeps. A method subclasses it with ``training_step``, which ends in :meth:`report`.

    Args:
        net: copied; its weights come with every message.
        optimizer: built anew for every client and round.
        scheduler: of the learning rate, stepped once per local epoch.
        settings: a method's own, which become attributes of the same names.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: OptimizerCallable,
        scheduler: LRSchedulerCallable | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        for name, value in settings.items():
            setattr(self, name, value)
        self.net = deepcopy(net).cpu()  # layers that the user froze in eval mode stay so
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._norms = [m for m in self.net.modules() if isinstance(m, _BatchNorm) and m.training]
        travels = self.net.state_dict().keys()
        self._stays = {n: b.clone() for n, b in self.net.named_buffers() if n not in travels}
        self._sums: dict[str, Tensor] = {}
        self._seen = 0

    def receive(self, message: Message, state: State) -> None:
        """Starts from the global model.

        Args:
            message: what the server sent.
            state: what this client kept from its last round; empty the first time.
        """
        self.net.load_state_dict(message.models["global"])
        for name, buffer in self.net.named_buffers():
            if name in self._stays:  # what one client left in it must not reach the next
                buffer.copy_(self._stays[name])
        self._sums, self._seen = {}, 0

    def reply(self) -> ClientUpdate:
        """The trained model and the report; a method adds ``extra`` and ``state``."""
        weights = {name: t.detach().cpu().clone() for name, t in self.net.state_dict().items()}
        metrics = {name: float(total) / self._seen for name, total in self._sums.items()}
        return ClientUpdate(client=-1, num_samples=0, weights=weights, metrics=metrics)

    def configure_optimizers(self) -> Any:
        """A new optimizer: no momentum passes from client to client."""
        optimizer = self.optimizer(self.net.parameters())
        if self.scheduler is None:
            return optimizer
        return [optimizer], [self.scheduler(optimizer)]

    def on_train_epoch_start(self) -> None:
        """The report is of the last local epoch."""
        self._sums, self._seen = {}, 0

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """A batch of one has no statistics: BatchNorm then uses those it has gathered.

        Args:
            batch: inputs and labels.
            batch_idx: Lightning's.
        """
        for norm in self._norms:
            norm.train(len(batch[1]) > 1)

    def report(self, size: int, **values: Tensor) -> None:
        """Adds batch means to the client's report; cheaper than ``self.log`` in every step.

        Args:
            size: samples in the batch.
            values: means over the batch, by name.
        """
        self._seen += size
        for name, value in values.items():
            total = value.detach() * size
            self._sums[name] = self._sums[name] + total if name in self._sums else total
