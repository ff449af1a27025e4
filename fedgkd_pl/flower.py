"""A federated run as a Flower app: ``from fedgkd_pl.flower import client_app, server_app``.

Both take the ``__file__`` of the app, beside which its ``config.yaml`` lies.
"""

from fedgkd_pl.engines.flower.apps import client_app, server_app

__all__ = ["client_app", "server_app"]
