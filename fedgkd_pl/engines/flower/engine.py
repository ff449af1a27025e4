"""The engine of several organisations: Flower carries the messages, the data stays where it is.

This is the server's half, which runs in a Flower ServerApp; the clients' is
:mod:`fedgkd_pl.engines.flower.client_app`. A node (Flower's SuperNode) stands for one client or
several and gets one message a round. What a client keeps between rounds never leaves its node: the
server, and its checkpoint, know only the round it dates from.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from fedgkd_pl.engines.base import Engine, Session, needs, schedule
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.federation.answers import Spec, Specs
from fedgkd_pl.federation.client_trainer import Job
from fedgkd_pl.federation.message import Answer, ClientFailure, ClientUpdate, Message
from fedgkd_pl.federation.performance import keep_memory

if TYPE_CHECKING:
    from fedgkd_pl.engines.flower.records import Contract
    from fedgkd_pl.federation.server import FederatedServer

POLL = 0.5  # seconds
MOST = 10**12  # samples of a client
ASK_AGAIN = 60.0  # seconds, until a node that refused may have been fixed
JOIN = 60.0  # seconds that a round waits for nodes that have come back
log = logging.getLogger("fedgkd_pl")


@dataclass
class Link:
    """What a ServerApp gives to the engine: Flower's grid, and what clients must agree to."""

    grid: Any
    contract: "Contract | None" = None


_link: Link | None = None


@contextmanager
def linked(grid: Any) -> Iterator[Link]:
    """Gives engines of this process Flower's ``grid``, the way to the nodes, within a block."""
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
        max_samples: the most samples that a client may say it has, which are its weight in the
            mean. Needed where nodes have data of their own (``own-data``); without it, a client
            has as many as the server's own partition gives it.
    """

    states_stay = True

    def __init__(
        self,
        deadline: float = 3600.0,
        patience: float = 300.0,
        threads: int = 1,
        max_samples: int | None = None,
    ) -> None:
        needs("flwr", "flower")
        require(deadline > 0, "deadline", "must be positive", deadline)
        require(patience >= 0, "patience", "must not be negative", patience)
        require(threads >= 1, "threads", "must be at least 1", threads)
        fits = max_samples is None or 1 <= max_samples <= MOST
        require(fits, "max_samples", f"must be from 1 to {MOST}", max_samples)
        self.deadline = deadline
        self.patience = patience
        self.threads = threads
        self.max_samples = max_samples

    def states(self, declared: Specs) -> Specs:
        """See :meth:`Engine.states`."""
        from fedgkd_pl.engines.flower.records import SINCE

        return {SINCE: Spec((2,), torch.int64, low=0)} if declared else {}

    def check(self, server: "FederatedServer") -> None:
        """See :meth:`Engine.check`."""
        apart = server.models_differ and not server.shares_models  # FedWeIT's may be averaged
        if server.client_nets.layout == "per_client" or apart:  # models stay with clients
            log.warning(
                "%s: clients keep their models, so val/ and test/ are of the nets that they start "
                "from; client/ values are of their own",
                type(server).__name__,
            )
        text = "FlowerEngine runs in a Flower app: make one with fedgkd-pl flower, start it with "
        require(_link is not None, "engine", text + "flwr run")

    def open(self, job: Job, cohort_size: int) -> Session:
        """See :meth:`Engine.open`; the nodes know the job themselves."""
        keep_memory()  # for evaluation
        if _link is None or _link.contract is None:
            raise SettingError("engine", "FlowerEngine runs in a Flower app: fedgkd-pl flower")
        return FlowerSession(self, job, _link.grid, _link.contract)


class FlowerSession(Session):
    """The nodes of a run."""

    def __init__(self, engine: FlowerEngine, job: Job, grid: Any, contract: "Contract") -> None:
        self.engine = engine
        self.job = job
        self.grid = grid
        self.contract = contract
        self.hosts: dict[int, int] = {}  # the node of every client that has one
        self.cards: dict[int, list[int]] = {}  # whom each node stands for
        self.asking: dict[str, int] = {}  # the nodes that have not answered yet, by message
        self.since: dict[int, float] = {}  # when they were asked
        self.refusals: dict[int, str] = {}  # why connected nodes refuse
        self.again: dict[int, float] = {}  # when to ask those again who refused or failed
        self.warned: set[tuple[int, int]] = set()  # clients and nodes
        self.waited = False

    def run(self, message: Message, cohort: Sequence[int]) -> Iterator[Answer]:
        """See :meth:`Session.run`."""
        self._find(cohort)
        order = schedule(self.job, cohort)
        asked: dict[int, list[int]] = {}
        done: dict[int, Answer] = {}
        for client in order:
            if client in self.hosts:
                asked.setdefault(self.hosts[client], []).append(client)
            else:
                done[client] = ClientFailure(client, self._nobody())
        answers = self._answers(message, asked)
        for client in order:
            while client not in done:
                done |= {answer.client: answer for answer in next(answers)}
            yield done.pop(client)

    def _answers(self, message: Message, asked: dict[int, list[int]]) -> Iterator[list[Answer]]:
        """The nodes' answers as they come; at last, failures for those that are late."""
        from fedgkd_pl.engines.flower.records import SINCE, pack_message, pack_task, unpack_answers

        states = self.job.states
        marks = {c: tuple(state[SINCE].tolist()) for c, state in states.items() if state}
        deadline, start = self.engine.deadline, time.monotonic()
        packed: dict[frozenset[int], dict[str, Any]] = {}  # by the nets of a node's clients
        pending = {}
        for node, clients in asked.items():
            nets = frozenset(map(self.job.net_of or (lambda client: 0), clients))
            if nets not in packed:
                packed[nets] = pack_message(message.for_nets(nets), self.contract)
            since = {c: marks.get(c, (0, 0)) for c in clients}
            task = pack_task(packed[nets], message.round, since)
            number = self._send("train", node, task, message.round, deadline)
            if number:
                pending[number] = node
            else:
                yield [ClientFailure(c, "the message could not be sent") for c in clients]
        while pending:
            left = start + deadline - time.monotonic()
            for node, reply in self._replies(pending):
                clients = asked[node]
                try:
                    reason = _error(reply)
                    answers = [] if reason else unpack_answers(reply.content, clients)
                except Exception as error:  # a node may send anything
                    reason = f"its node's answer cannot be read: {type(error).__name__}: {error}"
                if reason:
                    yield [ClientFailure(client, reason) for client in clients]
                else:
                    _add_transfer(answers, time.monotonic() - start)
                    yield answers
            if left <= 0:
                break
            if pending:
                time.sleep(min(POLL, left))
                self._meet()  # new nodes, for the next round
        for node in pending.values():
            reason = f"its node did not answer within {deadline:g} s"
            yield [ClientFailure(client, reason) for client in asked[node]]

    def _nobody(self) -> str:
        """Why a client has no node; a node that refuses does not say whose it is."""
        text = "no node that stands for it is connected"
        if not self.refusals:
            return text
        node, reason = min(self.refusals.items())
        more = f", and {len(self.refusals) - 1} more" if self.refusals.keys() - {node} else ""
        return f"{text}; node {node} is, but refuses: {reason[:300]}{more}"

    def _find(self, cohort: Sequence[int]) -> None:
        """Learns which node stands for whom; before the first round, waits for the cohort's nodes.

        Later it waits only for nodes that have just come back.
        """
        end = time.monotonic() + (0 if self.waited else self.engine.patience)
        warned = False
        while True:
            self._meet()
            missing = [client for client in cohort if client not in self.hosts]
            if not missing or (time.monotonic() >= end and not self._has_news()):
                break
            if not warned:
                log.warning("waiting for the nodes of clients %s", missing)
                warned = True
            time.sleep(POLL)
        self.waited = True

    def _has_news(self) -> bool:
        """Whether nodes have just been asked for the first time since they came."""
        new = [self.since[node] for node in self.asking.values() if node not in self.refusals]
        limit = min(JOIN, self.engine.patience)
        return bool(new) and time.monotonic() < max(new) + limit

    def _meet(self) -> None:
        """Asks new nodes whom they stand for, and reads the replies so far, without waiting."""
        from flwr.app import ConfigRecord, RecordDict

        connected = set(self.grid.get_node_ids())
        self.cards = {n: clients for n, clients in self.cards.items() if n in connected}
        self.refusals = {n: text for n, text in self.refusals.items() if n in connected}
        self.asking = {number: n for number, n in self.asking.items() if n in connected}
        self.again = {n: when for n, when in self.again.items() if n in connected}
        busy, now = {*self.cards, *self.asking.values()}, time.monotonic()
        content = RecordDict({"contract": ConfigRecord(asdict(self.contract))})
        for node in sorted(connected - busy):
            if now >= self.again.get(node, 0.0):
                number = self._send("query", node, content, 0, max(300.0, self.engine.patience))
                if number:
                    self.asking[number] = node
                    self.since[node] = now
        for node, reply in self._replies(self.asking):
            clients: list[int] = []
            try:
                reason = _error(reply)
                if not reason:
                    card, number_of = reply.content["node"], len(self.job.data.index)
                    reason = str(card["refuses"])
                    clients = [int(c) for c in card["clients"] if 0 <= int(c) < number_of]
            except Exception as error:  # a node may send anything
                reason = f"its answer cannot be read: {type(error).__name__}: {error}"
            if reason:
                if self.refusals.get(node) != reason:
                    log.warning("node %d is not used: %s", node, reason)
                self.refusals[node] = reason
                self.again[node] = time.monotonic() + ASK_AGAIN
            else:
                log.info("node %d stands for clients %s", node, clients)
                self.cards[node] = clients
                self.refusals.pop(node, None)
        self.since = {n: when for n, when in self.since.items() if n in self.asking.values()}
        self.hosts = {}
        for node in sorted(self.cards):
            for client in self.cards[node]:
                host = self.hosts.setdefault(client, node)
                if host != node and (client, node) not in self.warned:
                    text = "client %d is node %d's; node %d, which says so too, is not asked for it"
                    log.warning(text, client, host, node)
                    self.warned.add((client, node))

    def _send(self, category: str, node: int, content: Any, round: int, seconds: float) -> str:
        """Sends a message that expires after ``seconds``; its number, empty if that fails."""
        from flwr.app import Message as FlowerMessage

        message = FlowerMessage(content, node, category, ttl=seconds, group_id=str(round))
        numbers = list(self.grid.push_messages([message]))
        return numbers[0] or "" if numbers else ""

    def _replies(self, pending: dict[str, int]) -> Iterator[tuple[int, Any]]:
        """The replies that have come, each with its node, and no longer pending."""
        import httpx

        for number in list(pending):
            try:
                replies: list[Any] = list(self.grid.pull_messages([number]))
            except httpx.HTTPError:  # the SuperLink is gone
                raise
            except Exception as error:  # a node may send anything
                replies = [f"its node's answer cannot be read: {type(error).__name__}"]
            if replies:
                yield pending.pop(number), replies[0]


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
