"""What is measured of the global model over the server's splits, and of what clients report."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from fedgkd_pl.data.examples import Batch, Batches, TaskSequences
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.federation.hardware import evaluating
from fedgkd_pl.federation.losses import CrossEntropy, LocalLoss
from fedgkd_pl.federation.message import NAME
from fedgkd_pl.federation.own_module import NEEDS, Recorder, is_own_module, recording, run_step
from fedgkd_pl.seeds import seeded
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, MeanMetric, MeanSquaredError, Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MultilabelAccuracy,
    MultilabelF1Score,
)
from typing_extensions import override

if TYPE_CHECKING:
    from fedgkd_pl.data.datamodule import FederatedDataModule
    from fedgkd_pl.federation.server import FederatedServer

Found = tuple[dict[str, float], Tensor | None]  # values by name, and the confusion matrix
RETURNED = "returned_loss"


class Scores(nn.Module):
    """The loss, what the task is scored by, and what else was asked for.

    Of classes: ``acc``, macro ``f1`` and the accuracy of every class; of labels ``acc`` (of all
    decisions) and macro ``f1``; of values ``mae`` and ``rmse``.

    Args:
        loss: None where a module has one of its own for something else than classes.
        width: how many classes or labels there are.
        metrics: what else to measure; they are copied.
    """

    def __init__(self, loss: LocalLoss | None, width: int, metrics: Mapping[str, Metric]) -> None:
        super().__init__()
        self.local_loss = loss
        self.tasks: TaskSequences | None = None  # a sample's task is known where there are some
        self.loss = MeanMetric()
        found: dict[str, Metric] = {}
        if loss is not None and loss.targets == "classes":
            found["acc"] = MulticlassAccuracy(width, average="micro")
            found["f1"] = MulticlassF1Score(width, average="macro")
            found["class_acc"] = MulticlassAccuracy(width, average="none")
            found["confusion"] = MulticlassConfusionMatrix(width)
        elif loss is not None and loss.targets == "labels":
            found["acc"] = MultilabelAccuracy(width, average="micro")
            found["f1"] = MultilabelF1Score(width, average="macro")
        elif loss is not None:
            found = {"mae": MeanAbsoluteError(), "rmse": MeanSquaredError(squared=False)}
        for name in metrics:
            taken = name in (*found, "loss")
            require(not taken, f"metrics.{name}", "is measured already: give it another name")
        self.asked = dict(metrics)
        self.metrics = MetricCollection({**found, **deepcopy(self.asked)})

    @property
    def names(self) -> set[str]:
        """What is measured, but for single classes."""
        loss = [] if self.local_loss is None else ["loss"]
        return {*loss, *map(str, self.metrics.keys())} - {"class_acc", "confusion"}

    def step(self, net: nn.Module, batch: Batch, batch_idx: int, split: str) -> None:
        """Evaluates a net on a batch."""
        x, y = batch
        outputs = net(x)
        self.update(outputs if self.tasks is None else self.tasks.known(outputs, y), y)

    def update(self, outputs: Tensor, y: Tensor) -> None:
        """Takes the outputs for a batch in."""
        if self.local_loss is not None:
            self.loss.update(self.local_loss.each(outputs, y))
        y = y if self.local_loss is None else self.local_loss.for_metrics(y)
        if self.metrics:
            self.metrics.update(outputs, y)

    def finish(self, net: nn.Module) -> Found:
        """The values, and of classes how many of each (row) were taken for each (column)."""
        values = self.metrics.compute() if self.metrics else {}
        confusion, classes = values.pop("confusion", None), values.pop("class_acc", ())
        result = {name: value.item() for name, value in values.items()}
        if self.local_loss is not None:
            result["loss"] = self.loss.compute().item()
        result |= {f"class_acc/{number}": value.item() for number, value in enumerate(classes)}
        self.reset()
        return result, None if confusion is None else confusion.cpu()

    def check_metrics(self, outputs: Tensor, y: Tensor) -> None:
        """Raises a clear error for a metric that cannot measure such outputs."""
        y = y if self.local_loss is None else self.local_loss.for_metrics(y)
        for name, metric in self.asked.items():
            require(NAME.fullmatch(name) is not None, "metrics", "must be plain names", name)
            with failing(
                f"metrics.{name}", f"does not measure outputs of shape {tuple(outputs.shape)}"
            ):
                value = deepcopy(metric).to(outputs.device)(outputs, y)
            one = isinstance(value, Tensor) and value.numel() == 1
            require(one, f"metrics.{name}", "must give one number, such as by an average")

    def reset(self) -> None:
        """Starts anew."""
        self.loss.reset()
        self.metrics.reset()

    def pause(self, net: nn.Module) -> None:
        """Called before the same net is evaluated on another split."""


class ModuleScores(Scores):
    """What a module's own ``validation_step`` (for the test set ``test_step``, if it has one) logs.

    Without one of them: the loss of its ``training_step``. Where the module shows the logits of
    classes on the way, the usual scores are measured beside its own; of one name, its own is taken.
    """

    def __init__(self, loss: LocalLoss | None, width: int, metrics: Mapping[str, Metric]) -> None:
        super().__init__(loss, width, metrics)
        self.width = width
        self.recorder = Recorder()
        self.stage = ""  # of the steps since the last pause
        self.shown = False  # whether they have shown outputs that can be measured
        self.found: Found = ({}, None)
        self.known: set[str] = {"loss"}

    @property
    def names(self) -> set[str]:
        """What a trial has measured."""
        return self.known

    @override
    def step(self, net: nn.Module, batch: Batch, batch_idx: int, split: str) -> None:
        module = cast(LightningModule, net)
        with recording(module, self.recorder):
            if not self.stage:
                self.stage = stage_of(module, split)
                self._call(module, "start")
            self.recorder.size = len(batch[0])
            step = getattr(module, f"{self.stage}_step")
            loss, outputs = run_step(module, step, batch, batch_idx)
        if loss is not None and loss.numel() == 1:
            self.recorder.log(RETURNED, loss)
        if outputs is not None and (
            "confusion" not in self.metrics or outputs.shape[1:2] == (self.width,)
        ):
            self.shown = True
            self.update(outputs, batch[1])

    def _call(self, module: LightningModule, when: str) -> None:
        if self.stage != "training":
            getattr(module, f"on_{self.stage}_epoch_{when}")()

    def pause(self, net: nn.Module) -> None:
        """Reads the module's metrics before another split changes them."""
        if not self.stage:
            return
        module = cast(LightningModule, net)
        with recording(module, self.recorder):
            self._call(module, "end")
        values = self.recorder.values()
        returned = values.pop(RETURNED, None)
        if returned is not None:
            values.setdefault("loss", returned)
        usual, confusion = super().finish(net) if self.shown else ({}, None)
        self.found = (usual | values, confusion)
        self.stage, self.shown = "", False

    @override
    def finish(self, net: nn.Module) -> Found:
        self.pause(net)
        found, self.found = self.found, ({}, None)
        return found

    def try_out(self, module: LightningModule, data: "FederatedDataModule", split: str) -> None:
        """Finds out what is measured of a split, on two samples and a copy of the module."""
        examples = data.test[:2].to(module.device)
        x = examples.transform(examples.inputs, None)
        for weight in module.parameters():  # of another precision than the data
            x = x.to(weight) if x.is_floating_point() and weight.is_floating_point() else x
            break
        batch = (x, examples.targets)
        trial, stage = deepcopy(module).eval(), stage_of(module, split)
        trial._trainer = module._trainer
        what = f"{stage}_step of {type(module).__name__} fails on {data.name}"
        with failing("module", what), seeded(0), torch.no_grad():
            self.step(trial, batch, 0, split)
            values = self.finish(trial)[0]
        self.known = {name for name in values if not name.startswith("class_acc/")}
        text = f"are of a module's outputs: {type(module).__name__} needs {NEEDS}"
        require(self.known >= self.asked.keys(), "metrics", text)


class Evaluation(nn.ModuleDict):
    """The scores of one net, by split; a module, so that its metrics follow the net's device."""

    def step(self, net: nn.Module, batch: Batch, batch_idx: int, split: str) -> None:
        """Evaluates a batch of a split."""
        for other, scores in self.items():
            if other != split:  # a LightningModule has the same metrics for all splits
                cast(Scores, scores).pause(net)
        cast(Scores, self[split]).step(net, batch, batch_idx, split)

    def finish(self, net: nn.Module, split: str) -> Found:
        """The values of a split by name, and its confusion matrix where there are classes."""
        return cast(Scores, self[split]).finish(net)

    @property
    def has_accuracy(self) -> bool:
        """Whether a split is scored by it, as far as is known before."""
        return any("acc" in cast(Scores, scores).names for scores in self.values())


@contextmanager
def failing(key: str, what: str) -> Iterator[None]:
    """Says in one line what fails of the user's code, whatever it raises, and hides warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as that two samples are few
            yield
    except SettingError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SettingError(key, f"{what}: {reason}") from error


def stage_of(module: LightningModule, split: str) -> str:
    """Which of a module's steps evaluates a split."""
    if split == "test" and is_overridden("test_step", module):
        return "test"
    return "validation" if is_overridden("validation_step", module) else "training"


def scores_of(
    net: nn.Module,
    loss: LocalLoss,
    data: "FederatedDataModule",
    metrics: Mapping[str, Metric],
    split: str,
) -> Scores:
    """What is measured of a net over a split of some data."""
    if not is_own_module(net):
        labels = loss.targets == "labels"
        width = data.test.targets.shape[1] if labels else data.num_classes
        of_net = Scores(loss, width, metrics)
        of_net.tasks = data.client_data.tasks
        return of_net
    scores = ModuleScores(CrossEntropy() if data.num_classes else None, data.num_classes, metrics)
    scores.try_out(net, data, split)
    return scores


def personal_scores(server: "FederatedServer", split: str) -> dict[str, float]:
    """The mean over clients of what each one's own model scores on its own samples of a split."""
    data, scores = server.datamodule, cast(Scores, server.evaluation[split])
    own, net = data.client_splits[split], deepcopy(server.net).eval()
    examples, precision = own.examples.to(server.device), server.trainer.precision_plugin
    found: dict[str, list[float]] = {}
    for client in own.clients:
        net.load_state_dict(server.model_of(client))
        with torch.no_grad(), evaluating(precision, server.device):
            batches = Batches(examples.view(own.rows(client)), data.eval_batch_size)
            for number, (x, y) in enumerate(batches):
                scores.step(net, (precision.convert_input(x), y), number, split)
        for name, value in scores.finish(net)[0].items():
            found.setdefault(name, []).append(value)
    # a class may be missing at a client
    return {name: float(np.mean(values)) for name, values in found.items() if "/" not in name}


def cohort_statistics(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    """``client/<name>_mean``, ``_std``, ``_p10``, ``_p90`` over the clients that report a name."""
    statistics: dict[str, float] = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        values = np.array([report[name] for report in reports if name in report])
        p10, p90 = np.percentile(values, [10, 90])
        four = {"mean": values.mean(), "std": values.std(), "p10": p10, "p90": p90}
        statistics |= {f"client/{name}_{label}": float(value) for label, value in four.items()}
    return statistics
