"""What a round's commit costs, as a share of the paper's CIFAR-10 round, measured in one run.

``python -m benchmarks.commit [folder]`` writes to a disk of your choice. The round is that of
``cifar10_fedgkd``: four clients of 2,250 samples, 20 epochs, ResNet-8, two workers of
one thread; one epoch of one client is measured on random images and multiplied. The states are the
largest that a run reaches: full buffers, and every one of 20 clients with a state.
"""

import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fedgkd_pl import MOON, FedAvg, FedGen, FedGKD, FedGKDVote, ResNet8
from fedgkd_pl.storage import files as storage
from fedgkd_pl.storage.checkpoint import SafeCheckpointIO
from torch.optim import SGD

REPEATS = 7


def epoch_seconds() -> float:
    """One client's epoch: 36 batches of 64 in one thread."""
    torch.set_num_threads(1)
    net = ResNet8(num_classes=10)
    optimizer = SGD(net.parameters(), lr=0.05)
    x, y = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    step()
    start = time.perf_counter()
    for _ in range(36):
        step()
    return time.perf_counter() - start


def checkpoint(model: Any) -> dict[str, Any]:
    """What a run of this method saves once everything has filled up."""
    state = {name: t.detach().clone() for name, t in model.net.state_dict().items()}
    ours: dict[str, Any] = {"method": type(model).__name__}
    if hasattr(model, "buffer"):
        ours["buffer"] = [state] * 5
    if isinstance(model, MOON):
        ours["client_states"] = dict.fromkeys(range(20), state)
    return {"state_dict": model.state_dict(), "callbacks": {}, "global_step": 1, "fedgkd_pl": ours}


def main() -> None:
    """Prints a Markdown table."""
    epochs, folder = [epoch_seconds()], Path(tempfile.mkdtemp(dir=(sys.argv[1:] or [None])[0]))
    print("| method | MB | commit, ms (min to max of 7) | of it fsync | share of a round |")
    print("|---|---|---|---|---|")
    for method in (FedAvg, FedGKD, FedGKDVote, partial(MOON, mu=5.0), FedGen):
        projection = 256 if isinstance(method, partial) else None
        saved = checkpoint(method(ResNet8(num_classes=10, projection=projection)))
        times, synced = [], []
        for _ in range(REPEATS):
            marks: dict[str, float] = {}
            storage.reached = lambda step, _, marks=marks: marks.update({step: time.perf_counter()})
            start = time.perf_counter()
            SafeCheckpointIO().save_checkpoint(saved, folder / "last.ckpt")
            times.append(time.perf_counter() - start)
            synced.append(
                marks["synced"] - marks["written"] + marks["committed"] - marks["replaced"]
            )
        epochs.append(epoch_seconds())
        seconds = statistics.median(epochs) * 20 * 4 / 2
        size = (folder / "last.ckpt").stat().st_size / 1e6
        middle = statistics.median(times)
        print(
            f"| {saved['fedgkd_pl']['method']} | {size:.1f} "
            f"| {1e3 * middle:.0f} ({1e3 * min(times):.0f} to {1e3 * max(times):.0f}) "
            f"| {statistics.median(synced) / middle:.0%} "
            f"| {middle / seconds:.3%} of {seconds:.0f} s |"
        )


if __name__ == "__main__":
    main()
