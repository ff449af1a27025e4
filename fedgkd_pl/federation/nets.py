"""Different nets per client: which client has which, and what the server's net is made of."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal, cast

import torch
from fedgkd_pl.errors import require
from fedgkd_pl.federation.message import ClientUpdate, State
from fedgkd_pl.federation.own_module import is_own_module, one_of
from fedgkd_pl.models.heads import Ensemble
from torch import nn

# what the server's net is where clients have several: an ensemble with a member for every net, or
# for every client; or a net of its own beside the clients'
Layout = Literal["per_net", "per_client", "server_only"]


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
        """Validates ``nets_of``."""
        for number in self.listed or ():
            require(0 <= number < self.nets, "nets_of", f"must be 0 to {self.nets - 1}", number)

    def __call__(self, client: int) -> int:
        """Returns a client's number."""
        return client % self.nets if self.listed is None else self.listed[client]


def server_net(
    layout: Layout, net: nn.Module | None, nets: Sequence[nn.Module] | None
) -> nn.Module:
    """The net of the server, given the one net or the several nets of clients."""
    if nets is None:
        return one_of(net)
    require(len(nets) > 0, "nets", "is empty")
    plain = not any(is_own_module(one_of(each)) for each in nets)
    require(plain, "nets", "must be nets from inputs to logits, not modules with their own steps")
    require(len(set(map(id, nets))) == len(nets), "nets", "has one object twice; copy it")
    if layout == "server_only":
        return one_of(net)
    require(net is None, "nets", "takes the place of net; give one of them (net: null)")
    return Ensemble(nets if layout == "per_net" else ())


class ClientNets(nn.Module):
    """The nets of clients: that of the server, unless a method is given several.

    Args:
        layout: what the server's net is made of.
        nets: of clients in turn, from which :func:`server_net` has made the server's.
        nets_of: the number of every client's net, if not in turn.
    """

    def __init__(
        self,
        layout: Layout = "server_only",
        nets: Sequence[nn.Module] | None = None,
        nets_of: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        require(nets is not None or nets_of is None, "nets_of", "needs nets")
        self.layout = layout
        self.index: NetOf | None = None  # None where all clients have one net
        if nets is not None:
            self.index = NetOf(len(nets), None if nets_of is None else tuple(nets_of))
        own = nets if nets is not None and layout != "per_net" else ()
        self.own = nn.ModuleList(own)  # the clients', as they start, where the server's are others

    @property
    def one_per_client(self) -> bool:
        """Whether the server's net is an ensemble of the clients' own models."""
        return self.index is not None and self.layout == "per_client"

    def of(self, server: nn.Module) -> list[nn.Module]:
        """The nets that clients have, by number, given the server's."""
        if self.index is None:
            return [server]
        return list(self.own) or cast(Ensemble, server).nets

    def number(self, client: int) -> int:
        """The number of a client's net."""
        return 0 if self.index is None else self.index(client)

    def fill(self, server: nn.Module, clients: int) -> None:
        """Gives every client a member in the server's ensemble, where each is to have one."""
        if self.one_per_client and len(cast(Ensemble, server).members) != clients:
            members = [deepcopy(self.own[self.number(client)]) for client in range(clients)]
            cast(Ensemble, server).fill(members)

    def empty(self, server: nn.Module) -> None:
        """Takes the clients' models of an earlier run out; :meth:`fill` puts new ones in."""
        if self.one_per_client:
            cast(Ensemble, server).fill(())

    def fill_like(self, server: nn.Module, names: Iterable[str]) -> None:
        """Gives the server's ensemble the members that weights of these names need."""
        if self.one_per_client and not cast(Ensemble, server).members:
            self.fill(server, Ensemble.size(list(names)))

    def check(self, clients: int) -> None:
        """Raises a clear error if not every client has a net, or not every net a client."""
        if self.index is None:
            return
        listed = self.index.listed
        text = f"must have {clients} entries, one for each client"
        require(listed is None or len(listed) == clients, "nets_of", text)
        unused = set(range(self.index.nets)) - set(map(self.index, range(clients)))
        require(not unused, "nets", f"no client uses net {min(unused, default=0)}")

    def in_server_net(self, update: ClientUpdate) -> State:
        """A client's model as it enters the mean: where it belongs in the server's net."""
        if self.index is None:
            return update.weights
        if self.layout == "server_only" or not update.weights:
            return {}
        number = update.client if self.one_per_client else self.number(update.client)
        placed = {Ensemble.prefix(number) + name: t for name, t in update.weights.items()}
        return placed | {Ensemble.mark(number): torch.tensor(True)}
