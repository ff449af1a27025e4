"""Folders, checkpoints and predictions of runs, for the command line."""

import csv
from itertools import count
from pathlib import Path
from typing import Any

import torch
from fedgkd_pl.cli_messages import short
from fedgkd_pl.errors import SettingError, require
from torch import Tensor, nn


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
        except OSError as error:
            raise SettingError("output_dir", str(error.strerror), str(parent)) from error
    return folder


def load_checkpoint(path: str) -> dict[str, Any]:
    """A checkpoint's content, read without running anything in it.

    Args:
        path: the file.
    """
    require(Path(path).is_file(), "ckpt_path", "no such file", path)
    try:
        checkpoint: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        whole = {"state_dict", "callbacks", "global_step", "fedgkd_pl"} <= checkpoint.keys()
    except Exception as error:
        raise SettingError("ckpt_path", "cannot be read as a checkpoint", path) from error
    require(whole, "ckpt_path", "not a checkpoint of fedgkd_pl", path)
    return checkpoint


def check_settings(checkpoint: dict[str, Any], settings: dict[str, Any], rounds: int) -> None:
    """Refuses to go on with other settings than a checkpoint's.

    Args:
        checkpoint: its content.
        settings: those that decide the result, by dotted key.
        rounds: how many the run is to have in all.
    """
    saved = checkpoint["callbacks"].get("RunFiles", {}).get("config")
    require(saved is not None, "ckpt_path", "was not written by fedgkd-pl fit")
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
    done = checkpoint["global_step"]
    require(done < rounds, "rounds", f"the checkpoint has done {done}: ask for more", rounds)


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
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["index", "label", "prediction", "probability"])
        for index, row in enumerate(zip(labels, classes, confidence, strict=True)):
            writer.writerow([index, *(value.item() for value in row)])


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A nested mapping as dotted keys; lists stay whole.

    Args:
        tree: mappings of mappings.
        prefix: the key of ``tree``.
    """
    if not isinstance(tree, dict):
        return {prefix: tree}
    dot = f"{prefix}." if prefix else ""
    return {k: v for key, value in tree.items() for k, v in flatten(value, dot + str(key)).items()}
