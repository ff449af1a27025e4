"""The simulated device in Lightning: ``Trainer(**on(0))``."""

from typing import Any

import fedgkd_pl  # noqa: F401  (before Lightning; FAQ in README.md)
import simdevice
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy


class SimAccelerator(Accelerator):
    """Known to no registry of Lightning's: an instance is what a user would pass, too."""

    def setup_device(self, device: torch.device) -> None:
        assert device.type == simdevice.NAME
        torch.sim.set_device(device)  # type: ignore[attr-defined]

    def setup(self, trainer: Any) -> None:
        torch.sim.empty_cache()  # type: ignore[attr-defined]  # as Lightning's for CUDA

    def teardown(self) -> None:
        torch.sim.empty_cache()  # type: ignore[attr-defined]

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(devices)) if isinstance(devices, int) else list(devices)

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device(simdevice.NAME, index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 2

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return simdevice.NAME

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}


def on(index: int = 0, **more: Any) -> dict[str, Any]:
    """A Trainer's arguments for a device; Lightning's automatic strategy would take the CPU."""
    strategy = SingleDeviceStrategy(torch.device(simdevice.NAME, index))
    return {"accelerator": SimAccelerator(), "strategy": strategy, "devices": [index]} | more


def bf16(index: int = 0) -> dict[str, Any]:
    """The same in bf16-mixed, of which Lightning knows cpu, mps and cuda only."""
    return on(index, plugins=[MixedPrecision("bf16-mixed", simdevice.NAME)])  # type: ignore[arg-type]
