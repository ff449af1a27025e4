"""A federated run as a Flower app: ``from fedgkd_pl.flower import client_app, server_app``.

Both take the ``__file__`` of the app, beside which its ``config.yaml`` lies.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp


def server_app(file: str) -> "ServerApp":
    """The ServerApp: the server's Trainer, which reaches its clients through Flower."""
    from fedgkd_pl.engines.flower.server_app import make

    return make(file)


def client_app(file: str, mods: list[Any] | None = None) -> "ClientApp":
    """The ClientApp: the client half on the node's data; ``mods`` are Flower's modifiers."""
    from fedgkd_pl.engines.flower.client_app import make

    return make(file, mods)
