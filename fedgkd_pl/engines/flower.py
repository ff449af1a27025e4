"""The engine of several organisations: Flower carries the messages, the data stays where it is.

This is the server's half, which runs in a Flower ServerApp; the clients' is
:mod:`fedgkd_pl.flower.client`. A node (Flower's SuperNode) stands for one client or several and
gets one message a round. What a client keeps between rounds never leaves its node: the server, and
its checkpoint, know only the round it dates from.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fedgkd_pl.engines.base import Answer, ClientFailure, Engine, Session, needs, schedule
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.federation.client_trainer import Job
from fedgkd_pl.federation.kernels import keep_memory
from fedgkd_pl.federation.message import ClientUpdate, Message

if TYPE_CHECKING:
    from fedgkd_pl.federation.server import FederatedServer
    from fedgkd_pl.flower.records import Contract

POLL = 0.5  # seconds
log = logging.getLogger("fedgkd_pl")


@dataclass
class Link:
    """What a ServerApp has that a Trainer has not.

    Attributes:
        grid: Flower's way to the nodes.
        contract: what clients must agree to.
    """

    grid: Any
    contract: "Contract | None" = None


_link: Link | None = None


@contextmanager
def linked(grid: Any) -> Iterator[Link]:
    """Gives engines of this process a way to the nodes, for a while.

    Args:
        grid: Flower's.
    """
    global _link
    _link = Link(grid)
    try:
        yield _link
    finally:
        _link = None


class FlowerEngine(Engine):
    """Trains the clients of a round where their data is, through Flower.

    For a Flower app, which ``fedgkd-pl flower`` makes of a config; ``flwr run`` starts it, in
    simulation or on a SuperLink. Nodes that fail, or do not answer in time, are left out of the
    round; ``min_clients`` of the method says how many must remain.

    Args:
        deadline: seconds that a round may take, after which its missing clients are left out. A
            node that has vanished is given up by Flower itself, after a minute.
        patience: seconds to wait, before the first round, for nodes of all its clients.
        threads: intra-op threads of each client's training; another number gives other rounding.
    """

    states_stay = True

    def __init__(self, deadline: float = 3600.0, patience: float = 300.0, threads: int = 1) -> None:
        needs("flwr", "flower")
        require(deadline > 0, "deadline", "must be positive", deadline)
        require(patience >= 0, "patience", "must not be negative", patience)
        require(threads >= 1, "threads", "must be at least 1", threads)
        self.deadline = deadline
        self.patience = patience
        self.threads = threads

    def check(self, server: "FederatedServer") -> None:
        """See :meth:`Engine.check`.

        Args:
            server: the method.
        """
        self.check_method(server)
        text = "FlowerEngine runs in a Flower app: make one with fedgkd-pl flower, start it with "
        require(_link is not None, "engine", text + "flwr run")

    def check_method(self, server: "FederatedServer") -> None:
        """Refuses a method that has nothing to evaluate where models do not travel.

        Args:
            server: the method.
        """
        text = f"{type(server).__name__} sends no models, so that Flower's server has none to test"
        require(server.shares_models, "engine", f"{text}: take another engine")

    def open(self, job: Job, cohort_size: int) -> Session:
        """See :meth:`Engine.open`.

        Args:
            job: what the nodes will train, which they know themselves.
            cohort_size: clients per round.
        """
        keep_memory()  # for evaluation
        if _link is None or _link.contract is None:
            raise SettingError("engine", "FlowerEngine runs in a Flower app: fedgkd-pl flower")
        return Federation(self, job, _link.grid, _link.contract)


@dataclass
class Federation(Session):
    """The nodes of a run.

    Args:
        engine: the settings.
        job: what they train.
        grid: the way to them.
        contract: what they must agree to.
        hosts: the node of every client that has one.
        met: the nodes that were asked whom they stand for, and what they said.
    """

    engine: FlowerEngine
    job: Job
    grid: Any
    contract: "Contract"
    hosts: dict[int, int] = field(default_factory=dict)
    met: dict[int, list[int]] = field(default_factory=dict)
    waited: bool = False

    def run(self, message: Message, cohort: Sequence[int]) -> Iterator[Answer]:
        """See :meth:`Session.run`.

        Args:
            message: what every client gets.
            cohort: the clients' ids.
        """
        self._find(cohort)
        order = schedule(self.job, cohort)
        asked: dict[int, list[int]] = {}
        done: dict[int, Answer] = {}
        for client in order:
            if client in self.hosts:
                asked.setdefault(self.hosts[client], []).append(client)
            else:
                done[client] = ClientFailure(client, "no node that stands for it is connected")
        answers = self._answers(message, asked)
        for client in order:
            while client not in done:
                done |= {answer.client: answer for answer in next(answers)}
            yield done.pop(client)

    def _answers(self, message: Message, asked: dict[int, list[int]]) -> Iterator[list[Answer]]:
        """What the nodes answer, node by node; at last what those did not who are late."""
        from fedgkd_pl.flower.records import SINCE, pack_task, unpack_answers

        states = self.job.states
        marks = {c: tuple(state[SINCE].tolist()) for c, state in states.items() if state}
        tasks = {}
        for node, clients in asked.items():
            since = {client: marks.get(client, (0, 0)) for client in clients}
            tasks[node] = "train", pack_task(message, since, self.contract)
        start = time.monotonic()
        for node, reply in self._exchange(tasks, str(message.round)):
            clients = asked[node]
            try:
                reason = _error(reply)
                if not reason:
                    answers = unpack_answers(reply.content, clients)
                    _add_transfer(answers, time.monotonic() - start)
                    yield answers
                    continue
            except Exception as error:  # a node may send anything
                reason = f"its node's answer cannot be read: {type(error).__name__}: {error}"
            yield [ClientFailure(client, reason) for client in clients]

    def _find(self, cohort: Sequence[int]) -> None:
        """Asks new nodes whom they stand for; before the first round, waits for the cohort's."""
        end = time.monotonic() + (0 if self.waited else self.engine.patience)
        told = False
        while True:
            connected = set(self.grid.get_node_ids())
            self._meet(connected - self.met.keys())
            self.hosts = {}
            for node in self.met:  # of two that say the same, the later
                if node in connected:
                    self.hosts |= dict.fromkeys(self.met[node], node)
            missing = [client for client in cohort if client not in self.hosts]
            if not missing or time.monotonic() >= end:
                break
            if not told:
                log.warning("waiting for the nodes of clients %s", missing)
                told = True
            time.sleep(POLL)
        self.waited = True

    def _meet(self, nodes: set[int]) -> None:
        from flwr.app import ConfigRecord, RecordDict

        content = RecordDict({"contract": ConfigRecord(asdict(self.contract))})
        tasks: dict[int, Any] = {node: ("query", content) for node in sorted(nodes)}
        for node, reply in self._exchange(tasks, "0"):
            reason, clients = _error(reply), []
            if not reason:
                card = reply.content["node"]
                reason = str(card["refuses"])
                clients = [int(client) for client in card["clients"]]
            if reason:
                log.warning("node %d is not used: %s", node, reason)
            else:
                log.info("node %d stands for clients %s", node, clients)
            self.met[node] = [] if reason else clients

    def _exchange(self, tasks: dict[int, tuple[str, Any]], group: str) -> Iterator[tuple[int, Any]]:
        """Sends to every node what is for it, and gives the replies as they come.

        A node that has not answered within the deadline gets None.
        """
        from flwr.app import Message as FlowerMessage

        nodes, deadline = list(tasks), self.engine.deadline
        out = [
            FlowerMessage(content, node, kind, ttl=deadline, group_id=group)
            for node, (kind, content) in tasks.items()
        ]
        numbers = list(self.grid.push_messages(out)) if out else []
        pending = {n: node for n, node in zip(numbers, nodes, strict=False) if n}
        for node in set(nodes) - set(pending.values()):
            yield node, "the message could not be sent to its node"
        end = time.monotonic() + deadline
        while pending and time.monotonic() < end:
            for reply in self.grid.pull_messages(list(pending)):
                yield pending.pop(reply.metadata.reply_to_message_id), reply
            if pending:
                time.sleep(POLL)
        for node in pending.values():
            yield node, f"its node did not answer within {deadline:g} s"


def _error(reply: Any) -> str:
    """Why there is no answer; empty if there is one."""
    if isinstance(reply, str):
        return reply
    if reply.has_error():
        return f"its node failed: {' '.join(str(reply.error.reason).split())[:300]}"
    return ""


def _add_transfer(answers: list[Answer], took: float) -> None:
    """What was not training was transfer, and starting a process."""
    updates = [answer for answer in answers if isinstance(answer, ClientUpdate)]
    trained = sum(sum(update.seconds.values()) for update in updates)
    for update in updates:
        update.seconds["transfer"] = max(0.0, took - trained) / len(updates)
