"""The hooks that a round adds to Lightning's."""

import logging
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, Trainer
from torch import Tensor

if TYPE_CHECKING:
    from fedgkd_pl.data.datamodule import FederatedDataModule
    from fedgkd_pl.federation.message import ClientFailure, ClientUpdate, Message
    from fedgkd_pl.federation.server import FederatedServer

log = logging.getLogger("fedgkd_pl")
HOOKS = (
    *("check", "on_broadcast", "on_client_end", "on_client_failed"),
    *("on_server_step", "on_evaluated"),
)


class FederatedCallback(Callback):
    """A Lightning callback with hooks for what happens within a round.

    Each hook does nothing unless it is overridden. Values are logged by ``pl_module.log_round``;
    what a callback remembers belongs into its ``state_dict``, so that a resumed run is exact.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuses a method that nobody would call because its name is nearly a hook's."""
        super().__init_subclass__(**kwargs)
        for name, hook in nearly_hooks(cls).items():
            raise TypeError(f"{cls.__name__}.{name} is no hook and never called: {hook} is one")

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


def nearly_hooks(cls: type) -> dict[str, str]:
    """The methods of a class whose names are nearly a hook's, each with the hook."""
    near = {}
    for name in sorted(set(dir(cls)) - {*dir(Callback), *HOOKS}):
        begins_on = name.startswith("on")
        hooks = [hook for hook in HOOKS if hook.startswith("on_") == begins_on]
        meant = get_close_matches(name, hooks, n=1, cutoff=0.8 if begins_on else 0.85)
        if meant and not name.startswith("_") and callable(getattr(cls, name)):
            near[name] = meant[0]
    return near


def warn_of_near_hooks(trainer: Trainer) -> None:
    """Says which methods of Lightning's plain callbacks look like hooks and are none."""
    for cls in dict.fromkeys(type(callback) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        for name, hook in nearly_hooks(cls).items():
            log.warning("%s.%s is no hook and never called: %s is one", cls.__name__, name, hook)


def call_hooks(module: "FederatedServer", hook: str, *args: Any) -> None:
    """Calls a hook on every callback that has it, plain callbacks of Lightning's among them."""
    for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
        method = getattr(callback, hook, None)
        if method is not None:
            method(module.trainer, module, *args)
