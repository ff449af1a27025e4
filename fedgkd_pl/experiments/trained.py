"""A run's model afterwards: loaded again, used on new inputs, and exported."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fedgkd_pl.callbacks.export import FILES, Format, exported
from fedgkd_pl.config.build import build_model
from fedgkd_pl.config.request import open_run
from fedgkd_pl.data.inputs import RawInputs
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.experiments.runs import reading
from fedgkd_pl.federation.checks import Task
from fedgkd_pl.federation.own_module import has_outputs, outputs_of
from fedgkd_pl.runs.files import ModelInputs, read_model
from fedgkd_pl.runs.folder import AVERAGE, INPUTS, MODEL, RunFolder, fixed_settings
from fedgkd_pl.runs.resume import (
    check_net,
    check_settings,
    checkpoint_of,
    compare_settings,
    load_checkpoint,
)
from fedgkd_pl.storage.files import commit
from fedgkd_pl.storage.reading import read_yaml
from safetensors.torch import load_file
from torch import Tensor, nn

BATCH = 256  # inputs that the net sees at once


@dataclass(frozen=True)
class Predictions:
    """A model's predictions for some inputs, in their order.

    Attributes:
        probabilities: inputs × classes.
        labels: the number of the most probable class of every input.
        names: what it is called.
    """

    probabilities: Tensor
    labels: Tensor
    names: list[str]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Trained:
    """A run's model, ready for new inputs.

    Attributes:
        net: plain torch, in eval mode, on the CPU.
        transform: from raw inputs, as the dataset stores them, to the net's; see :meth:`predict`.
        class_names: in the order of the net's outputs; empty where it learned numbers.
        task: what it learned: ``classes``, ``dense``, ``labels`` or ``values``.
    """

    net: nn.Module
    transform: RawInputs
    class_names: list[str]
    task: Task

    @property
    def num_classes(self) -> int:
        """How many classes there are; 0 where it learned numbers."""
        return len(self.class_names)

    def predict(self, inputs: Any) -> Predictions:
        """Predicts the classes of raw inputs.

        Args:
            inputs: one or several: images of Pillow's, texts, rows of a table (an array, or columns
                by name), or arrays as the dataset stores them.
        """
        fits = self.task == "classes" and has_outputs(self.net)
        text = "needs the logits of classes, which this model does not have: call net(transform(x))"
        require(fits, "predict", text)
        parts = [self._probabilities(rows) for rows in self.transform.stored(inputs).split(BATCH)]
        probabilities = torch.cat(parts)
        labels = probabilities.argmax(dim=1)
        return Predictions(probabilities, labels, [self.class_names[n] for n in labels.tolist()])

    @torch.no_grad()
    def _probabilities(self, rows: Tensor) -> Tensor:
        x = self.transform.transform(rows, None)
        for parameter in self.net.parameters():
            x = x.to(parameter if x.is_floating_point() else parameter.device)
            break
        logits = outputs_of(self.net, x)
        text = f"its net gives {tuple(logits.shape)}, not the logits of {self.num_classes} classes"
        require(logits.shape == (len(x), self.num_classes), "run", text)
        return logits.softmax(dim=1).cpu()

    def __repr__(self) -> str:
        inputs = " × ".join(map(str, self.transform.shape))
        learned = f"{self.num_classes} classes" if self.num_classes else self.task
        return f"Trained({type(self.net).__name__}, inputs {inputs}, {learned})"


def load_run(
    folder: str | Path,
    which: str = "last",
    imports: Sequence[str] = (),
    settings: Sequence[str] = (),
) -> Trained:
    """A run's model for new inputs, by the run's folder alone: its data need not be there.

    Args:
        folder: of a run, finished or stopped; it may be a copy.
        which: the model of the ``last`` round, of the ``best`` by validation, the ``average`` of
            :class:`~fedgkd_pl.AveragedModel`, or a checkpoint file of the run.
        imports: your modules, where the net or the method is yours.
        settings: further flags of ``fedgkd-pl fit`` that do not decide the result.
    """
    home = open_run("run", str(folder))
    settings = [*(word for module in imports for word in ("--import", module)), *settings]
    model = model_of(home)
    net = load_net(home, which, settings, model.encoder)
    names = model.class_names or [str(number) for number in range(model.num_classes)]
    return Trained(net, model.raw, names, model.task)


def load_net(
    folder: RunFolder,
    which: str = "last",
    settings: Sequence[str] = (),
    encoder: dict[str, Any] | None = None,
) -> nn.Module:
    """A run's net with its weights, in eval mode, on the CPU; see :func:`load_run`."""
    config = read_yaml(str(folder.config))
    file = weights_file(folder, which, config.get("rounds"))
    made = build_model(["--config", str(folder.config), *settings], encoder)
    compare_settings(fixed_settings(config), made.fixed)
    if file.suffix == ".safetensors":
        with reading(file, "run"):
            weights = load_file(file)
    else:
        checkpoint, _ = load_checkpoint(file)
        check_settings(checkpoint, made.fixed)
        saved = checkpoint["state_dict"].items()
        weights = {k.removeprefix("net."): tensor for k, tensor in saved if k.startswith("net.")}
    net = made.model.net
    made.model.client_nets.fill_like(net, weights)
    check_net({"state_dict": weights}, net)
    kinds = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    if len(kinds) == 1:
        net.to(kinds.pop())
    net.load_state_dict(weights)
    return net.eval()


def weights_file(folder: RunFolder, which: str, rounds: Any = None) -> Path:
    """Where a run keeps a model's weights.

    Args:
        rounds: how many it was to do, by its settings: a run that was finished and then resumed
            for more has a newer model than that of its end.
    """
    if which == "average":
        average = folder.path / AVERAGE
        text = f"no {AVERAGE} in the run: train with AveragedModel"
        require(average.is_file(), "average", text, str(folder.path))
        return average
    model = folder.path / MODEL
    ended = which == "last" and model.is_file()
    if ended and (folder.last_checkpoint() is None or folder.is_finished(rounds)):
        return model
    return checkpoint_of(folder, which)


def model_of(folder: RunFolder) -> ModelInputs:
    """The inputs and outputs of a run's model, by ``model.json``."""
    model = read_model(folder.path)
    if model is None:
        raise SettingError("run", f"has no {INPUTS}", str(folder.path))
    return model


def export(
    run: str | Path,
    format: Format = "safetensors",
    ckpt_path: str = "last",
    average: bool = False,
    output: str | Path | None = None,
    settings: Sequence[str] = (),
) -> Path:
    """Writes a run's model in a format that other programs read; see :class:`ModelExport`.

    Args:
        run: the folder of a run, finished or stopped.
        format: ``safetensors``, ``onnx``, ``torchscript`` or ``torch_export``.
        ckpt_path: ``last``, ``best`` (by validation), ``average`` or a checkpoint file of the run.
        average: the same as ``ckpt_path="average"``, the model of AveragedModel.
        output: the file; by default ``model.…``, ``model-best.…`` or ``model-average.…`` in the
            run's folder.
        settings: further flags of ``fedgkd-pl fit`` that do not decide the result, such as
            ``["--data.data_dir", "data", "--import", "my_methods"]``.

    Returns:
        The file.
    """
    require(format in FILES, "format", f"must be one of {', '.join(FILES)}", format)
    text = "is another model than that of ckpt_path: give one of them"
    require(not average or ckpt_path == "last", "average", text, ckpt_path)
    folder = open_run("run", str(run))
    which = "average" if average else ckpt_path
    kind = f"-{which}" if which in ("best", "average") else ""
    name = FILES[format].replace("model", f"model{kind}", 1)
    file = folder.path / name if output is None else Path(output)
    require(file.parent.is_dir(), "output", "its folder does not exist", str(file))
    model = model_of(folder)
    net = load_net(folder, which, settings, model.encoder)
    commit(file, [exported(net, model.example(), format, "format")])
    return file
