"""FedMD: parties with nets of their own agree on the logits of public data.

Li and Wang, FedMD: Heterogenous Federated Learning via Model Distillation, NeurIPS 2019 workshop.
With d_t a sample of the public data, new in every round and the same for all, party k:

    first:  w_k ← trained on the labelled public data, by CE      a new Adam
            w_k ← trained on its own data, by CE                  start
    later:  w_k ← trained on (d_{t−1}, z̄_{t−1}) by                digest
                  mean |h(w_k, x) − z̄(x)| + λ ‖W‖²,  W the weight of its last layer
            w_k ← trained on its own data, by CE                  revisit
    all:    z_k = h(w_k, d_t)                                     logits, not probabilities

    server: z̄_t = mean_k z_k

No model travels. The optimizers of digest and revisit go on from round to round. The paper takes
the mean before any party digests: so do we, at the end of the round before, and T rounds of the
paper are T + 1 of ours. What is evaluated is the mean of the logits of all parties' nets.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from fedgkd_pl.data.datamodule import FederatedDataModule, sampled_rows
from fedgkd_pl.data.examples import Batches, Examples
from fedgkd_pl.errors import at_least, not_negative, positive, require
from fedgkd_pl.federation.hardware import wide
from fedgkd_pl.federation.message import (
    ClientUpdate,
    Message,
    Spec,
    Specs,
    State,
    grouped,
    joined,
    like,
)
from fedgkd_pl.federation.nets import ClientNets, server_net
from fedgkd_pl.federation.optimizer import empty_state, first_optimizer, load_state, state_of
from fedgkd_pl.federation.own_module import one_of
from fedgkd_pl.federation.server_training import logits_of, server_adam
from fedgkd_pl.methods.fedavg import FedAvg
from fedgkd_pl.methods.feddf import PublicClient
from fedgkd_pl.methods.feddistill import LARGEST, OWN, report_type
from fedgkd_pl.seeds import derive
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

PRIVATE, DIGEST = "own optimizer", "digest's optimizer"  # their groups in a client's state
SINCE = "consensus of round"  # the number in a message that says so


class FedMDClient(PublicClient):
    """The client module of FedMD: a party, which keeps its net and its optimizers."""

    kept: dict[str, State] = {}  # noqa: RUF012  (replaced, never changed)
    private: Optimizer

    def receive(self, message: Message, state: State) -> None:
        """Goes on with its own net, or begins."""
        self.kept = grouped(state)
        self.is_new = not state
        self.own_epochs = self.start_epochs if self.is_new else None
        own = self.kept.get(OWN, self.start)
        super().receive(replace(message, models={"global": own}), state)
        self.round, self.since = message.round, int(message.numbers.get(SINCE, 0))
        self.consensus = message.tensors.get("consensus", {}).get("logits")
        self.adam: Optimizer | None = None
        self.distance: float | None = None

    def configure_optimizers(self) -> Any:
        """The optimizer of its own data, as it left it in its last round."""
        configured = super().configure_optimizers()
        self.private = first_optimizer(configured)
        load_state(self.private, self.kept.get(PRIVATE, {}), weights_of(self.net))
        return configured

    def on_train_start(self) -> None:
        """Learns from the public data before its own: its labels at first, then the consensus."""
        super().on_train_start()
        if self.is_new:
            adam = server_adam(self.net.parameters(), self.public_lr)
            batches = Batches(self.public, self.public_batch_size, self.random())
            for _ in range(self.public_epochs):
                self.learn(batches, adam, label_loss, len(self.public))
        elif self.consensus is not None:
            self.adam = server_adam(self.net.parameters(), self.distil_lr)
            load_state(self.adam, self.kept.get(DIGEST, {}), weights_of(self.net))
            agreed = self._agreed(self.since)
            batches = Batches(agreed, self.digest_batch_size, self.random())
            batches.teacher_output = self.consensus.to(self.device)
            for _ in range(self.digest_epochs):
                self.distance = self.learn(batches, self.adam, self._digest, len(agreed))

    def _agreed(self, round: int) -> Examples:
        seed = derive(self.run_seed, "public", round)
        rows = sampled_rows(self.public, self.public_samples, self.labelled, seed)
        return self.public.view(rows.to(self.public.targets.device))

    def _digest(self, logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
        last = last_layer(self.net) if self.digest_decay else None
        return digest_loss(logits, target, last, self.digest_decay)

    def reply(self) -> ClientUpdate:
        """Sends the logits of the round's public inputs, and keeps all the rest."""
        update = super().reply()
        logits = logits_of(self.net, self._agreed(self.round))
        update.extra = {"logits": logits.cpu().to(report_type(self.net))}
        if self.distance is not None:
            update.metrics["digest"] = self.distance
        weights = weights_of(self.net)
        unmoved = empty_state(partial(server_adam, lr=self.distil_lr), weights)
        digest = self.kept.get(DIGEST, unmoved)
        if self.adam is not None:
            digest = state_of(self.adam, unmoved, weights)
        private = state_of(self.private, empty_state(self.optimizer, weights), weights)
        update.state = joined({OWN: update.weights, PRIVATE: private, DIGEST: digest})
        return update


class FedMD(FedAvg):
    """FedMD: parties with nets of their own, which agree on logits of public data.

    The server keeps a copy of every party's net to evaluate them: it is for tens of parties. With
    Flower, no model reaches it, and what it evaluates are the nets that parties start from.

    Args:
        net: the net that all parties have, or ``nets``; any module from inputs to logits.
        public_samples: public inputs that the parties agree on in a round, at most.
        public_epochs: of a party's first training, on public data with labels; 0 without labels.
        public_lr: Adam's rate in it.
        public_batch_size: public samples a step of it.
        start_epochs: passes over its own data in a party's first round, instead of
            ``local_epochs`` or ``local_steps`` as in later ones.
        digest_epochs: passes over the inputs agreed on.
        digest_batch_size: public inputs a step of them.
        digest_decay: λ, of the last layer's weight.
        distil_lr: the rate of their Adam.
        nets: of parties that have different nets, in turn.
        nets_of: the number of every party's net, from 0, if not in turn.
        kwargs: those of :class:`FedAvg`; the authors' ``optimizer`` is Adam at 0.001.
    """

    title = "FedMD"
    citation = "Li and Wang, 2019"
    exchanges = ()
    colour = 23
    client_class = FedMDClient
    client_settings = (
        *("labelled", "public_samples", "public_epochs", "public_lr", "public_batch_size"),
        *("start_epochs", "digest_epochs", "digest_batch_size", "digest_decay", "distil_lr"),
    )
    takes_modules = False
    tasks = ("classes",)
    shares_models = False
    takes_sequences = False
    averages = False
    public_inputs = 1
    keeps = ("start", "consensus", "since")

    def __init__(
        self,
        net: nn.Module | None = None,
        public_samples: int = 5_000,
        public_epochs: int = 20,
        public_lr: float = 1e-3,
        public_batch_size: int = 128,
        start_epochs: int = 25,
        digest_epochs: int = 1,
        digest_batch_size: int = 256,
        digest_decay: float = 1e-3,
        distil_lr: float = 1e-3,
        nets: list[nn.Module] | None = None,
        nets_of: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        if nets is None:
            net, nets = None, [one_of(net)]
        super().__init__(server_net("per_client", net, nets), **kwargs)
        self.client_nets = ClientNets("per_client", nets, nets_of)
        at_least(1, public_samples=public_samples, public_batch_size=public_batch_size)
        at_least(1, digest_batch_size=digest_batch_size, start_epochs=start_epochs)
        at_least(0, public_epochs=public_epochs, digest_epochs=digest_epochs)
        positive(public_lr=public_lr, distil_lr=distil_lr)
        not_negative(digest_decay=digest_decay)
        self.public_samples, self.public_epochs = public_samples, public_epochs
        self.public_lr, self.public_batch_size = public_lr, public_batch_size
        self.start_epochs, self.digest_epochs = start_epochs, digest_epochs
        self.digest_batch_size, self.digest_decay = digest_batch_size, digest_decay
        self.distil_lr = distil_lr
        self.labelled = False  # whether the public data is; known with the data
        self.reset()

    def reset(self) -> None:
        """Drops the consensus, too."""
        super().reset()
        self.consensus: State = {}  # z̄, once there is one
        self.since = 0  # its round

    def check(self, data: FederatedDataModule) -> None:
        """Asks for public data, with labels if it begins with them, and for a last layer."""
        self.labelled = data.public_source is not None and data.public_source.labelled
        super().check(data)
        text = "FedMD begins with labels of the public data: labelled: true, or public_epochs: 0"
        require(self.labelled or not self.public_epochs, "public", text)
        for net in self.nets:
            text = "FedMD's digest_decay is of a Linear layer, and there is none: set it to 0"
            require(not self.digest_decay or last_layer(net) is not None, "nets", text)
            empty_state(self.optimizer, weights_of(net))

    def broadcast(self) -> Message:
        """z̄, and no model."""
        if not self.consensus:
            return Message(self.round, {})
        return Message(self.round, {}, {SINCE: self.since}, {"consensus": self.consensus})

    def on_update(self, update: ClientUpdate) -> None:
        """Takes a party's logits in."""
        self.answers.append(update.extra["logits"])

    def server_step(self, mean: State) -> None:
        """Copies the parties' nets, to evaluate them, and makes z̄."""
        super().server_step(mean)
        self.consensus = {"logits": torch.stack(self.answers).mean(0)}
        self.since = self.round

    def client_extra(self) -> Specs:
        """The logits of the round's public inputs."""
        shape = min(self.public_samples, len(self.public)), self.datamodule.num_classes
        return {"logits": Spec(shape, report_type(self.net), -LARGEST, LARGEST)}

    def client_state(self, number: int = 0) -> Specs:
        """A party's net and the states of both optimizers."""
        weights, adam = weights_of(self.nets[number]), partial(server_adam, lr=self.distil_lr)
        private, digest = (like(empty_state(each, weights)) for each in (self.optimizer, adam))
        return joined({OWN: self.client_model(number), PRIVATE: private, DIGEST: digest})


def weights_of(net: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a net by name."""
    return dict(net.named_parameters())


def label_loss(logits: Tensor, y: Tensor) -> Tensor:
    """CE."""
    return cross_entropy(wide(logits), y)


def digest_loss(logits: Tensor, target: Tensor, last: nn.Linear | None, decay: float) -> Tensor:
    """Mean |logits − target| over batch and classes, + λ ‖W‖² of the last layer."""
    distance = (wide(logits) - target).abs().mean()
    return distance if last is None else distance + decay * wide(last.weight).square().sum()


def last_layer(net: nn.Module) -> nn.Linear | None:
    """The last Linear layer of a net, in the order in which it was put together."""
    layers = [module for module in net.modules() if isinstance(module, nn.Linear)]
    return layers[-1] if layers else None
