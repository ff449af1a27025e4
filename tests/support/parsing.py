"""What jsonargparse and PyYAML keep for the whole process."""

from typing import Any

import jsonargparse
import yaml
from jsonargparse import _common, _loaders_dumpers, _optionals, _typehints


def state() -> list[Any]:
    names = ("loaders", "loader_exceptions", "loader_json_superset", "loader_params")
    path: Any = jsonargparse.Path  # type: ignore[attr-defined]
    return [
        dict(_common.parsing_settings),
        _optionals._config_read_mode,
        [dict(getattr(_loaders_dumpers, name)) for name in names],
        _typehints.resolve_class_path_by_name,
        _typehints.discard_init_args_on_class_path_change,
        path.read_text,
        dict(yaml.SafeDumper.yaml_multi_representers),
    ]
