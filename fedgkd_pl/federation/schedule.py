"""The clients' learning rate over the rounds."""

from typing import Any

import torch
from fedgkd_pl.federation.checks import check_scheduler
from lightning.pytorch.cli import LRSchedulerCallable
from torch import nn


class RoundSchedule:
    """A scheduler of torch's that counts rounds; clients multiply their rates by what it gives.

    Args:
        scheduler: gets an optimizer with the clients' rate.
        lr: that rate.
    """

    def __init__(self, scheduler: LRSchedulerCallable, lr: float) -> None:
        self.build = scheduler
        self.lr = lr
        self.reset()

    def reset(self) -> None:
        """Starts with round 1 again."""
        self.rounds = 0  # that are over, as far as it knows
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=self.lr)
        self.scheduler: Any = self.build(self.optimizer)
        check_scheduler(([], [self.scheduler]), "round_scheduler")

    @property
    def factor(self) -> float:
        """What the rates of this round are multiplied by."""
        return float(self.optimizer.param_groups[0]["lr"]) / self.lr

    def begin(self, round: int) -> None:
        """Takes the steps of the rounds before.

        So a checkpoint may be written at any time after a round: it needs no step of that round.
        """
        while self.rounds < round - 1:
            self.optimizer.step()  # which has no gradient; torch warns without it
            self.scheduler.step()
            self.rounds += 1

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state and the rate."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "factor": self.factor,
            "rounds": self.rounds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.scheduler.load_state_dict(state["scheduler"])
        self.rounds = state.get("rounds", getattr(self.scheduler, "last_epoch", 0))
        self.optimizer.param_groups[0]["lr"] = state["factor"] * self.lr
