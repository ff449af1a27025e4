"""Four clients with four nets on CIFAR-10, by FedMD and by FedDF: ``python -m benchmarks.nets``.

An MLP, a small CNN, ResNet-8 and ResNet-20, a client each, on IID parts of some of the training
images; a fifth of them is public (with labels for FedMD, which begins with them). Prints the test
accuracy of every net and of their ensemble after the last round, and that of the same net trained
on its client's images alone for as many epochs; draws accuracy by round. The data is that of
``--data`` or FEDGKD_DATA, the folder with cifar-10-batches-py; nothing is downloaded.

The runs of docs/nets.md are kept in ``results/nets``: ``python -m tools.results add
OUTPUT --study nets --command "python -m benchmarks.nets …"``, and their figures in docs/images.

``--engine flower`` trains with the local engine and then, as a Flower app, with a node for every
client, all in this process; it fails unless both come to the same bits.
"""

import argparse
import csv
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from fedgkd_pl import CNN, MLP, FedAvg, HeldOut, LocalEngine, ResNet8, ResNet20, plot
from fedgkd_pl.cli.main import main as command
from fedgkd_pl.plots.style import save
from fedgkd_pl.runs.folder import RunFolder
from fedgkd_pl.storage.checkpoint import read_checkpoint
from lightning.pytorch import Trainer, seed_everything
from torch import nn
from torch.optim import Adam

from benchmarks.some_images import SomeImages

METHODS = ("FedMD", "FedDF")
NAMES = ("MLP", "CNN", "ResNet8", "ResNet20")
ALIKE = {
    "FedMD": "client metrics, consensus, nets and optimizers of clients, bit for bit",
    "FedDF": "metrics and weights, bit for bit",
}
HIDDEN = [256, 128]
SILENT: dict[str, Any] = {
    **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False},
    **{"enable_model_summary": False, "accelerator": "cpu", "devices": 1},
}


def nets() -> list[nn.Module]:
    """The four, with the weights that runs with seed 0 begin with."""
    seed_everything(0, verbose=False)
    return [MLP(3072, HIDDEN), CNN(), ResNet8(), ResNet20()]


def data_of(given: argparse.Namespace) -> dict[str, Any]:
    """Four clients, all in every round."""
    public = {"class_path": "HeldOut", "init_args": {"fraction": 0.2, "labelled": True}}
    sizes = {"train": given.train, "test": given.test}
    sizes |= {"num_clients": len(NAMES), "batch_size": 64}
    return sizes | {"data_dir": str(Path(given.data).absolute()), "public": public}


def settings_of(method: str, given: argparse.Namespace) -> dict[str, Any]:
    """A run's config, without the engine; Adam for all."""
    some: list[dict[str, Any]] = [{"class_path": f"fedgkd_pl.{name}"} for name in NAMES]
    some[0]["init_args"] = {"in_features": 3072, "hidden": HIDDEN}
    adam = {"class_path": "torch.optim.Adam", "init_args": {"lr": 1e-3}}
    model = {"nets": some, "local_epochs": given.epochs, "optimizer": adam}
    if method == "FedMD":
        model |= {"public_epochs": given.start, "start_epochs": given.start}
        model |= {"public_samples": given.public}
    else:
        model |= {"distil_steps": given.steps, "validate_every": max(1, given.steps // 10)}
        model |= {"patience": given.steps}
    return {
        "rounds": given.rounds,
        "output_dir": str(Path(given.output).absolute()),
        "model": {"class_path": method, "init_args": model},
        "data": {"class_path": "some_images.SomeImages", "init_args": data_of(given)},
        "trainer": {"callbacks": ["NetAccuracy"], "accelerator": "cpu"},
    }


def checked(code: int) -> None:
    """Ends with the code of a command that failed, which has said why."""
    if code:
        sys.exit(code)


def federated(method: str, given: argparse.Namespace) -> dict[str, float]:
    """The test accuracies after the last round; leaves a run's folder and its figure."""
    output, name = Path(given.output), method.lower()
    output.mkdir(parents=True, exist_ok=True)
    config = output / f"{name}.yaml"
    config.write_text(yaml.safe_dump(settings_of(method, given), sort_keys=False))
    words = ["--import", "some_images", "--config", str(config)]
    start = time.monotonic()
    workers = ["--model.engine.workers", str(given.workers)]
    checked(command(["fit", *words, "--name", name, *workers]))
    run = newest(output / name)
    save(plot("nets", run), output / f"{name}.svg")
    if given.engine == "flower":
        middle = time.monotonic()
        differ = differing(method, run, *through_flower([*words, "--name", f"{name}-flower"]))
        if differ:
            sys.exit(f"{method} through Flower is not as with the local engine: {differ}")
        took = f"{middle - start:.0f} s and {time.monotonic() - middle:.0f} s"
        print(f"{method}, local and through Flower: the same {ALIKE[method]}; {took}")
    last = rows(run)[-1]
    found = {each: last[f"nets/{each}_test_acc"] for each in NAMES} | {"ensemble": last["test/acc"]}
    return {each: float(value) for each, value in found.items()}


def newest(folder: Path) -> Path:
    """The last run of a name."""
    return RunFolder.versions(folder)[-1].path


def rows(run: Path) -> list[dict[str, str]]:
    """A run's metrics by round."""
    return list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))


def through_flower(words: list[str]) -> tuple[Path, dict[int, Any]]:
    """A run as a Flower app, with a node for each client; its folder, and what its nodes keep."""
    from tests.support.flower_apps import Runs, kept_by_nodes

    with tempfile.TemporaryDirectory() as place:
        app = Path(place) / "app"
        checked(command(["flower", str(app), *words]))
        nodes = {node: {"client": node} for node in range(len(NAMES))}
        grid = Runs(app).flower(app, nodes, **{"import": "some_images"})
        settings = yaml.safe_load((app / "config.yaml").read_text())
    run = newest(Path(settings["output_dir"]) / settings["name"])
    return run, kept_by_nodes(grid, run)


def differing(method: str, run: Path, there: Path, kept: dict[int, Any]) -> list[str]:
    """What is not the same in a run and in that through Flower.

    FedMD's models stay with their nodes, so the server's own metrics are of other nets. What the
    nodes keep, the nets and the optimizers, is in the local engine's checkpoint.
    """
    ours, theirs = (read_checkpoint(folder / "checkpoints/last.ckpt") for folder in (run, there))
    pairs = {"weights": (ours["state_dict"], theirs["state_dict"])}
    known: tuple[str, ...] = ("",)
    if method == "FedMD":
        known = ("client/", "comm/")
        ours, theirs = ours["fedgkd_pl"], theirs["fedgkd_pl"]
        pairs = {"consensus": (ours["consensus"], theirs["consensus"])}
        for client in range(len(NAMES)):
            pairs[f"client {client}"] = ours["client_states"][client], kept[client]
    differ = [name for name, pair in pairs.items() if not same(*pair)]
    for number, (row, other) in enumerate(zip(rows(run), rows(there), strict=True), 1):
        names = [name for name in row if name.startswith(known)]
        differ += [f"{name} of round {number}" for name in names if row[name] != other[name]]
    return differ


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether names, types and bits are."""
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor, other[name])
        for name, tensor in one.items()
    )


def alone(given: argparse.Namespace) -> dict[str, float]:
    """Every net on its client's images: as many epochs as FedMD's parties have on their own."""
    data = SomeImages(**data_of(given) | {"public": HeldOut(0.2, labelled=True)}, seed=0)
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
    parser.add_argument("--workers", type=int, default=1, help="processes of the local engine")
    parser.add_argument("--engine", choices=("local", "flower"), default="local")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))  # an app takes modules of one file along
    results = {"alone": alone(given)} | {method: federated(method, given) for method in METHODS}
    print("| test accuracy, % | " + " | ".join([*NAMES, "ensemble"]) + " |")
    print("|---" * (len(NAMES) + 2) + "|")
    for row, accuracies in results.items():
        values = [f"{100 * accuracies[n]:.1f}" if n in accuracies else "" for n in NAMES]
        both = f"{100 * accuracies['ensemble']:.1f}" if "ensemble" in accuracies else ""
        print(f"| {row} | " + " | ".join([*values, both]) + " |")
    drawn = ", ".join(str(Path(given.output) / f"{method.lower()}.svg") for method in METHODS)
    print(f"\n{given.rounds} rounds of {given.epochs} epochs, {given.train} images; wrote {drawn}")


if __name__ == "__main__":
    main()
