"""What a pool shares with its workers, and that it needs no ``/dev/shm``."""

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import FedAvg, LocalEngine
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.transforms import Scale
from fedgkd_pl.engines import shared
from fedgkd_pl.engines.shared import Memory, SharedTensors

from tests.conftest import REPO, Table, fit, linear, same

X = torch.arange(5 * 3 * 4 * 4, dtype=torch.float32).view(5, 3, 4, 4)
TENSORS = {
    "plain": X,
    "cut": X[1:4, :2, ::2, 1:],
    "channels last": X.to(memory_format=torch.channels_last),
    "turned": X.permute(3, 1, 0, 2),
    "expanded": torch.arange(3)[:, None].expand(3, 4),
    "a number": torch.tensor(7, dtype=torch.int16),
    "none": torch.empty(0, 3, dtype=torch.int64),
    "no features": torch.empty(4, 0),
    "one byte": torch.ones(1, dtype=torch.uint8),
    "bool": torch.arange(9) % 2 == 0,
    "bfloat16": X.bfloat16(),
    "complex": torch.complex(X, -X).conj(),
    "more than a chunk": torch.arange(10_000),
}


@pytest.fixture(params=["memfd", "temporary file", "named file"])
def kind(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way that some system has."""
    if request.param != "memfd":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(shared, "NAMED", request.param == "named file")
    return str(request.param)


def descriptors() -> int:
    """Without those of garbage, such as files that an error in an earlier test still maps."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_tensors_come_back_as_they_lay(kind: str) -> None:
    before = descriptors()
    sent = SharedTensors(list(TENSORS.values()))
    for got, given in zip(sent.tensors(), TENSORS.values(), strict=True):
        assert got.dtype == given.dtype and got.shape == given.shape
        assert torch.equal(got.resolve_conj(), given.resolve_conj())
    for name in ("plain", "channels last", "turned"):
        got = sent.tensors()[list(TENSORS).index(name)]
        assert got.stride() == TENSORS[name].stride()
    del got
    name = sent.memory.name
    assert Path(name).is_file() == (kind == "named file")
    sent.memory.close()
    sent.memory.close()
    assert descriptors() == before and not (name and Path(name).exists())


def test_what_one_process_writes_no_other_sees(kind: str) -> None:
    sent = SharedTensors([torch.zeros(1000)])
    mine, yours = sent.tensors()[0], sent.tensors()[0]
    mine += 1
    assert yours.sum() == 0 and sent.tensors()[0].sum() == 0
    sent.memory.close()


def test_a_message_may_grow_and_shrink(kind: str) -> None:
    memory = Memory()
    for text in (b"one", b"a longer one" * 1000, b"x"):
        assert memory.write([text]) == len(text)
        assert memory.map()[:] == memory.map(len(text))[:] == text
    memory.close()


def test_workers_get_what_is_shared(kind: str) -> None:
    models = [FedAvg(linear(), engine=LocalEngine(n)) for n in (1, 2)]
    for model in models:
        fit(model, Table(sizes=(8, 5, 6)), 2)
    assert same(models[0].net.state_dict(), models[1].net.state_dict())


class Mapped(Table):
    """The same table from a file that torch or NumPy maps."""

    def __init__(self, folder: Path, by: str, **kwargs: Any) -> None:
        super().__init__(sizes=(8, 5, 6), **kwargs)
        file = folder / "x.bin"
        file.write_bytes(self.x.tobytes())
        if by == "numpy":
            mapped = torch.from_numpy(np.memmap(file, np.float32, "c", shape=self.x.shape))
        else:
            mapped = torch.from_file(str(file), by == "torch, shared", self.x.size)
        self.mapped = mapped.view(self.x.shape)

    def load(self) -> Splits:
        all_ = Examples(self.mapped, torch.from_numpy(self.y), Scale(1))
        return Splits(all_, all_[:6])


@pytest.mark.parametrize("by", ["torch", "torch, shared", "numpy"])
def test_data_that_is_mapped_already(by: str, tmp_path: Path) -> None:
    """torch could not share it: "Bad file descriptor"."""
    models = [FedAvg(linear(), engine=LocalEngine(n)) for n in (1, 2)]
    fit(models[0], Table(sizes=(8, 5, 6)), 1)
    fit(models[1], Mapped(tmp_path, by), 1)
    assert same(models[0].net.state_dict(), models[1].net.state_dict())


def test_sessions_leave_nothing_open() -> None:
    counts = []
    for _ in range(4):
        fit(FedAvg(linear(), engine=LocalEngine(2)), Table(), 1)
        counts.append(descriptors())
    assert counts[-1] <= counts[0], counts


SMALL_SHM = """
import os, subprocess, sys, time
from pathlib import Path
import numpy as np
import torch
from fedgkd_pl import FedAvg, LocalEngine
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.transforms import Scale
from lightning.pytorch import Callback, Trainer, seed_everything
from tests.conftest import Table, quiet_trainer

ROWS = 60_000
x = torch.randint(0, 256, (ROWS, 3, 32, 32), dtype=torch.uint8)
y = torch.arange(ROWS) % 3

class Images(Table):
    def load(self):
        return Splits(Examples(x, y, Flat()), Examples(x[:6], y[:6], Flat()))

class Flat:
    def __call__(self, inputs, generator):
        return inputs.flatten(1)[:, ::768].float() / 255

def field(text, name):
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(name))

class Look(Callback):
    def on_train_epoch_end(self, trainer, model):
        for worker in getattr(model._session, "workers", []):
            folder = Path("/proc") / str(worker.process.pid)
            smaps = (folder / "smaps").read_text()
            start = smaps.index("fedgkd_pl (deleted)")
            data = smaps[start:].split("VmFlags")[0]
            private = field((folder / "smaps_rollup").read_text(), "Private")
            print("worker", field(data, "Size:") * 1024 >= x.nbytes, field(data, "Anonymous"),
                  private * 1024 < x.nbytes / 2, flush=True)

def train(workers):
    seed_everything(0, verbose=False)
    model = FedAvg(torch.nn.Linear(4, 3), engine=LocalEngine(workers))
    quiet_trainer(max_epochs=1, callbacks=[Look()]).fit(model, Images(sizes=(40, 50, 60)))
    return model.net.weight

alone = train(1)
print("64 MB", torch.equal(alone, train(2)), flush=True)
subprocess.run(["mount", "-o", "remount,ro", "/dev/shm"], check=True)
print("read-only", torch.equal(alone, train(2)), flush=True)
"""


@pytest.mark.long
def test_cifar_trains_in_a_containers_shm(tmp_path: Path) -> None:
    """64 MB of ``/dev/shm``, then a read-only one; 184 MB of images, shared and not copied."""
    (tmp_path / "script.py").write_text(SMALL_SHM)
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    private = ["unshare", "-m", "sh", "-c"]
    try:
        subprocess.run([*private, mount], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small /dev/shm here: {error}")
    done = subprocess.run(
        [*private, f'{mount} && exec "$0" script.py', sys.executable],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    worker = ["worker True 0 True"] * 2
    assert done.stdout.splitlines() == [*worker, "64 MB True", *worker, "read-only True"]
