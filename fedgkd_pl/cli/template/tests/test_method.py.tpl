"""The method computes what its equation says, and the config trains."""

from math import log
from pathlib import Path

import pytest
import torch
from fedgkd_pl import build, read_run
from torch import nn

from my_project.method import MyClient

CONFIG = Path(__file__).parents[1] / "config.yaml"


def test_the_loss_is_that_of_the_equation() -> None:
    """By hand, with one sample of class 0 and γ = 2.

    The teacher says p = (3/4, 1/4). The client, whose weights are zero, says q = (1/2, 1/2).
    CE = ln 2 = 0.693147, KL(p ‖ q) = 3/4 ln 3/2 + 1/4 ln 1/2 = 0.130812, p(y) = 3/4.
    """
    net = nn.Linear(1, 2)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    client = MyClient(net, None, gamma=2.0)
    x, y, teacher_output = torch.ones(1, 1), torch.tensor([0]), torch.tensor([[log(3), 0.0]])
    loss, parts = client.objective(x, y, teacher_output)
    assert parts["kd"].item() == pytest.approx(0.75 * 0.130812, abs=1e-6)
    assert loss.item() == pytest.approx(0.693147 + 0.75 * 0.130812, abs=1e-6)


def test_two_rounds_train(tmp_path: Path) -> None:
    settings = {"rounds": 2, "output_dir": str(tmp_path)}
    folder = build(CONFIG, imports=["my_project"], **settings).fit()
    run = read_run(folder.path)
    assert run.metrics()[-1]["test/acc"] > 0.2  # who guesses has 0.1
