"""What a round does to models: drift of clients, agreement with their teacher, forgetting."""

from typing import Any

import torch
from fedgkd_pl.callbacks.evaluate import Split, SplitCallback, SplitRunner, share
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.errors import require
from fedgkd_pl.federation.callback import FederatedCallback
from fedgkd_pl.federation.checks import require_classes
from fedgkd_pl.federation.message import ClientUpdate, Message, State
from fedgkd_pl.federation.server import FederatedServer
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override


class ClientDrift(FederatedCallback):
    """Logs how the clients' models of a round differ from the one they started from.

    With Δ_k = w_k − w_t, a vector of all parameters and floating-point buffers, over the K clients
    that answered (each counts once, whatever its samples):

    * ``drift/norm_mean`` and ``drift/norm_max``: of ‖Δ_k‖₂;
    * ``drift/cosine``: the mean cosine over all pairs of different clients; 1 where all move in one
      direction, near 0 or below where they pull apart. From the sum of the unit vectors u_k:
      (‖Σ u_k‖² − K) / (K (K − 1)). A client that did not move has no direction and is left out
      here; with fewer than two others there is no value;
    * ``drift/diversity``: Σ ‖Δ_k‖² / ‖Σ Δ_k‖², the gradient diversity of Yin et al. (Gradient
      Diversity: a Key Ingredient for Scalable Distributed Learning, AISTATS 2018); 1/K where all
      are equal, 1 where they are orthogonal. No value where the sum is zero.

    Sums are in float64, and of no client more than the sums is kept. A method that sends no global
    model (FedDistill) has no w_t that its clients start from: nothing is logged for it.
    """

    def __init__(self) -> None:
        self.start: Tensor | None = None  # w_t
        self.norms: list[float] = []

    @override
    def on_broadcast(
        self, trainer: Trainer, pl_module: FederatedServer, message: Message, cohort: Any
    ) -> None:
        """Takes w_t."""
        self.norms, self.start = [], None
        if state := message.models.get("global"):
            self.names = [name for name, tensor in state.items() if tensor.is_floating_point()]
            self.start = self._vector(state)
            self.sum = torch.zeros_like(self.start)
            self.unit_sum = torch.zeros_like(self.start)

    @override
    def on_client_end(
        self, trainer: Trainer, pl_module: FederatedServer, update: ClientUpdate, cohort_size: int
    ) -> None:
        """Adds a client's Δ_k to the sums."""
        if self.start is None:
            return
        delta = self._vector(update.weights) - self.start
        norm = float(delta.norm())
        self.norms.append(norm)
        self.sum += delta
        if norm > 0:
            self.unit_sum += delta / norm

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Logs the round."""
        if not self.norms:
            return
        moved = sum(norm > 0 for norm in self.norms)
        values = {"norm_mean": sum(self.norms) / len(self.norms), "norm_max": max(self.norms)}
        if moved >= 2:
            squared = float(self.unit_sum.dot(self.unit_sum))
            values["cosine"] = (squared - moved) / (moved * (moved - 1))
        if squared := float(self.sum.dot(self.sum)):
            values["diversity"] = sum(norm**2 for norm in self.norms) / squared
        pl_module.log_round({f"drift/{name}": value for name, value in values.items()})

    def _vector(self, state: State) -> Tensor:
        """A new one; on the CPU, as some devices have no doubles."""
        return torch.cat([state[name].detach().cpu().double().flatten() for name in self.names])


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

    @override
    def on_broadcast(
        self, trainer: Trainer, pl_module: FederatedServer, message: Message, cohort: Any
    ) -> None:
        """Lets the teacher decide."""
        super().on_broadcast(trainer, pl_module, message, cohort)
        self.decisions: Tensor | None = None  # the teacher's
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


class Forgetting(FederatedCallback):
    """Logs, per class, how far its accuracy is below the best of all earlier evaluated rounds.

    Chaudhry et al. (Riemannian Walk for Incremental Learning, ECCV 2018), with classes for tasks
    and rounds for stages:

        f_c = max over earlier rounds of acc_c − acc_c now

    It is negative where a class has never been recognised as well as now. ``forgetting/class/<c>``
    is f_c, ``forgetting/mean`` and ``forgetting/max`` are over the classes that the split has
    samples of, from the second evaluated round on. The best accuracies travel in the checkpoint.

    Args:
        split: the server's data whose evaluation counts, ``test`` or ``val``.
    """

    needs_whole = True

    def __init__(self, split: Split = "test") -> None:
        require(split in ("val", "test"), "split", "must be val or test", split)
        self.split = split
        self.best: dict[int, float] = {}  # accuracy by class, of the rounds so far

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From the checkpoint."""
        self.best = dict(state_dict["best"])

    @override
    def check(self, model: FederatedServer, data: FederatedDataModule) -> None:
        """Refuses data without classes."""
        require_classes(model, data, self)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """A new run has no earlier rounds; a checkpoint's come after this hook."""
        if stage == "fit" and trainer.current_epoch == 0:
            self.best = {}

    @override
    def on_evaluated(
        self, trainer: Trainer, pl_module: Any, split: str, values: Any, confusion: Tensor | None
    ) -> None:
        """Compares a round with those before; evaluations outside ``fit`` are none."""
        if split != self.split or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        assert confusion is not None  # see check
        now = {
            c: float(row[c] / row.sum()) for c, row in enumerate(confusion.double()) if row.any()
        }
        if self.best:
            lost = {c: self.best[c] - acc for c, acc in now.items()}
            values = {"mean": sum(lost.values()) / len(lost), "max": max(lost.values())}
            values |= {f"class/{c}": value for c, value in lost.items()}
            pl_module.log_round({f"forgetting/{name}": value for name, value in values.items()})
        self.best = {c: max(acc, self.best.get(c, acc)) for c, acc in now.items()}
