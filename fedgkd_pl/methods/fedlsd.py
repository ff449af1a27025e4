"""FedLSD and FedNTD: clients distil from the model they started from.

Lee et al., Preservation of the Global Knowledge by Not-True Distillation in Federated Learning,
NeurIPS 2022, whose first version (2021) was FedLSD. With p and q the probabilities of w_t and of
the client's model at temperature τ:

    FedLSD, additive   CE(w) + β τ² KL(p ‖ q)                 the authors' later code
            convex     (1 − β) CE(w) + β τ² (−Σ_c p_c log q_c)   their first code
    FedNTD             CE(w) + β τ² KL(p̃ ‖ q̃)    p̃, q̃ over the classes other than the label

All are means over the batch, and w_0 teaches, too.
"""

from typing import Any, Literal

import torch
from fedgkd_pl.errors import not_negative, positive, require
from fedgkd_pl.federation.client import Objective
from fedgkd_pl.federation.hardware import wide
from fedgkd_pl.federation.message import Message
from fedgkd_pl.methods.fedavg import FedAvg, TeacherClient
from fedgkd_pl.methods.fedgkd import distillation
from torch import Tensor, nn
from torch.nn.functional import log_softmax

Form = Literal["additive", "convex"]


class FedLSDClient(TeacherClient):
    """The client module of FedLSD."""

    def has_teacher(self, message: Message) -> bool:
        """w_t teaches in every round."""
        return bool(self.beta > 0)

    def objective(self, x: Tensor, y: Tensor, teacher_output: Tensor | None) -> Objective:
        """CE(w) + β τ² KL(p ‖ q), or the convex mixture."""
        if teacher_output is None:
            return super().objective(x, y, teacher_output)
        logits, ce, parts = self.task_loss(x, y)
        if self.form == "convex":
            p = (wide(teacher_output) / self.tau).softmax(1)
            kd = -(p * log_softmax(wide(logits) / self.tau, dim=1)).sum(1).mean()
            return (1 - self.beta) * ce + self.beta * self.tau**2 * kd, {**parts, "kd": kd}
        student, teacher = (self.compared(each, y) for each in (logits, teacher_output))
        kd = distillation(student, teacher, temperature=self.tau)
        return ce + self.beta * self.tau**2 * kd, {**parts, "kd": kd}

    def compared(self, logits: Tensor, y: Tensor) -> Tensor:
        """What of a model's logits is distilled."""
        return logits


class FedLSD(FedAvg):
    """FedLSD: local self-distillation from the global model.

    Args:
        net: the model to learn; any module from inputs to logits.
        beta: β, the weight of the distillation.
        tau: τ, its temperature.
        form: ``additive`` adds it to the cross-entropy, ``convex`` mixes both.
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedLSD"
    citation = "Lee et al., 2021"
    colour = 11
    client_class = FedLSDClient
    client_settings = ("beta", "tau", "form")
    needs_outputs = True
    tasks: tuple[str, ...] = ("classes", "dense")

    def __init__(
        self,
        net: nn.Module | None = None,
        beta: float = 1.0,
        tau: float = 3.0,
        form: Form = "additive",
        **kwargs: Any,
    ) -> None:
        super().__init__(net, **kwargs)
        not_negative(beta=beta)
        require(form == "additive" or beta <= 1, "beta", "must be at most 1 if convex", beta)
        positive(tau=tau)
        self.beta, self.tau, self.form = beta, tau, form


class FedNTDClient(FedLSDClient):
    """The client module of FedNTD."""

    def compared(self, logits: Tensor, y: Tensor) -> Tensor:
        """Those of the classes that are not the label."""
        return not_true(logits, y)


class FedNTD(FedLSD):
    """FedNTD: distillation of what the global model says of the classes that are not the label.

    Args:
        net: the model to learn; any module from inputs to logits.
        beta: β, the weight of the distillation.
        tau: τ, its temperature.
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedNTD"
    citation = "Lee et al., NeurIPS 2022"
    colour = 12
    client_class = FedNTDClient
    tasks = ("classes",)

    def __init__(
        self, net: nn.Module | None = None, beta: float = 1.0, tau: float = 1.0, **kwargs: Any
    ) -> None:
        super().__init__(net, beta, tau, "additive", **kwargs)


def not_true(logits: Tensor, y: Tensor) -> Tensor:
    """The logits of all classes but the label, in their order: one column less."""
    others = torch.arange(logits.shape[1] - 1, device=y.device)
    return logits.gather(1, others + (others >= y[:, None]))
