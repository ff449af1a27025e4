"""The engine of several organisations: Flower carries the messages, the data stays where it is.

This is the server's half, which runs in a Flower ServerApp; the clients' is
:mod:`fedgkd_pl.engines.flower.client_app`. A node (Flower's SuperNode) stands for one client or
several and gets one message a round. What a client keeps between rounds never leaves its node: the
server, and its checkpoint, know only the round it dates from.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from fedgkd_pl.engines.base import Engine, Session, needs, schedule
from fedgkd_pl.errors import require
from fedgkd_pl.federation.client_trainer import Job
from fedgkd_pl.federation.hardware import keep_memory
from fedgkd_pl.federation.message import Answer, ClientFailure, ClientUpdate, Message, Spec, Specs
from typing_extensions import override

if TYPE_CHECKING:
    from fedgkd_pl.engines.flower.records import Contract
    from fedgkd_pl.federation.server import FederatedServer

POLL = 0.5  # seconds
MOST = 10**12  # samples of a client
ASK_AGAIN = 60.0  # seconds, until a node that refused may have been fixed
JOIN = 60.0  # seconds that a round waits for nodes that have come back
log = logging.getLogger("fedgkd_pl")


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
        super().__init__(threads)
        require(deadline > 0, "deadline", "must be positive", deadline)
        require(patience >= 0, "patience", "must not be negative", patience)
        fits = max_samples is None or 1 <= max_samples <= MOST
        require(fits, "max_samples", f"must be from 1 to {MOST}", max_samples)
        self.deadline = deadline
        self.patience = patience
        self.max_samples = max_samples
        self.grid: Any = None  # Flower's, the way to the nodes
        self.contract: Callable[[], Contract]  # what they must agree to, once the data is loaded

    def connect(self, grid: Any, contract: "Callable[[], Contract]") -> None:
        """Gives the engine what a ServerApp has."""
        self.grid, self.contract = grid, contract

    @override
    def states(self, declared: Specs) -> Specs:
        from fedgkd_pl.engines.flower.records import SINCE

        return {SINCE: Spec((2,), torch.int64, low=0)} if declared else {}

    @override
    def check(self, server: "FederatedServer") -> None:
        apart = server.models_differ and not server.shares_models  # FedWeIT's may be averaged
        if server.client_nets.layout == "per_client" or apart:  # models stay with clients
            log.warning(
                "%s: val/ and test/ score the initial nets, because the trained ones stay on the "
                "nodes; client/ values are of the trained ones",
                type(server).__name__,
            )
        text = "FlowerEngine runs in a Flower app: make one with fedgkd-pl flower, start it with "
        require(self.grid is not None, "engine", text + "flwr run")

    @override
    def open(self, job: Job, cohort_size: int) -> Session:
        keep_memory()  # for evaluation
        return FlowerSession(self, job)


class FlowerSession(Session):
    """The nodes of a run."""

    def __init__(self, engine: FlowerEngine, job: Job) -> None:
        self.engine = engine
        self.job = job
        self.grid = engine.grid
        self.contract = engine.contract()
        self.hosts: dict[int, int] = {}  # the node of every client that has one
        self.cards: dict[int, list[int]] = {}  # whom each node stands for
        self.asking: dict[str, int] = {}  # the nodes that have not answered yet, by message
        self.again: dict[int, float] = {}  # when to ask nodes again that refused
        self.waited = False

    @override
    def run(self, message: Message, cohort: Sequence[int]) -> Iterator[Answer]:
        self._find(cohort)
        order = schedule(self.job, cohort)
        return self.in_order(order, self._answers(message, order))

    def _answers(self, message: Message, cohort: Sequence[int]) -> Iterator[Answer]:
        """The nodes' answers as they come; at last, failures for those that are late."""
        from fedgkd_pl.engines.flower.records import SINCE, pack_message, pack_task, unpack_answers

        states = self.job.states
        marks = {c: tuple(state[SINCE].tolist()) for c, state in states.items() if state}
        deadline, start = self.engine.deadline, time.monotonic()
        asked: dict[int, list[int]] = {}
        for client in cohort:
            if client in self.hosts:
                asked.setdefault(self.hosts[client], []).append(client)
            else:
                yield ClientFailure(client, "no node that stands for it is connected")
        packed: dict[frozenset[int], dict[str, Any]] = {}  # by the nets of a node's clients
        pending = {}
        for node, clients in asked.items():
            nets = frozenset(map(self.job.net_of or (lambda client: 0), clients))
            if nets not in packed:
                packed[nets] = pack_message(message.for_nets(nets), self.contract)
            since = {c: marks.get(c, (0, 0)) for c in clients}
            task = pack_task(packed[nets], message.round, since)
            if number := self._send("train", node, task, message.round, deadline):
                pending[number] = node
            else:
                yield from _failures(clients, "the message could not be sent")
        while pending:
            left = start + deadline - time.monotonic()
            for node, content, reason in self._replies(pending):
                if reason:
                    yield from _failures(asked[node], reason)
                    continue
                answers = unpack_answers(content, asked[node])
                updates = [answer for answer in answers if isinstance(answer, ClientUpdate)]
                # what was not training was transfer, and starting a process
                took = time.monotonic() - start
                trained = sum(sum(update.seconds.values()) for update in updates)
                for update in updates:
                    update.seconds["transfer"] = max(0.0, took - trained) / len(updates)
                yield from answers
            if left <= 0:
                break
            if pending:
                time.sleep(min(POLL, left))
                self._meet()  # new nodes, for the next round
        for node in pending.values():
            yield from _failures(asked[node], f"its node did not answer within {deadline:g} s")

    def _find(self, cohort: Sequence[int]) -> None:
        """Learns which node stands for whom; before the first round, waits for the cohort's nodes.

        Later it waits only for nodes that have just been asked.
        """
        patience = self.engine.patience
        end = time.monotonic() + (min(JOIN, patience) if self.waited else patience)
        self._meet()
        if missing := sorted(set(cohort) - self.hosts.keys()):
            log.warning("no node for clients %s yet", missing)
        while set(cohort) - self.hosts.keys() and time.monotonic() < end:
            if self.waited and not self.asking:
                break
            time.sleep(POLL)
            self._meet()
        self.waited = True

    def _meet(self) -> None:
        """Asks new nodes whom they stand for, and reads the replies so far, without waiting."""
        from flwr.app import ConfigRecord, RecordDict

        connected = set(self.grid.get_node_ids())
        for known in self.cards, self.again:
            for node in known.keys() - connected:
                known.pop(node)
        self.asking = {number: n for number, n in self.asking.items() if n in connected}
        now = time.monotonic()
        content = RecordDict({"contract": ConfigRecord(asdict(self.contract))})
        for node in sorted(connected - {*self.cards, *self.asking.values()}):
            if now >= self.again.get(node, 0.0):
                seconds = max(300.0, self.engine.patience)
                if number := self._send("query", node, content, 0, seconds):
                    self.asking[number] = node
        for node, content, reason in self._replies(self.asking):
            clients, reason = ([], reason) if reason else self._card(content)
            if reason:
                log.warning("node %d is not used: %s", node, reason)
                self.again[node] = time.monotonic() + ASK_AGAIN
                continue
            log.info("node %d stands for clients %s", node, clients)
            others = {client for card in self.cards.values() for client in card}
            if taken := sorted(others & set(clients)):
                text = "node %d: clients %s have another node, too; only the first is asked"
                log.warning(text, node, taken)
            self.cards[node] = clients
        last_to_first = sorted(self.cards, reverse=True)
        self.hosts = {client: node for node in last_to_first for client in self.cards[node]}

    def _card(self, content: Any) -> tuple[list[int], str]:
        """Whom a node stands for, or why it refuses."""
        try:
            card, number = content["node"], len(self.job.data.index)
            return [int(c) for c in card["clients"] if 0 <= int(c) < number], str(card["refuses"])
        except Exception as error:  # a node may send anything
            return [], f"its answer cannot be read: {type(error).__name__}: {error}"

    def _send(self, category: str, node: int, content: Any, round: int, seconds: float) -> str:
        """Sends a message that expires after ``seconds``; its number, empty if that fails."""
        from flwr.app import Message as FlowerMessage

        message = FlowerMessage(content, node, category, ttl=seconds, group_id=str(round))
        return next(iter(self.grid.push_messages([message])), "") or ""

    def _replies(self, pending: dict[str, int]) -> Iterator[tuple[int, Any, str]]:
        """The replies that have come, no longer pending: node, content, why there is none."""
        import httpx

        for number in list(pending):
            content, reason = None, ""
            try:
                replies = list(self.grid.pull_messages([number]))
                if not replies:
                    continue
                if replies[0].has_error():
                    reason = f"its node failed: {' '.join(replies[0].error.reason.split())[:300]}"
                else:
                    content = replies[0].content
            except httpx.HTTPError:  # the SuperLink is gone
                raise
            except Exception as error:  # a node may send anything
                reason = f"its node's answer cannot be read: {type(error).__name__}"
            yield pending.pop(number), content, reason


def _failures(clients: list[int], reason: str) -> list[Answer]:
    return [ClientFailure(client, reason) for client in clients]
