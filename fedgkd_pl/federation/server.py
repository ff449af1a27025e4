"""The server's half of a round: the clients' answers, failures, the engine's life. No algorithm."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from fedgkd_pl.data.cohorts import Population
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.errors import RunFailed, require
from fedgkd_pl.federation.answers import Specs, checked
from fedgkd_pl.federation.callback import FederatedCallback, call_hooks, warn_of_near_hooks
from fedgkd_pl.federation.checks import (
    check_learned,
    check_method,
    check_precision,
    check_trainer,
    first_not_finite,
    warn_of_eval_mode,
)
from fedgkd_pl.federation.client_trainer import Job
from fedgkd_pl.federation.divergence import Divergence
from fedgkd_pl.federation.message import (
    LR_FACTOR,
    ClientFailure,
    ClientUpdate,
    Message,
    State,
)
from fedgkd_pl.federation.performance import missing_compiler
from fedgkd_pl.federation.round import NoLossScale, RoundResults, forms_of, job_of, waiting
from fedgkd_pl.federation.saving import SavedModel
from fedgkd_pl.processes.signals import CtrlC, stop_behind
from fedgkd_pl.storage.checkpoint_io import SafeCheckpointIO
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import Precision
from torch import nn

if TYPE_CHECKING:
    from fedgkd_pl.engines.base import Engine, Session
    from fedgkd_pl.federation.client import FederatedClient

log = logging.getLogger("fedgkd_pl")


class FederatedServer(SavedModel):
    """A LightningModule whose training step is one communication round.

    A method subclasses it with ``training_step(cohort)``, ``configure_optimizers`` and
    :meth:`client`.

    Args:
        net: the global model.
        engine: where the clients train.
        local_epochs: passes of a client over its data in a round.
        local_steps: instead of epochs, this many batches.
        min_clients: a round in which fewer clients succeed changes nothing.
        max_failed_rounds: this many such rounds in a row end the run.
        compile: whether to compile the clients' steps.
        state_memory: megabytes of what clients keep that stay in memory.
    """

    # names of what clients may report; None for any plain ones. Read from the class that defines
    # client(): another client half may report others.
    client_metrics: tuple[str, ...] | None = None

    def __init__(
        self,
        net: nn.Module,
        engine: "Engine",
        local_epochs: int,
        local_steps: int | None,
        min_clients: int,
        max_failed_rounds: int,
        compile: bool,
        state_memory: float = 64,
    ) -> None:
        super().__init__(net, engine, state_memory)
        require(local_epochs >= 1, "local_epochs", "must be at least 1", local_epochs)
        require(local_steps is None or local_steps >= 1, "local_steps", "must be ≥ 1", local_steps)
        require(min_clients >= 1, "min_clients", "must be at least 1", min_clients)
        require(max_failed_rounds >= 1, "max_failed_rounds", "must be ≥ 1", max_failed_rounds)
        self.automatic_optimization = False
        self.local_epochs = local_epochs
        self.local_steps = local_steps
        self.min_clients = min_clients
        self.max_failed_rounds = max_failed_rounds
        self.compiles = compile  # nn.Module has a method compile()
        self.results = RoundResults()  # of the last round
        self.waited = 0.0  # seconds that the round has waited for clients
        self.trained = 0.0  # seconds that the server itself has trained in the round
        self._session: Session | None = None
        self._clip: float | None = None  # the Trainer's, while it is hidden from Lightning

    # -- for methods ---------------------------------------------------------------------------

    def client_extra(self) -> Specs:
        """What clients send beside their models: all of this and nothing else, or they fail."""
        return {}

    def client_fault(self, update: ClientUpdate) -> str:
        """Why an answer cannot be used though it is all that was declared; empty if it can."""
        return ""

    def teachers(self, message: Message) -> list[tuple[float, State]]:
        """The models that teach in a round, each with its weight; empty if no model is sent."""
        teacher = message.models.get("teacher", message.models.get("global"))
        return [] if teacher is None else [(1.0, teacher)]

    def choose_clients(self, drawn: list[int], population: Population) -> Sequence[int]:
        """Whom a round asks: what ``data.cohorts`` drew (ascending), unless a method knows better.

        Called before every round. What a choice depends on beside the arguments, a method
        :attr:`keeps`, so that a resumed run chooses alike.
        """
        return drawn

    # -- a round -------------------------------------------------------------------------------

    def local_updates(self, message: Message, cohort: Sequence[int]) -> Iterator[ClientUpdate]:
        """Trains a cohort and streams what comes back; reports and counts on the way.

        A client that fails, or answers what cannot be averaged, is left out and recorded.
        """
        assert self._session is not None
        forms = forms_of(self, cohort)
        if self.schedule is not None:
            self.schedule.begin(message.round)
            message.numbers[LR_FACTOR] = self.schedule.factor
        call_hooks(self, "on_broadcast", message, cohort)
        results = self.results = RoundResults(bytes_down=self.bytes_of(message, cohort))
        try:
            for client, given in waiting(self, self._session.run(message, cohort), cohort):
                answer = checked(given, client, forms[self.kind(client)])
                if isinstance(answer, ClientFailure):
                    self._leave_out(answer, len(cohort))
                    continue
                call_hooks(self, "on_client_end", answer, len(cohort))
                results.add(answer, self.bytes_of_answer(answer))
                yield answer
        except BaseException:
            self.close()
            raise
        self._has_answers = True
        self.bytes_down += results.bytes_down
        self.bytes_up += results.bytes_up
        self.log_round(results.values())

    def _leave_out(self, failure: ClientFailure, cohort_size: int) -> None:
        self.results.failures.append(failure)
        log.warning("round %d: left out client %d: %s", self.round, failure.client, failure.reason)
        call_hooks(self, "on_client_failed", failure, cohort_size)

    def round_counts(self) -> bool:
        """Whether enough clients of the round succeeded; if so, what they keep is kept.

        A round that does not count leaves everything as it was; too many in a row end the run.
        """
        succeeded, failures = len(self.results.reports), self.results.failures
        if succeeded >= self.min_clients:
            self._client_states.update(self.results.states)
            return True
        self.failed_rounds.append(self.round)
        log.warning(
            "round %d changes nothing: %d of %d clients succeeded, min_clients is %d",
            *(self.round, succeeded, succeeded + len(failures), self.min_clients),
        )
        latest = range(self.round - self.max_failed_rounds + 1, self.round + 1)
        if set(latest) <= set(self.failed_rounds):
            raise RunFailed(
                f"{self.max_failed_rounds} rounds in a row failed (max_failed_rounds); "
                f"in this one, client {failures[0].client}: {failures[0].reason}"
            )
        self.optimizers().step()  # type: ignore[union-attr]  # no gradient: only counts it
        return False

    # -- before a run --------------------------------------------------------------------------

    def check(self, data: FederatedDataModule) -> None:
        """Raises a clear error if the net does not fit the data, or an optimizer the net."""
        check_method(self, data)

    def check_device(self, device: torch.device) -> None:
        """Raises a clear error if clients cannot be compiled for a device as they should."""
        missing = missing_compiler(device) if self.compiles else ""
        require(not missing, "compile", f"needs {missing}, which is not on this machine")

    def check_precision(self, precision: Precision) -> None:
        """Raises a clear error if an optimizer is wrong for weights of a precision."""
        for half in self.clients():
            client = cast("FederatedClient", precision.convert_module(half))
            if client.optimizer is not None:  # a module's own may ask for its Trainer
                client.configure_optimizers()

    def configure_callbacks(self) -> list[Any]:
        """Makes checkpoints commits, ends workers on errors, watches the loss, hides clipping.

        Clipping is the clients'; the server's own step is never clipped. Lightning refuses it with
        manual optimization just after this hook, so :meth:`setup` gives it back.
        """
        if self.trainer.strategy._checkpoint_io is None:  # the user gave none
            self.trainer.strategy.checkpoint_io = SafeCheckpointIO()
        writer = self.trainer.strategy.checkpoint_io
        if isinstance(writer, SafeCheckpointIO):
            writer.resumes, writer.held = self.trainer.state.fn == "fit", False
        if self.trainer.state.fn == "fit":
            check_trainer(self.trainer)
        self._clip = self.trainer.gradient_clip_val
        self.trainer.gradient_clip_val = None
        return [_CloseOnError(), Divergence()]

    def setup(self, stage: str) -> None:
        """Begins a new run or resumes one, and checks what it is made of."""
        self.trainer.gradient_clip_val = self._clip
        data = self.datamodule
        if stage == "fit" and self.current_epoch == 0:
            self.reset()
        text = "the server takes one device; the engine spreads clients over all GPUs"
        require(self.trainer.world_size == 1, "devices", text, self.trainer.world_size)
        self.check(data)
        if stage == "fit":
            self._check_fit(data)
        check_precision(self.trainer)
        self.lay_out(data, self.trainer.strategy.root_device)
        # A round is an epoch of one batch, and what is logged is logged per epoch.
        warnings.filterwarnings("ignore", "The number of training batches \\(1\\) is smaller")
        super().setup(stage)

    def _check_fit(self, data: FederatedDataModule) -> None:
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, FederatedCallback):
                callback.check(self, data)
        self.check_device(self.trainer.strategy.root_device)
        self.check_precision(self.trainer.precision_plugin)
        self.engine.check(self)
        for net in self.kinds:
            warn_of_eval_mode(net)
        warn_of_near_hooks(self.trainer)

    # -- a run ---------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Opens the engine."""
        plugin = self.trainer.precision_plugin
        if getattr(plugin, "scaler", None) is not None:
            plugin.scaler = NoLossScale(plugin.scaler)  # type: ignore[attr-defined]
        job = self.job(self.trainer, self.datamodule)
        self._session = self.engine.open(job, self.datamodule.cohort_size)

    def job(self, trainer: Trainer, data: FederatedDataModule) -> Job:
        """What clients are trained on and how; the server's precision and clipping are theirs."""
        return job_of(self, trainer, data)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Starts the round's report."""
        self.report = {}
        self._has_answers = False
        self.waited = self.trained = 0.0
        self.trainer.callback_metrics.pop("step", None)  # the last round's, which names checkpoints
        if self.round == self.trainer.max_epochs:
            self.trainer.check_val_every_n_epoch = 1  # the last report is of the last model

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Ends a run whose global model is not finite any more."""
        broken = first_not_finite(self.global_state())
        if broken:
            raise RunFailed(
                f"round {self.round}: the server's step left {broken} with NaN or Inf: "
                "try a smaller lr of server_optimizer"
            )

    def on_train_end(self) -> None:
        """Closes the engine."""
        self.close()

    def on_fit_end(self) -> None:
        """Raises an error if nothing was learned; all files are written by now."""
        check_learned(self)

    def close(self) -> None:
        """Ends the engine's workers; may be called twice."""
        if self._session is not None:
            self._session.close()
            self._session = None


class _CloseOnError(Callback):
    """Ends the workers whatever fails, Ctrl-C included; a module has no hook for that."""

    def __init__(self) -> None:
        self.interrupts = CtrlC()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.interrupts.begin()  # not before: Lightning puts back the handlers that it finds

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.interrupts.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.interrupts.is_ending = True
        pl_module.close()
        if isinstance(trainer.datamodule, FederatedDataModule):
            trainer.datamodule.teardown("fit")  # Lightning does if nothing fails
        stop = stop_behind(exception)
        if stop is not None and not stop.hint:
            stop.hint = _how_to_go_on(trainer)
        elif isinstance(exception, KeyboardInterrupt):
            log.warning("interrupted; %s", _how_to_go_on(trainer))
        self.interrupts.end(exception)


def _how_to_go_on(trainer: Trainer) -> str:
    """With the newest checkpoint of Lightning's, and the round that it holds.

    It may be an old one: where a ModelCheckpoint monitors a value, ``save_last`` follows the best.
    """
    kept = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    paths = [path for each in kept for path in (each.last_model_path, each.best_model_path) if path]
    if not paths:
        return "no round is kept: train with a ModelCheckpoint to go on where it was"
    rounds = [_round_of(path, trainer) for path in paths]
    newest = rounds.index(max(rounds))
    after = f" (after round {rounds[newest]})" if rounds[newest] else ""
    return f"go on with: trainer.fit(model, data, ckpt_path={paths[newest]!r}){after}"


def _round_of(path: str, trainer: Trainer) -> int:
    """The rounds that a checkpoint has behind it; 0 where it cannot be read."""
    try:
        return int(trainer.strategy.load_checkpoint(path)["global_step"])
    except Exception:  # any CheckpointIO may fail in its own way, and this is only a hint
        return 0
