"""What flags and files come to, without the objects."""

import pytest
from fedgkd_pl.config.parser import Parsed
from fedgkd_pl.config.request import read_request
from fedgkd_pl.config.safety import our_rules

from tests.support.shipped import Parse, Settings


@pytest.fixture(scope="session")
def parse() -> Parse:
    """All settings of a ``fedgkd-pl fit`` but its name."""

    class OnlyParsed(Parsed):
        def instantiate_classes(self) -> None:
            """Leaves it at the settings."""

    def settings(flags: list[str]) -> Settings:
        with our_rules():
            found: Settings = OnlyParsed(read_request("fit", flags)).config.as_dict()
        return {key: value for key, value in found.items() if key not in ("name", "config")}

    return settings
