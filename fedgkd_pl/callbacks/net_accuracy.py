"""Accuracy of each net, where clients have different nets."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.errors import require
from fedgkd_pl.federation.callback import FederatedCallback
from fedgkd_pl.federation.checks import require_classes
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.models.ensemble import Ensemble
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

PREFIX = "nets/"  # of what is logged


class NetAccuracy(FederatedCallback):
    """Measures every net of clients with nets of their own, whenever their ensemble is measured.

    Logs ``nets/<name>_val_acc`` and ``nets/<name>_test_acc`` for every one of ``nets``: of FedDF's
    prototype; of FedMD and FedDistill the mean over the clients with that net that have trained so
    far. A net is called by its class, with its number where two are of one class; one that nobody
    has trained has no value. What the nets say is heard while the ensemble is evaluated, so it
    costs nothing.
    """

    def __init__(self) -> None:
        self.said: dict[int, Tensor] = {}  # what each member said of the batch
        self.hits: dict[str, dict[int, int]] = {}  # of each member, by split
        self.samples: Counter[str] = Counter()  # that were seen of each split
        self.hooks: list[RemovableHandle] = []

    @override
    def check(self, model: FederatedServer, data: FederatedDataModule) -> None:
        """Refuses a server without an ensemble."""
        text = "NetAccuracy needs an ensemble: nets of FedMD, FedDF or FedDistill"
        require(isinstance(model.net, Ensemble), "callbacks", text)
        require_classes(model, data, self)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Listens to the members in a round, and not in ``validate`` or the sanity check."""
        self._stop()
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            members = enumerate(pl_module.net.members)
            self.hooks = [member.register_forward_hook(self._hear(n)) for n, member in members]

    def _hear(self, number: int) -> Callable[..., None]:
        def hook(member: Any, inputs: Any, logits: Tensor) -> None:
            self.said[number] = logits

        return hook

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Counts what every member got right of the batch."""
        split, y = pl_module.datamodule.eval_splits()[dataloader_idx], batch[1]
        tasks = pl_module.datamodule.client_data.tasks
        hits = self.hits.setdefault(split, {})
        self.samples[split] += len(y)
        for number, logits in self.said.items():
            seen = logits if tasks is None else tasks.known(logits, y)
            hits[number] = hits.get(number, 0) + int((seen.argmax(1) == y).sum())
        self.said.clear()

    @override
    def on_evaluated(
        self,
        trainer: Trainer,
        pl_module: FederatedServer,
        split: str,
        values: dict[str, float],
        confusion: Tensor | None,
    ) -> None:
        """Logs the round."""
        hits, samples = self.hits.pop(split, {}), self.samples.pop(split, 0)
        of_net: dict[int, list[float]] = {}
        members: Any = pl_module.net.members
        for number, right in hits.items():
            if members[number].trained:
                own = pl_module.client_nets.one_per_client
                kind = pl_module.net_index(number) if own else number
                of_net.setdefault(kind, []).append(right / samples)
        pl_module.log_round(
            {
                f"{PREFIX}{pl_module.net_names[kind]}_{split}_acc": sum(accs) / len(accs)
                for kind, accs in sorted(of_net.items())
            }
        )

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Stops listening."""
        self._stop()

    def _stop(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.said, self.hits, self.samples = [], {}, {}, Counter()
