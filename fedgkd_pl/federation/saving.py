"""What a checkpoint keeps of a run beside the model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.federation.checks import check_resumed
from fedgkd_pl.federation.message import ClientUpdate, Message, State
from fedgkd_pl.federation.nets import ModelOfNets
from fedgkd_pl.federation.schedule import RoundSchedule
from fedgkd_pl.federation.task import TASKS
from fedgkd_pl.storage.checkpoint_io import HALF, SafeCheckpointIO, load_newest
from fedgkd_pl.storage.recorded import Recorded
from fedgkd_pl.storage.states import StateStore
from torch import nn

if TYPE_CHECKING:
    from fedgkd_pl.data.datamodule import FederatedDataModule
    from fedgkd_pl.engines.base import Engine
    from fedgkd_pl.federation.server import FederatedServer


class SavedModel(ModelOfNets, Recorded):
    """A global model whose checkpoint has all that a run goes on from."""

    takes_modules = True  # whether the net may be a LightningModule with its own training step
    needs_outputs = False  # whether a client's loss needs the net's outputs, beside the task's
    distils_classes = True  # whether they must be the logits of classes then
    tasks: tuple[str, ...] = TASKS  # what it can learn
    takes_sequences = True  # whether clients may learn one task after the other (data.tasks)
    shares_models = True  # whether what clients send up includes their models
    # names of what a method saves beside the model: plain values and tensors, or objects with
    # state_dict, load_state_dict and, for a new run, reset
    keeps: tuple[str, ...] = ()
    schedule: RoundSchedule | None = None  # of the clients' rate over rounds

    def __init__(self, net: nn.Module, engine: "Engine", state_memory: float = 64) -> None:
        super().__init__(net)
        require(state_memory >= 0, "state_memory", "must not be negative", state_memory)
        self.engine = engine
        self.state_memory = state_memory
        self.bytes_down = 0
        self.bytes_up = 0
        self.failed_rounds: list[int] = []
        self._client_states = StateStore(state_memory)
        self._has_answers = False  # whether all clients of the round have answered

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuses the name that :meth:`reset` had in earlier versions."""
        super().__init_subclass__(**kwargs)
        if "forget" in vars(cls):
            raise TypeError(f"{cls.__name__}.forget is never called: it is named reset now")

    def bytes_of(self, message: Message, cohort: Sequence[int]) -> int:
        """What a cohort downloads; called once a round."""
        if self.net_of is None:
            return message.nbytes * len(cohort)
        return sum(message.for_net(self.net_of(client)).nbytes for client in cohort)

    def bytes_of_answer(self, update: ClientUpdate) -> int:
        """What a client uploads; called once for every answer that counts."""
        return update.nbytes if self.shares_models else update.extra_nbytes

    def reset(self) -> None:
        """Begins a new run: what an earlier one left beside the model goes.

        Objects that a method keeps are reset here; plain values a method resets itself.
        """
        self.bytes_down = self.bytes_up = 0
        self.failed_rounds = []
        self._client_states = StateStore(self.state_memory)
        self.empty_ensemble()
        if self.schedule is not None:
            self.schedule.reset()
        for kept in (getattr(self, name) for name in self.keeps):
            if hasattr(kept, "load_state_dict") and hasattr(kept, "reset"):
                kept.reset()

    @property
    def is_half_done(self) -> bool:
        """Whether the server's part of a round is under way, which changes the model in place.

        What clients train changes nothing yet, so the last round is whole until all have answered.
        """
        if not self._has_answers or self.trainer.state.fn != "fit":
            return False
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return bool(progress.started > progress.processed)  # type: ignore[attr-defined]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what the server knows beside the model, and what a method :attr:`keeps`."""
        checkpoint["fedgkd_pl"] = {
            "method": type(self).__name__,
            "bytes": [self.bytes_down, self.bytes_up],
            "client_states": self._client_states,
            "states_stay": self.engine.states_stay,
            "failed_rounds": self.failed_rounds,
            "stopped": self.trainer.should_stop,
            "data": self.datamodule.fingerprint(),
        }
        if self.schedule is not None:
            checkpoint["fedgkd_pl"]["schedule"] = self.schedule.state_dict()
        if self.is_half_done:
            checkpoint["fedgkd_pl"][HALF] = self.round
        for name in self.keeps:
            kept = getattr(self, name)
            has_state = hasattr(kept, "load_state_dict")
            checkpoint["fedgkd_pl"][name] = kept.state_dict() if has_state else kept
        # only our own writer knows how to put states into files of their own
        if not isinstance(self.trainer.strategy.checkpoint_io, SafeCheckpointIO):
            for name, value in checkpoint["fedgkd_pl"].items():
                if isinstance(value, StateStore):
                    checkpoint["fedgkd_pl"][name] = dict(value)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The inverse of :meth:`on_save_checkpoint`."""
        saved = checkpoint.get("fedgkd_pl")
        if saved is None:
            raise SettingError("ckpt_path", "not a checkpoint of fedgkd_pl")
        method = type(self).__name__
        require(
            saved["method"] == method,
            "ckpt_path",
            f"was written by {saved['method']}, this run is {method}",
        )
        if self._trainer is not None:
            if self.trainer.state.fn == "fit":
                self.check_data(self.datamodule, saved)
            # Lightning does so after the weights are loaded, which rounds those of 64-true
            self.trainer.precision_plugin.convert_module(self)
        self.fill_like(name.removeprefix("net.") for name in checkpoint.get("state_dict", ()))
        self.bytes_down, self.bytes_up = saved["bytes"]
        self._client_states = self._store_of(saved["client_states"])
        self.failed_rounds = saved["failed_rounds"]
        if self.schedule is not None and "schedule" in saved:
            self.schedule.load_state_dict(saved["schedule"])
        for name in self.keeps:
            kept = getattr(self, name)
            if hasattr(kept, "load_state_dict"):
                kept.load_state_dict(saved[name])
            elif isinstance(kept, StateStore):
                setattr(self, name, self._store_of(saved[name]))
            else:
                setattr(self, name, saved[name])

    def _store_of(self, saved: Mapping[int, State]) -> StateStore:
        """A store of a checkpoint; what is inside the checkpoint itself, as before 0.1.0, too."""
        store = saved if isinstance(saved, StateStore) else StateStore()
        if store is not saved:
            store.update(saved)
        store.limit = self.state_memory * 1e6
        return store

    def close_stores(self) -> None:
        """Removes what clients' states and the like have left in temporary folders."""
        for store in (self._client_states, *(getattr(self, name) for name in self.keeps)):
            if isinstance(store, StateStore):
                store.close()

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """A method as a checkpoint left it; Lightning's own reads pickles.

        ``kwargs`` are the method's, ``net`` among them.
        """
        checkpoint = load_newest(Path(checkpoint_path))[0]
        model = cls(**kwargs)
        model.on_load_checkpoint(checkpoint)
        model.load_state_dict(checkpoint["state_dict"])
        return model

    def check_data(self, data: "FederatedDataModule", saved: dict[str, Any]) -> None:
        """Refuses to resume from ``saved``, our part of a checkpoint, if it does not fit."""
        check_resumed(cast("FederatedServer", self), data, saved)
