"""What a run has trained, afterwards: loaded again, used on new inputs, and exported."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import isfile  # which, unlike Path's, takes a name of any length
from pathlib import Path
from typing import Any

import torch
from fedgkd_pl.callbacks.export import FILES, Format, check_packages, exported
from fedgkd_pl.data.inputs import RawInputs
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.federation.checks import check_resumed
from fedgkd_pl.federation.own_module import has_outputs, outputs_of
from fedgkd_pl.federation.task import Task
from fedgkd_pl.runs.folder import CONFIG, INPUTS, MODEL, RunFolder
from fedgkd_pl.runs.inputs import ModelInputs, inputs_files, parse_model, read_model
from fedgkd_pl.runs.resume import (
    check_net,
    check_settings,
    checkpoint_of,
    compare_settings,
    load_checkpoint,
)
from fedgkd_pl.runs.settings import fixed_settings
from fedgkd_pl.settings import strict_yaml
from fedgkd_pl.settings.build import build_model, build_request
from fedgkd_pl.settings.experiment import Experiment
from fedgkd_pl.settings.request import read_request
from fedgkd_pl.storage.files import commit
from fedgkd_pl.storage.reading import read_json
from torch import Tensor, nn

BATCH = 256  # inputs that the net sees at once


@dataclass(frozen=True)
class Predictions:
    """What a model says of some inputs, in their order.

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
        """What the model says of raw inputs.

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
        settings: further flags of ``fedgkd-pl fit`` that do not decide the result. A run of an
            older version needs its data, such as ``["--data.data_dir", "data"]``.
    """
    home = begun(folder)
    settings = [*(word for module in imports for word in ("--import", module)), *settings]
    model = read_model(home.path) or _of_data(home, settings)
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
    config = strict_yaml.read(str(folder.config))
    file = weights_file(folder, which, config.get("rounds"))
    made = build_model(["--config", str(folder.config), *settings], encoder)
    compare_settings(fixed_settings(config), made.fixed)
    net = made.model.net
    if file.suffix == ".safetensors":
        tensors = _read_tensors(file)
        made.model.client_nets.fill_like(made.model.net, tensors)
        _load_weights(net, tensors, file)
    else:
        checkpoint, _ = load_checkpoint(file)
        check_settings(checkpoint, made.fixed)
        weights = {
            name.removeprefix("net."): tensor
            for name, tensor in checkpoint["state_dict"].items()
            if name.startswith("net.")
        }
        made.model.client_nets.fill_like(made.model.net, weights)
        check_net({"state_dict": weights}, net)
        _load_weights(net, weights, file)
    return net.eval()


def weights_file(folder: RunFolder, which: str, rounds: Any = None) -> Path:
    """Where a run keeps a model's weights.

    Args:
        rounds: how many it was to do, by its settings: a run that was finished and then resumed
            for more has a newer model than that of its end.
    """
    if which == "average":
        text = f"no {folder.average.name} in the run: train with AveragedModel"
        require(isfile(folder.average), "average", text, str(folder.path))
        return folder.average
    ended = which == "last" and isfile(folder.model)
    if ended and (folder.last_checkpoint() is None or _rounds_asked(folder) == rounds):
        return folder.model
    return checkpoint_of(folder, which)


def _rounds_asked(folder: RunFolder) -> Any:
    try:
        return read_json(folder.summary)["rounds_asked"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _read_tensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (OSError, ValueError, SafetensorError) as error:
        raise _damaged(file) from error


def _load_weights(net: nn.Module, weights: dict[str, Tensor], file: Path) -> None:
    """Loads weights into a net, which becomes of their precision."""
    kinds = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    if len(kinds) == 1:
        net.to(kinds.pop())
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:  # of another net
        raise _damaged(file) from error


def _damaged(file: Path) -> SettingError:
    key = "average" if file.name != MODEL else "run"
    return SettingError(key, "is damaged, or of another net", file)


def _of_data(folder: RunFolder, settings: Sequence[str]) -> ModelInputs:
    """What a run of an older version does not say, from its data."""
    try:
        made = _built(folder, checkpoint_of(folder, "last"), settings)
        with made.whole_keys():
            made.data.prepare_data()
            made.data.setup()
        files = inputs_files(made.model, made.data)
    except SettingError as error:
        text = f"is older than {INPUTS}, and its data is not here either: {error}"
        raise SettingError("run", text) from error
    return parse_model(json.loads(files[INPUTS]))


def _built(folder: RunFolder, file: Path, settings: Sequence[str]) -> Experiment:
    flags = [str(folder.path), "--ckpt_path", str(file)]
    return build_request(read_request("test", [*flags, *settings]))


def begun(run: str | Path) -> RunFolder:
    """The folder of a run that has settings."""
    folder = RunFolder(Path(run))
    text = f"no run was begun there: no {CONFIG}"
    require(isfile(folder.config), "run", text, str(run))
    return folder


def load_trained(folder: RunFolder, ckpt_path: str, settings: Sequence[str] = ()) -> Experiment:
    """A run's method with the weights of a checkpoint, and its data; all of it checked.

    Args:
        ckpt_path: ``last``, ``best`` (by validation) or a checkpoint file of the run.
        settings: further flags of ``fedgkd-pl fit`` that do not decide the result.
    """
    made = _built(folder, checkpoint_of(folder, ckpt_path), settings)
    model, data, checkpoint = made.model, made.data, made.start.checkpoint
    with made.whole_keys():
        made.check(trains=False)
        check_settings(checkpoint, made.fixed)
        check_resumed(model, data, checkpoint["fedgkd_pl"])
        check_net(checkpoint, model)
    made.trainer.precision_plugin.convert_module(model)  # before doubles are loaded
    model.on_load_checkpoint(checkpoint)
    model.load_state_dict(checkpoint["state_dict"])
    model.to(made.trainer.strategy.root_device)
    model.lay_out(data, made.trainer.strategy.root_device)  # as in a run
    return made


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
    folder = begun(run)
    which = "average" if average else ckpt_path
    kind = f"-{which}" if which in ("best", "average") else ""
    name = FILES[format].replace("model", f"model{kind}", 1)
    file = folder.path / name if output is None else Path(output)
    require(file.parent.is_dir(), "output", "its folder does not exist", str(file))
    check_packages(format, "format")
    text = "is another model than that of ckpt_path: give one of them"
    require(not average or ckpt_path == "last", "average", text, ckpt_path)
    model = read_model(folder.path)
    inputs = torch.empty(0)  # which only a trace needs
    if format != "safetensors":
        model = model or _of_data(folder, settings)
        inputs = model.example()
    net = load_net(folder, which, settings, model.encoder if model else None)
    commit(file, [exported(net, inputs, format, "format")])
    return file
