"""Where a round's time goes: parts that were made slow show up as themselves."""

import csv
import time
from pathlib import Path
from typing import Any

import pytest
from fedgkd_pl import FedGKD, LocalEngine, RoundProfile
from fedgkd_pl.callbacks.profile import MEANING, profile_table

from tests.conftest import Table, fit, linear


def test_every_part_is_seen(tmp_path: Path, capsys: Any) -> None:
    profile, start = RoundProfile(str(tmp_path)), time.perf_counter()
    data = Table(sizes=(8, 8), val_fraction=0.2)
    fit(FedGKD(linear(), engine=LocalEngine(1)), data, 3, callbacks=[profile])
    assert sum(sum(row.values()) for row in profile.rows) < time.perf_counter() - start
    for number, row in enumerate(profile.rows, start=1):
        assert all(seconds >= 0 for seconds in row.values())
        assert min(row[name] for name in ("student", "aggregation", "evaluation")) > 0
        assert number == 1 or row["teacher"] > 0
    rows = list(csv.DictReader((tmp_path / "profile.csv").open()))
    assert [row["round"] for row in rows] == ["1", "2", "3"]
    for row, kept in zip(rows, profile.rows, strict=True):
        assert {name: float(row[name]) for name in kept} == pytest.approx(kept, abs=1e-4)
    assert "where a round's time goes" in capsys.readouterr().out


def test_a_resumed_run_keeps_the_rounds_before(tmp_path: Path) -> None:
    header = ",".join(("round", *MEANING))
    old = [f"{number},1,1,1,1,1,1" for number in range(1, 5)]
    (tmp_path / "profile.csv").write_text("\n".join([header, *old]) + "\n")
    profile = RoundProfile(str(tmp_path))

    class AfterTwo:
        current_epoch = 2

    profile.on_train_start(AfterTwo(), FedGKD(linear()))  # type: ignore[arg-type]
    profile.row = dict.fromkeys(tuple(MEANING), 0.0)
    profile._close()
    rows = (tmp_path / "profile.csv").read_text().splitlines()
    assert rows[:3] == [header, *old[:2]] and rows[3].startswith("3,") and len(rows) == 4


def test_the_table_is_the_mean_without_the_first_round() -> None:
    names = tuple(MEANING)
    rows = [dict.fromkeys(names, 10.0), dict.fromkeys(names, 1.0), dict.fromkeys(names, 2.0)]
    rows[2]["student"] = 5.0
    text = profile_table(rows)
    student = next(line for line in text.splitlines() if line.startswith("  student"))
    assert "3.000 s" in student and "25.0%" in student  # (1 + 5) / 2 of 3 + 6 · 1.5 = 12
    assert "12.000 s; the first round took 70.000 s" in text
    assert "1.000 s  14.3%" in profile_table(rows[1:2])
