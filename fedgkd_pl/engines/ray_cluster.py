"""Joining a Ray cluster, or starting one for the length of a run."""

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.processes.signals import stop_behind

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": for no other machine, on Linux too
TOKEN = (
    "the cluster wants its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
    "RAY_AUTH_TOKEN_PATH, without which it is read from ~/.ray/auth_token"
)
UNKNOWN = "uthentication"  # in Ray's message where the token is missing or wrong
KNOCK_SECONDS = 30.0
KNOCK = """
import sys
import ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False)
except Exception as error:
    print(error, error.__cause__)
"""


def connect(address: str) -> None:
    """Joins a cluster."""
    _check_reachable(address)
    start({"address": address})


def start(settings: dict[str, Any]) -> None:
    """``ray.init`` without its output; what it raises becomes a :class:`SettingError`."""
    import ray

    where = settings["address"]
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    settings |= {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        with keep_signals(), warnings.catch_warnings(action="ignore"):
            ray.init(**settings)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.AuthenticationError) as error:
        reason = " ".join(str(error).split())
        if UNKNOWN in f"{reason} {error.__cause__}":
            reason = TOKEN
        elif where.startswith("ray://"):  # whose client does not mention tokens
            reason = f"{reason[:200]}; perhaps {TOKEN}"
        raise SettingError("ray_address", reason[:400], where) from error


@contextmanager
def own_cluster() -> Iterator[None]:
    """The environment of a Ray of our own, which listens on loopback and leaves nothing behind.

    Ray would keep a token in the home folder, and the user's next cluster would ask for it.
    """
    from ray._private import ray_constants

    names = "RAY_AUTH_TOKEN", "RAY_AUTH_MODE", LOOPBACK
    before = {name: os.environ.get(name) for name in names}
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ[LOOPBACK] = "0"
    cluster, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = cluster
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _reset_token()


def _reset_token() -> None:
    """Lets Ray read the environment again, for the next cluster of this process."""
    raylet: Any = import_module("ray._raylet")  # compiled, without types
    raylet.Config.initialize("")  # first: else a thread that is ending would look for a token
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def _check_reachable(address: str) -> None:
    """Refuses an address that nobody answers at, where Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise SettingError("ray_address", f"no Ray there: {error}", address) from error
    if address.startswith("ray://"):
        return
    argv = [sys.executable, "-c", KNOCK, address]  # in a process, because Ray prints a lot
    environment = os.environ | {"RAY_NUM_REDIS_GET_RETRIES": "1"}
    environment.pop("RAY_JOB_CONFIG_JSON_ENV_VAR", None)  # it is not the job
    try:
        output = subprocess.run(
            argv, env=environment, capture_output=True, text=True, timeout=KNOCK_SECONDS
        ).stdout
    except subprocess.TimeoutExpired as error:
        text = f"no Ray there: no answer within {KNOCK_SECONDS:g} s"
        raise SettingError("ray_address", text, address) from error
    require(UNKNOWN not in output, "ray_address", TOKEN, address)


@contextmanager
def keep_signals() -> Iterator[None]:
    """Restores the handler of SIGTERM, which Ray replaces."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    taken = False
    try:
        yield
    except SystemExit as error:
        taken = error.code == signal.SIGTERM  # Ray's handler
        if not taken:
            raise
    finally:
        if main and before is not None:
            signal.signal(signal.SIGTERM, before)
    if taken:
        signal.raise_signal(signal.SIGTERM)


@contextmanager
def end_if_interrupted() -> Iterator[None]:
    """Ends the processes of an interrupted start, which would outlive the run by a minute."""
    before = _descendants()
    try:
        yield
    except BaseException:
        halted: set[int] = set()
        while new := _descendants() - before - halted:  # none starts another meanwhile
            _send(signal.SIGSTOP, new)
            halted |= new
        _send(signal.SIGKILL, halted)
        raise


def _send(number: int, processes: set[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(process, number)


def _descendants() -> set[int]:
    """The processes below this one; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            after_name = file.read_text(errors="replace").rpartition(")")[2].split()
            children.setdefault(int(after_name[1]), []).append(int(file.parent.name))
    descendants, waiting = set(), [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        descendants.update(below)
        waiting += below
    return descendants


@contextmanager
def unwrap_stop() -> Iterator[None]:
    """Raises what a signal handler has raised, which Ray wraps in an error of its own."""
    try:
        yield
    except Exception as error:
        if stop := stop_behind(error):
            raise stop from error
        raise
