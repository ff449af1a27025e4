"""Deterministic faults: clients that fail when told, and processes stopped where told.

``python -m tests.support.faults`` is a launcher: it has everything imported and forks a child per
command, so that a killed run costs no import. The children are real processes with real signals.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import REPO

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

    def client() -> Any:
        half = honest()
        half.__class__ = _faulty(type(half))
        half.table = table
        return half

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


class Launcher:
    """Runs commands of ``fedgkd-pl`` in children of a process that has everything imported."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.faults"],
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},  # two side by side
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def start(
        self,
        folder: Path,
        *words: str,
        stop_at: tuple[str, str, int] | None = None,
        env: dict[str, str] | None = None,
        output: str = "output.txt",
    ) -> int:
        """Starts a command in a folder; returns its process id.

        Args:
            stop_at: kill it when a commit of the file of this name has reached this step for the
                n-th time: (step, name, n).
            env: variables of its environment.
            output: a file for what it prints; ``closed`` or ``broken`` for none.
        """
        folder.mkdir(parents=True, exist_ok=True)
        order = {"folder": str(folder), "words": list(map(str, words)), "stop_at": stop_at}
        self._say(order | {"env": env or {}, "output": output})
        self.child = int(self._answer())
        return self.child

    def wait(self, seconds: float = 300) -> int:
        """The exit code of the command; the negative number of the signal that ended it.

        Raises:
            TimeoutError: it goes on for longer than this, and was killed.
        """
        self._say({})
        late = not select.select([self.process.stdout], [], [], seconds)[0]
        if late:
            os.kill(self.child, signal.SIGKILL)
        code = int(self._answer())
        if late:
            raise TimeoutError(f"a command did not end within {seconds} s")
        return code

    def run(self, folder: Path, *words: str, **kwargs: Any) -> int:
        """Starts and waits."""
        self.start(folder, *words, **kwargs)
        return self.wait()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _say(self, order: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def _launch() -> None:
    import fedgkd_pl.settings.build  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    from fedgkd_pl.plots.partition import bubble_chart  # noqa: F401
    from fedgkd_pl.runs.events import rewind

    rewind(Path("/nonexistent"), [])  # imports TensorBoard's reader
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job of a script
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
    print("ready", flush=True)
    child = 0
    for line in sys.stdin:
        order = json.loads(line)
        if not order:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        child = os.fork()
        if not child:
            os.environ.update(order["env"])
            tempfile.tempdir = None  # asks for TMPDIR again
            _child(order["folder"], order["words"], order["stop_at"], order["output"])
        print(child, flush=True)


def _child(folder: str, words: list[str], stop_at: list[Any] | None, output: str) -> None:
    from fedgkd_pl.cli.main import main
    from fedgkd_pl.storage import files as storage

    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _direct(output)
    if stop_at is not None:
        step, name, times = stop_at
        left = [times]

        def reached(now: str, target: Path) -> None:
            if now == step and target.name == name:
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


def _direct(output: str) -> None:
    """Where a child's output goes."""
    if output == "closed":
        for number in (0, 1, 2):
            os.close(number)
        return
    if output == "broken":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(writer, number)


if __name__ == "__main__":
    _launch()
