"""A federated run as a Flower app; config.yaml beside it says which.

Both halves come from fedgkd_pl, which is installed on the server and on every node.
"""

from fedgkd_pl.flower import client_app, server_app

server = server_app(__file__)
client = client_app(__file__)  # Flower's modifiers: client_app(__file__, mods=[...])
