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
        self.live: Progress | None = None  # on a terminal
        self.tasks: dict[str, TaskID] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the display."""
        self.first_round, self.started = trainer.current_epoch, time.perf_counter()
        if sys.stdout is not None and sys.stdout.isatty():
            name, note = TextColumn("{task.description:>7}"), TextColumn("{task.fields[note]}")
            self.live = Progress(name, BarColumn(bar_width=20), MofNCompleteColumn(), note)
            for task in "rounds", "clients", "server":
                shown = task != "server"  # until it trains
                self.tasks[task] = self.live.add_task(task, total=None, visible=shown, note="")
            self._show("rounds", total=trainer.max_epochs, completed=trainer.current_epoch)
            self.live.start()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts counting clients."""
        self._show("clients", completed=0)

    @override
    def on_client_end(
        self, trainer: Trainer, pl_module: LightningModule, update: ClientUpdate, cohort_size: int
    ) -> None:
        """Counts a client."""
        self._show("clients", total=cohort_size, advance=1)

    @override
    def on_client_failed(
        self, trainer: Trainer, pl_module: LightningModule, failure: ClientFailure, cohort_size: int
    ) -> None:
        """Counts a client that is left out, too."""
        self._show("clients", total=cohort_size, advance=1)

    @override
    def on_server_step(self, trainer: Trainer, pl_module: Any, step: int, total: int) -> None:
        """Shows how far the server's own training is."""
        self._show("server", total=total, completed=step, visible=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows the round's accuracy and the time left."""
        done, total = trainer.current_epoch + 1, trainer.max_epochs or 0
        per_round = (time.perf_counter() - self.started) / (done - self.first_round)
        metrics = trainer.progress_bar_metrics
        scores = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        if steps := trainer.callback_metrics.get("server/steps"):
            scores += f"  server {int(steps)} steps"
        left = timedelta(seconds=round(per_round * max(0, total - done)))
        time_left = f"{per_round:.1f} s/round  {left} left"
        self._show("rounds", completed=done, note=scores)
        self._show("clients", note=time_left)
        if not self.live:
            print(f"round {done}/{total}  {scores}  {time_left}", flush=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Closes the display."""
        if self.live:
            self.live.stop()
            self.live = None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Closes the display, so that the error stands on a clean line."""
        self.on_train_end(trainer, pl_module)

    def _show(self, task: str, **values: Any) -> None:
        if self.live:
            self.live.update(self.tasks[task], **values)
