"""Data larger than the memory that a process may have: a lazy dataset, and a mapped file."""

import sys
from pathlib import Path

import pytest

from tests.support.faults import warm_script

SCRIPT = """
import resource, sys
import numpy as np
import torch
from fedgkd_pl import FedAvg, FederatedData, LocalEngine
from tests.conftest import fit

MB = 2**20

def used():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmData"))
    return int(line.split()[1]) * 1024

class Large(torch.utils.data.Dataset):  # a sample is made when it is read: 1 MB, its label in it
    def __init__(self, number):
        self.targets = np.arange(number) % 2

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, row):
        return torch.full((MB // 4,), float(self.targets[row])), self.targets[row]

class Net(torch.nn.Module):  # two features of the megabyte
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x[:, :2].float())

kwargs = dict(num_clients=4, batch_size=4, eval_batch_size=4, val_fraction=0.05, test_fraction=0.05)

def federation(number, file):
    if "{kind}" == "map":  # a hole: it has a size, but takes no room on the disk
        np.lib.format.open_memmap(file, "w+", np.uint8, (number, MB))
        first = lambda x, generator: x[:, :2].float()
        y = np.arange(number) % 2
        return FederatedData.from_arrays(file, y, transform=first, **kwargs)
    workers = 1 if "{kind}" == "workers" else 0
    return FederatedData.from_dataset(Large(number), loader_workers=workers, **kwargs)

def train(number, file):
    model = FedAvg(Net(), local_epochs=1, engine=LocalEngine(workers=1))
    fit(model, federation(number, file), 1)
    assert model.report["client/failed"] == 0, model.report

train(24, "small.npy")  # what torch takes once
room = 96 * MB
limit = used() + room
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    torch.empty(4 * room, dtype=torch.uint8)
    sys.exit("the limit does not hold")
except RuntimeError as error:
    assert "memory" in str(error), error
train(4 * room // MB, "large.npy")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits private memory, as Linux does")
@pytest.mark.parametrize("kind", ["lazy", "workers", "map"])
def test_four_times_the_memory_that_is_left(kind: str, tmp_path: Path) -> None:
    done = warm_script(SCRIPT.replace("{kind}", kind), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
