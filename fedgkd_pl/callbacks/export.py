"""The global model in formats that other programs read."""

import io
import warnings
from collections.abc import Sequence
from copy import deepcopy
from importlib.util import find_spec
from typing import Any, Literal

import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.errors import SettingError, installs, require
from fedgkd_pl.federation.callback import FederatedCallback
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.models.text import merged
from fedgkd_pl.runs.files import output_folder
from fedgkd_pl.storage.files import commit, to_safetensors
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

Format = Literal["safetensors", "onnx", "torchscript", "torch_export"]
FILES: dict[Format, str] = {
    "safetensors": "model.safetensors",
    "onnx": "model.onnx",
    "torchscript": "model.torchscript.pt",
    "torch_export": "model.pt2",
}


class ModelExport(FederatedCallback):
    """Writes the global model beside the run's files when the run ends.

    ``model.safetensors`` holds parameters and buffers; ``model.onnx`` (input ``inputs``, output
    ``logits``), ``model.torchscript.pt`` and ``model.pt2`` hold the net itself, in eval mode, for
    batches of any size; for texts, of any length too, where the net allows it. The files are on the
    CPU and in the net's own precision. Inputs are those that the net sees: what the dataset's
    transform gives.

    Formats that trace the net are tried before the first round, which takes seconds: a net that
    they cannot hold is refused then, not after hours of training. In a run without
    :class:`~fedgkd_pl.RunFiles` the files go to the logger's folder, or the Trainer's.

    Args:
        formats: of ``safetensors``, ``onnx``, ``torchscript`` and ``torch_export``.
    """

    needs_whole = True

    def __init__(self, formats: Sequence[Format] = ("safetensors",)) -> None:
        known = len(formats) > 0 and {*formats} <= {*FILES}
        require(known, "formats", f"must be some of {', '.join(FILES)}", formats)
        self.formats = tuple(formats)

    @override
    def check(self, model: FederatedServer, data: FederatedDataModule) -> None:
        """Refuses a net that a format cannot hold."""
        for form in self.formats:
            if form != "safetensors":
                exported(model.net, model.some_inputs(data), form)

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Writes the files."""
        folder = output_folder(trainer)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        for form in self.formats:
            inputs = pl_module.some_inputs(pl_module.datamodule)
            commit(folder / FILES[form], [exported(pl_module.net, inputs, form)])


def exported(net: nn.Module, inputs: Tensor, form: Format, key: str = "formats") -> bytes:
    """A net as a file's content, traced with some inputs."""
    net = merged(deepcopy(net)).cpu().requires_grad_(False).eval()
    net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    if form == "safetensors":
        return to_safetensors(net.state_dict())
    have_onnx = all(find_spec(package) for package in ("onnx", "onnxscript"))
    require(form != "onnx" or have_onnx, key, f"onnx needs {installs('export')}")
    inputs = torch.cat([inputs.cpu()] * 2)  # a batch of one, or a view, is traced as if all were
    file = io.BytesIO()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of torch about itself
            if form == "torchscript":
                torch.jit.save(_torchscript(net, inputs), file)
            elif form == "torch_export":
                torch.export.save(_graph(net, inputs), file)
            else:
                names: Any = {"input_names": ["inputs"], "output_names": ["logits"]}
                onnx: Any = torch.onnx.export(_graph(net, inputs), **names, verbose=False)
                file.write(onnx.model_proto.SerializeToString())
    except Exception as error:  # a net of the user's may fail in any way
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SettingError(key, f"{form} cannot hold this net: {reason}") from error
    return file.getvalue()


def _torchscript(net: nn.Module, inputs: Tensor) -> Any:
    other = torch.cat([inputs, inputs[:1]])  # a trace that depends on the batch's size is refused
    if isinstance(net, LightningModule):  # whose properties cannot be traced
        return net.to_torchscript(None, "trace", inputs, check_inputs=[(other,)])
    return torch.jit.trace(net, inputs, check_inputs=[(other,)])


def _graph(net: nn.Module, inputs: Tensor) -> torch.export.ExportedProgram:
    sizes: dict[int, Any] = {0: torch.export.Dim("batch")}
    if not inputs.is_floating_point() and inputs.dim() == 2:  # texts, cut to a batch's longest
        sizes[1] = torch.export.Dim.AUTO
    return torch.export.export(net, (inputs,), dynamic_shapes=(sizes,))
