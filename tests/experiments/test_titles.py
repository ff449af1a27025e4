"""A user's method has its ``title`` in tables and figures, though its code is not there then."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fedgkd_pl import FedAvg, FedGKD, FedGKDVote
from fedgkd_pl.methods import title_of_class

QUICK = ("--config", "digits/fedgkd.yaml", "--rounds", "1", "--model.local_steps", "1")
MODULE = """
from fedgkd_pl import FedGKD

class GKDProx(FedGKD):
    title = "GKD-Prox"
"""


def test_the_title_of_a_class() -> None:
    own = type("GKDProx", (FedGKD,), {"title": "GKD-Prox"})
    assert title_of_class(own) == "GKD-Prox"
    assert title_of_class(type("Untitled", (own,), {})) == "Untitled"
    assert title_of_class(type("Copied", (FedGKD,), {"title": "FedGKD"})) == "Copied"
    assert title_of_class(type("Mine", (FedAvg,), {"title": "a\nb"})) == "a b"
    assert title_of_class(FedGKDVote) == "FedGKD-Vote"


def test_runs_of_a_users_methods_are_shown_by_their_titles(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "titled.py").write_text(MODULE, encoding="utf-8")
    code, out, err = run("fit", *QUICK, "--import", "titled", "--model", "titled.GKDProx")
    assert code == 0 and "GKD-Prox on digits" in out + err
    (tmp_path / "titled.py").unlink()
    monkeypatch.delitem(sys.modules, "titled")
    code, out, _ = run("report", "--over_seeds", "runs")
    assert code == 0 and "GKD-Prox" in out and "GKDProx " not in out
