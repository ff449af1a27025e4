[project]
name = "{name}"
version = "1.0.0"
description = "{method} on {data}, written by fedgkd-pl flower"

[tool.flwr.app]
publisher = "fedgkd-pl"

[tool.flwr.app.components]
serverapp = "fedgkd_app:server"
clientapp = "fedgkd_app:client"

# A second SuperNode on one machine needs a port of its own: flower-supernode ... --port 9095
# flwr run ... --run-config 'args="--rounds 10" resume="/srv/runs/fedgkd/version_0"'
[tool.flwr.app.config]
args = ""
resume = ""
import = "{modules}"
