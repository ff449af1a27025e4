"""Clients that fail, and who notes it."""

import os
import signal
import time
from typing import Any

import torch
from fedgkd_pl import FedAvg
from fedgkd_pl.federation.message import ClientUpdate
from fedgkd_pl.methods.fedavg import FedAvgClient
from lightning.pytorch import Callback


class Troubled(FedAvgClient):
    """Raises with five samples, never ends with six, dies with seven; reports its settings."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        match len(batch[1]):
            case 5:
                raise ValueError("this client cannot")
            case 6:
                time.sleep(600)
            case 7:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

    def reply(self) -> ClientUpdate:
        update = super().reply()
        update.metrics["high"] = float(torch.get_float32_matmul_precision() == "high")
        update.metrics["strict"] = float(torch.are_deterministic_algorithms_enabled())
        return update


class Trouble(FedAvg):
    client_class = Troubled


class Watch(Callback):
    """The failures and the processes of a run."""

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}
        self.processes: list[Any] = []
        self.traceback = ""

    def on_client_failed(self, trainer: Any, pl_module: Any, failure: Any, _: int) -> None:
        self.reasons[failure.client] = failure.reason
        self.traceback = self.traceback or failure.traceback

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        workers = getattr(pl_module._session, "workers", [])
        self.processes += [worker.process for worker in workers]
