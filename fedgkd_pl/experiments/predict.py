"""What a run's model says of files: images, arrays, tables or texts, as its data lay in files."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fedgkd_pl.data.inputs import ImageInputs, TableInputs, TextInputs
from fedgkd_pl.data.sources.arrays import read_array
from fedgkd_pl.data.sources.base import read_text
from fedgkd_pl.data.sources.images import ENDINGS
from fedgkd_pl.data.sources.tables import column, numbers, read_csv, read_parquet
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.experiments.table import Table
from fedgkd_pl.experiments.trained import BATCH, Trained
from fedgkd_pl.storage.files import write_text
from fedgkd_pl.storage.reading import printable

ARRAYS = (".npy", ".npz")
TABLES = (".csv", ".tsv", ".parquet")
ALL_CLASSES = 20  # up to so many classes, each has a column of its own
TOP = 5  # otherwise the most probable ones have
SHOWN = 10  # rows on the terminal


@dataclass(frozen=True)
class Files:
    """Raw inputs in files.

    Attributes:
        head: what names an input, ``file`` or ``row``.
        names: of every input, in their order.
        take: the inputs from one number to before another.
    """

    head: str
    names: Sequence[str]
    take: Callable[[int, int], Any]


def predict_files(
    trained: Trained, source: str | Path, output: str | Path, progress: bool = False
) -> Table:
    """Writes what a model says of files as CSV: a row for every input.

    Args:
        trained: the model.
        source: a file, or a folder of files.
        output: the CSV file.
        progress: show how far it is, on a terminal.

    Returns:
        The first rows, for a terminal.
    """
    file = Path(output)
    require(file.suffix == ".csv", "output", "must end in .csv", str(file))
    require(file.parent.is_dir(), "output", "its folder does not exist", str(file))
    found = find_inputs(trained, Path(source).expanduser())
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    head, first = columns_of(trained, found.head), list[list[str]]()
    writer.writerow(head)
    for start in _starts(len(found.names), progress):
        rows = list(_rows(trained, found, start))
        writer.writerows(rows)
        first += rows[: SHOWN - len(first)]
    write_text(file, text.getvalue())
    shown = [dict(zip(head[:3], map(printable, row), strict=False)) for row in first]
    total = len(found.names)
    title = f"the first {len(first)} of {total:,} inputs" if total > len(first) else ""
    return replace(Table.of(shown), title=title)


def columns_of(trained: Trained, head: str) -> list[str]:
    """The columns of the CSV file."""
    columns = [head, "prediction", "probability"]
    if trained.num_classes <= ALL_CLASSES:
        return [*columns, *trained.class_names]
    return [*columns, *(f"{name}_{n}" for n in range(2, TOP + 1) for name in columns[1:])]


def _rows(trained: Trained, found: Files, start: int) -> Iterator[list[str]]:
    names = found.names[start : start + BATCH]
    try:
        probabilities = trained.predict(found.take(start, start + len(names))).probabilities
    except SettingError as error:
        key = "input" if error.key == "inputs" else error.key
        raise SettingError(key, error.reason, error.got) from error
    few = trained.num_classes <= ALL_CLASSES
    best = probabilities.topk(1 if few else TOP, dim=1)
    for name, top, of_top, row in zip(names, best.indices, best.values, probabilities, strict=True):
        cells = [name]
        for number, value in zip(top.tolist(), of_top.tolist(), strict=True):
            cells += [trained.class_names[number], f"{value:.6g}"]
        yield cells + ([f"{value:.6g}" for value in row.tolist()] if few else [])


def _starts(length: int, progress: bool) -> Iterator[int]:
    from rich.console import Console
    from rich.progress import track

    starts = range(0, length, BATCH)
    console = Console(stderr=True)
    hidden = not (progress and console.is_terminal and len(starts) > 1)
    yield from track(starts, "predicting", console=console, transient=True, disable=hidden)


def find_inputs(trained: Trained, source: Path) -> Files:
    """The inputs in a file or folder, as the kind of data allows."""
    reading = trained.transform.reading
    require(source.exists(), "input", "there is no such file or folder", str(source))
    if isinstance(reading, ImageInputs) and (source.is_dir() or source.suffix.lower() in ENDINGS):
        return _each_file(source, ENDINGS, lambda files: list(files))
    if isinstance(reading, TextInputs) and (source.is_dir() or source.suffix == ".txt"):
        return _each_file(source, (".txt",), lambda files: [read_text(f, "input") for f in files])
    if isinstance(reading, TextInputs) and source.suffix in TABLES:
        texts = column(_cells(source, [reading.column]), reading.column, "input", source)
        return Files("row", _numbered(len(texts)), lambda a, b: texts[a:b])
    if isinstance(reading, TableInputs) and source.suffix in TABLES:
        cells = _cells(source, list(reading.columns))
        table = numbers(cells, reading.columns, source, "input")
        return Files("row", _numbered(len(table)), lambda a, b: table[a:b])
    if not isinstance(reading, TextInputs) and source.suffix in ARRAYS:
        values = _array(source, trained.transform.shape)
        return Files("row", _numbered(len(values)), lambda a, b: _piece(values, a, b))
    shape = " × ".join(map(str, trained.transform.shape))
    known = {
        ImageInputs: f"image files, a folder of them, or an .npy or .npz of {shape} bytes each",
        TableInputs: f"a {', '.join(TABLES)} with a header, or an .npy or .npz of {shape} numbers",
        TextInputs: f"a .txt, a folder of them, or a {', '.join(TABLES)} with a header",
    }.get(type(reading), f"an .npy or .npz of {shape} numbers each, as its dataset gives them")
    raise SettingError("input", f"this run takes {known}", str(source))


def _numbered(length: int) -> list[str]:
    return [str(row) for row in range(1, length + 1)]


def _each_file(
    source: Path, endings: tuple[str, ...], read: Callable[[Sequence[Path]], list[Any]]
) -> Files:
    if not source.is_dir():
        return Files("file", [source.name], lambda a, b: read([source]))
    files = sorted(
        file
        for file in source.rglob("*")
        if file.suffix.lower() in endings and not file.name.startswith(".") and file.is_file()
    )
    require(len(files) > 0, "input", f"has no {', '.join(endings)} files", str(source))
    names = [file.relative_to(source).as_posix() for file in files]
    return Files("file", names, lambda a, b: read(files[a:b]))


def _cells(source: Path, columns: list[str]) -> Any:
    if source.suffix == ".parquet":
        return read_parquet(source, "input", columns)
    return read_csv(source, "input")


def _array(source: Path, shape: tuple[int, ...]) -> Any:
    found = read_array(source, "input")
    if isinstance(found, dict):
        names = [name for name in ("inputs", "x", "X", "x_test") if name in found]
        names = names or (list(found) if len(found) == 1 else [])
        reason = f"{source} has no inputs nor x, but {', '.join(found)}"
        require(len(names) > 0, "input", reason)
        found = found[names[0]]
    found = found[None] if found.shape == shape else found  # one sample
    require(found.ndim > 0 and len(found) > 0, "input", f"{source} has no rows")
    return found


def _piece(values: Any, start: int, stop: int) -> Any:
    """Some rows of an array, in memory."""
    piece = np.array(values[start:stop])
    if piece.dtype.kind == "f":
        bad = np.flatnonzero(~np.isfinite(piece.reshape(len(piece), -1)).all(axis=1))
        for row in bad[:1]:
            raise SettingError("input", f"row {start + row + 1} has NaN or Inf")
    return piece
