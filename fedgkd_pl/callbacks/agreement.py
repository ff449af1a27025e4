"""Agreement of the clients with their teacher."""

from typing import Any

import torch
from fedgkd_pl.callbacks.evaluate import Split, SplitCallback, SplitRunner, share
from fedgkd_pl.federation.message import ClientUpdate, Message
from fedgkd_pl.federation.server import FederatedServer
from lightning.pytorch import Trainer
from torch import Tensor
from typing_extensions import override


class TeacherAgreement(SplitCallback):
    """Compares every client's decisions after local training with its teacher's.

    Logs ``teacher/agreement_mean`` and ``_min``: over the clients that answered, the share of
    samples on which the client's most probable class is the teacher's; and ``teacher/acc``, the
    teacher's own accuracy on these samples. The teacher is what the method's ``teachers`` says: in
    FedGKD the mean of the last global models, in FedGKD-Vote the mixture of the teachers' class
    probabilities by their coefficients γ_m. In methods and rounds without a
    teacher it is w_t, which makes the number one of how much clients keep of what they started
    from; a method that sends no model (FedDistill) has none, and nothing is logged.

    Args:
        every_n_rounds: evaluates in rounds n, 2n, ….
        split: the server's data to compare on, ``val`` or ``test``.
        max_samples: this many of them at most, the same random ones in every run; null for all.
    """

    def __init__(
        self, every_n_rounds: int = 1, split: Split = "val", max_samples: int | None = None
    ) -> None:
        super().__init__(every_n_rounds, split, max_samples)
        self.decisions: Tensor | None = None  # the teacher's

    @override
    def on_broadcast(
        self, trainer: Trainer, pl_module: FederatedServer, message: Message, cohort: Any
    ) -> None:
        """Lets the teacher decide."""
        super().on_broadcast(trainer, pl_module, message, cohort)
        self.decisions = None
        runner, teachers = self.runner_of(pl_module), pl_module.teachers(message)
        if runner and teachers:
            weighted = [weight * runner.logits(model).softmax(1) for weight, model in teachers]
            self.decisions = torch.stack(weighted).sum(0).argmax(1)
            self.acc = share(self.decisions == runner.targets)

    @override
    def measure(
        self, runner: SplitRunner, server: FederatedServer, update: ClientUpdate
    ) -> float | None:
        if self.decisions is None:
            return None
        logits = runner.logits(update.weights, client=update.client)
        return share(logits.argmax(1) == self.decisions)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Logs the round."""
        if shares := self.found.values():
            values = {"agreement_mean": sum(shares) / len(shares), "agreement_min": min(shares)}
            values["acc"] = self.acc
            pl_module.log_round({f"teacher/{name}": value for name, value in values.items()})
