"""Which setting somebody may have meant; needs no torch, so that the answer comes at once."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.methods import discover
from fedgkd_pl.settings.help import flags
from fedgkd_pl.settings.signatures import parameters

# The first part of every setting, and flags that are no settings.
TOP = "rounds name output_dir seed_everything model data trainer checkpoint profile quiet".split()
FLAGS = "ckpt_path config no_profile no_quiet print_config return_predictions verbose".split()
FLAGS += ["weights_only"]
NO_VALUE = "best help last no_profile no_quiet print_config profile quiet".split()
COMMON = (  # settings of others' classes that people look for
    *("trainer.precision", "trainer.accelerator", "trainer.devices", "trainer.callbacks"),
    *("trainer.logger", "trainer.gradient_clip_val", "trainer.max_time", "model.net"),
    *("trainer.fast_dev_run", "model.net.num_classes", "model.net.hidden"),
)
OTHER_WORDS = {
    "algorithm": ["model"],
    "method": ["model"],
    "dataset": ["data"],
    "seed": ["seed_everything"],
    "epochs": ["model.local_epochs", "rounds"],
    "max_epochs": ["rounds"],
    "num_rounds": ["rounds"],
    "clients": ["data.num_clients"],
    "learning_rate": ["model.optimizer.lr"],
    "fraction": ["data.participation"],
    "device": ["trainer.accelerator"],
    "gpus": ["trainer.devices"],
    "num_workers": ["model.engine.workers"],
    "output": ["output_dir"],
    "checkpoint_path": ["ckpt_path"],
}


def check_file(settings: Mapping[Any, Any]) -> None:
    """Refuses a config file with a setting whose first part does not exist."""
    require("axes" not in settings, "config", "is a study: fedgkd-pl compare runs it")
    _check(key for key in settings if isinstance(key, str))


def check_flags(argv: Sequence[str], *others: str) -> None:
    """Refuses flags whose first part does not exist, and those that lack a value.

    ``others`` are flags that are there, too.
    """
    words = [word for word in argv if word.startswith("--") and word.strip("-")]
    keys = [word[2:].partition("=")[0].rstrip("+") for word in words]
    _check([key for key in keys if key not in others], "--")
    for word, value in pairwise([*argv, "--"]):
        alone = word.startswith("--") and "=" not in word and value.startswith("--")
        key = word.lstrip("-")
        if alone and key and key not in NO_VALUE and not key.endswith(".help"):
            raise SettingError(key.rstrip("+"), "needs a value")


def _check(keys: Iterable[str], dashes: str = "") -> None:
    for key in keys:
        if key.partition(".")[0] not in (*TOP, *FLAGS):
            raise SettingError(key, f"no such setting{did_you_mean(key, dashes)}")


def did_you_mean(key: str, dashes: str = "") -> str:
    """``, did you mean model.optimizer.lr?`` of ``lr``; empty where nothing is near."""
    meant = [f"{dashes}{known}" for known in _near(key.replace("-", "_").lower()) if known != key]
    return f", did you mean {' or '.join(meant)}?" if meant else ""


def _near(key: str) -> list[str]:
    *group, last = key.split(".")
    known = [*TOP, "ckpt_path", "config", "print_config", *COMMON, *flags(), *_of_methods()]
    if not group and key in OTHER_WORDS:
        return OTHER_WORDS[key]
    for ending in (key, last):
        if ends := [each for each in known if f".{each}".endswith(f".{ending}")]:
            return ends[:1]
    leaves: dict[str, Any] = {each.rpartition(".")[2]: each for each in reversed(known)}
    leaves |= {word: keys[0] for word, keys in OTHER_WORDS.items()}
    if group and group[0] in TOP:  # a name that is only alike says nothing of other groups
        leaves = {leaf: each for leaf, each in leaves.items() if each.startswith(f"{group[0]}.")}
    return [leaves[near] for near in get_close_matches(last, leaves, n=1)]


def _of_methods() -> list[str]:
    return [
        f"model.{name}"
        for method in discover().values()
        for name in parameters(f"{method.module}.{method.name}")
    ]
