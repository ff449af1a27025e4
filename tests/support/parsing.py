"""What jsonargparse and PyYAML keep for the whole process."""

from typing import Any

import yaml
from jsonargparse import _common, _loaders_dumpers, _optionals


def state() -> list[Any]:
    names = ("loaders", "loader_exceptions", "loader_json_superset", "loader_params")
    return [
        dict(_common.parsing_settings),
        _optionals._config_read_mode,
        [dict(getattr(_loaders_dumpers, name)) for name in names],
        dict(yaml.SafeDumper.yaml_multi_representers),
    ]
