"""The hooks that a round adds to Lightning's."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, Trainer
from torch import Tensor

if TYPE_CHECKING:
    from fedgkd_pl.data.datamodule import FederatedDataModule
    from fedgkd_pl.federation.message import ClientFailure, ClientUpdate, Message
    from fedgkd_pl.federation.server import FederatedServer


class FederatedCallback(Callback):
    """A Lightning callback with hooks for what happens within a round.

    Each hook does nothing unless it is overridden. Values are logged by ``pl_module.log_round``;
    what a callback remembers belongs into its ``state_dict``, so that a resumed run is exact.
    """

    needs_whole = False  # whether it looks at a model of all clients, which have no own parts

    def check(self, model: "FederatedServer", data: "FederatedDataModule") -> None:
        """Raises :class:`~fedgkd_pl.errors.SettingError` for what cannot work, before a run begins.

        The data is loaded. May be called more than once.
        """

    def on_broadcast(
        self,
        trainer: Trainer,
        pl_module: "FederatedServer",
        message: "Message",
        cohort: Sequence[int],
    ) -> None:
        """A round begins: the clients of the cohort are about to get the message."""

    def on_client_end(
        self,
        trainer: Trainer,
        pl_module: "FederatedServer",
        update: "ClientUpdate",
        cohort_size: int,
    ) -> None:
        """A client has answered; the largest client of a round is the first."""

    def on_client_failed(
        self,
        trainer: Trainer,
        pl_module: "FederatedServer",
        failure: "ClientFailure",
        cohort_size: int,
    ) -> None:
        """A client is left out of the round."""

    def on_server_step(
        self, trainer: Trainer, pl_module: "FederatedServer", step: int, total: int
    ) -> None:
        """The server has done a step of its own training in this round, of at most ``total``."""

    def on_evaluated(
        self,
        trainer: Trainer,
        pl_module: "FederatedServer",
        split: str,
        values: dict[str, float],
        confusion: Tensor | None,
    ) -> None:
        """The global model was evaluated, also by ``validate``, ``test`` and the sanity check.

        Args:
            split: ``val`` or ``test``.
            values: ``acc``, ``loss``, ``f1`` and ``class_acc/<c>``.
            confusion: how many samples of each class (row) were taken for each class (column);
                None where there are no classes.
        """


def call_hooks(module: "FederatedServer", hook: str, *args: Any) -> None:
    """Calls a hook on every callback that has it, plain callbacks of Lightning's among them."""
    for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
        method = getattr(callback, hook, None)
        if method is not None:
            method(module.trainer, module, *args)
