"""FedGKD-Vote: clients distil from each of the last M global models.

Yao et al., Local-Global Knowledge Distillation in Heterogeneous Federated Learning with Non-IID
Data. The local objective (Eq. 5), with L_m the loss of w_{t−m+1} on the server's validation set:

    CE(w) + Σ_m γ_m/2 · 1/n_k Σ_i KL( h(w_{t−m+1}, x_i) ‖ h(w, x_i) )
    γ_m/2 = λ · softmax_m( −L_m / β ),    β = 1/M

M models are sent to every client; the newest of them is the one it starts from.
"""

from itertools import count, takewhile
from typing import Any

import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.errors import at_least, not_negative, require
from fedgkd_pl.federation.client import Objective
from fedgkd_pl.federation.hardware import wide
from fedgkd_pl.federation.message import Message, State
from fedgkd_pl.federation.server_training import validation_scores
from fedgkd_pl.federation.teachers import FrozenNet, Recent, TeacherBuffer, TeacherPrecision
from fedgkd_pl.methods.fedavg import FedAvg, FedAvgClient
from torch import Tensor, nn
from torch.nn.functional import log_softmax


class FedGKDVoteClient(FedAvgClient):
    """The client module of FedGKD-Vote."""

    teacher_precision: TeacherPrecision = "same"

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.teachers: list[FrozenNet] = []
        self.half_gammas = torch.zeros(0)

    def receive(self, message: Message, state: State) -> None:
        """Loads the student and the teachers."""
        super().receive(message, state)
        teachers = voters(message)
        self.half_gammas = self.as_tensor([half_gamma for half_gamma, _ in teachers])
        while len(self.teachers) < len(teachers):
            self.teachers.append(FrozenNet(self.net, self.teacher_precision))
        for teacher, (_, model) in zip(self.teachers, teachers, strict=False):
            teacher.load(self.whole(model), self.device)

    def teach(self, x: Tensor) -> Tensor | None:
        """The teachers' mixture Σ_m γ_m/2 p_m and, in the last column, Σ_m γ_m/2 p_m·log p_m.

        That is all of the teachers that the objective and its gradient need, whatever M is.
        """
        if not len(self.half_gammas):
            return None
        weighted = []
        for half_gamma, teacher in zip(self.half_gammas, self.teachers, strict=False):
            log_p = log_softmax(wide(teacher(x)), dim=1)
            p = half_gamma * log_p.exp()
            weighted.append(torch.cat([p, (p * log_p).sum(1, keepdim=True)], dim=1))
        return torch.stack(weighted).sum(0)

    def objective(self, x: Tensor, y: Tensor, teacher_output: Tensor | None) -> Objective:
        """CE(w) + Σ_m γ_m/2 · KL(h(w_{t−m+1}) ‖ h(w))."""
        if teacher_output is None:
            return super().objective(x, y, teacher_output)
        logits, ce, parts = self.task_loss(x, y)
        mixture, own = teacher_output[:, :-1], teacher_output[:, -1]
        kd = (own - (mixture * log_softmax(wide(logits), dim=1)).sum(1)).mean()
        return ce + kd, {**parts, "kd": kd}


class FedGKDVote(FedAvg):
    """FedGKD-Vote: each of the last M global models teaches, the better ones more.

    Args:
        net: the model to learn; any module from inputs to logits.
        lam: λ, the weight of all teachers together (paper: 0.1).
        buffer_size: M, how many global models teach (paper: 5; 3 for text).
        teacher_precision: ``bf16`` asks the teachers in bfloat16; see :class:`FedGKD`.
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedGKD-Vote"
    citation = "Yao et al."
    exchanges = ("share",)
    colour = 7
    client_class = FedGKDVoteClient
    client_settings = ("teacher_precision",)
    needs_outputs = True
    tasks = ("classes",)
    keeps = ("buffer", "losses")

    def __init__(
        self,
        net: nn.Module | None = None,
        lam: float = 0.1,
        buffer_size: int = 5,
        teacher_precision: TeacherPrecision = "same",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, **kwargs)
        not_negative(lam=lam)
        at_least(1, buffer_size=buffer_size)
        self.lam = lam
        self.teacher_precision = teacher_precision
        self.buffer = TeacherBuffer(maxlen=buffer_size)
        self.losses = Recent[float](maxlen=buffer_size)  # of the buffer's models

    def check(self, data: FederatedDataModule) -> None:
        """Asks for validation data, too."""
        require(len(data.val) > 0, "val_fraction", "FedGKD-Vote needs a validation set")
        super().check(data)

    def coefficients(self) -> list[float]:
        """γ_m/2 of every teacher, the oldest first."""
        capacity = self.buffer.maxlen or 1
        scores = torch.tensor(self.losses, dtype=torch.float64) * -capacity
        return (self.lam * scores.softmax(0)).tolist()

    def broadcast(self) -> Message:
        """w_t and the M − 1 models before it, each with its coefficient."""
        message = super().broadcast()
        if len(self.buffer) and self.lam:
            newest = len(self.buffer) - 1
            for slot, half_gamma in enumerate(self.coefficients()):
                message.numbers[f"teacher{slot}"] = half_gamma
                if slot < newest:
                    message.models[f"teacher{slot}"] = self.buffer[slot]
                self.log_round({f"vote/teacher_{newest - slot}": half_gamma})
        return message

    def teachers(self, message: Message) -> list[tuple[float, State]]:
        """Those that vote; in round 1, w_t."""
        return voters(message) or super().teachers(message)

    def server_step(self, mean: State) -> None:
        """As FedAvg; the new global model enters the buffer with its validation loss."""
        super().server_step(mean)
        self.buffer.append(self.shared(self.global_state()))
        self.losses.append(validation_scores(self)[1])


def voters(message: Message) -> list[tuple[float, State]]:
    """γ_m/2 and the model of every teacher, the oldest first; the newest is w_t itself."""
    slots = takewhile(message.numbers.__contains__, (f"teacher{slot}" for slot in count()))
    newest = message.models["global"]
    return [(message.numbers[slot], message.models.get(slot, newest)) for slot in slots]
