"""The Ray actor that trains clients in a process of its own."""

import os
import platform
from contextlib import suppress
from typing import Any

import cloudpickle
import numpy as np
from fedgkd_pl.engines.worker import Worker
from fedgkd_pl.federation.client_trainer import quiet
from fedgkd_pl.federation.message import Message
from fedgkd_pl.federation.performance import set_numerics
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

    def started(self) -> tuple[str, str]:
        """Its machine and process, and the id of its node, once it is ready to train."""
        import ray

        with quiet(), suppress(Exception):  # the first client reports it
            self.worker.prepare()
        place = f"{platform.node()}, process {os.getpid()}"
        return place, ray.get_runtime_context().get_node_id()

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
