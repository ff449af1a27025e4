"""A run's model afterwards: loaded again, used on new inputs and files of them, and exported."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from fedgkd_pl.callbacks.export import FILES, Format, exported
from fedgkd_pl.config.build import build_model
from fedgkd_pl.config.request import open_run
from fedgkd_pl.data.inputs import ImageInputs, RawInputs, TableInputs, TextInputs
from fedgkd_pl.data.sources.base import visible
from fedgkd_pl.data.sources.folders import ENDINGS
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.experiments.runs import reading
from fedgkd_pl.federation.checks import Task
from fedgkd_pl.federation.own_module import has_outputs, outputs_of
from fedgkd_pl.runs.files import read_model
from fedgkd_pl.runs.folder import AVERAGE, MODEL, RunFolder, check_output, fixed_settings
from fedgkd_pl.runs.resume import (
    check_net,
    check_settings,
    checkpoint_of,
    compare_settings,
    load_checkpoint,
)
from fedgkd_pl.storage.checkpoint import read_sealed
from fedgkd_pl.storage.files import commit, printable, read_yaml, write_text
from torch import Tensor, nn

BATCH = 256  # inputs that the net sees at once
ARRAYS = (".npy", ".npz")
TABLES = (".csv", ".tsv", ".parquet")
ALL_CLASSES = 20  # up to so many classes, each has a column of its own
TOP = 5  # otherwise the most probable ones have
SHOWN = 10  # rows on the terminal


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
            inputs: one or several: images of Pillow's, texts, rows of a table (an array or a
                DataFrame), or arrays as the dataset stores them.
        """
        fits = self.task == "classes" and has_outputs(self.net)
        text = "needs the logits of classes, which this model does not have: call net(transform(x))"
        require(fits, "predict", text)
        stored = self.transform.stored(inputs)
        probabilities = torch.cat([self._probabilities(rows) for rows in stored.split(BATCH)])
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
    client: int | None = None,
) -> Trained:
    """A run's model for new inputs, by the run's folder alone: its data need not be there.

    Args:
        folder: of a run, finished or stopped; it may be a copy.
        which: the model of the ``last`` round, of the ``best`` by validation, the ``average`` of
            :class:`~fedgkd_pl.AveragedModel`, or a checkpoint file of the run.
        imports: your modules, where the net or the method is yours.
        settings: further flags of ``fedgkd-pl fit`` that do not decide the result.
        client: whose model, where clients have parts of their own.
    """
    home = open_run("run", str(folder))
    model = read_model(home.path)
    config = read_yaml(str(home.config))
    flags = [word for module in imports for word in ("--import", module)]
    made = build_model(["--config", str(home.config), *flags, *settings], model.encoder)
    compare_settings(fixed_settings(config), made.fixed)
    server = made.model
    text = "each client of this run has a model of its own: give its number"
    text = text if server.is_personal else "this run has one model for all clients: leave it out"
    require(server.is_personal == (client is not None), "client", text, client)
    file = weights_file(home, which, config.get("rounds"))
    if client is not None:  # what clients keep is in checkpoints alone
        file = checkpoint_of(home, which)
    if file.suffix == ".safetensors":
        with reading(file, "run"):
            weights = read_sealed(file)
    else:
        checkpoint, _ = load_checkpoint(file, states=client is not None)
        check_settings(checkpoint, made.fixed)
        saved = checkpoint["state_dict"].items()
        weights = {k.removeprefix("net."): tensor for k, tensor in saved if k.startswith("net.")}
    net = server.net
    server.client_nets.fill_like(net, weights)
    check_net({"state_dict": weights}, net)
    kinds = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    if len(kinds) == 1:
        net.to(kinds.pop())
    net.load_state_dict(weights)
    if client is not None:
        server.on_load_checkpoint(checkpoint)
        net.load_state_dict(server.model_of(client))
    names = model.class_names or [str(number) for number in range(model.num_classes)]
    return Trained(net.eval(), model.raw, names, model.task)


def weights_file(folder: RunFolder, which: str, rounds: Any) -> Path:
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


def export(
    run: str | Path,
    format: Format = "safetensors",
    ckpt_path: str = "last",
    output: str | Path | None = None,
    settings: Sequence[str] = (),
    client: int | None = None,
) -> Path:
    """Writes a run's model in a format that other programs read; see :class:`ModelExport`.

    Args:
        run: the folder of a run, finished or stopped.
        format: ``safetensors``, ``onnx``, ``torchscript`` or ``torch_export``.
        ckpt_path: ``last``, ``best`` (by validation), ``average`` or a checkpoint file of the run.
        output: the file; by default ``model.…``, ``model-best.…`` or ``model-average.…`` in the
            run's folder.
        settings: further flags of ``fedgkd-pl fit`` that do not decide the result, such as
            ``["--data.data_dir", "data", "--import", "my_methods"]``.
        client: whose model, where clients have parts of their own.

    Returns:
        The file.
    """
    require(format in FILES, "format", f"must be one of {', '.join(FILES)}", format)
    folder = open_run("run", str(run))
    kind = f"-{ckpt_path}" if ckpt_path in ("best", "average") else ""
    name = FILES[format].replace("model", f"model{kind}", 1)
    file = folder.path / name if output is None else Path(output)
    check_output(file, ckpt_path)
    net = load_run(run, ckpt_path, settings=settings, client=client).net
    commit(file, [exported(net, read_model(folder.path).example(), format, "format")])
    return file


def predict_files(trained: Trained, source: str | Path, output: str | Path) -> pd.DataFrame:
    """Writes a model's predictions for files as CSV: a row for every input.

    Args:
        trained: the model.
        source: a file, or a folder of files.
        output: the CSV file.

    Returns:
        The rows.
    """
    file = Path(output)
    require(file.suffix == ".csv", "output", "must end in .csv", str(file))
    check_output(file, source)
    head, names, values = find_inputs(trained, Path(source).expanduser())
    size = BATCH if isinstance(values, list) else len(values)  # images are not in memory yet
    batches = [values[start : start + size] for start in range(0, len(values), size)]
    probabilities = torch.cat([trained.predict(batch).probabilities for batch in batches])
    table = _table(trained.class_names, probabilities)
    table.insert(0, head, names)
    write_text(file, table.to_csv(index=False, float_format="%.6g", lineterminator="\r\n"))
    return table


def show(table: pd.DataFrame) -> None:
    """Prints the first rows."""
    first = table.iloc[:SHOWN, :3]
    first = first.map(lambda cell: printable(cell) if isinstance(cell, str) else cell)
    print(first.to_string(index=False))
    if len(table) > SHOWN:
        print(f"the first {SHOWN} of {len(table):,} inputs")


def _table(names: list[str], probabilities: Tensor) -> pd.DataFrame:
    few = len(names) <= ALL_CLASSES
    best = probabilities.double().topk(1 if few else TOP, dim=1)
    columns: dict[str, Any] = {}
    for place, (labels, values) in enumerate(zip(best.indices.T, best.values.T, strict=True), 1):
        ending = f"_{place}" if place > 1 else ""
        columns[f"prediction{ending}"] = [names[label] for label in labels.tolist()]
        columns[f"probability{ending}"] = values.numpy()
    if not few:
        return pd.DataFrame(columns)
    each = pd.DataFrame(probabilities.double().numpy(), columns=names)
    return pd.concat([pd.DataFrame(columns), each], axis=1)


def find_inputs(trained: Trained, source: Path) -> tuple[str, list[str], Any]:
    """The inputs in a file or folder, as the kind of data allows.

    Returns:
        What names an input (``file`` or ``row``), the names, and the inputs, a list or an array.
    """
    reading: Any = trained.transform.reading
    texts = isinstance(reading, TextInputs)
    single = {ImageInputs: ENDINGS, TextInputs: (".txt",)}.get(type(reading), ())
    tables = TABLES if isinstance(reading, TextInputs | TableInputs) else ()
    known = (*single, *tables, *(() if texts else ARRAYS))
    ending, several = source.suffix.lower(), source.is_dir() and len(single) > 0
    require(several or ending in known, "input", f"this run takes {', '.join(known)}", str(source))
    try:
        if several or ending in single:
            files, top = [source], source.parent
            if several:
                files = [f for f in visible(source, "**/*") if f.suffix.lower() in single]
                require(len(files) > 0, "input", f"has no {', '.join(single)} files", str(source))
                top = source
            names = [file.relative_to(top).as_posix() for file in files]
            return "file", names, [file.read_text("utf-8") for file in files] if texts else files
        if texts:
            values: Any = _cells(source, [reading.column], "str")[reading.column].tolist()
        elif ending in tables:
            values = _cells(source, [*reading.columns], "float64").to_numpy()
        else:
            values = np.load(source, allow_pickle=False)
            if source.suffix == ".npz":
                values = values["inputs" if "inputs" in values.files else "x"]
            if values.shape == trained.transform.shape:
                values = values[None]  # one sample
    except SettingError:
        raise
    except Exception as error:  # whatever a library has against a file
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise SettingError("input", f"{source} cannot be read: {reason[0]}") from error
    require(len(values) > 0, "input", f"{source} has no rows")
    return "row", [str(row) for row in range(1, len(values) + 1)], values


def _cells(source: Path, columns: list[str], kind: Any) -> pd.DataFrame:
    if source.suffix == ".parquet":
        return pd.read_parquet(source, columns=columns)[columns].astype(kind)
    separator = "\t" if source.suffix == ".tsv" else ","
    how: dict[str, Any] = {"dtype": kind, "keep_default_na": kind != "str"}
    return pd.read_csv(source, sep=separator, usecols=columns, **how)[columns]
