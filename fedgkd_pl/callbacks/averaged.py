"""The mean of the last global models, evaluated beside the newest one."""

from typing import Any

from fedgkd_pl.errors import require
from fedgkd_pl.federation.callback import FederatedCallback
from fedgkd_pl.federation.evaluation import Evaluation
from fedgkd_pl.federation.hardware import evaluating
from fedgkd_pl.federation.message import State
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.federation.teachers import FrozenNet, MovingMean, TeacherBuffer
from fedgkd_pl.models.heads import Ensemble
from fedgkd_pl.runs.files import run_folder
from fedgkd_pl.runs.folder import AVERAGE
from fedgkd_pl.storage.checkpoint import seal
from fedgkd_pl.storage.files import commit
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override


class AveragedModel(FederatedCallback):
    """Averages the global models of the last rounds, and evaluates the average beside them.

    The average is the plain mean of the last ``size`` global models (of all there are in the first
    rounds), or with ``decay`` = β their exponential moving average without bias,
    Σ β^(t−i) w_i / Σ β^(t−i). The model that a run starts from is not in it, and a round that
    fails adds none. It never enters training.

    Whenever the global model is evaluated, the average is, on the same batches: logs
    ``average/acc`` and ``average/loss`` of the test set, ``average/val_acc`` and
    ``average/val_loss`` of the validation set. What it is made of travels in the checkpoint. At
    the end of a run with :class:`~fedgkd_pl.RunFiles` it is written to ``average.safetensors``.

    Args:
        size: how many models the plain mean is of; 5 unless ``decay`` is given.
        decay: β of the moving average, between 0 and 1.
        export: whether to write ``average.safetensors``.
    """

    logs = ("average/acc", "average/loss", "average/val_acc", "average/val_loss")

    needs_whole = True

    def __init__(
        self, size: int | None = None, decay: float | None = None, export: bool = True
    ) -> None:
        require(size is None or size >= 1, "size", "must be at least 1", size)
        require(decay is None or 0 < decay < 1, "decay", "must be between 0 and 1", decay)
        text = "is another average than that of decay: give one of them"
        require(size is None or decay is None, "size", text, size)
        self.size = 5 if size is None and decay is None else size  # as the paper's buffer
        self.decay = decay
        self.export = export
        self.models: TeacherBuffer | MovingMean = (
            TeacherBuffer(maxlen=self.size) if decay is None else MovingMean(decay)
        )
        self.net: FrozenNet | None = None
        self.evaluation = Evaluation()

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"size": self.size, "decay": self.decay, "models": self.models.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From the checkpoint; refuses that of another average."""
        before = state_dict["size"], state_dict["decay"]
        text = f"a run is resumed with the average it began with; size and decay were {before}"
        require(before == (self.size, self.decay), "size", text)
        self.models.load_state_dict(state_dict["models"])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """A new run starts without models; those of a checkpoint come after this hook."""
        if stage == "fit" and trainer.current_epoch == 0:
            self.models.reset()

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Copies the net, once for all rounds."""
        self.net, data = FrozenNet(pl_module.net), pl_module.datamodule
        splits = data.eval_splits()
        self.evaluation.update({split: pl_module.new_scores(data, split) for split in splits})
        self.evaluation.to(pl_module.device)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Takes the new global model in, if the round counts."""
        if pl_module.round not in pl_module.failed_rounds:
            state = pl_module.global_state()
            own = pl_module.client_nets.one_per_client
            self.models.append(Ensemble.trained(state) if own else state)

    def average(self, server: FederatedServer) -> State:
        """The average so far; before the first round that counts, what the run starts from."""
        return server.global_state() | (self.models.mean() if self.models else {})

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Loads the average, in a round and not in ``validate`` or the sanity check."""
        if self.net:
            self.net.load(self.average(pl_module), pl_module.device)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Evaluates on the batch that the global model was evaluated on."""
        if self.net:
            split = pl_module.datamodule.eval_splits()[dataloader_idx]
            with evaluating(trainer.precision_plugin, pl_module.device):
                self.evaluation.step(self.net.net, batch, batch_idx, split)

    @override
    def on_evaluated(
        self, trainer: Trainer, pl_module: Any, split: str, values: Any, confusion: Tensor | None
    ) -> None:
        """Logs the round."""
        if self.net:
            found = self.evaluation.finish(self.net.net, split)[0]
            part = "" if split == "test" else f"{split}_"
            names = [name for name in ("acc", "loss") if name in found]
            pl_module.log_round({f"average/{part}{name}": found[name] for name in names})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives the net's memory back."""
        self.net = None

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Writes the average; also of a run that only lacked it."""
        folder = run_folder(trainer)
        if folder and self.export:
            commit(folder / AVERAGE, [seal(self.average(pl_module))])
