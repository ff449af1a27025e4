"""A dataset that is read sample by sample against one in memory: ``python -m benchmarks.lazy``.

One client of 2,250 CIFAR-10-sized images of 50,000, ResNet-8, batch 64, one thread. In memory, our
transform crops, flips and normalises batches; lazily, torchvision's transforms (v2) do it for every
sample. All train in one process, in turn; a ratio is taken within a turn. The processes that read
ahead need cores of their own: with fewer than three the ratio of seconds is not one of idle cores,
so CPU seconds, those of all processes, are given beside.
"""

import argparse
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl import FedAvg, ResNet8
from fedgkd_pl.data.examples import ClientData, Examples, ImageTransform
from fedgkd_pl.data.partition import ClientIndex
from fedgkd_pl.data.sources.dataset import lazy_examples
from fedgkd_pl.federation.client_trainer import ClientTrainer, Job, quiet
from fedgkd_pl.federation.hardware import channels_last, keep_memory, threads
from fedgkd_pl.federation.message import Message
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from benchmarks.contender import MEAN, STD
from benchmarks.speed import spread

TOTAL, SAMPLES, BATCH = 50_000, 2_250, 64
RESIDENT = "in memory"
LAZY = {f"lazy, {n} loader workers": n for n in (2, 0)}


class Images(Dataset[Any]):
    """Random images of bytes, each augmented on its own."""

    def __init__(self, number: int) -> None:
        rng = np.random.default_rng(0)
        self.images = torch.from_numpy(rng.integers(0, 256, (number, 3, 32, 32), dtype=np.uint8))
        self.targets = torch.from_numpy(rng.integers(0, 10, number))
        self.transform = v2.Compose(
            [
                v2.RandomCrop(32, padding=4),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.images[row]), self.targets[row]


def trainers(epochs: int, total: int, samples: int) -> dict[str, ClientTrainer]:
    """One for each contender, with a net of its own."""
    images = Images(total)
    index = ClientIndex([np.random.default_rng(1).permutation(total)[:samples]])
    resident = Examples(images.images, images.targets, ImageTransform(MEAN, STD))
    examples = {RESIDENT: resident}
    for name, workers in LAZY.items():
        examples[name] = lazy_examples(images, "train", workers=workers)
    made = {}
    for name, part in examples.items():
        model = FedAvg(ResNet8())
        channels_last(model.net, torch.zeros(2, 3, 32, 32))
        data = ClientData(part, index, BATCH, seed=0)
        arguments = {"max_epochs": epochs, "max_steps": -1, "gradient_clip_val": 10.0}
        made[name] = ClientTrainer(Job(model.client(), data, torch.device("cpu"), arguments, {}))
    return made


def cpu_seconds() -> float:
    """Those of this process and of the ones that read for it."""
    total = time.process_time()
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--total", type=int, default=TOTAL, help="images that the dataset has")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="images of the client")
    given = parser.parse_args()
    keep_memory()
    torch.manual_seed(0)
    net = ResNet8()
    message = Message(1, {"global": net.state_dict()})
    contenders = trainers(given.epochs, given.total, given.samples)
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    beside = []
    with threads(1), quiet():
        for turn in range(given.turns + 1):  # the first is to warm up: processes start
            beside.append(os.getloadavg()[0])
            for name, trainer in contenders.items():
                start, cpu = time.perf_counter(), cpu_seconds()
                trainer.update(message, 0, {})
                if turn:
                    took[name].append((time.perf_counter() - start, cpu_seconds() - cpu))
    for trainer in contenders.values():
        trainer.close()
    print(
        f"| {given.epochs} epochs of {given.samples} images | samples/s | seconds | CPU seconds |"
    )
    print("|---|---|---|---|")
    for name in LAZY:
        pairs = list(zip(took[name], took[RESIDENT], strict=True))
        ratios = [spread([one[n] / base[n] for one, base in pairs]) for n in (0, 1)]
        speed = given.epochs * given.samples / np.median([wall for wall, _ in took[name]])
        print(f"| {name} against {RESIDENT} | {speed:,.0f} | {ratios[0]} | {ratios[1]} |")
    free = f"{len(os.sched_getaffinity(0))} cores"
    print(
        f"\n{free}; load of the machine {min(beside):.1f} to {max(beside):.1f} at the turns' start."
    )


if __name__ == "__main__":
    main()
