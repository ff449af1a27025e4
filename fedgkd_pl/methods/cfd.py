"""CFD: soft labels of public data are all that travels, quantised and coded.

Sattler et al., CFD: Communication-Efficient Federated Distillation via Soft-Label Quantization and
Delta Coding, IEEE Transactions on Network Science and Engineering, 2021. In round t, with X the
public inputs and w_0 the same in every round:

    client k:  w_k ← w_0; for t > 1, trained on (X, Y_down) by Adam      dual distillation
               w_k ← local training on its own data
               Y_k = Q_up( softmax h(w_k, X) )
    server:    w ← trained on (X, mean_k Y_k) by Adam, whose state lasts over rounds
               Y_down = Q_down( softmax h(w, X) )

    loss of both distillations: −mean_x Σ_c y_c log max(q_c, 10⁻⁷)

Q_b moves a row of probabilities to the nearest one whose entries are multiples of 1/(2^b − 1) and
sum to 1; with b=1 that is its largest class. Bits are counted as in the paper: the empirical
entropy of the rows, of which one that is the same as in the last message between the two counts as
a symbol of its own (delta coding). Between our processes, plain tensors travel.
"""

import math
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from fedgkd_pl.data.examples import Examples
from fedgkd_pl.errors import at_least, positive, require
from fedgkd_pl.federation.hardware import wide
from fedgkd_pl.federation.message import ClientUpdate, Message, Spec, Specs, State
from fedgkd_pl.federation.nets import ClientNets, server_net
from fedgkd_pl.federation.server_training import (
    KeptOptimizer,
    answered_batches,
    logits_of,
    server_adam,
)
from fedgkd_pl.methods.fedavg import FedAvg
from fedgkd_pl.methods.feddf import PublicClient, distil
from fedgkd_pl.methods.feddistill import report_type
from fedgkd_pl.storage.checkpoint import StateStore
from torch import Tensor, nn

PLAIN = 32  # bits that mean: not quantised
MOST = 16  # other bits


class CFDClient(PublicClient):
    """The client module of CFD."""

    labels: Tensor | None = None

    def receive(self, message: Message, state: State) -> None:
        """Starts from w_0."""
        super().receive(replace(message, models={"global": self.start}), state)
        self.labels = message.tensors.get("labels", {}).get("labels")

    def on_train_start(self) -> None:
        """Distils the server's labels before the local training."""
        super().on_train_start()
        if self.labels is None or not self.client_steps:
            return
        like, size = next(self.net.parameters()), self.distil_batch_size
        labels = self.labels.to(like)
        batches = answered_batches(self.public, size, self.random(), as_known, like, labels)
        optimizer = server_adam(self.net.parameters(), self.distil_lr)
        first = islice(batches, self.client_steps)
        self.learn(first, optimizer, soft_cross_entropy, len(self.public))

    def reply(self) -> ClientUpdate:
        """Sends the soft labels of the public inputs."""
        update = super().reply()
        update.extra = {"labels": soft_labels(self.net, self.public, self.bits_up)}
        return update


class CFD(FedAvg):
    """CFD: clients and server teach each other by soft labels of public data.

    No model travels. What is evaluated is the server's own.

    Args:
        net: the model of the server and, unless they have ``nets``, of every client; any module
            from inputs to logits.
        bits_up: of a client's labels: 1 to 16, or 32 for labels that are not quantised.
        bits_down: of the server's labels.
        delta: code a message by what has changed since the last one.
        client_steps: of a client towards the server's labels.
        server_steps: of the server towards the clients' labels.
        distil_lr: Adam's rate in both.
        distil_batch_size: public inputs a step.
        nets: of clients that have different nets, in turn.
        nets_of: the number of every client's net, from 0, if not in turn.
        kwargs: those of :class:`FedAvg`.
    """

    title = "CFD"
    citation = "Sattler et al., 2021"
    exchanges = ()
    colour = 21
    client_class = CFDClient
    client_settings = ("bits_up", "client_steps", "distil_lr", "distil_batch_size")
    takes_modules = False
    tasks = ("classes",)
    shares_models = False
    takes_sequences = False
    averages = False
    public_inputs = 1
    keeps = ("start", "labels", "adam", "sent", "received")

    def __init__(
        self,
        net: nn.Module | None = None,
        bits_up: int = 1,
        bits_down: int = 1,
        delta: bool = True,
        client_steps: int = 2_000,
        server_steps: int = 1_000,
        distil_lr: float = 1e-3,
        distil_batch_size: int = 128,
        nets: list[nn.Module] | None = None,
        nets_of: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(server_net("server_only", net, nets), **kwargs)
        self.client_nets = ClientNets("server_only", nets, nets_of)
        for key, bits in ("bits_up", bits_up), ("bits_down", bits_down):
            require(1 <= bits <= MOST or bits == PLAIN, key, "must be 1 to 16, or 32", bits)
        at_least(0, client_steps=client_steps, server_steps=server_steps)
        positive(distil_lr=distil_lr)
        at_least(1, distil_batch_size=distil_batch_size)
        self.bits_up, self.bits_down, self.delta = bits_up, bits_down, delta
        self.client_steps, self.own_steps = client_steps, server_steps
        self.distil_lr, self.distil_batch_size = distil_lr, distil_batch_size
        self.adam = KeptOptimizer(partial(server_adam, lr=distil_lr))
        self.reset()
        self._sent: dict[int, State] = {}  # of the round, until it counts

    def reset(self) -> None:
        """Starts from the net as it is, without labels."""
        super().reset()
        self.labels: State = {}  # Y_down, once there is one
        self.sent = StateStore()  # to every client, the last
        self.received = StateStore()  # from every client, the last

    def broadcast(self) -> Message:
        """Y_down, and no model."""
        self._sent = {}
        return Message(self.round, {}, tensors={"labels": self.labels} if self.labels else {})

    def on_update(self, update: ClientUpdate) -> None:
        """Takes a client's labels in."""
        self.answers.append((update.client, update.extra["labels"]))

    def server_step(self, mean: State) -> None:
        """Trains the server's model on the mean of the clients' labels, and makes Y_down."""
        self.optimizers().step()  # type: ignore[union-attr]  # no gradient: only counts it
        like = next(self.net.parameters())
        target = torch.stack([labels for _, labels in self.answers]).mean(0).to(like)
        public, optimizer = (self.public, self.distil_batch_size), self.adam.of(self.net)
        steps, loss = self.own_steps, soft_cross_entropy
        distil(self, self.net, as_known, public, optimizer, steps, loss, known=target)
        self.labels = {"labels": soft_labels(self.net, self.public, self.bits_down)}
        self.sent.update(self._sent)
        # never the same file as what was sent
        self.received.update({client: {"answer": labels} for client, labels in self.answers})

    def bytes_of(self, message: Message, cohort: Any) -> int:
        """The coded labels; every client has another last message."""
        labels = message.tensors.get("labels", {}).get("labels")
        if labels is None:
            return 0
        total = sum(self._coded(labels, self.sent.get(k), self.bits_down) for k in cohort)
        self._sent = dict.fromkeys(cohort, message.tensors["labels"])
        return total

    def bytes_of_answer(self, update: ClientUpdate) -> int:
        """The coded labels."""
        labels, before = update.extra["labels"], self.received.get(update.client)
        return self._coded(labels, before, self.bits_up)

    def _coded(self, labels: Tensor, before: State | None, bits: int) -> int:
        if bits == PLAIN:
            return labels.numel() * PLAIN // 8
        known = next(iter(before.values())) if before and self.delta else None
        return math.ceil(coded_bits(labels, known) / 8)

    def client_extra(self) -> Specs:
        """The soft labels of all public inputs."""
        shape = (len(self.public), self.datamodule.num_classes)
        return {"labels": Spec(shape, report_type(self.net), 0, 1)}

    def client_fault(self, update: ClientUpdate) -> str:
        """Rows that are no probabilities, or not of so many bits."""
        labels = update.extra["labels"].double()
        if (labels.sum(1) - 1).abs().max() > 1e-3:
            return "its labels do not sum to 1"
        units = labels * (2**self.bits_up - 1)
        off = self.bits_up != PLAIN and (units - units.round()).abs().max() > 1e-2
        return f"its labels are not of {self.bits_up} bits" if off else ""


def as_known(x: Tensor, labels: Tensor) -> Tensor:
    """The labels that came with public inputs."""
    return labels


def soft_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """−Σ_c y_c log max(q_c, 10⁻⁷), a mean over the batch."""
    return -(labels * wide(logits).softmax(1).clamp(min=1e-7).log()).sum(1).mean()


def soft_labels(net: nn.Module, examples: Examples, bits: int) -> Tensor:
    """What a net says of public inputs in eval mode, quantised, on the CPU."""
    labels = quantise(logits_of(net, examples).cpu().double().softmax(1), bits)
    return labels.to(report_type(net))


def quantise(labels: Tensor, bits: int) -> Tensor:
    """The nearest rows of multiples of 1/(2^bits − 1) that sum to 1; equal ones go to the first."""
    if bits == PLAIN:
        return labels
    units = 2**bits - 1
    whole = (labels * units).floor()
    rest = labels * units - whole
    missing = (units - whole.sum(1, keepdim=True)).round()
    rank = rest.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    nearest: Tensor = (whole + (rank < missing)) / units
    return nearest


def coded_bits(labels: Tensor, before: Tensor | None = None) -> float:
    """The bits of all rows by their entropy; a row as ``before`` is a symbol of its own."""
    same = labels.new_zeros(len(labels)).bool()
    if before is not None:
        same = (labels == before).all(1)
    counts = labels[~same].unique(dim=0, return_counts=True)[1].double()
    if same.any():
        counts = torch.cat([counts, same.sum()[None].double()])
    return float(-(counts * (counts / len(labels)).log2()).sum())
