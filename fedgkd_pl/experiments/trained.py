"""What a run has trained, afterwards: loaded again, and exported."""

from collections.abc import Sequence
from os.path import isfile  # which, unlike Path's, takes a name of any length
from pathlib import Path

from fedgkd_pl.callbacks.export import FILES, Format, exported
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.federation.own_module import is_own_module
from fedgkd_pl.federation.performance import channels_last
from fedgkd_pl.runs.folder import CONFIG, RunFolder
from fedgkd_pl.runs.resume import check_net, check_settings, checkpoint_of
from fedgkd_pl.settings.build import build_request
from fedgkd_pl.settings.experiment import Experiment
from fedgkd_pl.settings.request import read_request
from fedgkd_pl.storage.files import commit


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
    file = checkpoint_of(folder, ckpt_path)
    flags = ["--config", str(folder.config), "--ckpt_path", str(file)]
    made = build_request(read_request("test", [*flags, *settings]))
    model, data, checkpoint = made.model, made.data, made.start.checkpoint
    with made.whole_keys():
        made.check(trains=False)
        check_settings(checkpoint, made.fixed)
        model.check_data(data, checkpoint["fedgkd_pl"])
        check_net(checkpoint, model)
    made.trainer.precision_plugin.convert_module(model)  # before doubles are loaded
    model.on_load_checkpoint(checkpoint)
    model.load_state_dict(checkpoint["state_dict"])
    model.to(made.trainer.strategy.root_device)
    if not is_own_module(model.net):  # as in a run
        device = made.trainer.strategy.root_device
        channels_last(model.net, model.some_inputs(data), device)
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
        ckpt_path: ``last``, ``best`` (by validation) or a checkpoint file of the run.
        average: the model of :class:`~fedgkd_pl.AveragedModel` instead of the global one.
        output: the file; by default ``model.…`` in the run's folder.
        settings: further flags of ``fedgkd-pl fit`` that do not decide the result, such as
            ``["--data.data_dir", "data", "--import", "my_methods"]``.

    Returns:
        The file.
    """
    require(format in FILES, "format", f"must be one of {', '.join(FILES)}", format)
    folder = begun(run)
    file = folder.path / FILES[format] if output is None else Path(output)
    require(file.parent.is_dir(), "output", "its folder does not exist", str(file))
    text = "no average.safetensors in the run: train with AveragedModel"
    require(not average or folder.average.exists(), "average", text, str(run))
    made = load_trained(folder, ckpt_path, settings)
    if average:
        _load_average(made, folder)
    with made.whole_keys():
        commit(file, [exported(made.model, made.data, format)])
    return file


def _load_average(made: Experiment, folder: RunFolder) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        made.model.net.load_state_dict(load_file(folder.average))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise SettingError("average", "is damaged, or of another net", folder.average) from error
