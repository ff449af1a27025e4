"""Joining a Ray cluster, or starting one for the length of a run."""

import logging
import os
import secrets
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from fedgkd_pl.engines.base import cores
from fedgkd_pl.errors import SettingError

# Of the clusters of this process, which Ray reads once. It would keep one in the home folder, and
# the user's next cluster would ask for it.
TOKEN = secrets.token_hex(32)


def connect(address: str) -> None:
    """Joins a cluster, or starts one on this machine if the address is ``local``."""
    if address == "local":
        _start_own()
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():  # Ray itself would wait for minutes
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise SettingError("ray_address", f"no Ray there: {error}", address) from error
    _init(address=address)


def _start_own() -> None:
    """Starts a Ray that listens on loopback and leaves nothing behind."""
    from ray._private import ray_constants

    environment = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # "0": loopback, on Linux too
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        environment["RAY_AUTH_TOKEN"] = TOKEN
    with (
        patch.dict(os.environ, environment),
        patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False),
    ):
        _init(address="local", num_cpus=cores(), include_dashboard=False)


def _init(**settings: Any) -> None:
    """``ray.init`` without its output; what it raises becomes a :class:`SettingError`."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    settings |= {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        with keep_signals(), warnings.catch_warnings(action="ignore"):
            ray.init(**settings)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.AuthenticationError) as error:
        reason = " ".join(str(error).split())[:400]
        raise SettingError("ray_address", reason, settings["address"]) from error


@contextmanager
def keep_signals() -> Iterator[None]:
    """Restores the handler of SIGTERM, which Ray replaces."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
