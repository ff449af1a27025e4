"""Says once that clients diverge, which a run otherwise ends with as if nothing had happened."""

import logging
import re
from math import isfinite
from typing import TYPE_CHECKING, Any

from fedgkd_pl.errors import CALMER
from lightning.pytorch import Callback, Trainer

if TYPE_CHECKING:
    from fedgkd_pl.federation.message import ClientFailure

log = logging.getLogger("fedgkd_pl")

GROWTH = 1e10  # of the clients' mean loss, over that of the first round that counted
KEY = "fedgkd_pl_divergence"  # in a checkpoint
NOT_FINITE = re.compile(r" is (not finite|nan|-?inf)$")  # the reason of a client that was left out


class Divergence(Callback):
    """Warns of the first round in which the clients' loss is out of all proportion.

    That is a mean over the round's clients of 1e10 times the first round's (or, in the first round
    itself, of 1e10), or a client that was left out because a number of its was not finite. What it
    knows travels in the checkpoint, so a resumed run neither repeats nor forgets it. Every run has
    one; ``summary.json`` has its :attr:`round`.

    Attributes:
        round: the first such round; None if there was none.
    """

    def __init__(self) -> None:
        self.first: float | None = None  # the mean loss of the first round that counted
        self.round: int | None = None

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Adds what it knows; not as the state of a callback, of which users expect their own."""
        checkpoint[KEY] = {"first": self.first, "round": self.round}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Goes on with what it knew; a checkpoint of an earlier version knows nothing."""
        known = checkpoint.get(KEY, {})
        self.first, self.round = known.get("first"), known.get("round")

    def on_client_failed(
        self, trainer: Trainer, pl_module: Any, failure: "ClientFailure", _: int
    ) -> None:
        """Looks why a client was left out."""
        if NOT_FINITE.search(failure.reason):
            self._tell(pl_module.round, f"of client {failure.client}, {failure.reason}")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Looks at the loss that the clients of the round told."""
        loss = pl_module.report.get("client/loss_mean")
        if loss is None:
            return
        # a first loss of nothing grows by any factor: one below 1e-10 counts as that
        base = 1.0 if self.first is None else max(abs(self.first), 1 / GROWTH)
        if not isfinite(loss) or abs(loss) >= GROWTH * base:
            self._tell(pl_module.round, f"the clients' mean loss is {loss:.1e}")
        if self.first is None and pl_module.round not in pl_module.failed_rounds:
            self.first = loss

    def _tell(self, number: int, what: str) -> None:
        if self.round is None:
            self.round = number
            log.warning("round %d: clients diverge: %s; %s", number, what, CALMER)


def diverged_round(trainer: Trainer) -> int | None:
    """The first round in which clients diverged, if any did.

    Args:
        trainer: of the run.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Divergence):
            return callback.round
    return None
