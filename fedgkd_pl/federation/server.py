"""The server module: a round, its evaluation, its checkpoint. The algorithm is a method's."""

import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from fedgkd_pl.data.cohorts import Population
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.examples import Batch, Examples
from fedgkd_pl.data.partition import largest_first
from fedgkd_pl.errors import CALMER, RunFailed, SettingError, at_least, require
from fedgkd_pl.federation.callback import call_hooks
from fedgkd_pl.federation.checks import (
    TASKS,
    check_alone,
    check_fit,
    check_learned,
    check_method,
    check_resumed,
    check_trainer,
)
from fedgkd_pl.federation.evaluation import Evaluation, Scores, personal_scores, scores_of
from fedgkd_pl.federation.exchange import Split, taken_apart
from fedgkd_pl.federation.hardware import channels_last
from fedgkd_pl.federation.losses import CrossEntropy, LocalLoss
from fedgkd_pl.federation.message import (
    LR_FACTOR,
    Answer,
    ClientFailure,
    ClientUpdate,
    Message,
    Spec,
    Specs,
    State,
    checked,
    like,
)
from fedgkd_pl.federation.nets import ClientNets
from fedgkd_pl.federation.optimizer import RoundSchedule
from fedgkd_pl.federation.own_module import has_outputs, is_own_module, outputs_of
from fedgkd_pl.federation.round import (
    CloseOnError,
    NoLossScale,
    RoundResults,
    divergence,
    form,
    job_of,
)
from fedgkd_pl.models.heads import Ensemble
from fedgkd_pl.storage.checkpoint import HALF, SafeCheckpointIO, StateStore, load_newest
from fedgkd_pl.storage.recorded import Recorded
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

if TYPE_CHECKING:
    from fedgkd_pl.engines.base import Engine, Session
    from fedgkd_pl.federation.client import FederatedClient

log = logging.getLogger("fedgkd_pl")
# what every method saves beside the model
COUNTED = ("bytes_down", "bytes_up", "failed_rounds", "first_loss", "diverged_round")
KEPT = (*COUNTED, "client_states", "schedule")
BAR = ("val/acc", "test/acc")
OTHER_BAR = ("val/loss", "test/loss")  # where there is no accuracy


class FederatedServer(LightningModule, Recorded):
    """A LightningModule whose training step is one communication round.

    A method subclasses it with ``training_step(cohort)``, ``configure_optimizers``, the class of
    its clients and the settings that they get.

    Args:
        net: the global model.
        engine: where the clients train.
        local_epochs: passes of a client over its data in a round.
        local_steps: instead of epochs, this many batches.
        min_clients: a round in which fewer clients succeed changes nothing.
        max_failed_rounds: this many such rounds in a row end the run.
        compile: whether to compile the clients' steps.
    """

    client_class: "type[FederatedClient]"
    client_settings: tuple[str, ...] = ()  # attributes of the server that every client gets
    # names of what a method saves beside the model: plain values and tensors, or objects with
    # state_dict, load_state_dict and, for a new run, reset
    keeps: tuple[str, ...] = ()
    takes_modules = True  # whether the net may be a LightningModule with its own training step
    needs_outputs = False  # whether a client's loss needs the net's outputs, beside the task's
    distils_classes = True  # whether they must be the logits of classes then
    tasks: tuple[str, ...] = TASKS  # what it can learn
    takes_sequences = True  # whether clients may learn one task after the other (data.tasks)
    split: Split | None = None  # of the net's names; None where all are shared
    # whether what stays with clients may be parts that are trained, or frozen ones
    exchanges: tuple[str, ...] = ("share", "personal")
    shares_models = True  # whether what clients send up includes their models
    models_differ = False  # whether :meth:`model_of` depends on the client and its task
    optimizer: OptimizerCallable | None = None  # of clients; None for that of a LightningModule
    scheduler: LRSchedulerCallable | None = None  # of clients, per local epoch
    schedule: RoundSchedule | None = None  # of the clients' rate over rounds
    local_loss: LocalLoss = CrossEntropy()  # of clients, which decides what is measured
    metrics: Mapping[str, Metric] = {}  # measured beside what always is

    def __init__(
        self,
        net: nn.Module,
        engine: "Engine",
        local_epochs: int,
        local_steps: int | None,
        min_clients: int,
        max_failed_rounds: int,
        compile: bool,
    ) -> None:
        super().__init__()
        at_least(1, local_epochs=local_epochs)
        require(local_steps is None or local_steps >= 1, "local_steps", "must be ≥ 1", local_steps)
        at_least(1, min_clients=min_clients, max_failed_rounds=max_failed_rounds)
        self.automatic_optimization = False
        self.net = net
        self.client_nets = ClientNets()
        self.evaluation = Evaluation()
        self.engine = engine
        self.local_epochs = local_epochs
        self.local_steps = local_steps
        self.min_clients = min_clients
        self.max_failed_rounds = max_failed_rounds
        self.compiles = compile  # nn.Module has a method compile()
        self.client_optimizer = ""  # as text, once it is checked
        self.report: dict[str, float] = {}  # what was logged of the last round
        self.results = RoundResults()  # of the last round
        self.waited = 0.0  # seconds that the round has waited for clients
        self.trained = 0.0  # seconds that the server itself has trained in the round
        self.bytes_down = self.bytes_up = 0
        self.failed_rounds: list[int] = []
        self.client_states = StateStore()
        self.first_loss: float | None = None  # the clients' mean, in the first round that counted
        self.diverged_round: int | None = None  # the first in which clients diverged
        self._checked: tuple[FederatedDataModule | None, Trainer | None] = (None, None)
        self._has_answers = False  # whether all clients of the round have answered
        self._session: Session | None = None
        self._clip: float | None = None  # the Trainer's, while it is hidden from Lightning

    # -- for methods ---------------------------------------------------------------------------

    def client(self, number: int = 0) -> "FederatedClient":
        """The client module with one of the clients' nets."""
        settings = {name: getattr(self, name) for name in self.client_settings}
        made = self.client_class(self.nets[number], self.optimizer, self.scheduler, **settings)
        made.divide(self.split)
        return made

    def client_extra(self) -> Specs:
        """What clients send beside their models: all of this and nothing else, or they fail."""
        return {}

    def client_state(self, number: int = 0) -> Specs:
        """What clients with a net keep for their next round: all of this and nothing else."""
        return {}

    def client_model(self, number: int = 0) -> dict[str, Spec]:
        """The form of a client's model, as far as it travels."""
        return like(self.shared(self.nets[number].state_dict()))

    def kept_of(self, number: int = 0) -> Specs:
        """What clients with a net keep: that of the method, and their own parts of the model."""
        own = {} if self.split is None else self.split.specs(self.nets[number])
        return {**self.client_state(number), **own}

    def client_fault(self, update: ClientUpdate) -> str:
        """Why an answer cannot be used though it is all that was declared; empty if it can."""
        return ""

    def teachers(self, message: Message) -> list[tuple[float, State]]:
        """The models that teach in a round, each with its weight; empty if no model is sent."""
        teacher = message.models.get("teacher", message.models.get("global"))
        return [] if teacher is None else [(1.0, teacher)]

    def choose_clients(self, drawn: list[int], population: Population) -> Sequence[int]:
        """The clients of a round: what ``data.cohorts`` drew, unless a method chooses others.

        Called before every round. What a choice depends on beside the arguments, a method
        :attr:`keeps`, so that a resumed run chooses alike.
        """
        return drawn

    def bytes_of(self, message: Message, cohort: Sequence[int]) -> int:
        """The bytes that a cohort downloads; called once a round."""
        return sum(message.for_net(self.net_index(client)).nbytes for client in cohort)

    def bytes_of_answer(self, update: ClientUpdate) -> int:
        """The bytes that a client uploads; called once for every answer that counts."""
        return update.nbytes if self.shares_models else update.extra_nbytes

    def model_of(self, client: int, place: int = 0) -> State:
        """The model that a client has for the task at a place of its sequence, from 0."""
        if not self.is_personal:
            return self.global_state()
        return self.global_state() | taken_apart(self.client_states.get(client, {}))[0]

    def check(self, data: FederatedDataModule) -> None:
        """Raises a clear error if method, net, loss, optimizers and data do not fit together."""
        check_method(self, data)

    def check_run(
        self, data: FederatedDataModule, trainer: Trainer | None = None, reaches: bool = True
    ) -> None:
        """Checks data and, for ``fit``, a Trainer, each unless it has passed already.

        ``reaches``: whether the engine must be able to reach its clients from here.
        """
        if self._checked[0] is not data:
            self.check(data)
            self._checked = (data, None)
        if trainer is not None and self._checked[1] is not trainer:
            if self._trainer is None:  # which a Trainer of its own has checked by now
                check_trainer(trainer)
            check_fit(self, data, trainer)
            if reaches:
                self.engine.check(self)
                self._checked = (data, trainer)

    # -- models and data -----------------------------------------------------------------------

    @property
    def nets(self) -> list[nn.Module]:
        """The nets that clients have, by number."""
        return self.client_nets.of(self.net)

    def net_index(self, client: int) -> int:
        """The number of a client's net."""
        return self.client_nets.number(client)

    @property
    def net_names(self) -> list[str]:
        """The nets' classes, numbered where two are of one."""
        names = [type(net).__name__ for net in self.nets]
        return [f"{name}{n}" if names.count(name) > 1 else name for n, name in enumerate(names)]

    def every_net(self) -> list[nn.Module]:
        """All nets of clients and server, ensembles taken apart."""
        own = list(self.client_nets.own)
        return [*(self.net.nets if isinstance(self.net, Ensemble) else [self.net]), *own]

    @property
    def round(self) -> int:
        """The round being run, from 1."""
        return self.current_epoch + 1

    @property
    def datamodule(self) -> FederatedDataModule:
        """The data of the Trainer that this is attached to."""
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, FederatedDataModule):
            raise SettingError("data", "must be a FederatedDataModule: trainer.fit(model, data)")
        return data

    def global_state(self) -> State:
        """The global model: parameters and buffers."""
        return {name: tensor.detach() for name, tensor in self.net.state_dict().items()}

    def shared(self, state: State) -> State:
        """The part of a whole state that travels."""
        return state if self.split is None else self.split.of(state)

    def whole(self, update: ClientUpdate) -> State:
        """The model of a client that has answered."""
        if self.split is None:
            return update.weights
        return self.global_state() | update.weights | taken_apart(update.state)[0]

    @property
    def is_personal(self) -> bool:
        """Whether clients have parts of their own, so that no one model is that of all."""
        return self.split is not None and len(self.split.personal) > 0

    def global_copy(self) -> State:
        """A copy of the global model on the CPU."""
        return {name: tensor.cpu().clone() for name, tensor in self.global_state().items()}

    def some_inputs(self, data: FederatedDataModule) -> Tensor:
        """Two test samples as the net sees them."""
        examples = data.test[:2]
        inputs = examples.transform(examples.inputs, None)
        for parameter in self.net.parameters():
            return inputs.to(parameter if inputs.is_floating_point() else parameter.device)
        return inputs

    def lay_out(self, data: FederatedDataModule, device: torch.device) -> None:
        """Lays out the nets' weights for where they will train."""
        for net in self.every_net():
            if not is_own_module(net):  # whose step may not be able to, though its forward is
                channels_last(net, self.some_inputs(data), device)

    @property
    def public(self) -> Examples:
        """The public data of a method that has asked for it in :meth:`check`."""
        public = self.datamodule.public
        assert public is not None
        return public

    # -- evaluation ----------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """The global model's logits."""
        return outputs_of(self.net, x)

    def new_scores(self, data: FederatedDataModule, split: str = "val") -> Scores:
        """The scores of a model over a split."""
        return scores_of(self.net, self.local_loss, data, self.metrics, split)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Evaluates on the server's validation set and, within ``fit``, the test set."""
        self._evaluate(batch, batch_idx, self.datamodule.eval_splits()[dataloader_idx])

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Evaluates on the test set."""
        self._evaluate(batch, batch_idx, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Class probabilities."""
        classes = has_outputs(self.net) and self.local_loss.targets == "classes"
        require(classes, "predict", "needs the logits of classes, which this model does not have")
        text = "needs --input and --client K: each client of this run has a model of its own"
        require(not self.is_personal, "predict", text)
        with torch.autocast(self.device.type, enabled=False):
            return self.forward(batch[0]).softmax(dim=1)

    def _evaluate(self, batch: Batch, batch_idx: int, split: str) -> None:
        if self.is_personal:  # no one model is to be scored
            return
        with torch.autocast(self.device.type, enabled=False):  # whatever clients train in
            self.evaluation.step(self.net, batch, batch_idx, split)

    @override
    def on_validation_epoch_end(self) -> None:
        for split in self.datamodule.eval_splits():
            self._log_scores(split)

    @override
    def on_test_epoch_end(self) -> None:
        self._log_scores("test")

    def _log_scores(self, split: str) -> None:
        if self.is_personal and self.engine.states_stay:
            return  # the clients' own parts are not here
        if self.is_personal:
            values, confusion = personal_scores(self, split), None
        else:
            values, confusion = self.evaluation.finish(self.net, split)
        self.log_round({f"{split}/{name}": value for name, value in values.items()})
        call_hooks(self, "on_evaluated", split, values, confusion)

    def log_round(self, values: dict[str, float]) -> None:
        """Logs per round; ``step`` sets the loggers' x-axis to the number of rounds done."""
        fitting = self.trainer.state.fn == "fit" and not self.trainer.sanity_checking
        if fitting:
            self.report |= values
        for name, value in (values | {"step": self.round} if fitting else values).items():
            bar = name in BAR or (name in OTHER_BAR and not self.evaluation.has_accuracy)
            number = torch.tensor(float(value))  # a float would be copied to the device
            self.log(name, number, prog_bar=bar, on_step=False, on_epoch=True, batch_size=1)

    # -- a round -------------------------------------------------------------------------------

    def local_updates(self, message: Message, cohort: Sequence[int]) -> Iterator[ClientUpdate]:
        """Trains a cohort and streams what comes back; reports and counts on the way.

        A client that fails, or answers what cannot be averaged, is left out and recorded.
        """
        assert self._session is not None
        forms = [form(self, cohort, number) for number in range(len(self.nets))]
        if self.schedule is not None:
            self.schedule.begin(message.round)
            numbers = message.numbers | {LR_FACTOR: self.schedule.factor}
            message = replace(message, numbers=numbers)
        call_hooks(self, "on_broadcast", message, cohort)
        results = self.results = RoundResults(bytes_down=self.bytes_of(message, cohort))
        try:
            for client, given in self._asked(message, cohort):
                answer = checked(given, client, forms[self.net_index(client)])
                if isinstance(answer, ClientFailure):
                    results.failures.append(answer)
                    log.warning(
                        "round %d: left out client %d: %s", self.round, client, answer.reason
                    )
                    call_hooks(self, "on_client_failed", answer, len(cohort))
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

    def _asked(self, message: Message, cohort: Sequence[int]) -> Iterator[tuple[int, Answer]]:
        """The answer of every client, the largest first; counts the seconds of waiting."""
        answers = self._session.run(message, cohort)  # type: ignore[union-attr]
        for client in [*largest_first(self.datamodule.client_data.index, cohort), None]:
            start = time.perf_counter()
            answer = next(answers, None)
            self.waited += time.perf_counter() - start
            if client is not None:  # None: the engine is asked once more, to end the round
                yield client, answer or ClientFailure(client, "did not answer")

    def round_counts(self) -> bool:
        """Whether enough clients of the round succeeded; if so, what they keep is kept.

        A round that does not count leaves everything as it was; too many in a row end the run.
        """
        succeeded, failures = len(self.results.reports), self.results.failures
        counts = succeeded >= self.min_clients
        if not self.diverged_round and (how := divergence(self.results, self.first_loss)):
            self.diverged_round = self.round
            log.warning("round %d: clients diverge: %s; %s", self.round, how, CALMER)
        if counts:
            self.first_loss = self.results.mean_loss if self.first_loss is None else self.first_loss
            self.client_states.update(self.results.states)
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

    # -- a run ---------------------------------------------------------------------------------

    @override
    def configure_callbacks(self) -> list[Any]:
        # Clipping is the clients'. Lightning refuses it with manual optimization just after this
        # hook, so it is hidden here and setup() gives it back.
        check_alone(self.trainer)
        fits = self.trainer.state.fn == "fit"
        self.trainer.strategy.checkpoint_io = SafeCheckpointIO(resumes=fits)
        if fits and self._checked[1] is not self.trainer:  # before callbacks are set up
            check_trainer(self.trainer)
        self._clip = self.trainer.gradient_clip_val
        self.trainer.gradient_clip_val = None
        return [CloseOnError()]

    @override
    def setup(self, stage: str) -> None:
        self.trainer.gradient_clip_val = self._clip
        data = self.datamodule
        if stage == "fit" and self.current_epoch == 0:
            self.reset()
        self.check_run(data, self.trainer if stage == "fit" else None)
        self.client_nets.fill(self.net, data.num_clients)
        self.lay_out(data, self.trainer.strategy.root_device)
        # A round is an epoch of one batch, and what is logged is logged per epoch.
        for text in ("The number of training batches \\(1\\) is smaller", "`isinstance\\(treespec"):
            warnings.filterwarnings("ignore", text)
        self.evaluation.update({s: self.new_scores(data, s) for s in ("val", "test")})

    def reset(self) -> None:
        """Begins a new run: what an earlier one left beside the model goes.

        Objects that a method keeps are reset here; plain values a method resets itself.
        """
        self.bytes_down = self.bytes_up = 0
        self.failed_rounds = []
        self.first_loss = self.diverged_round = None
        self.client_states = StateStore()
        self.client_nets.empty(self.net)
        for name in ("schedule", *self.keeps):
            kept: Any = getattr(self, name, None)
            if hasattr(kept, "load_state_dict") and hasattr(kept, "reset"):
                kept.reset()

    @override
    def on_train_start(self) -> None:
        plugin = self.trainer.precision_plugin
        if getattr(plugin, "scaler", None) is not None:
            plugin.scaler = NoLossScale(plugin.scaler)  # type: ignore[attr-defined]
        job = job_of(self, self.trainer, self.datamodule)
        self._session = self.engine.open(job, self.datamodule.cohort_size)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.report = {}
        self._has_answers = False
        self.waited = self.trained = 0.0
        self.trainer.callback_metrics.pop("step", None)  # the last round's, which names checkpoints
        if self.round == self.trainer.max_epochs:
            self.trainer.check_val_every_n_epoch = 1  # the last report is of the last model

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = self.global_state().items()
        if broken := next((name for name, t in state if not t.isfinite().all()), ""):
            raise RunFailed(
                f"round {self.round}: the server's step left {broken} with NaN or Inf; "
                "try a smaller lr of server_optimizer"
            )

    @override
    def on_train_end(self) -> None:
        self.close()

    @override
    def on_fit_end(self) -> None:
        check_learned(self)  # all files are written by now

    def close(self) -> None:
        """Ends the engine's workers; may be called twice."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def close_stores(self) -> None:
        """Removes the temporary folders of clients' states and the like."""
        for store in (self.client_states, *(getattr(self, name) for name in self.keeps)):
            if isinstance(store, StateStore):
                store.close()

    # -- the checkpoint ------------------------------------------------------------------------

    @property
    def is_half_done(self) -> bool:
        """Whether the server's part of a round is under way, which changes the model in place.

        What clients train changes nothing yet, so the last round is whole until all have answered.
        """
        if not self._has_answers or self.trainer.state.fn != "fit":
            return False
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return bool(progress.started > progress.processed)  # type: ignore[attr-defined]

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["fedgkd_pl"] = {
            "method": type(self).__name__,
            "states_stay": self.engine.states_stay,
            "stopped": self.trainer.should_stop,
            "data": self.datamodule.fingerprint(),
        }
        if self.is_half_done:
            saved[HALF] = self.round
        for name in (*KEPT, *self.keeps):
            kept = getattr(self, name)
            saved[name] = kept.state_dict() if hasattr(kept, "load_state_dict") else kept

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("fedgkd_pl")
        if saved is None:
            raise SettingError("ckpt_path", "is not a checkpoint of fedgkd_pl")
        method = type(self).__name__
        text = f"was written by {saved['method']}, this run is {method}"
        require(saved["method"] == method, "ckpt_path", text)
        if self._trainer is not None:
            if self.trainer.state.fn == "fit":
                check_resumed(self, self.datamodule, saved)
            # Lightning does so after the weights are loaded, which rounds those of 64-true
            self.trainer.precision_plugin.convert_module(self)
        names = (name.removeprefix("net.") for name in checkpoint.get("state_dict", ()))
        self.client_nets.fill_like(self.net, names)
        for name in (*KEPT, *self.keeps):
            kept = getattr(self, name)
            if hasattr(kept, "load_state_dict"):
                kept.load_state_dict(saved[name])
            else:
                setattr(self, name, saved[name])

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
