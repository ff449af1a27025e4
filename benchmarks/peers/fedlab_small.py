"""The small-work case on FedLab: `python -m benchmarks.peers.fedlab_small ROUNDS`.

Its standalone pipeline with the serial SGD trainer, in this process. FedLab weights all clients
alike, which is weighting by samples here, and reads batches through a DataLoader, made anew for
each client and unshuffled, as its own datasets do.
"""

import json
import random
import sys
import time
from importlib.metadata import version
from itertools import pairwise
from typing import Any

try:
    import torch

    # FedLab imports torchvision but uses none of its operators here; those of the package index's
    # CUDA build do not load beside a CPU torch, and declaring two names lets the import pass
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")

    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler
    from fedlab.contrib.dataset.basic_dataset import BaseDataset, FedDataset
    from fedlab.core.standalone import StandalonePipeline
except ModuleNotFoundError:
    print("missing: pip install torch==2.13.0 && pip install torch==2.13.0 fedlab", file=sys.stderr)
    raise SystemExit(3) from None

from torch.utils.data import DataLoader

from benchmarks import small_work as work

WARMUP = 2


class Clients(FedDataset):
    """The samples of all clients, split once."""

    def __init__(self) -> None:
        super().__init__()
        self.num = work.CLIENTS
        inputs, labels = (part.split(work.SAMPLES) for part in work.data())
        self.parts = [BaseDataset(*part) for part in zip(inputs, labels, strict=True)]

    def get_dataset(self, id: int, type: str = "train") -> BaseDataset:
        """Samples of one client."""
        return self.parts[id]

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> "DataLoader[Any]":
        """Batches of one client."""
        return DataLoader(self.get_dataset(id, type), batch_size=batch_size)


class Pipeline(StandalonePipeline):
    """The standalone pipeline, which notes the time where it would evaluate."""

    def __init__(self, handler: SyncServerHandler, trainer: SGDSerialClientTrainer) -> None:
        super().__init__(handler, trainer)
        self.ends: list[float] = []

    def evaluate(self) -> None:
        """Note when the round ended."""
        self.ends.append(time.perf_counter())


def run(rounds: int) -> list[float]:
    """Seconds of each of that many rounds, after the warm-up."""
    torch.set_num_threads(1)
    random.seed(0)  # FedLab draws its cohorts from the global generator
    net = work.net()
    trainer = SGDSerialClientTrainer(net, work.CLIENTS)
    trainer.setup_dataset(Clients())
    trainer.setup_optim(work.EPOCHS, work.BATCH, work.RATE)
    handler = SyncServerHandler(net, WARMUP + rounds, work.COHORT / work.CLIENTS)
    pipeline = Pipeline(handler, trainer)
    pipeline.main()
    return [end - start for start, end in pairwise(pipeline.ends[WARMUP - 1 :])]


if __name__ == "__main__":
    seconds = run(int(sys.argv[1]))
    result = {"peer": "fedlab", "version": version("fedlab"), "seconds_per_round": seconds}
    print(json.dumps(result | {"workers": 1}))
