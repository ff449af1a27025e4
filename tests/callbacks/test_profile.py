"""Where a round's time goes: parts that were made slow show up as themselves."""

import csv
import time
from pathlib import Path
from typing import Any

import pytest
from fedgkd_pl import FedGKD, LocalEngine, RoundProfile
from fedgkd_pl.callbacks.profile import CLIENTS, SERVER, profile_table
from fedgkd_pl.methods.fedgkd import FedGKDClient

from tests.conftest import Table, fit, linear

SLOW = 0.05


class SlowClient(FedGKDClient):
    def teach(self, x: Any) -> Any:
        if self.distil:
            time.sleep(SLOW)
        return super().teach(x)

    def receive(self, *args: Any) -> None:
        time.sleep(2 * SLOW)
        super().receive(*args)


class Slow(FedGKD):
    def client(self) -> SlowClient:
        settings = {"gamma": self.gamma, "distance": "kl", "temperature": 1.0}
        return SlowClient(self.net, self.optimizer, self.scheduler, **settings)

    def server_step(self, mean: Any) -> None:
        time.sleep(3 * SLOW)
        super().server_step(mean)

    def on_validation_epoch_end(self) -> None:
        time.sleep(4 * SLOW)
        super().on_validation_epoch_end()


def test_every_part_is_seen(tmp_path: Path, capsys: Any) -> None:
    profile = RoundProfile(str(tmp_path))
    start = time.perf_counter()
    data = Table(sizes=(8, 8), val_fraction=0.2)
    fit(Slow(linear(), engine=LocalEngine(workers=1)), data, rounds=3, callbacks=[profile])
    whole = time.perf_counter() - start
    assert len(profile.rows) == 3
    assert profile.rows[0]["teacher"] < SLOW / 2, "nobody teaches in round 1"
    for row in profile.rows[1:]:
        # two clients, each with one batch
        clients = {"teacher": 2 * SLOW, "student": 4 * SLOW}
        for name, least in {**clients, "aggregation": 3 * SLOW, "evaluation": 4 * SLOW}.items():
            assert 0.9 * least <= row[name] < least + 6 * SLOW, (name, row)
        assert all(seconds >= 0 for seconds in row.values())
    assert sum(sum(row.values()) for row in profile.rows) < whole
    rows = list(csv.DictReader((tmp_path / "profile.csv").open()))
    assert [row["round"] for row in rows] == ["1", "2", "3"]
    for row, kept in zip(rows, profile.rows, strict=True):
        assert {name: float(row[name]) for name in kept} == pytest.approx(kept, abs=1e-4)
    assert "where a round's time goes" in capsys.readouterr().out


def test_a_resumed_run_keeps_the_rounds_before(tmp_path: Path) -> None:
    header = ",".join(("round", *CLIENTS, *SERVER))
    old = [f"{number},1,1,1,1,1,1" for number in range(1, 5)]
    (tmp_path / "profile.csv").write_text("\n".join([header, *old]) + "\n")
    profile = RoundProfile(str(tmp_path))

    class AfterTwo:
        current_epoch = 2

    profile.on_train_start(AfterTwo(), FedGKD(linear()))  # type: ignore[arg-type]
    profile.row = dict.fromkeys((*CLIENTS, *SERVER), 0.0)
    profile._close()
    rows = (tmp_path / "profile.csv").read_text().splitlines()
    assert rows[:3] == [header, *old[:2]] and rows[3].startswith("3,") and len(rows) == 4


def test_the_table_is_the_mean_without_the_first_round() -> None:
    names = (*CLIENTS, *SERVER)
    rows = [dict.fromkeys(names, 10.0), dict.fromkeys(names, 1.0), dict.fromkeys(names, 2.0)]
    rows[2]["student"] = 5.0
    text = profile_table(rows)
    student = next(line for line in text.splitlines() if line.startswith("  student"))
    assert "3.000 s" in student and "25.0%" in student  # (1 + 5) / 2 of 3 + 6 · 1.5 = 12
    assert "12.000 s; the first round took 70.000 s" in text
    assert "1.000 s  14.3%" in profile_table(rows[1:2])
