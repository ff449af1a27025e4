"""FedRep: clients train a head of their own, then the representation that all share.

Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021.
With the head Π_k of client k and the rest ω:

    client k:  Π_k ← SGD on CE(ω_t, Π_k), some epochs;  then ω_k ← SGD on CE(ω, Π_k) from ω_t
    server:    ω_{t+1} ← Σ_k n_k/n ω_k

Only one half has gradients at a time. What has none is not moved by momentum or weight decay, as
it is in the authors' code with an older torch.
"""

from typing import Any

from fedgkd_pl.errors import at_least, require
from fedgkd_pl.federation.exchange import Split
from fedgkd_pl.federation.message import Message, State
from fedgkd_pl.methods.fedavg import FedAvgClient
from fedgkd_pl.methods.fedper import FedPer
from torch import nn
from typing_extensions import override


class FedRepClient(FedAvgClient):
    """The client module of FedRep."""

    @override
    def divide(self, split: Split | None) -> None:
        super().divide(split)
        trained = [(n, p) for n, p in self.net.named_parameters() if p.requires_grad]
        self.head = [p for n, p in trained if n in self.first]
        self.body = [p for n, p in trained if n not in self.first]

    def receive(self, message: Message, state: State) -> None:
        """Loads w_t and this client's head, which is trained first."""
        super().receive(message, state)
        self.own_epochs = self.head_epochs + self.local_epochs

    @override
    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        at_head = self.current_epoch < self.head_epochs
        for half, moves in ((self.head, at_head), (self.body, not at_head)):
            for parameter in half:
                parameter.requires_grad_(moves)


class FedRep(FedPer):
    """FedRep: each client trains its own last layer, then the layers that all share.

    Args:
        net: the model to learn; any module from inputs to logits.
        head_epochs: local epochs of the head, before ``local_epochs`` of the rest (authors: 10, 1).
        kwargs: those of :class:`FedPer`.
    """

    title = "FedRep"
    citation = "Collins et al., ICML 2021"
    colour = 27
    client_class = FedRepClient
    client_settings = ("head_epochs", "local_epochs")

    def __init__(self, net: nn.Module | None = None, head_epochs: int = 10, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        at_least(1, head_epochs=head_epochs)
        text = "must be null: FedRep counts epochs of the head and of the rest"
        require(self.local_steps is None, "local_steps", text, self.local_steps)
        self.head_epochs = head_epochs
