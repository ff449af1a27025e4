"""Flower's apps within one process: what two nodes and a server do, without a network."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from fedgkd_pl.cli.main import main
from fedgkd_pl.engines.flower.records import SINCE, States
from fedgkd_pl.federation.message import State
from fedgkd_pl.flower import client_app, server_app
from fedgkd_pl.storage.checkpoint import read_checkpoint
from flwr.app import Context, Error, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.supercore.task_identity import TaskIdentity

from tests.support import everything

BASE = ["--data", "Digits", "--data.num_clients", "5", "--data.batch_size", "20", "--rounds", "3"]
BASE += ["--data.participation", "0.8", "--data.partition", "Dirichlet"]
METHODS = {
    "FedGKD": ["--model", "FedGKD", "--model.buffer_size", "2"],
    "MOON": ["--model", "MOON", "--model.mu", "1"],
    "FedMD": ["--model", "FedMD", "--data.public", "HeldOut", "--data.public.labelled", "true"],
}
METHODS["FedPer"] = ["--model", "FedPer", "--checkpoint.monitor", "null"]
METHODS["FedPer"] += ["--data.client_test_fraction", "0.2", "--data.client_val_fraction", "0.2"]
NET = ["--model.net", "fedgkd_pl.MLP", "--model.net.hidden", "[16]", "--model.net.projection", "8"]


def flags(method: str) -> list[str]:
    """Those of ``fit`` that train a method."""
    return everything.words() if method == "Everything" else [*METHODS[method], *NET, *BASE]


class Loop:
    """Hands messages to ClientApps of this process, with what Flower keeps for each node.

    ``change`` answers in their place: it gets the loop, the message and its node.
    """

    def __init__(self, app: Path, nodes: Any, run: dict[str, Any], change: Any = None) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self.client = client_app(str(app / "fedgkd_app.py"))
        self.nodes = nodes
        self.change = change or Loop._answer
        self.contexts = {n: Context(1, n, nodes[n], RecordDict(), run) for n in nodes}
        self.replies: dict[str, Any] = {}
        self.sent: list[tuple[str, int, RecordDict]] = []

    def _answer(self, message: Any, node: int) -> Any:
        return self.client(message, self.contexts[node])

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Any]) -> Iterable[str]:
        names = []
        for message in messages:
            node = message.metadata.dst_node_id
            self.sent.append((message.metadata.message_type, node, message.content))
            message.metadata.__dict__["_message_id"] = name = f"{len(self.sent)}"
            try:
                reply = self.change(self, message, node)
            except Exception as error:
                reply = FlowerMessage(Error(0, str(error)), reply_to=message)
            if reply is not None:
                self.replies[name] = reply
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Any]:
        return [self.replies.pop(name) for name in message_ids if name in self.replies]


TWO = {11: {"partition-id": 0, "num-partitions": 2}, 12: {"partition-id": 1, "num-partitions": 2}}


class Runs:
    """Runs an app and its counterpart without Flower."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def local(self, method: str, *words: str) -> Path:
        name = ["--output_dir", str(self.folder), "--name", f"local-{method}"]
        name += ["--model.engine.workers", "1"]
        assert main(["fit", *flags(method), *name, *words]) == 0
        return self.folder / f"local-{method}/version_0"

    def app(self, method: str, *words: str) -> Path:
        app = self.folder / f"app-{method}"
        name = ["--output_dir", str(self.folder), "--name", f"flower-{method}"]
        assert main(["flower", str(app), *flags(method), *name, *words]) == 0
        return app

    def flower(self, app: Path, nodes: Any = TWO, change: Any = None, **run: Any) -> Loop:
        grid = Loop(app, nodes, run, change)
        context = Context(1, 0, {}, RecordDict(), run)
        server_app(str(app / "fedgkd_app.py"))(grid, context)
        return grid


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(folder / "checkpoints/last.ckpt")["state_dict"]  # type: ignore[no-any-return]


def kept_by_nodes(grid: Loop, folder: Path) -> dict[int, State]:
    """What every client keeps at its node, which the server of a run has only marks of."""
    marks = read_checkpoint(folder / "checkpoints/last.ckpt")["fedgkd_pl"]["client_states"]
    kept = {}
    for context in grid.contexts.values():
        for client, stands in marks.items():
            mark = tuple(stands[SINCE].tolist())
            if any(name.startswith(f"client-{client}-") for name in context.state):
                kept[client] = States(context.state).find(client, mark)
    return kept


def failures(folder: Path) -> list[tuple[str, str, str]]:
    """(round, client, reason) of every client that was left out."""
    file = folder / "failures.csv"  # which is only there if there is something to tell
    rows = list(csv.DictReader(file.open())) if file.exists() else []
    return [(row["round"], row["client"], row["reason"]) for row in rows]
