"""The studies of the paper, turned into commands here and not by the package's reader."""

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import yaml

from tests.conftest import REPO

CONFIGS = {  # the end of the name of a method's config
    "FedAvg": "fedavg",
    "FedProx": "fedprox",
    "MOON": "moon",
    "FedDistill": "feddistill",
    "FedDistill+": "feddistill_plus",
    "FedGen": "fedgen",
    "FedGKD": "fedgkd",
    "FedGKD-Vote": "fedgkd_vote",
    "FedGKD+": "fedgkd_plus",
}
COUNTS = {
    "overview": 3 * 3 * 8,
    "text": 2 * 8,
    "participation": 8 * 4 * 2,
    "rounds": 8 * 4,
    "buffer": 2 * 4 * 3,
    "buffer_vote": 4 * 3,
    "loss": 3 * 3,
}
Row = dict[str, str]
Settings = dict[str, Any]


@cache
def study(name: str) -> dict[str, Any]:
    text = (REPO / "configs" / "studies" / f"{name}.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    chosen = content["axes"].get("method")
    if not isinstance(chosen, dict) and chosen is not None:
        chosen = CONFIGS if chosen == "all" else chosen
        of_methods = {title: {"config": f"methods/{CONFIGS[title]}.yaml"} for title in chosen}
        content["axes"]["method"] = of_methods
    for axis, labels in content["axes"].items():
        content["axes"][axis] = {str(label): settings for label, settings in labels.items()}
    for one in content.get("special", []):
        one["where"] = {axis: str(label) for axis, label in one["where"].items()}
    return content


def cells(name: str) -> list[Row]:
    axes = study(name)["axes"]
    return [dict(zip(axes, labels, strict=True)) for labels in product(*axes.values())]


def words(name: str, **labels: str) -> list[str]:
    content = study(name)
    (cell,) = [cell for cell in cells(name) if labels.items() <= cell.items()]
    parts = [content.get("set", {})]
    parts += [content["axes"][axis][label] for axis, label in cell.items()]
    parts += [
        one["set"] for one in content.get("special", []) if one["where"].items() <= cell.items()
    ]
    configs = [content["config"]] if "config" in content else []
    configs += [part["config"] for part in parts if "config" in part]
    flags = [(key, value) for part in parts for key, value in part.items() if key != "config"]
    found = [word for config in configs for word in ("--config", config)]
    return found + [word for key, value in flags for word in (f"--{key}", str(value))]


Parse = Callable[[list[str]], Settings]


def one(settings: Settings, key: str) -> Any:
    """The setting with a dotted key, as a flag would have it."""
    value: Any = settings
    for word in key.split("."):
        value = value.get("init_args", value)[word]
    return value
