"""One line per round in a log; a live display on a terminal."""

import re
from functools import partial
from typing import Any

import pytest
from fedgkd_pl import FedAvg, LocalEngine, RoundProgress
from rich.progress import Progress
from torch.optim import SGD

from tests.conftest import Table, fit, linear
from tests.support.methods import build
from tests.support.methods import table as public_table


def model() -> FedAvg:
    return FedAvg(linear(), optimizer=partial(SGD, lr=0.1), engine=LocalEngine(1))


def table() -> Table:
    return Table(sizes=(8, 5, 6), val_fraction=0.1)


def test_plain_lines_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    fit(model(), table(), 3, callbacks=[RoundProgress()], enable_progress_bar=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert [line.split()[1] for line in lines] == ["1/3", "2/3", "3/3"]
    pattern = r"round \d/3  val/acc 0\.\d+  test/acc 0\.\d+  .* left"
    assert all(re.match(pattern, line) for line in lines)


def test_live_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    seen: list[tuple[float, float | None, float]] = []

    class Watched(RoundProgress):
        def on_client_end(self, *args: Any) -> None:
            super().on_client_end(*args)
            assert isinstance(self.live, Progress)
            rounds, clients, _ = self.live.tasks
            seen.append((clients.completed, clients.total, rounds.completed))

    progress = Watched()
    fit(model(), table(), 2, callbacks=[progress], enable_progress_bar=True)
    assert seen == [(n, 3, done) for done in (0, 1) for n in (1, 2, 3)]
    assert progress.live is None, "the display was left open"


def test_the_servers_own_steps_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    fit(build("FedDF"), public_table(), 1, callbacks=[RoundProgress()], enable_progress_bar=True)
    assert re.search(r"round 1/1 .* server [4-7] steps", capsys.readouterr().out)
