"""Predictions for files: images, arrays, tables or texts, as the run's data lay in files."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from fedgkd_pl.data.inputs import ImageInputs, TableInputs, TextInputs
from fedgkd_pl.data.sources.folders import ENDINGS
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.experiments.trained import BATCH, Trained
from fedgkd_pl.storage.files import printable, write_text
from rich.console import Console
from rich.progress import track

ARRAYS = (".npy", ".npz")
TABLES = (".csv", ".tsv", ".parquet")
ALL_CLASSES = 20  # up to so many classes, each has a column of its own
TOP = 5  # otherwise the most probable ones have
SHOWN = 10  # rows on the terminal


def predict_files(
    trained: Trained, source: str | Path, output: str | Path, progress: bool = False
) -> pd.DataFrame:
    """Writes a model's predictions for files as CSV: a row for every input.

    Args:
        trained: the model.
        source: a file, or a folder of files.
        output: the CSV file.
        progress: show how far it is, on a terminal.

    Returns:
        The rows.
    """
    file = Path(output)
    require(file.suffix == ".csv", "output", "must end in .csv", str(file))
    require(file.parent.is_dir(), "output", "its folder does not exist", str(file))
    head, names, values = find_inputs(trained, Path(source).expanduser())
    starts = range(0, len(names), BATCH)
    bar: dict[str, Any] = {"console": Console(stderr=True), "transient": True}
    parts = []
    for start in track(starts, "predicting", disable=not (progress and sys.stderr.isatty()), **bar):
        batch = values[start : start + BATCH]
        try:
            batch = np.array(batch) if isinstance(batch, np.ndarray) else batch  # off the disk
            parts.append(trained.predict(batch).probabilities)
        except SettingError as error:
            key = "input" if error.key == "inputs" else error.key
            where = f"after {head} {names[start - 1]}: " if start else ""
            raise SettingError(key, where + error.reason, error.got) from error
    table = _table(trained.class_names, torch.cat(parts))
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


def _table(names: list[str], probabilities: torch.Tensor) -> pd.DataFrame:
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
        What names an input (``file`` or ``row``), the names, and the inputs, which can be sliced.
    """
    reading = trained.transform.reading
    require(source.exists(), "input", "there is no such file or folder", str(source))
    endings = {ImageInputs: tuple(ENDINGS), TextInputs: (".txt",)}.get(type(reading), ())
    values: Any = None
    try:
        if endings and (source.is_dir() or source.suffix.lower() in endings):
            names, files = _each_file(source, endings)
            texts = isinstance(reading, TextInputs)
            return "file", names, [_text(file) for file in files] if texts else files
        if source.suffix in TABLES and isinstance(reading, TextInputs):
            values = _cells(source, [reading.column], "str")[reading.column].tolist()
        elif source.suffix in TABLES and isinstance(reading, TableInputs):
            values = _cells(source, list(reading.columns), "float64").to_numpy()
        elif source.suffix in ARRAYS and not isinstance(reading, TextInputs):
            values = _array(source, trained.transform.shape)
    except SettingError:
        raise
    except Exception as error:  # whatever a library has against a file
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise SettingError("input", f"{source} cannot be read: {reason[0]}") from error
    if values is not None:
        require(len(values) > 0, "input", f"{source} has no rows")
        return "row", [str(row) for row in range(1, len(values) + 1)], values
    shape = " × ".join(map(str, trained.transform.shape))
    known = {
        ImageInputs: f"image files, a folder of them, or an .npy or .npz of {shape} bytes each",
        TableInputs: f"a {', '.join(TABLES)} with a header, or an .npy or .npz of {shape} numbers",
        TextInputs: f"a .txt, a folder of them, or a {', '.join(TABLES)} with a header",
    }.get(type(reading), f"an .npy or .npz of {shape} numbers each, as its dataset gives them")
    raise SettingError("input", f"this run takes {known}", str(source))


def _each_file(source: Path, endings: tuple[str, ...]) -> tuple[list[str], list[Path]]:
    if not source.is_dir():
        return [source.name], [source]
    files = sorted(
        file
        for file in source.rglob("*")
        if file.suffix.lower() in endings and not file.name.startswith(".") and file.is_file()
    )
    require(len(files) > 0, "input", f"has no {', '.join(endings)} files", str(source))
    return [file.relative_to(source).as_posix() for file in files], files


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _cells(source: Path, columns: list[str], kind: Any) -> pd.DataFrame:
    if source.suffix == ".parquet":
        return pd.read_parquet(source, columns=columns)[columns].astype(kind)
    separator = "\t" if source.suffix == ".tsv" else ","
    how: dict[str, Any] = {"dtype": kind, "keep_default_na": kind != "str"}
    table = pd.read_csv(source, sep=separator, usecols=columns, **how)
    return table[columns]


def _array(source: Path, shape: tuple[int, ...]) -> Any:
    found = np.load(source, mmap_mode="r", allow_pickle=False)
    if source.suffix == ".npz":
        names = [name for name in ("inputs", "x", "X", "x_test") if name in found.files]
        names = names or found.files
        if len(names) > 1 and names == found.files:
            raise ValueError(f"it has no inputs nor x, but {', '.join(names)}")
        found = found[names[0]]
    return found[None] if found.shape == shape else found  # one sample
