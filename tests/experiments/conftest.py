"""One parser for all tests that only ask what flags and files come to."""

from typing import Any

import pytest
from fedgkd_pl.cli.commands import prepare
from fedgkd_pl.settings.build import FederatedCLI

from tests.support.shipped import Parse, Settings


@pytest.fixture(scope="session")
def parse() -> Parse:
    """All settings of a ``fedgkd-pl fit`` but its name; one parser, as building it takes long."""
    parsers = []

    class OnlyParser(FederatedCLI):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            parsers.append(parser)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        OnlyParser(["fit"])

    def settings(flags: list[str]) -> Settings:
        found: Settings = parsers[0].parse_args(prepare(["fit", *flags])[0]).fit.as_dict()
        return {key: value for key, value in found.items() if key not in ("name", "config")}

    return settings
