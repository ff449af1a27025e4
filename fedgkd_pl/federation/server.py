"""The server's plumbing: evaluation, reports, checkpoints, the engine's life. No algorithm."""

import logging
import math
import time
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from fedgkd_pl.data.cohorts import Population
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.examples import Batch
from fedgkd_pl.data.index import largest_first
from fedgkd_pl.errors import RunFailed, SettingError, require
from fedgkd_pl.federation.answers import USES, Form, Spec, Specs, checked, like
from fedgkd_pl.federation.checks import check_scheduler, check_trainer, first_not_finite
from fedgkd_pl.federation.client_trainer import Job
from fedgkd_pl.federation.divergence import Divergence
from fedgkd_pl.federation.evaluation import Evaluation, cohort_statistics
from fedgkd_pl.federation.message import Answer, ClientFailure, ClientUpdate, Message, State
from fedgkd_pl.federation.performance import channels_last, missing_compiler, slow_precision
from fedgkd_pl.storage.checkpoint_io import SafeCheckpointIO, load_newest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from fedgkd_pl.engines.base import Engine, Session
    from fedgkd_pl.federation.client import FederatedClient

log = logging.getLogger("fedgkd_pl")


class FederatedServer(LightningModule):
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
    """

    shares_models = True  # whether what clients send up includes their models
    keeps: tuple[str, ...] = ()  # names of what a method saves beside the model: plain or tensors
    # names of what clients may report; None for any plain ones. It is the class with client() that
    # says so: another client half may report others.
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
    ) -> None:
        super().__init__()
        require(local_epochs >= 1, "local_epochs", "must be at least 1", local_epochs)
        require(local_steps is None or local_steps >= 1, "local_steps", "must be ≥ 1", local_steps)
        require(min_clients >= 1, "min_clients", "must be at least 1", min_clients)
        require(max_failed_rounds >= 1, "max_failed_rounds", "must be ≥ 1", max_failed_rounds)
        self.automatic_optimization = False
        self.net = net
        self.engine = engine
        self.local_epochs = local_epochs
        self.local_steps = local_steps
        self.min_clients = min_clients
        self.max_failed_rounds = max_failed_rounds
        self.compiles = compile  # a module has a method of the other name
        self.failed_rounds: list[int] = []
        self.bytes_down = 0
        self.bytes_up = 0
        self.report: dict[str, float] = {}  # what was logged of the last round
        self.waited = 0.0  # seconds that the round has waited for clients
        self._session: Session | None = None
        self._client_states: dict[int, State] = {}
        self._new_states: dict[int, State] = {}  # of this round, until it counts

    # -- for methods ---------------------------------------------------------------------------

    @abstractmethod
    def client(self) -> "FederatedClient":
        """The client half of the method; it owns a net of its own."""

    def client_extra(self) -> Specs:
        """What clients send beside their models: all of this and nothing else, or they fail."""
        return {}

    def client_state(self) -> Specs:
        """What clients keep for their next round, likewise."""
        return {}

    def client_fault(self, update: ClientUpdate) -> str:
        """Why an answer cannot be used though it is all that was declared; empty if it can.

        Args:
            update: of a client.
        """
        return ""

    @property
    def round(self) -> int:
        """The round being run, from 1."""
        return self.current_epoch + 1

    def choose_clients(self, drawn: list[int], population: Population) -> Sequence[int]:
        """Whom a round asks: what was drawn, unless a method knows better.

        Called before every round. What a choice depends on beside the arguments, a method
        :attr:`keeps`, so that a resumed run chooses alike.

        Args:
            drawn: the ids that ``data.cohorts`` drew, ascending.
            population: whom one may choose from.
        """
        return drawn

    def global_state(self) -> State:
        """The global model: parameters and buffers."""
        return {name: tensor.detach() for name, tensor in self.net.state_dict().items()}

    def client_model(self) -> dict[str, Spec]:
        """What a client's model is like: the global one, a round of training on."""
        data, most = self.datamodule.client_data, self.engine.max_samples
        batches = math.ceil((most or len(data.examples)) / data.batch_size)
        steps = self.local_steps or self.local_epochs * batches
        return like(self.global_state(), USES * steps * self.round)

    def _form(self, cohort: Sequence[int]) -> Form:
        """What this round's answers must be."""
        makers = (kind for kind in (self, *type(self).__mro__) if "client" in vars(kind))
        known = self.engine.max_samples is None
        size = self.datamodule.client_data.index.size
        return Form(
            weights=self.client_model(),
            extra=self.client_extra(),
            state=self.engine.states(self.client_state()),
            metrics=vars(next(makers)).get("client_metrics"),
            samples={client: size(client) for client in cohort} if known else {},
            max_samples=self.engine.max_samples,
            check=self.client_fault,
        )

    def local_updates(self, message: Message, cohort: Sequence[int]) -> Iterator[ClientUpdate]:
        """Trains a cohort and streams what comes back; reports and counts on the way.

        A client that fails, or answers what cannot be averaged, is left out and recorded.

        Args:
            message: what every client gets.
            cohort: the clients' ids.
        """
        assert self._session is not None
        form = self._form(cohort)
        self._tell("on_broadcast", message, cohort)
        reports: list[dict[str, float]] = []
        down, up = message.nbytes * len(cohort), 0
        self._new_states = {}
        self._failures: list[ClientFailure] = []
        try:
            for client, given in self._waiting(self._session.run(message, cohort), cohort):
                answer = checked(given, client, form)
                if isinstance(answer, ClientFailure):
                    self._leave_out(answer, len(cohort))
                    continue
                self._tell("on_client_end", answer, len(cohort))
                up += answer.nbytes if self.shares_models else answer.extra_nbytes
                reports.append(answer.metrics)
                if answer.state:
                    self._new_states[answer.client] = answer.state
                yield answer
        except BaseException:
            self.close()
            raise
        self.bytes_down += down
        self.bytes_up += up
        self._survivors = len(reports)
        self.log_round(cohort_statistics(reports))
        self.log_round({"client/failed": len(self._failures)})
        self.log_round({"comm/bytes_down": down, "comm/bytes_up": up})

    def _waiting(
        self, answers: Iterator[Answer], cohort: Sequence[int]
    ) -> Iterator[tuple[int, Answer]]:
        """The answers, each with who was asked for it; counts the time that is waited for them."""
        start = time.perf_counter()
        for client in largest_first(self.datamodule.client_data.index, cohort):
            answer = next(answers, ClientFailure(client, "did not answer"))
            self.waited += time.perf_counter() - start
            yield client, answer
            start = time.perf_counter()
        for _ in answers:
            log.warning("round %d: more answers than clients were asked", self.round)
        self.waited += time.perf_counter() - start

    def round_counts(self) -> bool:
        """Whether enough clients of the round succeeded; if so, what they keep is kept.

        A round that does not count leaves everything as it was; too many in a row end the run.
        """
        if self._survivors >= self.min_clients:
            self._client_states |= self._new_states
            return True
        self.failed_rounds.append(self.round)
        first = self._failures[0]
        log.warning(
            "round %d changes nothing: %d of %d clients succeeded, min_clients is %d",
            *(self.round, self._survivors, self._survivors + len(self._failures), self.min_clients),
        )
        latest = range(self.round - self.max_failed_rounds + 1, self.round + 1)
        if set(latest) <= set(self.failed_rounds):
            raise RunFailed(
                f"{self.max_failed_rounds} rounds in a row failed (max_failed_rounds); "
                f"in this one, client {first.client}: {first.reason}"
            )
        self.optimizers().step()  # type: ignore[union-attr]  # no gradient, no change: a round more
        return False

    def _leave_out(self, failure: ClientFailure, cohort_size: int) -> None:
        self._failures.append(failure)
        log.warning("round %d: left out client %d: %s", self.round, failure.client, failure.reason)
        self._tell("on_client_failed", failure, cohort_size)

    # -- life ----------------------------------------------------------------------------------

    @property
    def datamodule(self) -> FederatedDataModule:
        """The data of the Trainer that this is attached to."""
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, FederatedDataModule):
            raise SettingError("data", "a FederatedDataModule is needed: trainer.fit(model, data)")
        return data

    def check(self, data: FederatedDataModule) -> None:
        """Raises a clear error if the net does not fit the data, or an optimizer the net.

        Args:
            data: loaded data.
        """
        data.check_net(self.net)
        require(
            self.min_clients <= data.cohort_size,
            "min_clients",
            f"must be at most the {data.cohort_size} clients of a round",
            self.min_clients,
        )
        normed = any(isinstance(m, _BatchNorm) and m.training for m in self.net.modules())
        require(
            data.batch_size > 1 or not normed,
            "batch_size",
            "must be at least 2 for a net with BatchNorm (or norm: group)",
            data.batch_size,
        )
        modes = {module: module.training for module in self.net.modules()}
        self.net.eval()
        inputs = self.some_inputs(data)
        try:
            with torch.no_grad():
                shape = tuple(self.net(inputs).shape)
        except Exception as error:  # a net of the user's may fail in any way
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise SettingError(
                "net", f"does not take {data.name} inputs of shape {tuple(inputs.shape)}: {reason}"
            ) from error
        finally:
            for module, training in modes.items():
                module.training = training
        require(
            shape == (len(inputs), data.num_classes),
            "num_classes",
            f"{data.name} has {data.num_classes} classes, the net gives {shape[-1]} logits",
        )
        for key, build in ("server_optimizer", self), ("optimizer", self.client()):
            try:
                check_scheduler(build.configure_optimizers())
            except SettingError:
                raise
            except (ValueError, TypeError) as error:
                raise SettingError(key, str(error)) from error

    def some_inputs(self, data: FederatedDataModule) -> Tensor:
        """Two test samples as the net sees them.

        Args:
            data: loaded data.
        """
        examples = data.test[:2]
        inputs = examples.transform(examples.inputs, None)
        for parameter in self.net.parameters():
            return inputs.to(parameter if inputs.is_floating_point() else parameter.device)
        return inputs

    def check_device(self, device: torch.device) -> None:
        """Raises a clear error if clients cannot train there as they are told to.

        Args:
            device: of the Trainer.
        """
        missing = missing_compiler(device) if self.compiles else ""
        require(not missing, "compile", f"needs {missing}, which is not on this machine")

    def check_precision(self, precision: Precision) -> None:
        """Raises a clear error if an optimizer is wrong for weights of a precision.

        Args:
            precision: the Trainer's.
        """
        precision.convert_module(self.client()).configure_optimizers()  # type: ignore[operator]

    def configure_callbacks(self) -> list[Any]:
        """Makes checkpoints commits, ends workers on errors, watches the loss, hides clipping.

        Clipping is the clients'; the server's own step is never clipped. Lightning refuses it with
        manual optimization just after this hook, so :meth:`setup` gives it back.
        """
        if self.trainer.strategy._checkpoint_io is None:  # the user gave none
            self.trainer.strategy.checkpoint_io = SafeCheckpointIO()
        if self.trainer.state.fn == "fit":
            check_trainer(self.trainer)
        self._clip = self.trainer.gradient_clip_val
        self.trainer.gradient_clip_val = None
        return [_CloseOnError(), Divergence()]

    def setup(self, stage: str) -> None:
        """Builds the metrics.

        Args:
            stage: Lightning's.
        """
        self.trainer.gradient_clip_val = self._clip
        data = self.datamodule
        if stage == "fit" and self.current_epoch == 0:
            self.forget()
        require(
            self.trainer.world_size == 1,
            "devices",
            "the server takes one device; the engine spreads clients over all GPUs",
            self.trainer.world_size,
        )
        self.check(data)
        device = self.trainer.strategy.root_device
        if stage == "fit":
            self.check_device(device)
            self.check_precision(self.trainer.precision_plugin)
            self.engine.check(self)
            layers = [module for module in self.net.modules() if not any(module.children())]
            frozen = sum(not layer.training for layer in layers)
            if frozen:
                log.warning(
                    "net: %d of its %d layers are in eval mode and stay so while clients train "
                    "(net.train() before, if that is not meant)",
                    *(frozen, len(layers)),
                )
        if slow_precision(self.trainer.precision, device):
            text = "trainer.precision: this hardware only emulates %s, which is slower than 32-true"
            log.warning(text, self.trainer.precision)
        channels_last(self.net, self.some_inputs(data))
        # A round is an epoch of one batch, and what is logged is logged per epoch.
        warnings.filterwarnings("ignore", "The number of training batches \\(1\\) is smaller")
        self.evaluations = nn.ModuleDict(
            {split: Evaluation(data.num_classes) for split in ("val", "test")}
        )

    def on_train_start(self) -> None:
        """Opens the engine."""
        data = self.datamodule
        plugin = self.trainer.precision_plugin
        if getattr(plugin, "scaler", None) is not None:
            plugin.scaler = None  # type: ignore[attr-defined]  # no loss here: nothing to unscale
        job = self.job(self.trainer, data)
        self._session = self.engine.open(job, data.cohort_size)

    def job(self, trainer: Trainer, data: FederatedDataModule) -> Job:
        """What clients are trained on and how.

        Args:
            trainer: the server's, whose precision and clipping are the clients'.
            data: loaded data.
        """
        return Job(
            client=self.client(),
            data=data.client_data,
            device=trainer.strategy.root_device,
            trainer={
                "precision": trainer.precision,
                "max_epochs": self.local_epochs if self.local_steps is None else -1,
                "max_steps": -1 if self.local_steps is None else self.local_steps,
                "gradient_clip_val": trainer.gradient_clip_val,
                "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
            },
            states=self._client_states,
            compile=self.compiles,
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Starts the round's report.

        Args:
            batch: the cohort.
            batch_idx: Lightning's.
        """
        self.report = {}
        self.waited = 0.0
        self.trainer.callback_metrics.pop("step", None)  # the last round's, which names checkpoints
        if self.round == self.trainer.max_epochs:
            self.trainer.check_val_every_n_epoch = 1  # what is told last is of the last model

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Ends a run whose global model is no model any more.

        Args:
            outputs: Lightning's.
            batch: the cohort.
            batch_idx: Lightning's.
        """
        broken = first_not_finite(self.global_state())
        if broken:
            raise RunFailed(
                f"round {self.round}: the server's step left {broken} with NaN or Inf: "
                "a smaller lr of server_optimizer?"
            )

    def on_train_end(self) -> None:
        """Closes the engine."""
        self.close()

    def on_fit_end(self) -> None:
        """Ends with an error where nothing was learned; what there is has been written."""
        done = self.current_epoch
        if done and len(self.failed_rounds) >= done:
            raise RunFailed(f"none of {done} rounds counted: too few clients succeeded in each")
        for split in ("val", "test"):
            loss = self.report.get(f"{split}/loss", 0.0)
            if not math.isfinite(loss):
                raise RunFailed(f"after round {done} the global model's {split}/loss is {loss}")

    def forget(self) -> None:
        """Starts a new run: what an earlier one left beside the model goes."""
        self.bytes_down = self.bytes_up = 0
        self.failed_rounds = []
        self._client_states = {}

    def close(self) -> None:
        """Ends the engine's workers; may be called twice."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what the server knows beside the model, and what a method :attr:`keeps`.

        Args:
            checkpoint: Lightning's.
        """
        checkpoint["fedgkd_pl"] = {
            "method": type(self).__name__,
            "bytes": [self.bytes_down, self.bytes_up],
            "client_states": self._client_states,
            "states_stay": self.engine.states_stay,
            "failed_rounds": self.failed_rounds,
            "stopped": self.trainer.should_stop,
            "data": self.datamodule.fingerprint(),
            **{name: getattr(self, name) for name in self.keeps},
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The inverse of :meth:`on_save_checkpoint`.

        Args:
            checkpoint: Lightning's.
        """
        saved = checkpoint.get("fedgkd_pl")
        if saved is None:
            raise SettingError("ckpt_path", "not a checkpoint of fedgkd_pl")
        method = type(self).__name__
        require(
            saved["method"] == method,
            "ckpt_path",
            f"was written by {saved['method']}, this run is {method}",
        )
        if self._trainer is not None and self.trainer.state.fn == "fit":
            self.check_data(self.datamodule, saved)
        self.bytes_down, self.bytes_up = saved["bytes"]
        self._client_states = saved["client_states"]
        self.failed_rounds = saved["failed_rounds"]
        for name in self.keeps:
            setattr(self, name, saved[name])

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """A method as a checkpoint left it; Lightning's own reads pickles.

        Args:
            checkpoint_path: the file.
            args: Lightning's, unused.
            kwargs: those of the method, ``net`` among them.
        """
        checkpoint = load_newest(Path(checkpoint_path))[0]
        model = cls(**kwargs)
        model.on_load_checkpoint(checkpoint)
        model.load_state_dict(checkpoint["state_dict"])
        return model

    def check_data(self, data: FederatedDataModule, saved: dict[str, Any]) -> None:
        """Refuses to go on with other data than a checkpoint's, or where its states are not.

        Args:
            data: loaded data.
            saved: what the checkpoint keeps of ours.
        """
        require(
            saved["data"] == data.fingerprint(),
            "data",
            "the checkpoint was trained on other data: its samples, labels or partition differ",
        )
        stay = saved.get("states_stay", False)
        where = "with the clients" if stay else "in the checkpoint"
        require(
            not saved["client_states"] or stay == self.engine.states_stay,
            "engine",
            f"what clients keep between rounds is {where}: go on with the engine that began",
        )

    # -- evaluation ----------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """The global model's logits.

        Args:
            x: inputs.
        """
        logits: Tensor = self.net(x)
        return logits

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Evaluates on the server's validation set and, within ``fit``, the test set.

        Args:
            batch: inputs and labels.
            batch_idx: Lightning's.
            dataloader_idx: which of the datamodule's ``eval_splits``.
        """
        self._evaluate(batch, self.datamodule.eval_splits()[dataloader_idx])

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Evaluates on the test set.

        Args:
            batch: inputs and labels.
            batch_idx: Lightning's.
        """
        self._evaluate(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Class probabilities.

        Args:
            batch: inputs and labels.
            batch_idx: Lightning's.
        """
        return self.forward(batch[0]).softmax(dim=1)

    def on_validation_epoch_end(self) -> None:
        """Logs the round's metrics."""
        for split in self.datamodule.eval_splits():
            self._log_metrics(split)

    def on_test_epoch_end(self) -> None:
        """Logs the test metrics."""
        self._log_metrics("test")

    def _evaluate(self, batch: Batch, split: str) -> None:
        x, y = batch
        self._evaluation(split).update(self.forward(x), y)

    def _log_metrics(self, split: str) -> None:
        evaluation = self._evaluation(split)
        confusion = evaluation.confusion()
        values = evaluation.finish()
        self.log_round({f"{split}/{name}": value for name, value in values.items()})
        self._tell("on_evaluated", split, values, confusion)

    def _evaluation(self, split: str) -> Evaluation:
        return cast(Evaluation, self.evaluations[split])

    def log_round(self, values: dict[str, float]) -> None:
        """Logs per round; ``step`` sets the loggers' x-axis to the number of rounds done.

        Args:
            values: by name.
        """
        fitting = self.trainer.state.fn == "fit" and not self.trainer.sanity_checking
        if fitting:
            self.report |= values
        for name, value in (values | {"step": self.round} if fitting else values).items():
            bar = name in ("val/acc", "test/acc")
            self.log(name, float(value), prog_bar=bar, on_step=False, on_epoch=True, batch_size=1)

    def _tell(self, hook: str, *args: Any) -> None:
        """Calls a hook of ours on the callbacks that have it."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, hook):
                getattr(callback, hook)(self.trainer, self, *args)


class _CloseOnError(Callback):
    """Ends the workers whatever fails; a module has no hook for that."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        pl_module.close()
