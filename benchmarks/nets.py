"""Four clients with four nets on CIFAR-10, by FedMD and by FedDF: ``python -m benchmarks.nets``.

An MLP, a small CNN, ResNet-8 and ResNet-20, a client each, on IID parts of some of the training
images; a fifth of them is public (with labels for FedMD, which begins with them). Prints the test
accuracy of every net and of their ensemble after the last round, and that of the same net trained
on its client's images alone for as many epochs; draws accuracy by round. The data is that of
``--data`` or FEDGKD_DATA, the folder with cifar-10-batches-py; nothing is downloaded.
"""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fedgkd_pl import (
    CIFAR10,
    CNN,
    MLP,
    FedAvg,
    FedDF,
    FedMD,
    HeldOut,
    LocalEngine,
    NetAccuracy,
    ResNet8,
    ResNet20,
    RunFiles,
    Splits,
    plot,
)
from fedgkd_pl.plots.style import save
from lightning.pytorch import Trainer, seed_everything
from torch import nn
from torch.optim import Adam

METHODS = ("FedMD", "FedDF")
SILENT: dict[str, Any] = {
    **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False},
    **{"enable_model_summary": False, "accelerator": "cpu", "devices": 1},
}


class SomeImages(CIFAR10):
    """The first so many training and test images, which come in no order."""

    def __init__(self, train: int, test: int, **kwargs: Any) -> None:
        super().__init__(download=False, **kwargs)
        self.sizes = train, test

    def load(self) -> Splits:
        """See :meth:`FederatedDataModule.load`."""
        splits = super().load()
        train, test = self.sizes
        return Splits(splits.train[:train], splits.test[:test])


def nets() -> list[nn.Module]:
    """The four, with the same weights for every method."""
    seed_everything(0, verbose=False)
    return [MLP(3072, [256, 128]), CNN(), ResNet8(), ResNet20()]


def data_of(given: argparse.Namespace) -> SomeImages:
    """Four clients, all in every round."""
    return SomeImages(
        *(given.train, given.test),
        data_dir=given.data,
        num_clients=len(nets()),
        batch_size=64,
        public=HeldOut(0.2, labelled=True),
        seed=0,
    )


def model_of(method: str, given: argparse.Namespace) -> FedAvg:
    """A method; Adam for all."""
    common: dict[str, Any] = {
        "nets": nets(),
        "local_epochs": given.epochs,
        "optimizer": partial(Adam, lr=1e-3),
        "engine": LocalEngine(given.workers),
    }
    if method == "FedMD":
        starts = {"public_epochs": given.start, "start_epochs": given.start}
        return FedMD(public_samples=given.public, **starts, **common)
    steps = {"distil_steps": given.steps, "validate_every": max(1, given.steps // 10)}
    return FedDF(patience=given.steps, **steps, **common)


def federated(method: str, given: argparse.Namespace) -> dict[str, float]:
    """The test accuracies after the last round; leaves a run's folder and its figure."""
    folder = Path(given.output) / method.lower()
    trainer = Trainer(
        max_epochs=given.rounds, callbacks=[RunFiles(str(folder)), NetAccuracy()], **SILENT
    )
    model = model_of(method, given)
    trainer.fit(model, data_of(given))
    save(plot("nets", folder), folder / "nets.svg")
    found = {name: model.report[f"nets/{name}_test_acc"] for name in model.net_names}
    return found | {"ensemble": model.report["test/acc"]}


def alone(given: argparse.Namespace) -> dict[str, float]:
    """Every net on its client's images: as many epochs as FedMD's parties have on their own."""
    data = data_of(given)
    data.setup()
    found = {}
    for client, net in enumerate(nets()):
        only = SomeImages(given.train, given.test, data_dir=given.data, seed=0, num_clients=1)
        only.setup()
        only.clients = data.client_data.only(0, data.client_data.owned(client))
        epochs = given.start + given.epochs * (given.rounds - 1)
        optimizer = partial(Adam, lr=1e-3)
        model = FedAvg(net, epochs, optimizer=optimizer, engine=LocalEngine(1))
        Trainer(max_epochs=1, **SILENT).fit(model, only)
        found[type(net).__name__] = model.report["test/acc"]
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=os.environ.get("FEDGKD_DATA", "data"))
    parser.add_argument("--output", default="runs/nets")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=2, help="of a client in a round")
    parser.add_argument("--start", type=int, default=5, help="FedMD's first epochs, of each kind")
    parser.add_argument("--train", type=int, default=10_000, help="images, a tenth for validation")
    parser.add_argument("--test", type=int, default=2_000, help="images")
    parser.add_argument("--public", type=int, default=1_000, help="FedMD's inputs in a round")
    parser.add_argument("--steps", type=int, default=500, help="FedDF's on the server in a round")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = {"alone": alone(given)} | {method: federated(method, given) for method in METHODS}
    names = [type(net).__name__ for net in nets()]
    print("| test accuracy, % | " + " | ".join([*names, "ensemble"]) + " |")
    print("|---" * (len(names) + 2) + "|")
    for row, accuracies in rows.items():
        values = [f"{100 * accuracies[n]:.1f}" if n in accuracies else "" for n in names]
        both = f"{100 * accuracies['ensemble']:.1f}" if "ensemble" in accuracies else ""
        print(f"| {row} | " + " | ".join([*values, both]) + " |")
    drawn = ", ".join(str(Path(given.output) / method.lower() / "nets.svg") for method in METHODS)
    print(f"\n{given.rounds} rounds of {given.epochs} epochs, {given.train} images; wrote {drawn}")


if __name__ == "__main__":
    main()
