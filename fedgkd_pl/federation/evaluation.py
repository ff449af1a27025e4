"""The global model's scores over the server's splits, and statistics of the clients' reports."""

from collections.abc import Collection, Mapping, Sequence
from typing import cast

import numpy as np
from fedgkd_pl.data.examples import Batch
from fedgkd_pl.federation.scores import Found, Scores
from torch import nn


class Evaluation(nn.Module):
    """The scores of one net, by split; a module, so that its metrics follow the net's device."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.ModuleDict()

    def prepare(self, scores: Mapping[str, Scores]) -> None:
        """Takes new scores for every split."""
        self.scores.update(scores)

    def step(self, net: nn.Module, batch: Batch, batch_idx: int, split: str) -> None:
        """Evaluates a batch of a split."""
        for other, scores in self.scores.items():
            if other != split:  # a LightningModule has the same metrics for all splits
                cast(Scores, scores).pause(net)
        cast(Scores, self.scores[split]).step(net, batch, batch_idx, split)

    def finish(self, net: nn.Module, split: str) -> Found:
        """The values of a split by name, and its confusion matrix where there are classes."""
        return cast(Scores, self.scores[split]).finish(net)

    @property
    def names(self) -> Collection[str]:
        """What is measured over a split, as far as it is known before."""
        return [name for scores in self.scores.values() for name in cast(Scores, scores).names]


def cohort_statistics(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    """``client/<name>_mean``, ``_std``, ``_p10``, ``_p90`` over the clients that report a name."""
    statistics: dict[str, float] = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        values = np.array([report[name] for report in reports if name in report])
        p10, p90 = np.percentile(values, [10, 90])
        four = {"mean": values.mean(), "std": values.std(), "p10": p10, "p90": p90}
        statistics |= {f"client/{name}_{label}": float(value) for label, value in four.items()}
    return statistics
