"""Clients with nets of their own: which client has which, and what the server makes of them."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.errors import require
from fedgkd_pl.federation.answers import USES, Spec, Specs, like
from fedgkd_pl.federation.evaluation import GlobalModel
from fedgkd_pl.federation.message import ClientUpdate, State
from fedgkd_pl.federation.own_module import is_own_module, one_of
from fedgkd_pl.federation.performance import channels_last
from fedgkd_pl.models.ensemble import Ensemble
from lightning.pytorch import LightningModule
from torch import nn

if TYPE_CHECKING:
    from fedgkd_pl.engines.base import Engine
    from fedgkd_pl.federation.client import FederatedClient

# what the server's net is where clients have several: an ensemble with a member for every net, or
# for every client; a net of its own beside the clients'; or there is but one
TakesNets = Literal["", "members", "parties", "apart"]


@dataclass(frozen=True)
class NetOf:
    """The number of a client's net.

    Attributes:
        nets: how many there are; clients have them in turn.
        listed: or the number of every client's.
    """

    nets: int
    listed: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Refuses numbers of nets that are not there."""
        for number in self.listed or ():
            require(0 <= number < self.nets, "nets_of", f"there are {self.nets} nets", number)

    def __call__(self, client: int) -> int:
        """A client's."""
        return client % self.nets if self.listed is None else self.listed[client]


def server_net(
    takes: TakesNets,
    net: nn.Module | None,
    module: LightningModule | None,
    nets: Sequence[nn.Module] | None,
) -> nn.Module:
    """The net of the server, given what a method takes and what it is given."""
    if nets is None:
        return one_of(net, module)
    require(len(nets) > 0, "nets", "names none")
    plain = module is None and not any(is_own_module(each) for each in nets)
    require(plain, "nets", "must be nets from inputs to logits, not modules with their own steps")
    require(len(set(map(id, nets))) == len(nets), "nets", "has one object twice: copy it")
    if takes == "apart":
        return one_of(net, None)
    require(net is None, "nets", "takes the place of net: give one of them (net: null)")
    return Ensemble(nets if takes == "members" else ())


class ModelOfNets(GlobalModel):
    """A global model of clients that have one net, or several."""

    takes_nets: TakesNets = ""
    engine: "Engine"
    local_epochs: int
    local_steps: int | None
    net_of: NetOf | None = None  # None where all clients have one net

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        # the clients', as they start, where the server's are others
        self.own_nets: nn.ModuleList | None = None

    def take_nets(
        self, nets: Sequence[nn.Module] | None, nets_of: Sequence[int] | None = None
    ) -> None:
        """Gives clients nets of their own, of which :func:`server_net` has made the server's."""
        require(nets is not None or nets_of is None, "nets_of", "says whose nets are whose: nets")
        if nets is None:
            return
        self.net_of = NetOf(len(nets), None if nets_of is None else tuple(nets_of))
        if self.takes_nets != "members":
            self.own_nets = nn.ModuleList(nets)

    @property
    def kinds(self) -> list[nn.Module]:
        """The nets that clients have, by number."""
        if self.net_of is None:
            return [self.net]
        return cast(Ensemble, self.net).nets if self.own_nets is None else list(self.own_nets)

    @property
    def net_names(self) -> list[str]:
        """What to call them: by their classes, numbered where two are of one."""
        names = [type(net).__name__ for net in self.kinds]
        return [f"{name}{n}" if names.count(name) > 1 else name for n, name in enumerate(names)]

    @property
    def has_parties(self) -> bool:
        """Whether the server's net is an ensemble of the clients' own models."""
        return self.net_of is not None and self.takes_nets == "parties"

    def kind(self, client: int) -> int:
        """The number of a client's net."""
        return 0 if self.net_of is None else self.net_of(client)

    def every_net(self) -> list[nn.Module]:
        """All nets of clients and server, ensembles taken apart."""
        own = [] if self.own_nets is None else list(self.own_nets)
        return [*(self.net.nets if isinstance(self.net, Ensemble) else [self.net]), *own]

    def fill_ensemble(self, clients: int) -> None:
        """Gives every client a member in the server's ensemble, where each is to have one."""
        if self.has_parties:
            ensemble = cast(Ensemble, self.net)
            if len(ensemble.members) != clients:
                ensemble.fill(
                    [deepcopy(self.kinds[self.kind(client)]) for client in range(clients)]
                )

    def empty_ensemble(self) -> None:
        """Takes the clients' models of an earlier run out; :meth:`check_nets` puts new ones in."""
        if self.has_parties:
            cast(Ensemble, self.net).fill(())

    def fill_like(self, names: Iterable[str]) -> None:
        """Likewise, by the names of the weights that the server's net is to take."""
        if self.has_parties and not cast(Ensemble, self.net).members:
            self.fill_ensemble(Ensemble.size(list(names)))

    def check_nets(self, data: FederatedDataModule) -> None:
        """Raises a clear error if not every client has a net; makes the server's whole."""
        if self.net_of is not None and self.net_of.listed is not None:
            named, number = len(self.net_of.listed), data.num_clients
            require(named == number, "nets_of", f"must name the nets of {number} clients", named)
        if self.net_of is not None:
            had = set(map(self.net_of, range(data.num_clients)))
            nobody = sorted(set(range(self.net_of.nets)) - had)
            require(not nobody, "nets", f"none of {data.num_clients} clients has some", nobody)
        self.fill_ensemble(data.num_clients)

    def lay_out(self, data: FederatedDataModule, device: torch.device) -> None:
        """Lays out the nets' weights for where they will train."""
        for net in self.every_net():
            if not is_own_module(net):  # whose step may not be able to, though its forward is
                channels_last(net, self.some_inputs(data), device)

    # -- for methods ---------------------------------------------------------------------------

    @abstractmethod
    def client(self) -> "FederatedClient":
        """The client half of the method; it owns a net of its own."""

    def client_with(self, number: int) -> "FederatedClient":
        """The client half of clients with one of several nets, where a method takes them."""
        raise NotImplementedError(f"{type(self).__name__} takes one net")

    def clients(self) -> "list[FederatedClient]":
        """A client half for every net."""
        if self.net_of is None:
            return [self.client()]
        return [self.client_with(number) for number in range(self.net_of.nets)]

    def most_steps(self) -> int:
        """The steps of a client in a round, at most."""
        data, most = self.datamodule.client_data, self.engine.max_samples
        batches = math.ceil((most or len(data.examples)) / data.batch_size)
        return self.local_steps or self.local_epochs * batches

    def client_model(self, number: int = 0) -> dict[str, Spec]:
        """What a client's model is like: what it started from, rounds of training on."""
        return like(self.kinds[number].state_dict(), USES * self.most_steps() * self.round)

    def client_state(self) -> Specs:
        """What clients keep for their next round: all of this and nothing else, or they fail."""
        return {}

    def client_state_of(self, number: int) -> Specs:
        """Likewise of clients with one of several nets, if it depends on the net."""
        return self.client_state()

    def placed(self, update: ClientUpdate) -> State:
        """A client's model as it enters the mean: where it belongs in the server's net."""
        if self.net_of is None:
            return update.weights
        if self.takes_nets == "apart" or not update.weights:
            return {}
        number = update.client if self.takes_nets == "parties" else self.kind(update.client)
        placed = {Ensemble.prefix(number) + name: t for name, t in update.weights.items()}
        return placed | {Ensemble.mark(number): torch.tensor(True)}
