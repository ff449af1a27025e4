"""A SuperLink and SuperNodes as real processes on loopback, with TLS and authentication."""

import json
import os
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

BIN = Path(sys.executable).parent
NAME = "net"  # of the connection


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def until(done: Callable[[], Any], what: str, seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.3)
    return found


def environment(home: Path) -> dict[str, str]:
    """Where Flower's programs find each other, keep their files and say nothing to anyone."""
    return {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PYTHONUNBUFFERED": "1",
    }


class Network:
    """One SuperLink and the nodes that are started.

    Args:
        folder: for certificates, keys, logs and Flower's own files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "home").mkdir(parents=True)
        self.environment = environment(folder / "home")
        self._certificates()
        (folder / "home/config.toml").write_text(
            f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\n'
            f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{folder / "server.crt"}"\n'
        )
        self._superlink()

    def _certificates(self) -> None:
        """One certificate, which is its own authority."""
        key = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        files = ["-days", "2", "-keyout", "server.key", "-out", "server.crt"]
        words = ["openssl", "req", *key, *names, *files]
        subprocess.run(words, check=True, cwd=self.folder, capture_output=True)

    def _superlink(self) -> None:
        files = {"ca-certfile": "server.crt", "certfile": "server.crt", "keyfile": "server.key"}
        tls = [w for k, name in files.items() for w in (f"--ssl-{k}", str(self.folder / name))]
        words = ["--host", "127.0.0.1", "--port", str(self.port), *tls, "--enable-supernode-auth"]
        words.append("--disable-runtime-dependency-installation")
        self.spawn("superlink", "flower-superlink", *words)
        trusted = ssl.create_default_context(cafile=str(self.folder / "server.crt"))

        def healthy() -> bool:
            try:
                place = f"https://127.0.0.1:{self.port}/health"
                urllib.request.urlopen(place, context=trusted, timeout=2).read()
            except (OSError, urllib.error.URLError):
                assert self.processes["superlink"].poll() is None, self.log("superlink")
                return False
            return True

        until(healthy, "the SuperLink")

    def spawn(self, name: str, program: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                [str(BIN / program), *words],
                env=self.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                start_new_session=True,
            )

    def key(self, name: str) -> Path:
        """Makes the key of a node, as docs/flower.md does."""
        words = ["-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", name]
        subprocess.run(["ssh-keygen", *words], check=True, cwd=self.folder)
        return self.folder / name

    def register(self, key: Path) -> None:
        answer = self.flwr("supernode", "register", str(key.with_suffix(".pub")), NAME)
        assert answer["success"], answer

    def node(self, key: Path, config: str) -> None:
        """Starts a SuperNode."""
        self.spawn(
            key.name,
            "flower-supernode",
            *("--superlink", f"127.0.0.1:{self.port}"),
            *("--root-certificates", str(self.folder / "server.crt")),
            *("--auth-supernode-private-key", str(key)),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            *("--node-config", config),
        )

    def online(self) -> int:
        nodes = self.flwr("supernode", "list", NAME)["nodes"]
        return sum(node["status"] == "online" for node in nodes)

    def flwr(self, *words: str) -> Any:
        done = subprocess.run(
            [str(BIN / "flwr"), *words, "--format", "json"],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stdout.strip().startswith("{"), done.stdout + done.stderr
        return json.loads(done.stdout)

    def start(self, app: Path, *words: str) -> int:
        answer = self.flwr("run", str(app), NAME, *words)
        assert answer["success"], answer
        return int(answer["run-id"])

    def wait(self, run: int, seconds: float = 400) -> dict[str, Any]:
        def finished() -> Any:
            state = self.flwr("list", NAME, "--run-id", str(run))["runs"][0]
            return state if state["status"].startswith("finished") else None

        found: dict[str, Any] = until(finished, f"run {run}\n{self.log('superlink')}", seconds)
        return found

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-6000:]

    def family(self, name: str, words: str = "") -> list[psutil.Process]:
        """A process and all that it has started, or those with these words in their command."""
        first = psutil.Process(self.processes[name].pid)
        found = []
        for process in [first, *first.children(recursive=True)]:
            try:
                if words in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:  # it has ended
                continue
        return found

    def kill(self, name: str) -> None:
        """Ends a process, and all that it has started, as a power cut would."""
        for process in self.family(name):
            process.kill()
        self.processes.pop(name).wait(20)

    def close(self) -> None:
        for name in sorted(self.processes, key=lambda name: name == "superlink"):
            family = self.family(name) if self.processes[name].poll() is None else []
            self.processes[name].terminate()
            for process in psutil.wait_procs(family, timeout=10)[1]:
                process.kill()
