"""Where a round's time goes, in the table of a run that was resumed, too."""

import time
from pathlib import Path
from typing import Any

from fedgkd_pl import FedGKD, LocalEngine, RoundProfile, RunFiles
from fedgkd_pl.callbacks.profile import PARTS, profile_table
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.callbacks.by_hand import rows_of
from tests.conftest import Table, fit, linear, quiet_trainer


def test_every_part_is_seen_and_a_resume_keeps_the_rounds_before(
    tmp_path: Path, capsys: Any
) -> None:
    model, data = FedGKD(linear(), engine=LocalEngine(1)), Table(sizes=(8, 8), val_fraction=0.2)
    profile, start = RoundProfile(), time.perf_counter()
    last = ModelCheckpoint(tmp_path, filename="last")
    callbacks = [profile, RunFiles(str(tmp_path)), last]
    fit(model, data, 2, callbacks=callbacks, enable_checkpointing=True)
    assert sum(row[part] for row in profile.rows for part in PARTS) < time.perf_counter() - start
    for row in profile.rows:
        assert all(row[part] >= 0 for part in PARTS)
        assert min(row[name] for name in ("student", "aggregation", "evaluation", "other")) > 0
        assert row["round"] == 1 or row["teacher"] > 0
    assert "seconds of a round" in capsys.readouterr().out
    before = rows_of(tmp_path / "profile.csv")
    again = quiet_trainer(max_epochs=3, callbacks=[RoundProfile(), RunFiles(str(tmp_path))])
    again.fit(model, data, ckpt_path=tmp_path / "last.ckpt")
    rows = rows_of(tmp_path / "profile.csv")
    assert rows[:2] == before and [row["round"] for row in rows] == [1, 2, 3]


def test_the_table_is_the_mean_without_the_first_round() -> None:
    rows = [dict.fromkeys(PARTS, seconds) for seconds in (10.0, 1.0, 2.0)]
    rows[2]["student"] = 5.0
    lines = {line.split("  ")[0]: line.split()[-3:] for line in profile_table(rows).splitlines()}
    assert lines["student"] == ["10.000", "3.000", "25.000"]  # (1 + 5) / 2 of 3 + 6 · 1.5 = 12
    assert lines["a round"] == ["70.000", "12.000", "100.000"]
    assert profile_table(rows[:1]).split()[-3:] == ["70.000", "0.000", "0.000"]
