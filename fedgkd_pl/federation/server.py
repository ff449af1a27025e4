"""The server's plumbing: evaluation, reports, checkpoints, the engine's life. No algorithm."""

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.resident import Batch
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.federation.client_trainer import Job
from fedgkd_pl.federation.message import ClientUpdate, Message, State
from fedgkd_pl.federation.metrics import Evaluation, cohort_statistics
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

if TYPE_CHECKING:
    from fedgkd_pl.engines.base import Engine, Session
    from fedgkd_pl.federation.client import FederatedClient


class FederatedServer(LightningModule):
    """A LightningModule whose training step is one communication round.

    A method subclasses it with ``training_step(cohort)``, ``configure_optimizers`` and
    :meth:`client`.

    Args:
        net: the global model.
        engine: where the clients train.
        local_epochs: passes of a client over its data in a round.
        local_steps: instead of epochs, this many batches.
    """

    shares_models = True  # whether what clients send up includes their models

    def __init__(
        self, net: nn.Module, engine: "Engine", local_epochs: int, local_steps: int | None
    ) -> None:
        super().__init__()
        require(local_epochs >= 1, "local_epochs", "must be at least 1", local_epochs)
        require(local_steps is None or local_steps >= 1, "local_steps", "must be ≥ 1", local_steps)
        self.automatic_optimization = False
        self.net = net
        self.engine = engine
        self.local_epochs = local_epochs
        self.local_steps = local_steps
        self.bytes_down = 0
        self.bytes_up = 0
        self.report: dict[str, float] = {}  # what the clients of the last round told
        self._session: Session | None = None
        self._client_states: dict[int, State] = {}

    # -- for methods ---------------------------------------------------------------------------

    @abstractmethod
    def client(self) -> "FederatedClient":
        """The client half of the method; it owns a net of its own."""

    @property
    def round(self) -> int:
        """The round being run, from 1."""
        return self.current_epoch + 1

    def global_state(self) -> State:
        """The global model: parameters and buffers."""
        return {name: tensor.detach() for name, tensor in self.net.state_dict().items()}

    def local_updates(self, message: Message, cohort: Sequence[int]) -> Iterator[ClientUpdate]:
        """Trains a cohort and streams what comes back; reports and counts on the way.

        Args:
            message: what every client gets.
            cohort: the clients' ids.
        """
        assert self._session is not None
        reports: list[dict[str, float]] = []
        down, up = message.nbytes * len(cohort), 0
        try:
            for update in self._session.run(message, cohort):
                up += update.nbytes if self.shares_models else update.extra_nbytes
                reports.append(update.metrics)
                self._tell("on_client_end", update, len(cohort))
                yield update
        except BaseException:
            self.close()
            raise
        self.bytes_down += down
        self.bytes_up += up
        self.report = cohort_statistics(reports)
        self.report |= {"comm/bytes_down": down, "comm/bytes_up": up}
        self.log_round(self.report)

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
        examples = data.test[:2]
        modes = {module: module.training for module in self.net.modules()}
        self.net.eval()
        inputs = examples.transform(examples.inputs, None)
        for parameter in self.net.parameters():
            inputs = inputs.to(parameter if inputs.is_floating_point() else parameter.device)
            break
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
            shape == (2, data.num_classes),
            "num_classes",
            f"{data.name} has {data.num_classes} classes, the net gives {shape[-1]} logits",
        )
        for key, build in ("server_optimizer", self), ("optimizer", self.client()):
            try:
                build.configure_optimizers()
            except (ValueError, TypeError) as error:
                raise SettingError(key, str(error)) from error

    def configure_callbacks(self) -> list[Any]:
        """Ends the workers on errors, and hides the gradient clipping for a moment.

        Clipping is the clients'; the server's own step is never clipped. Lightning refuses it with
        manual optimization just after this hook, so :meth:`setup` gives it back.
        """
        self._clip = self.trainer.gradient_clip_val
        self.trainer.gradient_clip_val = None
        return [_CloseOnError()]

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
        job = Job(
            client=self.client(),
            data=data.client_data,
            device=self.trainer.strategy.root_device,
            trainer={
                "precision": self.trainer.precision,
                "max_epochs": self.local_epochs if self.local_steps is None else -1,
                "max_steps": -1 if self.local_steps is None else self.local_steps,
                "gradient_clip_val": self.trainer.gradient_clip_val,
                "gradient_clip_algorithm": self.trainer.gradient_clip_algorithm,
            },
            states=self._client_states,
        )
        self._session = self.engine.open(job, data.cohort_size)

    def on_train_end(self) -> None:
        """Closes the engine."""
        self.close()

    def forget(self) -> None:
        """Starts a new run: what an earlier one left beside the model goes."""
        self.bytes_down = self.bytes_up = 0
        self._client_states = {}

    def close(self) -> None:
        """Ends the engine's workers; may be called twice."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what the server knows beside the model; a method adds its own.

        Args:
            checkpoint: Lightning's.
        """
        checkpoint["fedgkd_pl"] = {
            "method": type(self).__name__,
            "bytes": [self.bytes_down, self.bytes_up],
            "client_states": self._client_states,
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
        self.bytes_down, self.bytes_up = saved["bytes"]
        self._client_states = saved["client_states"]

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
        values = self._evaluation(split).finish()
        self.log_round({f"{split}/{name}": value for name, value in values.items()})

    def _evaluation(self, split: str) -> Evaluation:
        return cast(Evaluation, self.evaluations[split])

    def log_round(self, values: dict[str, float]) -> None:
        """Logs per round; ``step`` sets the loggers' x-axis to the number of rounds done.

        Args:
            values: by name.
        """
        fitting = self.trainer.state.fn == "fit" and not self.trainer.sanity_checking
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
