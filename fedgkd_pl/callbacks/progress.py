"""The progress display: rounds, the clients of the round, accuracy, time left."""

import sys
import time
from datetime import timedelta
from typing import Any

from fedgkd_pl.federation.callback import FederatedCallback
from fedgkd_pl.federation.message import ClientFailure, ClientUpdate
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from typing_extensions import override


class RoundProgress(ProgressBar, FederatedCallback):
    """A live display on a terminal; one plain line per round elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True
        self.live: Progress | None = None
        self.tasks: dict[str, TaskID] = {}
        self.first_round = 0
        self.started = 0.0

    def disable(self) -> None:
        """Shows nothing."""
        self.enabled = False

    def enable(self) -> None:
        """Shows again."""
        self.enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the display."""
        self.first_round, self.started = trainer.current_epoch, time.perf_counter()
        if self.enabled and sys.stdout is not None and sys.stdout.isatty():
            note = TextColumn("{task.fields[note]}")
            name = TextColumn("{task.description:>7}")
            self.live = Progress(name, BarColumn(bar_width=20), MofNCompleteColumn(), note)
            totals = {"rounds": trainer.max_epochs, "clients": None}
            self.tasks = {n: self.live.add_task(n, total=t, note="") for n, t in totals.items()}
            self.live.update(self.tasks["rounds"], completed=trainer.current_epoch)
            self.live.start()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts counting clients."""
        if self.live:
            self.live.reset(self.tasks["clients"])

    @override
    def on_client_end(
        self, trainer: Trainer, pl_module: LightningModule, update: ClientUpdate, cohort_size: int
    ) -> None:
        """Counts a client."""
        self._count(cohort_size)

    @override
    def on_client_failed(
        self, trainer: Trainer, pl_module: LightningModule, failure: ClientFailure, cohort_size: int
    ) -> None:
        """Counts a client that is left out, too."""
        self._count(cohort_size)

    @override
    def on_server_step(self, trainer: Trainer, pl_module: Any, step: int, total: int) -> None:
        """Shows how far the server's own training is."""
        if self.live:
            if "server" not in self.tasks:
                self.tasks["server"] = self.live.add_task("server", total=total, note="")
            self.live.update(self.tasks["server"], total=total, completed=step)

    def _count(self, cohort_size: int) -> None:
        if self.live:
            self.live.update(self.tasks["clients"], total=cohort_size, advance=1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows the round's accuracy and the time left."""
        done, total = trainer.current_epoch + 1, trainer.max_epochs or 0
        per_round = (time.perf_counter() - self.started) / (done - self.first_round)
        metrics = trainer.progress_bar_metrics
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        if steps := trainer.callback_metrics.get("server/steps"):
            shown += f"  server {int(steps)} steps"
        left = timedelta(seconds=round(per_round * max(0, total - done)))
        time_left = f"{per_round:.1f} s/round  {left} left"
        if self.live:
            self.live.update(self.tasks["rounds"], completed=done, note=shown)
            self.live.update(self.tasks["clients"], note=time_left)
        elif self.enabled:
            print(f"round {done}/{total}  {shown}  {time_left}", flush=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Closes the display."""
        self._stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Closes the display, so that the error stands on a clean line."""
        self._stop()

    def _stop(self) -> None:
        if self.live:
            self.live.stop()
            self.live = None
