"""The method. Edit me. A new name goes into __init__.py, config.yaml, study.yaml and the test, too.

Every client learns from the global model w_t that it started from, and trusts it as far as it is
right: with p_i = softmax h(w_t, x_i) of the teacher and q_i = softmax h(w, x_i) of the client,

    CE(w) + γ/2 · 1/n_k Σ_i p_i(y_i) · KL(p_i ‖ q_i)

FedGKD with M=1 has this term without the factor p_i(y_i). The mean of the clients, the rounds and
the loops are FedAvg's. docs/extending.md of fedgkd_pl lists what else a method may change.
"""

from typing import Any

from fedgkd_pl import FedAvg, FedAvgClient, FrozenNet
from fedgkd_pl.errors import require
from torch import nn


class MyClient(FedAvgClient):
    """The client module: its loss. One object serves all clients, one after the other."""

    def __init__(self, net: nn.Module, *args: Any, **settings: Any) -> None:
        super().__init__(net, *args, **settings)
        self.teacher = FrozenNet(net)

    def receive(self, message, state):  # before a client trains
        super().receive(message, state)
        self.teacher.load(message.models["global"], self.device)

    def teach(self, x):  # of a batch, without gradient
        return self.teacher(x)

    def objective(self, x, y, teacher_output):
        logits, ce, parts = self.task_loss(x, y)
        log_p, log_q = teacher_output.log_softmax(1), logits.log_softmax(1)
        kl = (log_p.exp() * (log_p - log_q)).sum(1)
        trust = log_p.exp().gather(1, y[:, None]).squeeze(1)
        kd = (trust * kl).mean()
        return ce + self.gamma / 2 * kd, {**parts, "kd": kd}


class MyMethod(FedAvg):
    """The server module: the settings, and what clients get to know."""

    title = "MyMethod"  # in tables and figures
    client_class = MyClient
    client_settings = ("gamma",)  # attributes that every client gets: self.gamma
    needs_outputs = True  # the objective uses logits, also those of a LightningModule

    def __init__(self, net: nn.Module | None = None, gamma: float = 1.0, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        require(gamma >= 0, "gamma", "must not be negative", gamma)
        self.gamma = gamma
