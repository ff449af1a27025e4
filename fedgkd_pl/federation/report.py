"""The report of one client: means over its last local epoch."""

import math
from typing import cast

from fedgkd_pl.federation.own_module import Recorder
from torch import Tensor, nn
from torchmetrics import Metric

TASK = "task"  # the name under which a LightningModule's own loss is reported


class Report:
    """Sums of what a client measures batch by batch; cheaper than ``self.log``.

    Args:
        recorder: of what a LightningModule logs itself; None for a plain net.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder
        self.metrics: nn.ModuleDict | None = None  # the server's
        self.reset()

    def reset(self) -> None:
        """Starts a new epoch."""
        self._sums: dict[str, Tensor] = {}
        self._seen = 0
        if self.recorder is not None:
            self.recorder.reset()
        for metric in self._metrics().values():
            metric.reset()

    def add(self, size: int, parts: dict[str, Tensor]) -> None:
        """Adds means over a batch of some size."""
        self._seen += size
        for name, value in parts.items():
            total = value.detach() * size
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    def measure(self, outputs: Tensor, targets: Tensor) -> None:
        """Updates the metrics with a batch."""
        for metric in self._metrics().values():
            metric.update(outputs, targets)

    def values(self) -> dict[str, float]:
        """The means so far, and the metrics that are finite."""
        values = {name: float(total) / self._seen for name, total in self._sums.items()}
        if self.recorder is not None:
            if TASK not in values:
                raise RuntimeError("the client's objective does not use task_loss")
            values = self.recorder.values() | values
        computed = {name: float(metric.compute()) for name, metric in self._metrics().items()}
        # of an area under a curve, a class may be missing
        return values | {name: value for name, value in computed.items() if math.isfinite(value)}

    def _metrics(self) -> dict[str, Metric]:
        return {name: cast(Metric, metric) for name, metric in (self.metrics or {}).items()}
