"""Clients that fail are left out, counted, and change nothing for the others."""

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fedgkd_pl import FedAvg, LocalEngine, RunFiles
from fedgkd_pl.data.cohorts import CohortLoader
from fedgkd_pl.errors import RunFailed
from torch.optim import SGD

from tests.conftest import Table, fit, linear, same
from tests.support.faults import Fault, inject
from tests.support.methods import EVERY, Inputs, build
from tests.support.runs import of_families

SIZES = (8, 5, 6, 7, 9, 4, 5, 6, 8, 7)
SILENT = ("raise", "nan", "inf", "shape", "missing", "loss")  # the worker survives these
REASONS = {
    "raise": "ArithmeticError: injected",
    "nan": " is not finite",
    "inf": " is not finite",
    "shape": ", not torch.",
    "missing": "its model lacks ",
    "loss": "its loss is not finite",
}


class Absent(Table):
    """A table in whose cohorts some clients are missing: the run without the failed ones."""

    def __init__(self, absent: set[tuple[int, int]] = frozenset(), **kwargs: Any) -> None:  # type: ignore[assignment]
        settings: dict[str, Any] = {
            "sizes": SIZES,
            "batch_size": 4,
            "val_fraction": 0.1,
            "scored": True,
        }
        super().__init__(**(settings | {"public": Inputs()} | kwargs))
        self.absent = absent

    def train_dataloader(self) -> CohortLoader:
        absent = self.absent

        class Loader(CohortLoader):
            def cohort(self) -> list[int]:
                return [k for k in super().cohort() if (self.epoch + 1, k) not in absent]

        return Loader(self.cohorts, self.population, None)


def faults_of(kinds: tuple[str, ...], rounds: int) -> list[Fault]:
    """Three clients of ten fail in every round, each time in another way."""
    turns = [kinds[n % len(kinds)] for n in range(3 * rounds)]
    clients = [(round + 3 * place) % 10 for round in range(rounds) for place in range(3)]
    return [
        Fault(n // 3 + 1, client, kind, step=n % 2)
        for n, (client, kind) in enumerate(zip(clients, turns, strict=True))
    ]


@pytest.mark.parametrize("name", of_families(["FedAvg", *EVERY]))
def test_a_run_with_failures_is_the_run_without_those_clients(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R5: 30 % of all updates raise, are not finite or have another shape."""

    def model() -> FedAvg:
        if name == "FedAvg":
            return FedAvg(linear(), optimizer=partial(SGD, lr=0.3), engine=LocalEngine(1))
        return build(name)

    faults = faults_of(SILENT, 6)
    files = RunFiles(str(tmp_path))
    failed, expected = inject(model(), faults), model()
    fit(failed, Absent(), 6, callbacks=[files])
    fit(expected, Absent({(f.round, f.client) for f in faults}), 6)
    assert same(failed.net.state_dict(), expected.net.state_dict())
    assert all(tensor.isfinite().all() for tensor in failed.net.state_dict().values())
    assert failed.client_states.keys() == expected.client_states.keys()
    rows = list(csv.DictReader((tmp_path / "failures.csv").open()))
    found = {(int(row["round"]), int(row["client"])): row for row in rows}
    assert len(rows) == len(faults) == 18
    for fault in faults:
        row = found[fault.round, fault.client]
        assert REASONS[fault.kind] in row["reason"], row
        assert ("on_before_backward" in row["traceback"]) is (fault.kind == "raise")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["failed_clients"] == 18 and summary["failed_rounds"] == []
    assert sum(summary["failures"].values()) == 18 and summary["client_trainings"] == 6 * 10
    (told,) = [text for text in caplog.messages if "client trainings failed" in text]
    assert told.startswith("18 of 60 client trainings failed, most often: ")
    metrics = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert [float(row["client/failed"]) for row in metrics] == [3.0] * 6


def test_clients_that_hang_or_die_are_left_out_too(tmp_path: Path) -> None:
    """R5 in a pool: a worker that is gone is replaced, and the others go on."""
    faults = [Fault(1, 3, "die", 1), Fault(1, 8, "hang"), Fault(2, 0, "die"), Fault(3, 4, "raise")]
    engine = LocalEngine(workers=2, timeout=5)

    def model(engine: LocalEngine) -> FedAvg:
        return FedAvg(linear(), optimizer=partial(SGD, lr=0.3), engine=engine)

    failed, expected = inject(model(engine), faults), model(LocalEngine(1))
    fit(failed, Absent(), 4, callbacks=[RunFiles(str(tmp_path))])
    fit(expected, Absent({(f.round, f.client) for f in faults}), 4)
    assert same(failed.net.state_dict(), expected.net.state_dict())
    told = list(csv.DictReader((tmp_path / "failures.csv").open()))
    assert [int(row["round"]) for row in told] == [1, 1, 2, 3]


def test_rounds_that_fail_again_and_again_end_the_run(tmp_path: Path) -> None:
    faults = [Fault(round, client, "nan") for round in (2, 4, 5) for client in range(10)]
    optimizer, files = partial(SGD, lr=0.3), RunFiles(str(tmp_path))
    model = FedAvg(
        linear(), optimizer=optimizer, engine=LocalEngine(1), min_clients=2, max_failed_rounds=2
    )
    with pytest.raises(RunFailed, match=r"^2 rounds in a row failed .* client 4: its weight"):
        fit(inject(model, faults), Absent(), 9, callbacks=[files])
    assert model.failed_rounds == [2, 4, 5]
    assert model.trainer.global_step == model.trainer.current_epoch == 4
    rows = list(csv.DictReader((tmp_path / "failures.csv").open()))
    assert len(rows) == 30, "those of the last round are told too"
