"""What is measured of the global model, and what is made of the clients' reports."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)


class Evaluation(nn.Module):
    """Accuracy, loss, macro F1 and the accuracy of every class, over one split.

    Args:
        num_classes: number of classes.
    """

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
        """Takes a batch in.

        Args:
            logits: of the net.
            labels: the truth.
        """
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
    """``client/<name>_mean``, ``_std``, ``_p10`` and ``_p90`` of what the clients report.

    Args:
        reports: the metrics of each client; over those that report a name.
    """
    statistics: dict[str, float] = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        values = np.array([report[name] for report in reports if name in report])
        p10, p90 = np.percentile(values, [10, 90])
        four = {"mean": values.mean(), "std": values.std(), "p10": p10, "p90": p90}
        statistics |= {f"client/{name}_{label}": float(value) for label, value in four.items()}
    return statistics
