"""The Ray actor that trains clients in a process of its own."""

from contextlib import suppress
from typing import Any

import cloudpickle
import numpy as np
from fedgkd_pl.engines.worker import Worker
from fedgkd_pl.federation.client_trainer import quiet
from fedgkd_pl.federation.hardware import set_numerics
from fedgkd_pl.federation.message import Message
from numpy.typing import NDArray

Blob = NDArray[np.uint8]  # bytes that Ray's workers read without a copy


class RayWorker:
    """Trains clients in a process that Ray starts.

    ``job`` and messages are references, in lists so that Ray does not fetch them before use.
    """

    def __init__(self, job: list[Any], threads: int, settings: dict[str, Any]) -> None:
        set_numerics(settings, threads)
        self.worker = Worker(lambda: cloudpickle.loads(_get(job)))
        self.name = ""
        self.message: Message | None = None

    def prepare(self) -> None:
        """Makes it ready to train."""
        with quiet(), suppress(Exception):  # the first client reports it
            self.worker.prepare()

    def train(self, message: list[Any], client: int, state: bytes, part: Blob) -> bytes:
        """The answer of a client, for :func:`read`."""
        name = message[0].hex()
        if self.message is None or name != self.name:  # once a round
            self.name, self.message = name, Message.decode(_get(message))
        with quiet():
            return self.worker.train(self.message, client, state, part.tobytes())


def _get(reference: list[Any]) -> bytes:
    import ray

    content: Blob = ray.get(reference[0])
    return content.tobytes()


def blob(content: bytes) -> Blob:
    """Bytes in the form that Ray does not copy."""
    return np.frombuffer(content, dtype=np.uint8)
