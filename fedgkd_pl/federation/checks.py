"""What of a stock Trainer works per round, and what is refused because it cannot.

A round is one batch and one step of the server's Trainer, which has no loss of its own. The whole
table is in docs/lightning.md.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from fedgkd_pl.errors import SettingError, require
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
)
from torch.optim.lr_scheduler import ReduceLROnPlateau

log = logging.getLogger("fedgkd_pl")
SCORES = ("val/", "test/")
# flag → whether a value works, and what to do instead
FLAGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    # before limit_train_batches, which it sets
    "overfit_batches": (lambda n: not n, "is for batches: fewer samples are data.partition's"),
    "accumulate_grad_batches": (lambda n: n == 1, "a round is one step: nothing to accumulate"),
    "barebones": (lambda on: not on, "leaves nothing that a round could be recorded by"),
    "check_val_every_n_epoch": (lambda n: n is not None and n >= 1, "must be at least 1"),
    "gradient_clip_val": (lambda norm: norm is None or norm >= 0, "must not be negative"),
    "limit_train_batches": (
        lambda n: n is None or n >= 1,
        "a round is one batch: nothing would be trained; data.participation is for fewer clients",
    ),
    "max_steps": (lambda n: n == -1 or n >= 1, "a round is one step: must be at least 1, or -1"),
    "val_check_interval": (lambda n: n in (None, 1), "is for batches: check_val_every_n_epoch"),
}
# callbacks that are about steps, losses or layers that the server's Trainer does not have
REFUSED: dict[type[Callback], str] = {
    StochasticWeightAveraging: "averages steps, not rounds: take EMAWeightAveraging or "
    "WeightAveraging",
    GradientAccumulationScheduler: "a round is one step: nothing to accumulate",
    BatchSizeFinder: "would train rounds to find it: set data.batch_size",
    LearningRateFinder: "would train rounds to find it: set lr of model.optimizer",
    BaseFinetuning: "thaws the server's net, which clients only copy: freeze layers of the net",
    SpikeDetection: "needs the loss of a step: a round has none",
    ModelPruning: "gives the server's net parameters that the clients' nets do not have",
}


def check_trainer(trainer: Trainer) -> None:
    """Raises a clear error for a flag or callback that would do something else than it says.

    Args:
        trainer: the server's.
    """
    for name, (is_right, instead) in FLAGS.items():
        value = getattr(trainer, name, None)
        require(value is None or is_right(value), name, instead, value)
    if trainer.limit_val_batches not in (None, 0, 1.0) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        text = "trainer.limit_val_batches: val/ and test/ scores are of a part of the data (%s)"
        log.warning(text, trainer.limit_val_batches)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        for kind, reason in REFUSED.items():
            if isinstance(callback, kind):
                raise SettingError("callbacks", f"{name} {reason}")
        if isinstance(callback, ModelCheckpoint):
            _check_checkpoint(callback)


def _check_checkpoint(callback: ModelCheckpoint) -> None:
    by_steps = callback._every_n_train_steps or callback._train_time_interval
    if by_steps and str(callback.monitor).startswith(SCORES):
        raise SettingError(
            "callbacks",
            "ModelCheckpoint would name a round's file by the score of the round before: "
            "every_n_epochs instead of every_n_train_steps or train_time_interval",
        )


def check_scheduler(optimizers: Any) -> None:
    """Raises a clear error for a scheduler that no client can step.

    Args:
        optimizers: what a client's ``configure_optimizers`` gives.
    """
    schedulers = optimizers[1] if isinstance(optimizers, tuple) else []
    for scheduler in schedulers:
        require(
            not isinstance(scheduler, ReduceLROnPlateau),
            "scheduler",
            "follows a score of every epoch, which a client has not: take one that counts epochs",
            type(scheduler).__name__,
        )


def first_not_finite(state: dict[str, torch.Tensor]) -> str:
    """The first weight of a model that is not finite; empty if all are.

    Args:
        state: parameters and buffers.
    """
    for name, tensor in state.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            return name
    return ""
