"""FedDistill and FedDistill+: clients share, for every label, their mean logits.

Seo et al., Federated Knowledge Distillation, 2020. Plain, logits alone travel and every client
keeps a model of its own; the "+", sharing models too, is the FedGKD paper's. The local objective,
with t(y) the mean over the *other* clients that hold label y of their mean logits for it:

    CE(w) + c · 1/n_k Σ_i KL( softmax t(y_i) ‖ h(w, x_i) )

Logits are gathered while a client trains, each before its step. The newest report of every client
counts. A sample whose label nobody else holds adds nothing, and still counts in the mean.
"""

from dataclasses import replace
from typing import Any

import torch
from fedgkd_pl.errors import not_negative
from fedgkd_pl.federation.client import OUTPUTS, Objective
from fedgkd_pl.federation.hardware import wide
from fedgkd_pl.federation.message import ClientUpdate, Message, Spec, Specs, State, grouped, joined
from fedgkd_pl.federation.nets import ClientNets, server_net
from fedgkd_pl.methods.fedavg import FedAvg, FedAvgClient
from torch import Tensor, nn
from torch.nn.functional import log_softmax

OWN, REPORT = "own model", "report"  # the groups of a client's state
LARGEST = 1e6  # of a mean logit


class FedDistillClient(FedAvgClient):
    """The client module of both; its last report is its state and, in the plain one, its model."""

    start: State | None = None  # w_0, for clients that keep a model of their own
    targets: Tensor | None = None  # t(y) by label
    known: Tensor  # whether anybody else holds the label
    gathered: Tensor | None = None  # by label, the sum of the logits and, last, their number

    def receive(self, message: Message, state: State) -> None:
        """Loads w_t, and makes the others' means out of everybody's."""
        kept = grouped(state)
        if self.start is not None:
            own = kept.get(OWN, self.start)
            message = replace(message, models={**message.models, "global": own})
        super().receive(message, state)
        self.gathered = self.targets = None
        if "logits" in message.tensors:
            means, holds = (message.tensors["logits"][name] for name in ("means", "holds"))
            if REPORT in kept:
                means, holds = means - kept[REPORT]["means"], holds - kept[REPORT]["holds"]
            self.known = (holds > 0.5).to(self.device)
            targets = (means / holds.clamp(min=1)[:, None]).to(means.dtype)
            self.targets = targets.to(self.device)

    def objective(self, x: Tensor, y: Tensor, teacher_output: Tensor | None) -> Objective:
        """CE(w) + c · KL(softmax t(y) ‖ h(w))."""
        logits, loss, parts = self.task_loss(x, y)
        parts[OUTPUTS] = logits
        if self.targets is None:
            return loss, parts
        kd = label_distillation(logits, y, self.targets, self.known)
        return loss + self.coefficient * kd, {**parts, "kd": kd}

    def observe(self, y: Tensor, outputs: Tensor | None) -> None:
        """Adds the logits to the sums of their labels."""
        if not self.coefficient or outputs is None:
            return
        logits, classes = outputs.to(report_type(self.net)), outputs.shape[1]
        if self.gathered is None:
            self.gathered = logits.new_zeros(classes, classes + 1)
        ones = logits.new_ones(len(y), 1)
        self.gathered.index_add_(0, y, torch.cat([logits, ones], dim=1))

    def reply(self) -> ClientUpdate:
        """Sends the mean logits of every label it holds, and keeps them."""
        update = super().reply()
        if self.gathered is not None:
            sums, counts = self.gathered[:, :-1].cpu(), self.gathered[:, -1].cpu()
            update.extra = {
                "means": sums / counts.clamp(min=1)[:, None],
                "holds": (counts > 0).to(sums),
            }
        own = {} if self.start is None else {OWN: update.weights}
        update.state = joined({REPORT: update.extra, **own})
        return update


class FedDistillPlus(FedAvg):
    """FedDistill+: FedAvg with distillation from the other clients' mean logits per label.

    Args:
        net: the model to learn; any module from inputs to logits.
        coefficient: the weight of the distillation (paper: 0.1).
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedDistill+"
    citation = "Yao et al."
    exchanges = ()
    colour = 4
    client_class = FedDistillClient
    client_settings = ("coefficient",)
    takes_modules = False
    tasks = ("classes",)
    keeps: tuple[str, ...] = ("reports",)

    def __init__(
        self, net: nn.Module | None = None, coefficient: float = 0.1, **kwargs: Any
    ) -> None:
        super().__init__(net, **kwargs)
        not_negative(coefficient=coefficient)
        self.coefficient = coefficient
        self.reports: dict[int, State] = {}  # the newest of every client

    def reset(self) -> None:
        """Drops the reports, too."""
        super().reset()
        self.reports = {}

    def broadcast(self) -> Message:
        """w_t, and the sum of all clients' reports; each client takes its own out."""
        message = super().broadcast()
        if self.reports and self.coefficient:
            reports = [self.reports[client] for client in sorted(self.reports)]
            message.tensors["logits"] = {
                name: torch.stack([report[name] for report in reports]).sum(0)
                for name in ("means", "holds")
            }
        return message

    def on_update(self, update: ClientUpdate) -> None:
        """Keeps a client's report until the round counts."""
        if update.extra:
            self.answers.append((update.client, update.extra))

    def server_step(self, mean: State) -> None:
        """As FedAvg; the new reports replace those of the same clients."""
        super().server_step(mean)
        self.reports |= dict(self.answers)

    def client_extra(self) -> Specs:
        """The mean logits of every label, and which labels a client holds."""
        if not self.coefficient:
            return {}
        classes, dtype = self.datamodule.num_classes, report_type(self.net)
        return {
            "means": Spec((classes, classes), dtype, -LARGEST, LARGEST),
            "holds": Spec((classes,), dtype, 0, 1),
        }

    def client_state(self, number: int = 0) -> Specs:
        """A client's last report."""
        return joined({REPORT: self.client_extra()})

    def client_fault(self, update: ClientUpdate) -> str:
        """A label is held or is not; of one that is not there are no logits."""
        kept = grouped(update.state).get(REPORT, {})
        for report in (update.extra, kept) if self.coefficient else ():
            if "holds" in report:  # a state may be elsewhere
                held = report["holds"].bool()
                if not held.any() or not torch.equal(held.to(report["holds"]), report["holds"]):
                    return "its holds are not 0 or 1, or all 0"
                if report["means"][~held].any():
                    return "its means are of labels that it does not hold"
        return ""


class FedDistill(FedDistillPlus):
    """FedDistill: logits alone travel, and every client keeps a model of its own.

    There is no global model to test. What is evaluated, logged and saved as such is the weighted
    mean of the models of the round's clients, which in this method nobody ever sends; of clients
    with ``nets``, the mean of the logits of all that have trained.

    Args:
        net: the model that every client starts from; any module from inputs to logits; or ``nets``.
        coefficient: the weight of the distillation (paper: 0.1).
        nets: of clients that have different nets, in turn.
        nets_of: the number of every client's net, from 0, if not in turn.
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedDistill"
    citation = "Seo et al., 2020"
    colour = 3
    shares_models = False
    keeps = ("reports", "start")  # w_0: clients that have not trained yet start from it

    def __init__(
        self,
        net: nn.Module | None = None,
        coefficient: float = 0.1,
        nets: list[nn.Module] | None = None,
        nets_of: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(server_net("per_client", net, nets), coefficient, **kwargs)
        self.client_nets = ClientNets("per_client", nets, nets_of)

    def broadcast(self) -> Message:
        """The sum of all clients' reports, and no model."""
        message = super().broadcast()
        message.models.clear()
        return message

    def client_state(self, number: int = 0) -> Specs:
        """A client's last report and its model."""
        return {**super().client_state(), **joined({OWN: self.client_model(number)})}


def report_type(net: nn.Module) -> torch.dtype:
    """In which logits are summed, counted and sent, whatever type autocast gives them."""
    return torch.promote_types(next(net.parameters()).dtype, torch.float32)


def label_distillation(logits: Tensor, y: Tensor, targets: Tensor, known: Tensor) -> Tensor:
    """KL(softmax t(y) ‖ softmax logits), 0 where nobody else holds the label; a batch mean.

    ``targets`` and ``known`` are by label: the others' mean logits, and whether there are any.
    """
    log_p, log_q = log_softmax(wide(targets[y]), dim=1), log_softmax(wide(logits), dim=1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(dim=1)
    return (divergence * known[y]).sum() / len(y)
