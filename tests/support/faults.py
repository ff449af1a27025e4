"""Deterministic faults: clients that fail when told, and processes stopped where told.

A launcher's commands are forked off a process that has everything imported, so that a killed run
costs no import, and so are their fork servers. They are real processes with real signals.
"""

import atexit
import contextlib
import gc
import io
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.conftest import REPO
from tests.support.runs import no_picture

# -- clients -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What happens to a client in a round, at a step of its training where that makes sense."""

    round: int
    client: int
    kind: str  # raise, nan, inf, shape, missing, loss, hang, die
    step: int = 0


def inject(model: Any, faults: list[Fault], seed: int = 0) -> Any:
    """Makes the clients of a method fail as told, in whatever process they train.

    A client does not know its id; its seed, which is a function of (round, client), does.
    """
    from fedgkd_pl.seeds import derive

    table = {derive(seed, "model", fault.round, fault.client): fault for fault in faults}
    honest = model.client

    def client(number: int = 0) -> Any:
        module = honest(number)
        module.__class__ = _faulty(type(module))
        module.table = table
        return module

    model.client = client
    return model


def _faulty(kind: type) -> type:
    class Faulty(kind):  # type: ignore[misc, valid-type]
        table: dict[int, Fault]

        def receive(self, message: Any, state: Any) -> None:
            import torch

            super().receive(message, state)
            self.fault = self.table.get(torch.initial_seed())

        def on_before_backward(self, loss: Any) -> None:
            """Not in training_step: a client that has its own works without cached teachers."""
            fault = self.fault
            if fault is None or self.global_step != fault.step:
                return
            if fault.kind == "raise":
                raise ArithmeticError("injected\nin two lines")
            if fault.kind == "hang":
                time.sleep(600)
            if fault.kind == "die":
                os.kill(os.getpid(), signal.SIGKILL)

        def reply(self) -> Any:
            update = super().reply()
            kind = self.fault.kind if self.fault else ""
            name = next(iter(update.weights))
            if kind in ("nan", "inf"):
                update.weights[name] = update.weights[name].clone()
                update.weights[name].view(-1)[-1] = float(kind)
            elif kind == "shape":
                update.weights[name] = update.weights[name][:-1]
            elif kind == "missing":
                del update.weights[name]
            elif kind == "loss":
                update.metrics["loss"] = float("nan")
            return update

    return Faulty


# -- processes ---------------------------------------------------------------------------------

SHARED = "_FEDGKD_PL_LAUNCHER"  # names the server of pytest's workers


class Launcher:
    """Runs commands of ``fedgkd-pl``, one at a time, in children that have everything imported."""

    def __init__(self) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(os.environ.get(SHARED) or start_server())
        self.lines = self.connection.makefile("r")
        assert self._answer() == "ready"

    def start(
        self,
        folder: Path,
        *words: str,
        stop_at: tuple[str, str, int] | None = None,
        env: dict[str, str] | None = None,
        output: str = "output.txt",
        errors: str = "",
        script: bool = False,
    ) -> int:
        """Starts a command in a folder; returns its process id.

        Args:
            words: of ``fedgkd-pl``, or the path of a script.
            stop_at: kill it when a commit of a file of this name, or in a folder of it, has
                reached this step for the n-th time: (step, name, n).
            env: variables of its environment.
            output: a file for what it prints; ``broken`` for a reader that has gone.
            errors: another file for its errors.
            script: it is a script, and ends as the interpreter does.
        """
        folder.mkdir(parents=True, exist_ok=True)
        order = {"folder": str(folder), "words": list(map(str, words)), "stop_at": stop_at}
        files = {"output": output, "errors": errors or output}
        self._say(order | files | {"env": env or {}, "script": script})
        self.child = int(self._answer())
        return self.child

    def wait(self, seconds: float = 300) -> int:
        """The exit code of the command; the negative number of the signal that ended it.

        Raises:
            TimeoutError: it goes on for longer than this, and was killed.
        """
        self._say({"wait": True})
        late = not select.select([self.connection], [], [], seconds)[0]
        if late:
            os.kill(self.child, signal.SIGKILL)
        code = int(self._answer())
        if late:
            raise TimeoutError(f"a command did not end within {seconds} s")
        return code

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        self._say({"wait": False})
        answer = self._answer()
        return None if answer == "running" else int(answer)

    def run(self, folder: Path, *words: str, **kwargs: Any) -> int:
        """Starts and waits."""
        self.start(folder, *words, **kwargs)
        return self.wait()

    def close(self) -> None:
        self.lines.close()
        self.connection.close()

    def _say(self, order: dict[str, Any]) -> None:
        self.connection.sendall(json.dumps(order).encode() + b"\n")

    def _answer(self) -> str:
        return self.lines.readline().strip()


class Command:
    """A command of a launcher of its own, used as a Popen is."""

    def __init__(self, folder: Path, *words: str, **kwargs: Any) -> None:
        self.launcher = Launcher()
        self.output = folder / f"told-{time.monotonic_ns()}.txt"
        self.pid = self.launcher.start(folder, *words, output=str(self.output), **kwargs)
        self.poll = self.launcher.poll

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        self.returncode = self.launcher.wait()
        self.launcher.close()
        return self.returncode

    def communicate(self) -> tuple[str]:
        """What it has said, when it has ended."""
        self.wait()
        return (self.output.read_text(),)


def warm_script(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a script of the user's in a process that has everything imported."""
    (folder / "script.py").write_text(text)
    output, errors = folder / "output.txt", folder / "errors.txt"
    launcher = Launcher()
    code = launcher.run(folder, "script.py", errors=errors.name, script=True)
    launcher.close()
    return subprocess.CompletedProcess(text, code, output.read_text(), errors.read_text())


@cache
def start_server() -> str:
    """The address of a process that ends with this one and forks for every launcher."""
    folder = tempfile.mkdtemp(prefix="launch")
    atexit.register(shutil.rmtree, folder)
    address = f"{folder}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.faults", str(listener.fileno())],
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},  # several at once
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
    assert process.stdin is not None
    atexit.register(process.wait)
    atexit.register(process.stdin.close)
    return address


def _serve(listener: socket.socket) -> None:
    """Serves launchers when everything is imported that a run needs."""
    from fedgkd_pl.cli.main import main
    from torch.utils.tensorboard import writer

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        words = ["--rounds", "1", "--model.engine.workers", "1", "--output_dir", folder]
        assert main(["fit", "--config", "smoke.yaml", *words]) == 0
    os.environ.pop("PL_GLOBAL_SEED")
    writer.figure_to_image = no_picture
    gc.collect()
    gc.freeze()  # so that children copy less
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job of a script
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection = listener.accept()[0]
        if not os.fork():
            listener.close()
            connection.sendall(b"ready\n")
            _launch(connection)
            os._exit(0)
        connection.close()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)  # at once: torch takes seconds to clean up


def _launch(connection: socket.socket) -> None:
    child, code = 0, None
    for line in connection.makefile("r"):
        order = json.loads(line)
        answer: int | str | None
        if "folder" in order:
            child = answer = os.fork()
            code = None
            if not child:
                connection.close()
                os.environ.update(order["env"])
                tempfile.tempdir = None  # asks for TMPDIR again
                os.chdir(order["folder"])
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                _direct(order["output"], order["errors"])
                _fork_fork_servers()
                if order["script"]:
                    _script(*order["words"])
                _command(order["words"], order["stop_at"])
        else:
            if code is None:
                ended, status = os.waitpid(child, 0 if order["wait"] else os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if ended else None
            answer = "running" if code is None else code
        connection.sendall(f"{answer}\n".encode())


def _command(words: list[str], stop_at: list[Any] | None) -> None:
    from fedgkd_pl.cli.main import main
    from fedgkd_pl.storage import files as storage

    if stop_at is not None:
        step, name, times = stop_at
        left = [times]

        def reached(now: str, target: Path) -> None:
            if now == step and name in (target.name, target.parent.name):
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)

        storage.reached = reached
    code = 1
    try:
        code = main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _script(file: str) -> None:
    """As Python does: its variables live until the interpreter has ended."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = file
    sys.argv, sys.path[0] = [file], str(Path(file).parent)
    exec(compile(Path(file).read_text(), file, "exec"), main.__dict__)
    sys.exit()


def _direct(output: str, errors: str) -> None:
    """Where a child's output goes."""
    if output == "broken":
        reader, writer = os.pipe()
        os.close(reader)
        writers = (writer, writer)
    else:
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        writers = (os.open(output, flags), os.open(errors, flags))
    for number, writer in zip((1, 2), writers, strict=True):
        os.dup2(writer, number)


def _fork_fork_servers() -> None:
    """Has multiprocessing fork its servers off this process, where it would start interpreters.

    A server gets what it would have got: standard streams, the descriptors that are passed on,
    signals that are not ours to answer, and a multiprocessing that has started nothing yet.
    """
    started = util.spawnv_passfds

    def start(path: Any, args: list[str], descriptors: list[int]) -> int:
        if not args[-1].startswith("from multiprocessing.forkserver import main"):
            return started(path, args, descriptors)
        if child := os.fork():
            return child
        try:
            gc.freeze()
            kept, nowhere = {0, 1, 2, *descriptors}, os.open(os.devnull, os.O_RDWR)
            for number in {int(name) for name in os.listdir("/proc/self/fd")} - kept - {nowhere}:
                with contextlib.suppress(OSError):  # that of the listing
                    os.fstat(number)
                    os.dup2(nowhere, number)  # not closed: what owns it may close it yet
            signal.set_wakeup_fd(-1)
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    ours = number == signal.SIGINT  # of a new interpreter
                    signal.signal(number, signal.default_int_handler if ours else signal.SIG_DFL)
            forkserver._forkserver.__init__()
            resource_tracker._resource_tracker.__init__()
            exec(args[-1], {})
        except SystemExit:
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    util.spawnv_passfds = start


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
