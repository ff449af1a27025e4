"""FedGMT: clients distil from a moving average of global models, and duals hold them together.

Li et al., One Arrow, Two Hawks: Sharpness-aware Minimization for Federated Learning via Global
Model Trajectory, ICML 2025. With e_t the moving average, d_k the sum of client k's moves:

    client k:  CE(w) + γ τ² KL( h(e_t) ‖ h(w) ) + ⟨d_k, w⟩/β,   then  d_k ← d_k + w_k − w_t
    server:    w_{t+1} = Σ_k n_k/n w_k + 1/N Σ_{all k} d_k
               e_{t+1} = α e_t + (1 − α) w_{t+1}

By default the average starts empty and is divided by 1 − α^t, so that the random w_0 does not teach
(after 100 rounds at α=0.995 it would still be 61 % of e). The dual without a proximal term moves
directions that the loss does not hold: β is 10 in the authors' code for fewer local steps; with
hundreds of steps take a larger β.
"""

from typing import Any

from fedgkd_pl.errors import not_negative, positive, require
from fedgkd_pl.federation.client import Objective
from fedgkd_pl.federation.message import Message, State
from fedgkd_pl.federation.teachers import MovingMean
from fedgkd_pl.methods.fedavg import DISTIL, TeacherClient, Weighting
from fedgkd_pl.methods.feddyn import FedDyn, FedDynClient
from fedgkd_pl.methods.fedgkd import distillation
from torch import Tensor, nn


class FedGMTClient(TeacherClient, FedDynClient):
    """The client module of FedGMT; d_k is its state."""

    def receive(self, message: Message, state: State) -> None:
        """Loads the student and the teacher; the dual's gradient is d_k/β."""
        super().receive(message, state)
        if state:
            names = [name for name, _ in self.corrected]
            self.correction = [(state[name] / self.beta).to(self.device) for name in names]

    def objective(self, x: Tensor, y: Tensor, teacher_output: Tensor | None) -> Objective:
        """CE(w) + γ τ² KL(h(e_t) ‖ h(w)); the dual is added to the gradient."""
        if teacher_output is None:
            return super().objective(x, y, teacher_output)
        logits, ce, parts = self.task_loss(x, y)
        parts["kd"] = distillation(logits, teacher_output, temperature=self.tau)
        return ce + self.gamma * self.tau**2 * parts["kd"], parts


class FedGMT(FedDyn):
    """FedGMT: distillation from the trajectory of global models, with duals.

    Args:
        net: the model to learn; any module from inputs to logits.
        gamma: γ, the weight of the distillation (authors: 1).
        tau: τ, its temperature (authors: 3).
        alpha: α, the decay of the moving average (authors: 0.95).
        beta: β, which divides the dual (authors: 10); ``inf`` for none in the client's loss.
        server_term: add the mean of all clients' d_k to the mean of the cohort's models.
        teach_from_start: start the average at w_0, as the authors do.
        weighting: of the clients in their mean: by their ``samples``, or ``uniform``.
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedGMT"
    citation = "Li et al., ICML 2025"
    colour = 19
    client_class = FedGMTClient
    client_settings = ("mu", "gamma", "tau", "beta")
    needs_outputs = True
    tasks = ("classes", "dense")
    keeps = ("moved", "average")

    def __init__(
        self,
        net: nn.Module | None = None,
        gamma: float = 1.0,
        tau: float = 3.0,
        alpha: float = 0.95,
        beta: float = 10.0,
        server_term: bool = True,
        teach_from_start: bool = False,
        weighting: Weighting = "samples",
        **kwargs: Any,
    ) -> None:
        not_negative(gamma=gamma)
        positive(tau=tau)
        require(0 <= alpha < 1, "alpha", "must be in [0, 1)", alpha)
        require(beta > 0, "beta", "must be positive", beta)
        super().__init__(net, alpha, server_term, weighting, **kwargs)
        self.gamma, self.tau, self.beta = gamma, tau, beta
        self.mu = 0.0  # no proximal term
        self.teach_from_start = teach_from_start
        self.average = MovingMean(alpha)

    def on_train_start(self) -> None:
        """Opens the engine; the average starts at w_0 where that may teach."""
        super().on_train_start()
        if self.teach_from_start and not self.average:
            self.average.start(self.shared(self.global_state()))

    def broadcast(self) -> Message:
        """w_t and, once there is one, e_t."""
        message = super().broadcast()
        if self.average and self.gamma:
            message.numbers[DISTIL] = 1
            message.models["teacher"] = self.average.mean()
        return message

    def server_step(self, mean: State) -> None:
        """As FedDyn; the new global model enters the average."""
        super().server_step(mean)
        self.average.append(self.shared(self.global_state()))
