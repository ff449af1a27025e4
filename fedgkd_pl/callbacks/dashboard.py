"""What TensorBoard shows of a run: charts for the paper's questions, figures, features."""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.examples import Batches
from fedgkd_pl.data.index import ClientIndex, Indices
from fedgkd_pl.errors import require
from fedgkd_pl.federation.callback import FederatedCallback
from fedgkd_pl.federation.own_module import has_outputs
from fedgkd_pl.federation.precision import evaluating
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.federation.teachers import FrozenNet
from fedgkd_pl.runs.files import RunFiles
from fedgkd_pl.runs.folder import EVENTS
from fedgkd_pl.seeds import seeded
from fedgkd_pl.storage.files import write_text
from fedgkd_pl.storage.reading import printable
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

Layout = dict[str, dict[str, list[Any]]]  # category → chart → its type and tags
LAYOUT_TAG = "custom_scalars__config__"  # TensorBoard's
SETTINGS = "config"
SETTINGS_TAG = f"{SETTINGS}/text_summary"  # what add_text makes of it
CONFUSION = "test/confusion"
FEATURES = "features"


class Dashboard(FederatedCallback):
    """Adds to what TensorBoard shows of a run; does nothing where it is not the logger.

    CUSTOM SCALARS gets charts of what belongs together, TEXT the settings, IMAGES the confusion
    matrix of the test set, and PROJECTOR what the final model makes of the clients' samples.

    Args:
        every_n_rounds: how often the confusion matrix is drawn; after the last round in any case.
        samples: how many training samples the projector shows, evenly of the clients; 0 for none.
    """

    def __init__(self, every_n_rounds: int = 10, samples: int = 500) -> None:
        require(every_n_rounds >= 1, "every_n_rounds", "must be at least 1", every_n_rounds)
        require(samples >= 0, "samples", "must not be negative", samples)
        self.every_n_rounds = every_n_rounds
        self.samples = samples
        self.undrawn: dict[str, Any] = {}  # the last evaluation: its round and confusion matrix
        self._written: dict[Path, set[tuple[str, int]]] = {}  # by folder; see _points

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint: a run that is killed after its last round still draws it."""
        return self.undrawn

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From the checkpoint."""
        self.undrawn = state_dict

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Writes the charts and the settings, unless the run that is resumed has them."""
        self._written = {}
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        names = {type(callback).__name__ for callback in callbacks}
        if not pl_module.shares_models:  # clients are sent no model to move from or agree with
            names -= {"ClientDrift", "TeacherAgreement"}
        charts = layout(names, pl_module.datamodule.eval_splits())
        settings = [callback.config for callback in callbacks if isinstance(callback, RunFiles)]
        for logger in _tensorboards(trainer):
            written = {tag for tag, _ in self._points(Path(logger.log_dir))}
            if LAYOUT_TAG not in written:
                logger.experiment.add_custom_scalars(charts)
            if SETTINGS_TAG not in written and any(settings):
                logger.experiment.add_text(SETTINGS, as_yaml(settings[0]))

    def on_evaluated(
        self,
        trainer: Trainer,
        pl_module: FederatedServer,
        split: str,
        values: dict[str, float],
        confusion: Tensor | None,
    ) -> None:
        """Draws the confusion matrix when it is time to."""
        fitting = trainer.state.fn == "fit" and not trainer.sanity_checking
        if confusion is not None and split == "test" and fitting and _tensorboards(trainer):
            number = pl_module.round
            self.undrawn = {"round": number, "confusion": confusion}
            if number % self.every_n_rounds == 0 or number == trainer.max_epochs:
                self._draw(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Draws the last round, where a callback ended the run, and writes the features."""
        loggers = _tensorboards(trainer)
        if self.undrawn:
            self._draw(trainer, pl_module)
        if loggers and self.samples and has_outputs(pl_module.net):
            rows, owners = even_sample(pl_module.datamodule.client_data.index, self.samples)
            data = pl_module.datamodule
            labels = data.client_data.examples.labels.cpu().numpy()[rows].tolist()
            names = [printable(name) for name in data.class_names]
            labels = [names[label] for label in labels] if names else labels
            features = features_of(pl_module, rows)
            for logger in loggers:
                write_projector(Path(logger.log_dir), features, labels, owners)

    def _draw(self, trainer: Trainer, server: FederatedServer) -> None:
        from fedgkd_pl.plots.figures import confusion_chart
        from fedgkd_pl.plots.style import opaque

        number, confusion = self.undrawn["round"], self.undrawn["confusion"]
        self.undrawn = {}
        for logger in _tensorboards(trainer):
            written = self._points(Path(logger.log_dir))
            if (CONFUSION, number) in written:
                continue  # by a session that was killed when it had drawn
            data = server.datamodule
            title = f"{data.name}, round {number}"
            chart = confusion_chart(confusion.numpy(), title, data.class_names)
            logger.experiment.add_figure(CONFUSION, opaque(chart), number)
            written.add((CONFUSION, number))

    def _points(self, folder: Path) -> set[tuple[str, int]]:
        """Our tags and their steps in a folder, whose files are read once a session: it is slow."""
        if folder not in self._written:
            self._written[folder] = _points(folder)
        return self._written[folder]


def layout(callbacks: Collection[str], splits: Sequence[str]) -> Layout:
    """The charts of TensorBoard's CUSTOM SCALARS, none of them empty.

    TensorBoard shows the layouts of all runs of a folder merged, and a chart once if it is the same
    in all of them; so what depends on the method is named by a pattern, not tag by tag.

    Args:
        callbacks: the names of the classes whose values may be shown.
        splits: what the global model is evaluated on.
    """
    charts: Layout = {
        "accuracy": {"global model": _lines(*(f"{split}/acc" for split in splits))},
        "losses": {
            "clients: the whole and its parts": _lines(r"client/(?!acc_)\w+_mean"),
            "global model": _lines(*(f"{split}/loss" for split in splits)),
        },
        "client spread": {
            f"{name}: mean, 10th to 90th percentile": _margin(f"client/{name}", "p10", "p90")
            for name in ("acc", "loss")
        },
        "bytes": {"of a round": _lines("comm/bytes_down", "comm/bytes_up")},
    }
    if "LocalModels" in callbacks:
        local = _margin("local/acc", "min", "max")
        charts["accuracy"]["local models: mean, worst to best"] = local
    if "ClientEvaluation" in callbacks:
        own = _lines(r"clients/\w+_acc_mean", r"clients/\w+_acc_worst10")
        charts["accuracy"]["clients' own samples: mean, worst tenth"] = own
    if "AveragedModel" in callbacks:
        parts = ["val_"] * ("val" in splits) + [""]
        for category, name in (("accuracy", "acc"), ("losses", "loss")):
            lines = _lines(*(f"average/{part}{name}" for part in parts))
            charts[category]["averaged model"] = lines
    if "ClientDrift" in callbacks:
        charts["drift"] = {
            "how far clients move": _lines("drift/norm_mean", "drift/norm_max"),
            "in how different directions": _lines("drift/cosine", "drift/diversity"),
        }
    if "Forgetting" in callbacks:
        charts["forgetting"] = {"over classes": _lines("forgetting/mean", "forgetting/max")}
    if "TeacherAgreement" in callbacks:
        agreement = _lines("teacher/agreement_mean", "teacher/agreement_min")
        charts["teacher"] = {"agreement of clients": agreement, "accuracy": _lines("teacher/acc")}
    if "Communication" in callbacks:
        total = _lines("comm/total_mb_down", "comm/total_mb_up")
        charts["bytes"]["so far, in 10⁶"] = total
        charts["seconds"] = {"of a round": _lines("time/clients", "time/evaluation")}
    return charts


def _lines(*patterns: str) -> list[Any]:
    """TensorBoard takes tags for regular expressions that fit the beginning of one."""
    return ["Multiline", [f"{pattern}$" for pattern in patterns]]


def _margin(name: str, lower: str, upper: str) -> list[Any]:
    return ["Margin", [f"{name}_mean", f"{name}_{lower}", f"{name}_{upper}"]]


def as_yaml(settings: dict[str, Any]) -> str:
    """Settings, by dotted key, as a block of YAML in Markdown."""
    values = {key: json.dumps(v, default=str, ensure_ascii=False) for key, v in settings.items()}
    return "\n".join(["```yaml", *(f"{key}: {value}" for key, value in values.items()), "```"])


def even_sample(index: ClientIndex, samples: int) -> tuple[Indices, Indices]:
    """As many samples of every client, as far as it has them, and spread over what it has.

    Returns the numbers of the samples, and of their owners.
    """
    sizes = index.sizes
    shares = np.zeros_like(sizes)
    left = min(samples, int(sizes.sum()))
    while left:
        richer = np.flatnonzero(sizes > shares)
        chosen = richer[_spread(len(richer), left)]
        shares[chosen] += 1
        left -= len(chosen)
    owners = np.repeat(np.arange(len(index)), shares)
    asked = np.flatnonzero(shares).tolist()
    rows = [index[client][_spread(int(sizes[client]), int(shares[client]))] for client in asked]
    return np.concatenate(rows), owners


def _spread(length: int, number: int) -> Indices:
    """This many indices of a list, or all, at even distances."""
    number = min(length, number)
    return np.arange(number) * length // number


def features_of(server: FederatedServer, rows: Indices) -> Tensor:
    """What the global model's last layer sees of training samples; a net that hides it: logits.

    The net is a copy, and random numbers go on as if none were drawn. Features that still have
    a height and a width, as those of torchvision's VGG, are averaged over them.
    """
    data, precision = server.datamodule, server.trainer.precision_plugin
    net = FrozenNet(server.net)
    net.load(server.global_state(), server.device)
    examples = data.client_data.examples
    examples = examples[torch.from_numpy(rows).to(examples.targets.device)].to(server.device)
    batches = Batches(examples, data.eval_batch_size)

    def outputs(run: Callable[[Tensor], Tensor]) -> Tensor:
        with seeded(data.seed), evaluating(precision, server.device):
            return torch.cat([run(precision.convert_input(x)).float().cpu() for x, _ in batches])

    try:
        features = outputs(net.features)
        if features.dim() < 2 or len(features) != len(rows):
            features = outputs(net)
    except Exception:  # of the user's net, which may mean anything by that name
        features = outputs(net)
    return features.flatten(2).mean(dim=2) if features.dim() > 2 else features


def write_projector(
    folder: Path, features: Tensor, labels: Sequence[object], owners: Indices
) -> None:
    """Writes what TensorBoard's PROJECTOR reads; a resumed run replaces it.

    ``SummaryWriter.add_embedding`` would leave a folder for every session's last round, and a
    half-written one where it is killed.
    """
    from google.protobuf import text_format
    from tensorboard.plugins.projector import ProjectorConfig

    tensor, metadata = f"{FEATURES}.tsv", f"{FEATURES}_of.tsv"
    write_text(folder / tensor, _tsv(features.tolist()))
    write_text(folder / metadata, _tsv([("label", "client"), *zip(labels, owners, strict=True)]))
    config = ProjectorConfig()
    config.embeddings.add(tensor_name=FEATURES, tensor_path=tensor, metadata_path=metadata)
    write_text(folder / "projector_config.pbtxt", text_format.MessageToString(config))


def _tsv(rows: Sequence[Sequence[Any]]) -> str:
    return "".join("\t".join(map(str, row)) + "\n" for row in rows)


def _tensorboards(trainer: Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def _points(folder: Path) -> set[tuple[str, int]]:
    """The tags of ours and their steps in the event files of a folder."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    files = folder.glob(EVENTS)
    records = (record for file in files for record in RawEventFileLoader(str(file)).Load())
    events = map(Event.FromString, records)
    points = ((value.tag, event.step) for event in events for value in event.summary.value)
    return {point for point in points if point[0] in (LAYOUT_TAG, SETTINGS_TAG, CONFUSION)}
