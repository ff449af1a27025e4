"""What a run prints of itself: what begins, and who ended it before its last round."""

from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.methods import title_of_class
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason


def what_begins(trainer: Trainer, model: FederatedServer, data: FederatedDataModule) -> str:
    """``FedGKD on digits: 20 clients, 4 a round, 30 rounds, seed 0``."""
    parts = [_many(data.num_clients, "client"), f"{data.cohort_size} a round"]
    parts += [_many(trainer.max_epochs or 0, "round"), f"seed {data.seed}"]
    if trainer.precision != "32-true":
        parts.append(f"precision {trainer.precision}")
    return f"{title_of_class(type(model))} on {data.name}: {', '.join(parts)}"


def who_ended(trainer: Trainer) -> str | None:
    """Who ended a run before its last round, and why; None if it has all rounds."""
    done, rounds = trainer.current_epoch, trainer.max_epochs or 0
    if trainer.fast_dev_run or done >= rounds:  # type: ignore[attr-defined]
        return None
    return f"ended after round {done} of {rounds}: {_reason(trainer)}"


def _reason(trainer: Trainer) -> str:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if 0 < trainer.max_steps <= trainer.global_step:
        return f"trainer.max_steps is {trainer.max_steps}"
    for callback in callbacks:
        if isinstance(callback, EarlyStopping) and callback.stopping_reason_message:
            return f"{type(callback).__name__}: {_of_early_stopping(callback, trainer)}"
        left = callback.time_remaining() if isinstance(callback, Timer) else None
        if left is not None and left <= 0:
            return f"{type(callback).__name__}: the time is over"
    theirs = [type(callback) for callback in callbacks]
    names = [cls.__name__ for cls in theirs if not cls.__module__.startswith(("lightning", "fedg"))]
    return f"a callback set trainer.should_stop{f' ({names[0]})' if len(names) == 1 else ''}"


def _of_early_stopping(callback: EarlyStopping, trainer: Trainer) -> str:
    if callback.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED:
        unit = "round" if trainer.check_val_every_n_epoch == 1 else "evaluation"
        many, best = _many(callback.wait_count, unit), float(callback.best_score)
        return f"{callback.monitor} did not improve for {many} (best {best:.4f})"
    text = str(callback.stopping_reason_message)
    return text.removesuffix("Signaling Trainer to stop.").rstrip(". ")


def _many(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"
