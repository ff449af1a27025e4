"""Folders, checkpoints and predictions of runs, for the command line."""

import re
from itertools import count
from os.path import exists, isdir  # which, unlike Path's, take a name of any length
from pathlib import Path
from typing import Any

from fedgkd_pl.errors import SettingError, StorageError, require
from fedgkd_pl.runs.settings import short
from fedgkd_pl.storage.checkpoint import CheckpointDamaged, load_newest, round_of
from fedgkd_pl.storage.files import PART, previous, write_text
from fedgkd_pl.storage.reading import read_json
from torch import Tensor, nn

NOT_OURS = "not a checkpoint of fedgkd_pl"


def new_version(parent: Path) -> Path:
    """Makes the next free ``version_k``; two runs that start at once get two.

    Args:
        parent: the folder of the run's name.
    """
    for number in count():
        folder = parent / f"version_{number}"
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            require(parent.is_dir(), "output_dir", "is not a folder", str(parent))
        except NotADirectoryError as error:
            raise SettingError("output_dir", "is not a folder", str(parent)) from error
        except OSError as error:
            raise StorageError(folder, error) from error
    return folder


def versions(parent: Path) -> list[Path]:
    """The runs of one name, the oldest first.

    Args:
        parent: the folder of the name.
    """
    found = [(re.fullmatch(r"version_(\d+)", path.name), path) for path in parent.glob("version_*")]
    return [path for match, path in sorted((int(m[1]), path) for m, path in found if m)]


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run; None if no round was ever committed.

    Args:
        folder: of the run.
    """
    last = folder / "checkpoints" / "last.ckpt"
    return last if exists(last) or exists(previous(last)) else None


def find_checkpoint(name: str, parent: Path) -> Path:
    """The file of a ``--ckpt_path``: a file, a run folder, or ``last``.

    Args:
        name: what was typed.
        parent: the folder of the run's name, of whose versions ``last`` takes the newest.
    """
    folders = versions(parent)[::-1] if name == "last" else [Path(name)]
    for folder in folders:
        if (found := last_checkpoint(folder)) is not None:
            return found
    require(name != "last", "ckpt_path", f"no run in {parent} has a checkpoint", name)
    file = Path(name)
    require(not isdir(file), "ckpt_path", "no checkpoints/last.ckpt in this folder", name)
    there = exists(file) or exists(previous(file))
    require(there, "ckpt_path", "no such file", name)
    return file


def load_checkpoint(path: Path, run: Path | None = None) -> tuple[dict[str, Any], Path]:
    """A checkpoint's content, read without running anything in it, and its file.

    Args:
        path: the file; if it is damaged, the one before it.
        run: the folder of the run that it is the last commit of, if that is to be resumed.
    """
    try:
        checkpoint, path = load_newest(path)
    except CheckpointDamaged as error:
        if run is not None:
            raise StorageError(path, f"{error}, nor is the one before it sound") from error
        raise SettingError("ckpt_path", str(error), str(path)) from error
    whole = {"state_dict", "callbacks", "global_step", "fedgkd_pl"} <= checkpoint.keys()
    require(whole and _is_plausible(checkpoint), "ckpt_path", NOT_OURS, str(path))
    return checkpoint, path


def _is_plausible(checkpoint: dict[str, Any]) -> bool:
    """Whether what is looked at before Lightning restores it is what it should be."""
    files = checkpoint["callbacks"].get("RunFiles", {"config": {}})
    rows, config = files.get("rows", []), files.get("config")
    return (
        type(checkpoint["global_step"]) is int
        and 0 <= checkpoint["global_step"] < 2**31
        and isinstance(checkpoint["fedgkd_pl"], dict)
        and isinstance(config, dict | None)
        and isinstance(checkpoint["state_dict"], dict)
        and all(isinstance(value, Tensor) for value in checkpoint["state_dict"].values())
        and isinstance(rows, list)
        and all(isinstance(row, dict) and type(row.get("round")) is int for row in rows)
        and all(isinstance(value, int | float) for row in rows for value in row.values())
        and all(isinstance(name, str) for row in rows for name in row)
    )


def drop_uncommitted(folder: Path, checkpoint: dict[str, Any]) -> None:
    """Removes what an interrupted round left: half files, and a best round that is not yet one.

    Args:
        folder: of the run.
        checkpoint: the last commit; empty if there is none.
    """
    for part in folder.rglob(f".*{PART}"):
        if not isdir(part):
            part.unlink()
    done = checkpoint.get("global_step", 0)
    for file in (folder / "checkpoints").glob("*.ckpt"):
        if (round_of(file) or 0) > done:
            file.unlink()


def rows_of(checkpoint: dict[str, Any]) -> list[dict[str, float]]:
    """What a checkpoint knows of the rounds before it.

    Args:
        checkpoint: its content; empty where there is none.
    """
    rows: list[dict[str, float]] = (
        checkpoint.get("callbacks", {}).get("RunFiles", {}).get("rows", [])
    )
    return rows


def is_finished(folder: Path, rounds: int) -> bool:
    """Whether a run has said how its last round went.

    Args:
        folder: of the run.
        rounds: how many it has done.
    """
    summary = folder / "summary.json"
    try:
        return bool(read_json(summary)["rounds"] == rounds)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def check_settings(checkpoint: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuses to go on with other settings than a checkpoint's.

    Args:
        checkpoint: its content.
        settings: those that decide the result, by dotted key.
    """
    saved = checkpoint["callbacks"].get("RunFiles", {}).get("config")
    require(saved is not None, "ckpt_path", "was not written by fedgkd-pl fit")
    compare_settings(saved, settings)


def compare_settings(saved: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuses other settings than those a run began with.

    Args:
        saved: those, by dotted key.
        settings: these.
    """
    keys = sorted(saved.keys() | settings.keys())
    changed = [key for key in keys if saved.get(key) != settings.get(key)]
    if changed:
        key = changed[0]
        more = f"; {', '.join(map(short, changed[1:]))} differ too" if changed[1:] else ""
        raise SettingError(
            short(key),
            f"a run is resumed with the settings it began with, here {saved.get(key)}{more}",
            settings.get(key),
        )


def check_net(checkpoint: dict[str, Any], model: nn.Module) -> None:
    """Refuses a checkpoint of another net.

    Args:
        checkpoint: its content.
        model: the method with its net.
    """
    saved, ours = checkpoint["state_dict"], model.state_dict()
    for name in sorted(saved.keys() | ours.keys()):
        there, here = (tuple(s[name].shape) if name in s else None for s in (saved, ours))
        require(
            there == here,
            "ckpt_path",
            f"holds another net: {name} is {there} there and {here} here",
        )


def write_predictions(file: Path, probabilities: Tensor, labels: Tensor) -> None:
    """A row per sample: the truth, the guess and its probability.

    Args:
        file: the CSV file.
        probabilities: samples × classes.
        labels: the truth.
    """
    confidence, classes = probabilities.max(dim=1)
    lines = ["index,label,prediction,probability"]
    for index, row in enumerate(zip(labels, classes, confidence, strict=True)):
        lines.append(",".join(str(value) for value in (index, *(v.item() for v in row))))
    write_text(file, "\n".join(lines) + "\n")
