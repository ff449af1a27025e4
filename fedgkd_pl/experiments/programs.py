"""What the configs say of a method, and the digits' protocol with it as a Python program."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from fedgkd_pl.methods import MethodInfo, discover
from fedgkd_pl.settings.files import METHODS, PROTOCOLS, TUNED, folder, methods

AS_PROTOCOL = ("local_epochs", "optimizer", "engine")  # what the programs take from the protocol
OPTIMIZERS = "torch.optim."


@dataclass(frozen=True)
class Page:
    """A method and its page.

    Attributes:
        stem: the name of its config and of its page, without their endings.
    """

    info: MethodInfo
    stem: str

    @property
    def path(self) -> str:
        """Of its class."""
        return f"{self.info.module}.{self.info.name}"

    def configured(self) -> dict[str, Any]:
        """What its config sets, by the names that flags have after ``model.``; its data apart."""
        given = read(f"{METHODS}/{self.stem}.yaml")["model"].get("init_args", {})
        return dict(_flat(given))

    def tuned(self) -> dict[str, dict[str, Any]]:
        """What it takes on one protocol only: by protocol, as :meth:`configured`."""
        every = read(TUNED).get(self.stem, {})
        return {
            protocol: {key.removeprefix("model."): value for key, value in settings.items()}
            for protocol, settings in every.items()
        }


def all_pages() -> list[Page]:
    """A page for every method that has a config, in the order of their colours."""
    configs = methods()
    return [
        Page(info, Path(configs[info.title]).stem)
        for info in discover().values()
        if info.title in configs
    ]


def program(page: Page) -> str:
    """The digits' protocol with a method, as a program."""
    protocol, method = read(f"{PROTOCOLS}/digits.yaml"), read(f"{METHODS}/{page.stem}.yaml")
    of_protocol, given = protocol["model"]["init_args"], method.get("data", {})
    data = protocol["data"]["init_args"] | given.get("init_args", {})
    values = page.configured() | page.tuned().get("digits", {})
    net = {key.removeprefix("net."): v for key, v in values.items() if key.startswith("net.")}
    usual = {"class_path": of_protocol["net"]["class_path"], "init_args": net}
    net_class = values.get("net", usual)
    own = {key: value for key, value in values.items() if key.partition(".")[0] != "net"}
    own |= {key: of_protocol[key] for key in AS_PROTOCOL if key not in own}
    for key in [key for key in own if "." in key]:  # a part of what is made, such as optimizer.lr
        whole, _, part = key.partition(".")
        arguments = own[whole].get("init_args", {}) | {part: own.pop(key)}
        own[whole] = own[whole] | {"init_args": arguments}
    data_class = given.get("class_path", protocol["data"]["class_path"])
    used = [net_class, *own.values(), *data.values()]
    ours, optimizers = _classes([{"class_path": data_class}, {"class_path": page.info.name}, *used])
    trainer = {"max_epochs": protocol["rounds"], **protocol["trainer"]}
    return "\n".join(
        [
            "from functools import partial\n",
            f"from fedgkd_pl import {', '.join(ours)}",
            "from lightning.pytorch import Trainer, seed_everything",
            f"from torch.optim import {', '.join(optimizers)}\n",
            f"seed_everything({protocol['seed_everything']})",
            f"data = {data_class}(",
            *(f"    {key}={as_python(value)}," for key, value in data.items()),
            ")",
            f"model = {page.info.name}(",
            f"    {as_python(net_class)},",
            *(f"    {key}={as_python(value)}," for key, value in own.items()),
            ")",
            f"Trainer({_keywords(trainer)}).fit(model, data)\n",
        ]
    )


def _classes(values: list[Any]) -> tuple[list[str], list[str]]:
    """The names to import for what a config describes: ours, and torch's optimizers."""
    paths = {each["class_path"] for each in values if is_class(each)}
    optimizers = {path for path in paths if path.startswith(OPTIMIZERS)}
    return _sorted(paths - optimizers), _sorted(optimizers)


def _sorted(paths: set[str]) -> list[str]:
    """The last words, as isort has them: those in capitals first."""
    names = {path.rpartition(".")[2] for path in paths}
    return sorted(names, key=lambda name: (not name.isupper(), name))


def as_python(value: Any) -> str:
    """A value of a config as one writes it in Python."""
    if isinstance(value, str):
        return f'"{value}"'
    if not is_class(value):
        return repr(value)
    name, arguments = value["class_path"].rpartition(".")[2], _keywords(value.get("init_args", {}))
    if value["class_path"].startswith(OPTIMIZERS):
        return f"partial({name}, {arguments})"
    return f"{name}({arguments})"


def is_class(value: Any) -> bool:
    """Whether a value of a config describes an object."""
    return isinstance(value, dict) and "class_path" in value


def _keywords(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={as_python(value)}" for key, value in arguments.items())


def _flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """``{net: {init_args: {projection: 256}}}`` as ``net.projection``."""
    for key, value in settings.items():
        if isinstance(value, dict) and set(value) == {"init_args"}:
            yield from ((f"{key}.{name}", each) for name, each in _flat(value["init_args"]))
        else:
            yield key, value


def read(name: str) -> dict[str, Any]:
    """One of our configs."""
    content: dict[str, Any] = yaml.safe_load((folder() / name).read_text(encoding="utf-8"))
    return content
