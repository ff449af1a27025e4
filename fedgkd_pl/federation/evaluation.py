"""What is measured of the global model, and what is logged of a round."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.examples import Batch
from fedgkd_pl.errors import SettingError
from fedgkd_pl.federation.callback import call_hooks
from fedgkd_pl.federation.message import State
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

if TYPE_CHECKING:
    from fedgkd_pl.federation.server import FederatedServer


class GlobalModel(LightningModule):
    """The global model, evaluated on the server's data; a round is an epoch."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.report: dict[str, float] = {}  # what was logged of the last round
        self.evaluations = nn.ModuleDict()  # by split

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

    def global_state(self) -> State:
        """The global model: parameters and buffers."""
        return {name: tensor.detach() for name, tensor in self.net.state_dict().items()}

    def some_inputs(self, data: FederatedDataModule) -> Tensor:
        """Two test samples as the net sees them."""
        examples = data.test[:2]
        inputs = examples.transform(examples.inputs, None)
        for parameter in self.net.parameters():
            return inputs.to(parameter if inputs.is_floating_point() else parameter.device)
        return inputs

    def forward(self, x: Tensor) -> Tensor:
        """The global model's logits."""
        logits: Tensor = self.net(x)
        return logits

    def setup(self, stage: str) -> None:
        """Builds the metrics."""
        for split in "val", "test":
            self.evaluations[split] = Evaluation(self.datamodule.num_classes)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Evaluates on the server's validation set and, within ``fit``, the test set."""
        self._evaluate(batch, self.datamodule.eval_splits()[dataloader_idx])

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Evaluates on the test set."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Class probabilities."""
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
            bar = name in ("val/acc", "test/acc")
            self.log(name, float(value), prog_bar=bar, on_step=False, on_epoch=True, batch_size=1)

    def _evaluate(self, batch: Batch, split: str) -> None:
        x, y = batch
        cast(Evaluation, self.evaluations[split]).update(self.forward(x), y)

    def _log_metrics(self, split: str) -> None:
        evaluation = cast(Evaluation, self.evaluations[split])
        confusion = evaluation.confusion()
        values = evaluation.finish()
        self.log_round({f"{split}/{name}": value for name, value in values.items()})
        call_hooks(cast("FederatedServer", self), "on_evaluated", split, values, confusion)


class Evaluation(nn.Module):
    """Accuracy, loss, macro F1 and the accuracy of every class, over one split."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.loss = MeanMetric()
        self.counts = MulticlassConfusionMatrix(num_classes)
        self.scores = MetricCollection(
            {
                "acc": MulticlassAccuracy(num_classes, average="micro"),
                "f1": MulticlassF1Score(num_classes, average="macro"),
                "class_acc": MulticlassAccuracy(num_classes, average="none"),
            }
        )

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Takes a batch in."""
        self.loss.update(cross_entropy(logits, labels, reduction="none"))
        self.scores.update(logits, labels)
        self.counts.update(logits, labels)

    def confusion(self) -> Tensor:
        """How many samples of each class (row) were taken for each class (column)."""
        counts: Tensor = self.counts.compute().cpu()
        return counts

    def finish(self) -> dict[str, float]:
        """The values, by name; starts anew."""
        values = self.scores.compute()
        classes = values.pop("class_acc").tolist()
        result = {name: value.item() for name, value in values.items()}
        result["loss"] = self.loss.compute().item()
        result |= {f"class_acc/{number}": value for number, value in enumerate(classes)}
        self.loss.reset()
        self.scores.reset()
        self.counts.reset()
        return result


def cohort_statistics(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    """``client/<name>_mean``, ``_std``, ``_p10``, ``_p90`` over the clients that report a name."""
    statistics: dict[str, float] = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        values = np.array([report[name] for report in reports if name in report])
        p10, p90 = np.percentile(values, [10, 90])
        four = {"mean": values.mean(), "std": values.std(), "p10": p10, "p90": p90}
        statistics |= {f"client/{name}_{label}": float(value) for label, value in four.items()}
    return statistics
