"""Forgetting of classes by the global model."""

from typing import Any

from fedgkd_pl.callbacks.evaluate import Split
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.errors import require
from fedgkd_pl.federation.callback import FederatedCallback
from fedgkd_pl.federation.checks import require_classes
from fedgkd_pl.federation.server import FederatedServer
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override


class Forgetting(FederatedCallback):
    """Logs, per class, how far its accuracy is below the best of all earlier evaluated rounds.

    Chaudhry et al. (Riemannian Walk for Incremental Learning, ECCV 2018), with classes for tasks
    and rounds for stages:

        f_c = max over earlier rounds of acc_c − acc_c now

    It is negative where a class has never been recognised as well as now. ``forgetting/class/<c>``
    is f_c, ``forgetting/mean`` and ``forgetting/max`` are over the classes that the split has
    samples of, from the second evaluated round on. The best accuracies travel in the checkpoint.

    Args:
        split: the server's data whose evaluation counts, ``test`` or ``val``.
    """

    def __init__(self, split: Split = "test") -> None:
        require(split in ("val", "test"), "split", "must be val or test", split)
        self.split = split
        self.best: dict[int, float] = {}  # accuracy by class, of the rounds so far

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From the checkpoint."""
        self.best = dict(state_dict["best"])

    @override
    def check(self, model: FederatedServer, data: FederatedDataModule) -> None:
        """Refuses data without classes."""
        require_classes(model, data, self)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """A new run has no earlier rounds; a checkpoint's come after this hook."""
        if stage == "fit" and trainer.current_epoch == 0:
            self.best = {}

    @override
    def on_evaluated(
        self, trainer: Trainer, pl_module: Any, split: str, values: Any, confusion: Tensor | None
    ) -> None:
        """Compares a round with those before; evaluations outside ``fit`` are none."""
        if split != self.split or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        assert confusion is not None  # see check
        now = {
            c: float(row[c] / row.sum()) for c, row in enumerate(confusion.double()) if row.any()
        }
        if self.best:
            lost = {c: self.best[c] - acc for c, acc in now.items()}
            values = {"mean": sum(lost.values()) / len(lost), "max": max(lost.values())}
            values |= {f"class/{c}": value for c, value in lost.items()}
            pl_module.log_round({f"forgetting/{name}": value for name, value in values.items()})
        self.best = {c: max(acc, self.best.get(c, acc)) for c, acc in now.items()}
