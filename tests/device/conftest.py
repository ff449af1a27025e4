"""Skips the tests where there is no simulated device."""

import pytest


@pytest.fixture(autouse=True)
def _on_a_device() -> None:
    from tests.device.pieces import absent

    if absent:
        pytest.skip(absent)
