"""Changes jsonargparse's settings while a config is read.

They belong to the process, where another library or the user's own LightningCLI may need them, so
they are put back after. Only this module changes jsonargparse's private names; a test compares
before and after.
"""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

import fedgkd_pl
import jsonargparse
import yaml
from fedgkd_pl.settings.allowed import only_these
from fedgkd_pl.settings.engines import engine_defaults, short_engines
from fedgkd_pl.settings.strict_yaml import load, read_text
from jsonargparse import _common, _loaders_dumpers, _optionals, _typehints, set_loader

_LOADERS = ("loaders", "loader_exceptions", "loader_json_superset", "loader_params")


@contextmanager
def our_rules(modules: Collection[str] = ()) -> Iterator[None]:
    """Reads YAML strictly, imports only what a config may name, knows short names of engines."""
    for name in fedgkd_pl.__all__:
        getattr(fedgkd_pl, name)  # imported, so that a config may name a class without its module
    with ExitStack() as undo:
        _keep_dict(undo, _common.parsing_settings)
        for name in _LOADERS:
            _keep_dict(undo, getattr(_loaders_dumpers, name))
        _keep(undo, _optionals, "_config_read_mode")
        _keep(undo, _typehints, "resolve_class_path_by_name", short_engines)
        _keep(undo, _typehints, "resolve_class_path_by_name", lambda f: _ours_first(f, modules))
        _keep(undo, _typehints, "discard_init_args_on_class_path_change", engine_defaults)
        path: Any = jsonargparse.Path  # type: ignore[attr-defined]
        _keep(undo, path, "read_text", lambda _: read_text)
        _keep(undo, yaml.SafeDumper, "yaml_multi_representers")
        only_these(modules)
        set_loader("yaml", load, (yaml.YAMLError,))
        # Lightning's enumerations of texts, which may be a default, are written as those texts
        yaml.SafeDumper.add_multi_representer(
            str, lambda to, text: to.represent_str(str.__str__(text))
        )
        yield


def _ours_first(usual: Any, modules: Collection[str]) -> Any:
    """Wraps ``resolve_class_path_by_name``: of classes of one name ours is meant, or the user's.

    Which others there are depends on what was imported: torchvision, too, has an ``MLP``.
    """

    def resolve(cls: Any, name: str) -> str:
        try:
            path: str = usual(cls, name)
        except ValueError as error:
            paths: list[str] = re.findall(rf"[\w.]+\.{re.escape(name)}\b", str(error))
            homes = ("fedgkd_pl.", *(f"{module}." for module in modules))
            ours = [path for path in paths if path.startswith(homes)]
            if len(ours) != 1:
                raise
            return ours[0]
        return path

    return resolve


def _keep(undo: ExitStack, owner: Any, name: str, change: Callable[[Any], Any] = copy) -> None:
    """Changes an attribute, by default to a copy of it, until the end."""
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:  # inherited
        undo.callback(delattr, owner, name)
    setattr(owner, name, change(getattr(owner, name)))


def _keep_dict(undo: ExitStack, settings: dict[Any, Any]) -> None:
    before = dict(settings)

    def restore() -> None:
        settings.clear()
        settings.update(before)

    undo.callback(restore)
