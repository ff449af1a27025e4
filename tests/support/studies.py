"""Studies and results made up, as a table takes them."""

from pathlib import Path
from typing import Any

import pandas as pd
from fedgkd_pl.experiments.runs import Run
from fedgkd_pl.experiments.study import Cell, Study


def fake(method: str, seed: int, curve: list[float], **extra: Any) -> Run:
    """A run of this test accuracy by round."""
    summary = {
        "method": method,
        "dataset": "cifar10",
        "seed": seed,
        "rounds": len(curve),
        "best_test_acc": max(curve),
        "final_test_acc": curve[-1],
        "mean_last_10_test_acc": sum(curve[-10:]) / len(curve[-10:]),
        "test_acc_at_best_val": None,
        "bytes_down": 1_000_000,
        "bytes_up": 500_000,
        **extra,
    }
    run = Run(Path("nowhere"), summary)
    run.__dict__["frame"] = pd.DataFrame({"test/acc": dict(enumerate(curve, 1))})
    return run


def study(**kwargs: Any) -> Study:
    axes = {"alpha": {"1": {}, "0.1": {}}, "method": {"FedAvg": {}, "FedGKD": {}, "MOON": {}}}
    settings = {"name": "s", "axes": axes, "rows": ["alpha"], "seeds": [0, 1], "title": "T"}
    return Study(**(settings | kwargs))


def results(of: Study, values: dict[tuple[str, str], list[list[float]]]) -> list[tuple[Cell, Run]]:
    return [
        (Cell({"alpha": alpha, "method": method}, seed, ()), fake(method, seed, curve))
        for (alpha, method), curves in values.items()
        for seed, curve in enumerate(curves)
    ]


def grouped(method: str, seed: int, alpha: float, clients: int = 20, **model: Any) -> Run:
    """A run of the paper's protocol on CIFAR-10."""
    one = fake(method, seed, [0.5] * 100, rounds_asked=100)
    cut = {"class_path": "Dirichlet", "init_args": {"alpha": alpha, "balanced": True}}
    data: dict[str, Any] = {"num_clients": clients, "participation": 0.2, "batch_size": 64}
    data |= {"val_fraction": 0.1, "augment": True, "unseen_clients": 0, "partition": cut}
    net = {"class_path": "fedgkd_pl.ResNet8", "init_args": {"norm": "group", "group_size": 16}}
    sgd = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-5, "nesterov": False}
    model |= {"net": net, "optimizer": {"class_path": "torch.optim.SGD", "init_args": sgd}}
    model |= {"server_optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0}}}
    one.__dict__["settings"] = {
        "seed_everything": seed,
        "trainer": {"gradient_clip_val": 10},
        "model": {"class_path": method, "init_args": {"local_epochs": 20, **model}},
        "data": {"class_path": "fedgkd_pl.CIFAR10", "init_args": data},
    }
    return one
