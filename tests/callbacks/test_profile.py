"""Where a round's time goes, in the table of a run that was resumed, too."""

import time
from pathlib import Path
from typing import Any

import pytest
from fedgkd_pl import FedGKD, LocalEngine, RoundProfile
from fedgkd_pl.callbacks.profile import PARTS, profile_table

from tests.callbacks.by_hand import rows_of
from tests.conftest import Table, fit, linear


def test_every_part_is_seen_and_a_resume_keeps_the_rounds_before(
    tmp_path: Path, capsys: Any
) -> None:
    profile, start = RoundProfile(str(tmp_path)), time.perf_counter()
    data = Table(sizes=(8, 8), val_fraction=0.2)
    trainer = fit(FedGKD(linear(), engine=LocalEngine(1)), data, 3, callbacks=[profile])
    assert sum(sum(row.values()) for row in profile.rows) < time.perf_counter() - start
    for number, row in enumerate(profile.rows, start=1):
        assert all(seconds >= 0 for seconds in row.values())
        assert min(row[name] for name in ("student", "aggregation", "evaluation", "other")) > 0
        assert number == 1 or row["teacher"] > 0
    rows = rows_of(tmp_path / "profile.csv")
    for number, (row, kept) in enumerate(zip(rows, profile.rows, strict=True), start=1):
        assert row == pytest.approx({"round": number, **kept}, abs=1e-4)
    assert "seconds of a round" in capsys.readouterr().out
    trainer.fit_loop.epoch_progress.current.completed = 2  # the third was never committed
    trainer.fit_loop.epoch_progress.current.processed = 2
    profile.on_train_start(trainer, trainer.lightning_module)
    profile.on_train_epoch_start(trainer, trainer.lightning_module)
    profile.on_train_end(trainer, trainer.lightning_module)
    again = rows_of(tmp_path / "profile.csv")
    assert again[:2] == rows[:2] and again[2]["round"] == 3 and again[2] != rows[2]


def test_the_table_is_the_mean_without_the_first_round() -> None:
    rows = [dict.fromkeys(PARTS, seconds) for seconds in (10.0, 1.0, 2.0)]
    rows[2]["student"] = 5.0
    lines = {line.split("  ")[0]: line.split()[-3:] for line in profile_table(rows).splitlines()}
    assert lines["student"] == ["10.000", "3.000", "25.000"]  # (1 + 5) / 2 of 3 + 6 · 1.5 = 12
    assert lines["a round"] == ["70.000", "12.000", "100.000"]
    assert profile_table(rows[:1]).split()[-3:] == ["70.000", "0.000", "0.000"]
