"""A run in TensorBoard: charts for the paper's questions, figures."""

from collections.abc import Collection
from typing import Any

import yaml
from fedgkd_pl.errors import at_least
from fedgkd_pl.federation.callback import FederatedCallback
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.runs.files import RunFiles
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from typing_extensions import override

Layout = dict[str, dict[str, list[Any]]]  # category → chart → its type and tags


CHARTS: tuple[tuple[str, ...], ...] = (
    # the callback that a chart needs, its category and name; a pattern of tags, or how tags begin,
    # and the ends of a value and the margin around it. A run has one colour in all tags, so test
    # and validation have charts of their own.
    ("", "accuracy", "global model, test", "test/acc"),
    ("", "accuracy", "global model, validation", "val/acc"),
    ("LocalModels", "accuracy", "local models: mean, worst to best", "local/acc_ mean min max"),
    ("ClientEvaluation", "accuracy", "clients' own samples", r"clients/\w+_acc_(mean|worst10)"),
    ("AveragedModel", "accuracy", "averaged model, test", "average/acc"),
    ("AveragedModel", "accuracy", "averaged model, validation", "average/val_acc"),
    ("", "losses", "clients: the whole and its parts", r"client/(?!acc_)\w+_mean"),
    ("", "losses", "global model, test", "test/loss"),
    ("", "losses", "global model, validation", "val/loss"),
    ("AveragedModel", "losses", "averaged model, test", "average/loss"),
    ("AveragedModel", "losses", "averaged model, validation", "average/val_loss"),
    ("", "client spread", "acc: mean, 10th to 90th percentile", "client/acc_ mean p10 p90"),
    ("", "client spread", "loss: mean, 10th to 90th percentile", "client/loss_ mean p10 p90"),
    ("", "bytes", "of a round", "comm/bytes_(down|up)"),
    ("Communication", "bytes", "so far, in 10⁶", "comm/total_mb_(down|up)"),
    ("Communication", "seconds", "of a round", "time/(clients|evaluation)"),
    ("ClientDrift", "drift", "how far clients move", "drift/norm_(mean|max)"),
    ("ClientDrift", "drift", "in how different directions", "drift/(cosine|diversity)"),
    ("Forgetting", "forgetting", "over classes", "forgetting/(mean|max)"),
    ("TeacherAgreement", "teacher", "agreement of clients", "teacher/agreement_(mean|min)"),
    ("TeacherAgreement", "teacher", "accuracy", "teacher/acc"),
)


class Dashboard(FederatedCallback):
    """Adds to what TensorBoard shows of a run; does nothing where it is not the logger.

    CUSTOM SCALARS gets charts of what belongs together, TEXT the settings, and IMAGES the
    confusion matrix of the test set.

    Args:
        every_n_rounds: how often the confusion matrix is drawn; when the run ends in any case.
    """

    def __init__(self, every_n_rounds: int = 10) -> None:
        at_least(1, every_n_rounds=every_n_rounds)
        self.every_n_rounds = every_n_rounds
        self.undrawn: tuple[int, Tensor] | None = None  # the last round and its confusion matrix

    @override
    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Writes the charts, and of a new run the settings."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        names = {type(callback).__name__ for callback in callbacks}
        settings = [callback.config for callback in callbacks if isinstance(callback, RunFiles)]
        for logger in tensorboards(trainer):
            logger.experiment.add_custom_scalars(layout(names))
            if trainer.current_epoch == 0 and any(settings):
                text = yaml.safe_dump(settings[0], sort_keys=False, allow_unicode=True)
                logger.experiment.add_text("config", f"```yaml\n{text}```")

    @override
    def on_evaluated(
        self, trainer: Trainer, pl_module: Any, split: str, values: Any, confusion: Tensor | None
    ) -> None:
        fitting = trainer.state.fn == "fit" and not trainer.sanity_checking
        if confusion is not None and split == "test" and fitting:
            self.undrawn = pl_module.round, confusion
            if pl_module.round % self.every_n_rounds == 0:
                self._draw(trainer, pl_module)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Draws the last round."""
        self._draw(trainer, pl_module)

    def _draw(self, trainer: Trainer, server: FederatedServer) -> None:
        from fedgkd_pl.plots.figures import confusion_chart
        from fedgkd_pl.plots.style import opaque

        if self.undrawn is not None:
            (number, confusion), self.undrawn = self.undrawn, None
            data = server.datamodule
            for logger in tensorboards(trainer):
                title = f"{data.name}, round {number}"
                chart = confusion_chart(confusion.numpy(), title, data.class_names)
                logger.experiment.add_figure("test/confusion", opaque(chart), number)


def layout(callbacks: Collection[str]) -> Layout:
    """The charts of TensorBoard's CUSTOM SCALARS, none of them empty.

    TensorBoard shows the layouts of all runs of a folder merged, and a chart once if it is the same
    in all of them; so what depends on the method is named by a pattern, not tag by tag.

    Args:
        callbacks: the names of the classes whose values may be shown.
    """
    charts: Layout = {}
    for needed, category, name, tags in CHARTS:
        start, *ends = tags.split()
        margin = ["Margin", [start + end for end in ends]]
        content = margin if ends else ["Multiline", [f"{start}$"]]  # else longer tags fit, too
        if not needed or needed in callbacks:
            charts.setdefault(category, {})[name] = content
    return charts


def tensorboards(trainer: Trainer) -> list[TensorBoardLogger]:
    """The loggers that write for TensorBoard."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
