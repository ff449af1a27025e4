"""What the benchmarks compare is the same work, and their tables come out."""

import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import contender
from benchmarks.contender import CASES


def first_model(case: contender.Case, file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(contender.os, "_exit", sys.exit)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    if case.method == "plain":
        contender.run_plain(case, str(file))
    else:
        with pytest.raises(SystemExit):
            contender.run_ours(case, str(file))
    return torch.load(file)


@pytest.mark.parametrize("tuned", [False, True])
def test_the_plain_loop_does_the_same_work(
    tuned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"clients": 2, "cohort": 2, "samples": 20, "batch": 8, "epochs": 2, "workers": 1}
    plain = replace(CASES["plain, double"], tuned=tuned, **small)
    ours = replace(CASES["FedAvg, double"], **small)
    threads = torch.get_num_threads()
    one = first_model(plain, tmp_path / "plain.pt", monkeypatch)
    two = first_model(ours, tmp_path / "ours.pt", monkeypatch)
    torch.set_num_threads(threads)
    start = contender.resnet().double().state_dict()
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, atol=1e-10, rtol=0)
        assert not torch.equal(value, start[key]), f"{key} was not trained"
