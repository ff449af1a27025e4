"""What is measured of the global model, and what is logged of a round."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.examples import Batch
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.federation.callback import call_hooks
from fedgkd_pl.federation.losses import CrossEntropy, LocalLoss
from fedgkd_pl.federation.message import State
from fedgkd_pl.federation.own_module import has_outputs, outputs_of
from fedgkd_pl.federation.scores import Scores, scores_of
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

if TYPE_CHECKING:
    from fedgkd_pl.federation.server import FederatedServer

BAR = ("val/acc", "test/acc")
OTHER_BAR = ("val/loss", "test/loss")  # where there is no accuracy


class GlobalModel(LightningModule):
    """The global model, evaluated on the server's data; a round is an epoch."""

    local_loss: LocalLoss = CrossEntropy()  # of clients, which decides what is measured
    metrics: Mapping[str, Metric] = {}  # measured beside what always is
    models_differ = False  # whether :meth:`model_of` depends on the client and its task

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.report: dict[str, float] = {}  # what was logged of the last round
        self.scores = nn.ModuleDict()  # by split

    @property
    def round(self) -> int:
        """The round being run, from 1."""
        return self.current_epoch + 1

    @property
    def datamodule(self) -> FederatedDataModule:
        """The data of the Trainer that this is attached to."""
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, FederatedDataModule):
            raise SettingError("data", "a FederatedDataModule is needed: trainer.fit(model, data)")
        return data

    def model_of(self, client: int, place: int) -> State:
        """The model that a client has for the task at a place of its sequence, from 0."""
        return self.global_state()

    def global_state(self) -> State:
        """The global model: parameters and buffers."""
        return {name: tensor.detach() for name, tensor in self.net.state_dict().items()}

    def global_copy(self) -> State:
        """The same on the CPU, as it is now, whatever happens to the net."""
        return {name: tensor.cpu().clone() for name, tensor in self.global_state().items()}

    def some_inputs(self, data: FederatedDataModule) -> Tensor:
        """Two test samples as the net sees them."""
        examples = data.test[:2]
        inputs = examples.transform(examples.inputs, None)
        for parameter in self.net.parameters():
            return inputs.to(parameter if inputs.is_floating_point() else parameter.device)
        return inputs

    def forward(self, x: Tensor) -> Tensor:
        """The global model's logits."""
        return outputs_of(self.net, x)

    def new_scores(self, data: FederatedDataModule, split: str = "val") -> Scores:
        """What is measured of a model over a split."""
        return scores_of(self.net, self.local_loss, data, self.metrics, split)

    def setup(self, stage: str) -> None:
        """Builds the metrics."""
        for split in "val", "test":
            self.scores[split] = self.new_scores(self.datamodule, split)

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
        with torch.autocast(self.device.type, enabled=False):
            return self.forward(batch[0]).softmax(dim=1)

    def on_validation_epoch_end(self) -> None:
        """Logs the round's metrics."""
        for split in self.datamodule.eval_splits():
            self._log_metrics(split)

    def on_test_epoch_end(self) -> None:
        """Logs the test metrics."""
        self._log_metrics("test")

    def log_round(self, values: dict[str, float]) -> None:
        """Logs per round; ``step`` sets the loggers' x-axis to the number of rounds done."""
        fitting = self.trainer.state.fn == "fit" and not self.trainer.sanity_checking
        if fitting:
            self.report |= values
        for name, value in (values | {"step": self.round} if fitting else values).items():
            bar = name in BAR or (name in OTHER_BAR and "acc" not in self.score_names)
            number = torch.tensor(float(value))  # a float would be copied to the device
            self.log(name, number, prog_bar=bar, on_step=False, on_epoch=True, batch_size=1)

    @property
    def score_names(self) -> Collection[str]:
        """What is measured over a split, as far as it is known before."""
        return [name for scores in self.scores.values() for name in cast(Scores, scores).names]

    def _evaluate(self, batch: Batch, batch_idx: int, split: str) -> None:
        for other, scores in self.scores.items():
            if other != split:  # a module has the same metrics for all splits
                cast(Scores, scores).pause(self.net)
        # whatever autocast clients train in
        with torch.autocast(self.device.type, enabled=False):
            cast(Scores, self.scores[split]).step(self.net, batch, batch_idx, split)

    def _log_metrics(self, split: str) -> None:
        values, confusion = cast(Scores, self.scores[split]).finish(self.net)
        self.log_round({f"{split}/{name}": value for name, value in values.items()})
        call_hooks(cast("FederatedServer", self), "on_evaluated", split, values, confusion)


def cohort_statistics(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    """``client/<name>_mean``, ``_std``, ``_p10``, ``_p90`` over the clients that report a name."""
    statistics: dict[str, float] = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        values = np.array([report[name] for report in reports if name in report])
        p10, p90 = np.percentile(values, [10, 90])
        four = {"mean": values.mean(), "std": values.std(), "p10": p10, "p90": p90}
        statistics |= {f"client/{name}_{label}": float(value) for label, value in four.items()}
    return statistics
