"""Accuracy of each net, where clients have different nets."""

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from fedgkd_pl.callbacks.evaluate import share
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.errors import require
from fedgkd_pl.federation.callback import FederatedCallback
from fedgkd_pl.federation.checks import require_classes
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.models.heads import Ensemble
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import override


class NetAccuracy(FederatedCallback):
    """Measures every net of clients with nets of their own, whenever their ensemble is measured.

    Logs ``nets/<name>_val_acc`` and ``nets/<name>_test_acc`` for every one of ``nets``: of FedDF's
    prototype; of FedMD and FedDistill the mean over the clients with that net that have trained so
    far. A net is called by its class, with its number where two are of one class; one that nobody
    has trained has no value. What the nets say is heard while the ensemble is evaluated, so it
    costs nothing.
    """

    needs_whole = True

    def __init__(self) -> None:
        self.now: tuple[str, Any] = ("", None)  # the batch's split and targets
        self.hits: defaultdict[tuple[str, int], list[Tensor]] = defaultdict(list)  # by member
        self.hooks: list[RemovableHandle] = []

    @override
    def check(self, model: FederatedServer, data: FederatedDataModule) -> None:
        """Refuses a server without an ensemble."""
        text = "NetAccuracy needs an ensemble: nets of FedMD, FedDF or FedDistill"
        require(isinstance(model.net, Ensemble), "callbacks", text)
        require_classes(model, data, self)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Listens to the members in a round, and not in ``validate`` or the sanity check."""
        self.on_validation_end(trainer, pl_module)
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            for number, member in enumerate(pl_module.net.members):
                hear = partial(self._hear, number, pl_module.datamodule.client_data.tasks)
                self.hooks.append(member.register_forward_hook(hear))

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Notes the truth."""
        self.now = pl_module.datamodule.eval_splits()[dataloader_idx], batch[1]

    def _hear(self, number: int, tasks: Any, member: Any, inputs: Any, logits: Tensor) -> None:
        split, y = self.now
        known = logits if tasks is None else tasks.known(logits, y)
        self.hits[split, number].append(known.argmax(1) == y)

    @override
    def on_evaluated(
        self, trainer: Trainer, pl_module: Any, split: str, values: Any, confusion: Tensor | None
    ) -> None:
        """Logs the round."""
        accs = defaultdict[int, list[float]](list)  # by net
        for number, member in enumerate(pl_module.net.members if self.hooks else ()):
            if member.trained:
                own = pl_module.client_nets.one_per_client
                kind = pl_module.net_index(number) if own else number
                accs[kind].append(share(torch.cat(self.hits[split, number]).cpu()))
        names = pl_module.net_names
        means = {names[kind]: sum(found) / len(found) for kind, found in sorted(accs.items())}
        pl_module.log_round({f"nets/{name}_{split}_acc": acc for name, acc in means.items()})

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Stops listening."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        self.hits.clear()
