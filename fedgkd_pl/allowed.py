"""What a config may name, so that reading one from a stranger runs none of their code.

Of torch only what nets and optimizers are made of: elsewhere in it there are functions that turn a
text into a module, such as ``torch.fx.graph_module.reduce_graph_module``.
"""

from typing import Any

from fedgkd_pl.engines.base import Engine
from jsonargparse import _typehints, set_parsing_settings

PACKAGES = (
    "fedgkd_pl",
    "torch.nn",
    "torch.optim",
    "torchvision",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "torchmetrics",
    "transformers",
)


def only_these_packages() -> None:
    """Lets jsonargparse import nothing else for a value, nor read a config from a URL."""
    set_parsing_settings(
        import_path_denylist=["*"],
        import_path_allowlist=list(PACKAGES),
        instantiate_subclass_spec_in_any=False,
        config_read_mode_fsspec_enabled=False,
    )


def allow(module: str) -> None:
    """Adds the user's own.

    Args:
        module: a module that may be named from now on, with all that is in it.
    """
    set_parsing_settings(import_path_allowlist=[module])


def short_engines() -> None:
    """Lets a config say ``engine: ray``; jsonargparse knows no names but those of classes."""
    usual = _typehints.resolve_class_path_by_name
    short = {"local": "LocalEngine", "ray": "RayEngine", "flower": "FlowerEngine"}

    def resolve(cls: Any, name: str) -> str:
        engine = isinstance(cls, type) and issubclass(cls, Engine)
        return usual(cls, short.get(name, name) if engine else name)

    _typehints.resolve_class_path_by_name = resolve
