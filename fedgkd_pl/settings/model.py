"""The method and the net of a config, without its data and its Trainer, which may not fit here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.runs.settings import fixed_settings, flatten
from fedgkd_pl.settings.messages import setting_error
from fedgkd_pl.settings.parser import Parsed
from fedgkd_pl.settings.request import Request, read_request
from fedgkd_pl.settings.scope import our_rules
from torch.random import fork_rng


@dataclass
class BuiltModel:
    """A method, and the settings that decide its result, by dotted key."""

    model: FederatedServer
    fixed: dict[str, Any]


def build_model(argv: Sequence[str], encoder: dict[str, Any] | None = None) -> BuiltModel:
    """Builds the method of a config; the generators stay as they were.

    Args:
        argv: flags of ``fedgkd-pl fit``.
        encoder: the settings of a text net's encoder, so that no pretrained weights are fetched
            where they will be replaced.
    """
    request = read_request("fit", argv)
    with our_rules(request.modules), fork_rng([]):
        made = _Model(request, encoder)
    return BuiltModel(made.model, fixed_settings(made.settings))


class _Model(Parsed):
    """Of all objects that settings describe, only the method."""

    settings: dict[str, Any]

    def __init__(self, request: Request, encoder: dict[str, Any] | None) -> None:
        self.encoder = encoder
        super().__init__(request)

    def _set_seed(self) -> None:
        """Draws nothing that is kept."""

    def instantiate_classes(self) -> None:
        text = self.parser.dump(self.config, skip_unset=False, format="yaml", skip_validation=True)
        self.settings = yaml.safe_load(text)
        config = self.config.clone()
        for group in ("data", "trainer", "checkpoint"):
            del config[group]
        config.model.init_args.pop("engine", None)  # of another machine
        net = config.model.init_args.get("net")
        if self.encoder is not None and net and net.class_path.endswith(".TextClassifier"):
            net.init_args.encoder_config = self.encoder
        try:
            self.model = self.parser.instantiate(config).model
        except Exception as error:  # a constructor may not expect what it is given
            raise setting_error(error, flatten(self.settings)) from error
