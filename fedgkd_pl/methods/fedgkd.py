"""FedGKD: clients distil from past global models.

Yao et al., Local-Global Knowledge Distillation in Heterogeneous Federated Learning with Non-IID
Data. The local objective (Eq. 4), with the teacher w̄_t = 1/M Σ_{m=1..M} w_{t−m+1}:

    CE(w) + γ/2 · 1/n_k Σ_i KL( h(w̄_t, x_i) ‖ h(w, x_i) )

The mean is over the last M *aggregated* models, or as many as there are: the random w_0 does not
teach, so round 1 is plain FedAvg. With M=1 the teacher is the model the round started from and
nothing more is sent than in FedAvg; with M>1 the mean is sent beside it.
"""

from typing import Any, Literal

from fedgkd_pl.errors import at_least, not_negative, positive, require
from fedgkd_pl.federation.client import Objective
from fedgkd_pl.federation.hardware import wide
from fedgkd_pl.federation.message import Message, State
from fedgkd_pl.federation.teachers import MovingMean, TeacherBuffer, TeacherPrecision
from fedgkd_pl.methods.fedavg import DISTIL, FedAvg, TeacherClient
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, mse_loss

Distance = Literal["kl", "mse"]


class FedGKDClient(TeacherClient):
    """The client module of FedGKD."""

    def objective(self, x: Tensor, y: Tensor, teacher_output: Tensor | None) -> Objective:
        """CE(w) + γ/2 · KL(h(w̄_t) ‖ h(w))."""
        if teacher_output is None:
            return super().objective(x, y, teacher_output)
        logits, ce, parts = self.task_loss(x, y)
        kd = distillation(logits, teacher_output, self.distance, self.temperature)
        factor = self.temperature**2 if self.tau_squared and self.distance == "kl" else 1.0
        return ce + self.gamma * factor / 2 * kd, {**parts, "kd": kd}


class FedGKD(FedAvg):
    """FedGKD: local training is regularised by the mean of the last M global models.

    Args:
        net: the model to learn; any module from inputs to logits.
        gamma: γ, twice the weight of the distillation term (paper: 0.2; 0.1 for ResNet-50).
        buffer_size: M, how many global models the teacher is the mean of (paper: 5; 1 for text).
        distance: ``kl`` of the class probabilities, or ``mse`` of the logits.
        temperature: τ, which divides both logits inside the KL.
        teach_from_start: let the random initial model teach in round 1.
        ema: instead of the mean of the last M, a moving average of all global models with this
            decay teaches; with ``teach_from_start`` it starts at the initial model, as in FedGMT.
        tau_squared: multiply the KL by τ², which keeps the size of its gradient.
        teacher_precision: ``bf16`` asks the teacher in bfloat16, which is faster where the hardware
            has instructions for it and the student trains in float32; ``same`` as the student.
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedGKD"
    citation = "Yao et al."
    colour = 6
    client_class = FedGKDClient
    client_settings = ("gamma", "distance", "temperature", "tau_squared", "teacher_precision")
    needs_outputs = True
    keeps = ("buffer",)

    def __init__(
        self,
        net: nn.Module | None = None,
        gamma: float = 0.2,
        buffer_size: int = 5,
        distance: Distance = "kl",
        temperature: float = 1.0,
        teach_from_start: bool = False,
        ema: float | None = None,
        tau_squared: bool = False,
        teacher_precision: TeacherPrecision = "same",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, **kwargs)
        not_negative(gamma=gamma)
        at_least(1, buffer_size=buffer_size)
        positive(temperature=temperature)
        self.distance = distance
        self.gamma, self.temperature = gamma, temperature
        self.teach_from_start = teach_from_start
        require(ema is None or 0 <= ema < 1, "ema", "must be in [0, 1)", ema)
        self.tau_squared = tau_squared
        self.teacher_precision = teacher_precision
        self.buffer: TeacherBuffer | MovingMean = (
            TeacherBuffer(maxlen=buffer_size) if ema is None else MovingMean(ema)
        )

    @property
    def distils_classes(self) -> bool:  # type: ignore[override]
        """Of squared differences, the outputs may be anything."""
        return self.distance == "kl"

    def on_train_start(self) -> None:
        """Opens the engine; w_0 enters the buffer where it may teach."""
        super().on_train_start()
        if self.teach_from_start and not self.buffer:
            self.buffer.start(self.shared(self.global_state()))

    def broadcast(self) -> Message:
        """w_t, and w̄_t where it is another model."""
        message = super().broadcast()
        if self.buffer and self.gamma:
            message.numbers[DISTIL] = 1
            if isinstance(self.buffer, MovingMean) or len(self.buffer) > 1:
                message.models["teacher"] = self.buffer.mean()
        return message

    def server_step(self, mean: State) -> None:
        """As FedAvg; the new global model enters the buffer."""
        super().server_step(mean)
        self.buffer.append(self.shared(self.global_state()))


def distillation(
    student: Tensor, teacher: Tensor, distance: Distance = "kl", temperature: float = 1.0
) -> Tensor:
    """How far the student's logits are from the teacher's, a mean over the batch and its pixels.

    ``kl`` is KL(teacher ‖ student) of the class probabilities, inside which τ divides the logits;
    ``mse`` is the mean squared difference of the logits. Both are computed in float32 at least.
    """
    student, teacher = wide(student), wide(teacher)
    if distance == "mse":
        return mse_loss(student, teacher)
    if student.ndim > 2:  # a prediction for every pixel
        student, teacher = (part.movedim(1, -1).flatten(0, -2) for part in (student, teacher))
    log_q = log_softmax(student / temperature, dim=1)
    log_p = log_softmax(teacher / temperature, dim=1)
    return kl_div(log_q, log_p, reduction="batchmean", log_target=True)
