"""What is public: the classes that a config may name, grouped by the key that names them.

Classes are read as source, so nothing here imports torch.
"""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fedgkd_pl.methods import discover

from tools.signatures import settings

REPO = Path(__file__).parents[1]


@dataclass(frozen=True)
class Group:
    """Classes that one key of a config may name.

    Attributes:
        key: where a config names them; empty for the page's own classes.
        modules: beginnings of the modules' names, below ``fedgkd_pl``.
        base: the class whose settings all of them have; shown first.
    """

    title: str
    key: str
    modules: tuple[str, ...]
    base: str = ""
    text: str = ""


PAGES = {
    "methods": (
        "Methods, losses and server optimizers",
        [
            Group(
                "Methods",
                "model",
                ("methods.",),
                "FedAvg",
                "Every method takes the settings of FedAvg, and its own. Where it comes from: "
                "[a page each](../methods/index.md), [papers and choices](../../PAPERS.md); "
                "what its clients report: [metrics](metrics.md).",
            ),
            Group(
                "Losses of clients",
                "model.loss",
                ("federation.losses",),
                text="Of every method; [tasks](../modules.md#numbers-several-labels-pixels).",
            ),
            Group(
                "Pretraining and server optimizers",
                "model.pretraining, model.server_optimizer",
                ("federation.pretraining", "federation.optimizers"),
                text="`SimCLR` is FedAUX's; `Adaptive` is what FedAdam, FedYogi and FedAdagrad "
                "use. Any optimizer of torch.optim is one for `server_optimizer`, too.",
            ),
        ],
    ),
    "data": (
        "Data, partitions and cohorts",
        [
            Group(
                "Datasets",
                "data",
                ("data.datamodule", "data.datasets."),
                "FederatedDataModule",
                "Every dataset, and every source below, takes the settings of "
                "FederatedDataModule, and its own.",
            ),
            Group(
                "Your own data",
                "data",
                ("data.sources.",),
                "OwnData",
                "With examples: [bring your own data](../data.md).",
            ),
            Group(
                "Partitions",
                "data.partition",
                ("data.partition", "data.published"),
                text="With pictures: [data and partitions](../partitions.md).",
            ),
            Group("Cohort samplers", "data.cohorts", ("data.cohorts",)),
            Group(
                "Public data",
                "data.public",
                ("data.public",),
                text="What FedDF, CFD, FedAUX and FedMD distil on; no labels unless `labelled`.",
            ),
            Group(
                "Tasks",
                "data.tasks",
                ("data.tasks",),
                text="One group of classes after the other: [tasks](../tasks.md).",
            ),
        ],
    ),
    "nets": (
        "Nets",
        [
            Group(
                "Nets",
                "model.net",
                ("models.",),
                text="Or any module of torch.nn and any model of torchvision; your own "
                "with `--import`.",
            )
        ],
    ),
    "engines": (
        "Engines",
        [
            Group(
                "Engines",
                "model.engine",
                ("engines.local", "engines.ray", "engines.flower"),
                text="Which to take: [engines](../engines.md).",
            )
        ],
    ),
    "callbacks": (
        "Callbacks",
        [
            Group(
                "Callbacks",
                "trainer.callbacks",
                ("callbacks.", "runs.files"),
                text="A list: a name, or a `class_path` with `init_args`. What they log: "
                "[metrics](metrics.md). Lightning's own work per round, too: "
                "[which](../lightning.md#callbacks). `RunFiles`, `Dashboard` and `RoundProgress` "
                "are in every run of the command line already.",
            )
        ],
    ),
}


def public() -> dict[str, str]:
    """The full name of every public class and function, by the name it has in fedgkd_pl."""
    stub = ast.parse((REPO / "fedgkd_pl" / "__init__.pyi").read_text(encoding="utf-8"))
    lines = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    names = {
        alias.name: f"fedgkd_pl.{line.module}.{alias.name}"
        for line in lines
        for alias in line.names
    }
    return names | {name: f"{info.module}.{name}" for name, info in discover().items()}


def members(group: Group) -> dict[str, str]:
    """The public classes of a group: methods in the order of their colours, its base first."""
    found = {
        name: path
        for name, path in public().items()
        if path.removeprefix("fedgkd_pl.").startswith(group.modules)
        and not name.endswith("Client")
        and docstring(path) is not None
        and (settings(path) or not _is_abstract(path))
    }
    order = [name for name in (group.base, *discover(), *found) if name in found]
    return {name: found[name] for name in dict.fromkeys(order)}


def docstring(path: str) -> str | None:
    """Of a class; None where the name is a function's."""
    node = _class(path)
    return None if node is None else ast.get_docstring(node) or ""


def _class(path: str) -> ast.ClassDef | None:
    module, _, name = path.rpartition(".")
    found = [n for n in _body(module) if isinstance(n, ast.ClassDef) and n.name == name]
    return found[0] if found else None


@cache
def _body(module: str) -> list[ast.stmt]:
    file = REPO.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8")).body


def choices(name: str, path: str) -> str:
    """The values of a ``Literal`` that a module has a name for, or imports; else the name."""
    module = path.rpartition(".")[0]
    for node in _body(module):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return " | ".join(re.findall(r"'(\w+)'", ast.unparse(node.value))) or name
        if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
            ours = node.module is not None and node.module.startswith("fedgkd_pl.")
            return choices(name, f"{node.module}.{name}") if ours else name
    return name


def _is_abstract(path: str) -> bool:
    """Whether a class is there to be derived from: it has an abstract method."""
    node = _class(path)
    return node is not None and "abstractmethod" in ast.unparse(node)
