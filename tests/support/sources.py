"""Small files of every kind of own data, written here."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

COLOURS = {"blue": (0, 0, 255), "red": (255, 0, 0)}


def write_csv(file: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([header, *rows])
    return file


def table_rows(number: int, seed: int = 0) -> list[list[Any]]:
    """Two numbers and the label "hot" or "cold", by the first one."""
    values = np.random.default_rng(seed).normal(size=(number, 2)).round(3)
    return [[a, 100 * b + 7, "hot" if a > 0 else "cold"] for a, b in values.tolist()]


def write_images(
    folder: Path, number: int = 6, side: int = 8, colours: Sequence[str] = ("red", "blue")
) -> Path:
    """Noisy images in a folder for each colour."""
    rng = np.random.default_rng(0)
    for name in colours:
        (folder / name).mkdir(parents=True)
        for image in range(number):
            noise = rng.integers(-40, 40, (side, side, 3))
            pixels = np.clip(np.array(COLOURS[name]) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{image}.png")
    return folder


def write_leaf(file: Path, users: dict[str, tuple[list[Any], list[Any]]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    data = {name: {"x": x, "y": y} for name, (x, y) in users.items()}
    sizes = [len(y) for _, y in users.values()]
    content = {"users": list(users), "num_samples": sizes, "user_data": data}
    file.write_text(json.dumps(content))


def write_config(
    folder: Path, source: str, features: int, method: str = "FedAvg", classes: int = 2, **args: Any
) -> str:
    """A config that trains an MLP on a source, and its name."""
    net = {"in_features": features, "hidden": [8], "num_classes": classes}
    engine = {"class_path": "LocalEngine", "init_args": {"workers": 1}}
    init = {
        "net": {"class_path": "fedgkd_pl.MLP", "init_args": net},
        "local_epochs": 1,
        "engine": engine,
    }
    config = {
        "name": "own",
        "rounds": 1,
        "seed_everything": 0,
        "model": {"class_path": method, "init_args": init},
        "data": {"class_path": source, "init_args": args},
    }
    (folder / "own.yaml").write_text(yaml.safe_dump(config))
    return "own.yaml"
