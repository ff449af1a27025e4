"""A worker in another process: a Trainer that is kept, and answers as bytes."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from fedgkd_pl.federation.client_trainer import ClientTrainer, Job
from fedgkd_pl.federation.message import (
    Answer,
    ClientFailure,
    ClientUpdate,
    Message,
    decode_state,
    failure,
    plain_seconds,
)


class Worker:
    """Trains one client after the other; an error, also of ``load`` (the job), is an answer."""

    def __init__(self, load: Callable[[], Job]) -> None:
        self.load = load
        self.trainer: ClientTrainer | None = None

    def prepare(self) -> None:
        """Makes the Trainer; what goes wrong is the answer of the next client."""
        with suppress(Exception):
            self._ready()

    def close(self) -> None:
        """Ends the Trainer; the next client gets another."""
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = None

    def train(self, message: Message, client: int, state: bytes, part: bytes = b"") -> bytes:
        """The answer of a client, for :func:`read`.

        Args:
            state: what it kept, encoded.
            part: its examples' content, encoded, if the job does not have it.
        """
        try:
            trainer = self._ready()
            if part:
                data, own = trainer.data, decode_state(part)
                trainer.load_data(data.only(client, data.examples.filled(own)))
            return b"=" + trainer.update(message, client, decode_state(state)).encode()
        except Exception as error:  # a user's net or loss may fail in any way
            self.close()  # nothing of the failed fit stays
            failed = failure(client, error)
            return b"!" + json.dumps([failed.reason, failed.traceback]).encode()

    def _ready(self) -> ClientTrainer:
        self.trainer = self.trainer or ClientTrainer(self.load())
        return self.trainer


def read(answer: bytes, client: int, took: float) -> Answer:
    """The answer of :meth:`Worker.train`, decoded; ``took``: seconds of training and transfer."""
    try:
        if answer[:1] == b"!":
            reason, traceback = json.loads(answer[1:])
            return ClientFailure(client, str(reason), str(traceback))
        update = ClientUpdate.decode(answer[1:])
    except Exception as error:  # bytes may be anything
        failed = failure(client, error)
        return replace(failed, reason=f"its answer cannot be read: {failed.reason}")
    if update.client != client:  # for whose answer the round would wait for ever
        return ClientFailure(client, f"answers as client {update.client!r:.50}, not as itself")
    update.seconds = plain_seconds(update.seconds)
    update.seconds["transfer"] = max(0.0, took - sum(update.seconds.values()))
    return update
