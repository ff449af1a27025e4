"""Memory and time against the number of clients: ``python -m benchmarks.scale``.

Every run is a process of its own: 1,000,000 samples of 64 bytes, a cohort of 10, FedAvg on a linear
net, no evaluation, clients in the process itself so that its peak memory is all there is.

Then what clients keep: SCAFFOLD's control variates of a net of 0.3 MB, a cohort of 20, a commit
every round until every client has taken part.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

SAMPLES, COHORT, ROUNDS, LONG = 1_000_000, 10, 30, 200
KEEPERS, TURNS = 20, 100  # clients in a round that keep something, and rounds


def run(clients: int, used: int, rounds: int) -> None:
    """Trains; prints peak memory, seconds a round and the memory after each round.

    Args:
        clients: how many share the data.
        used: how many samples of a client are trained on: the same work for every number of them.
        rounds: how many.
    """
    import numpy as np
    import torch
    from fedgkd_pl import FedAvg, LocalEngine
    from fedgkd_pl.data.datamodule import FederatedDataModule
    from fedgkd_pl.data.examples import Batches, ClientData, Examples, Scale, Splits
    from lightning.pytorch import Callback, Trainer
    from torch import nn

    from benchmarks.contender import BARE

    class First(ClientData):
        def batches(self, client: int, round: int) -> Batches:
            rows = torch.from_numpy(self.index[client][:used])
            generator = torch.Generator().manual_seed(client)
            return Batches(self.examples[rows], self.batch_size, generator)

    class Data(FederatedDataModule):
        name, num_classes = "random", 10

        def load(self) -> Splits:
            rng = np.random.default_rng(0)
            inputs = torch.from_numpy(rng.integers(0, 16, (SAMPLES, 64), dtype=np.uint8))
            labels = torch.from_numpy(rng.integers(0, 10, SAMPLES))
            train = Examples(inputs, labels, Scale(16))
            return Splits(train, train[:10])

        def setup(self, stage: str | None = None) -> None:
            super().setup(stage)
            if not isinstance(self.clients, First):
                self.clients = First(**vars(self.client_data))

    class Watch(Callback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.memory: list[int] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.start = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)
            with open("/proc/self/statm", encoding="ascii") as file:
                self.memory.append(int(file.read().split()[1]) * resource.getpagesize())

    data = Data(
        num_clients=clients, participation=COHORT / clients, batch_size=10, val_fraction=0.0, seed=0
    )
    model = FedAvg(nn.Linear(64, 10), engine=LocalEngine(workers=1))
    watch = Watch()
    Trainer(max_epochs=rounds, callbacks=[watch], **BARE).fit(model, data)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"peak": peak, "seconds": watch.seconds, "memory": watch.memory}))


def run_keepers(clients: int) -> None:
    """Trains SCAFFOLD until every client has a state; prints memory and the commits' seconds."""
    import torch
    from fedgkd_pl import SCAFFOLD, Arrays, CyclicCohorts, LocalEngine
    from fedgkd_pl.runs.resume import LastRound
    from fedgkd_pl.storage.checkpoint import SafeCheckpointIO
    from lightning.pytorch import Trainer
    from torch import nn

    from benchmarks.contender import BARE

    commits: list[float] = []

    save = SafeCheckpointIO.save_checkpoint

    def timed(*args: Any, **kwargs: Any) -> None:  # the server takes no other CheckpointIO
        start = time.perf_counter()
        save(*args, **kwargs)
        commits.append(time.perf_counter() - start)

    SafeCheckpointIO.save_checkpoint = timed  # type: ignore[method-assign]

    torch.manual_seed(0)
    x, y = torch.rand(40_000, 64), torch.randint(10, (40_000,))
    data = Arrays(
        *(x.numpy(), y.numpy(), x[:10].numpy(), y[:10].numpy()),
        num_clients=clients,
        participation=KEEPERS / clients,
        cohorts=CyclicCohorts(),
        batch_size=10,
        val_fraction=0.0,
        seed=0,
    )
    net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
    model = SCAFFOLD(net, local_steps=1, engine=LocalEngine(workers=1))
    with tempfile.TemporaryDirectory() as folder:
        keep = LastRound()
        keep.dirpath = folder
        bare = BARE | {"enable_checkpointing": True}
        Trainer(max_epochs=TURNS, callbacks=[keep], **bare).fit(model, data)
        files = [file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()]
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {"states": len(model.client_states), "disk": sum(files), "seconds": commits[-20:]}
    print(json.dumps(found | {"resident": resident, "peak": peak}))


def measure(*numbers: int) -> dict[str, Any]:
    """The same, in a process of its own."""
    words = [sys.executable, "-W", "ignore", "-m", "benchmarks.scale", *map(str, numbers)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Prints Markdown."""
    if len(sys.argv) > 2:
        run(*map(int, sys.argv[1:]))
        return
    if sys.argv[1:] and sys.argv[1] != "keepers":
        run_keepers(int(sys.argv[1]))
        return
    if not sys.argv[1:]:
        clients_table()
        print()
    keepers_table()


def clients_table() -> None:
    """FedAvg, which keeps nothing."""
    print("| clients | samples of each | peak memory, MB | of 100 clients' | ms a round | of it |")
    print("|---|---|---|---|---|---|")
    first: dict[str, Any] = {}
    for clients in (100, 1_000, 10_000, 100_000):
        found = measure(clients, 10, ROUNDS)
        first = first or found
        seconds, base = (median(one["seconds"][1:]) for one in (found, first))
        print(
            f"| {clients:,} | {SAMPLES // clients:,} | {found['peak'] / 1e6:.0f} "
            f"| {found['peak'] / first['peak']:.2f} × | {1e3 * seconds:.0f} "
            f"| {seconds / base:.2f} × |",
            flush=True,
        )
    memory = measure(1_000, 10, LONG)["memory"]
    early, late = memory[9], memory[-1]
    print(
        f"\nOver {LONG} rounds, memory grows from {early / 1e6:.1f} MB after round 10 to "
        f"{late / 1e6:.1f} MB: {late / early - 1:+.2%} (bound: 2 %)."
    )


def keepers_table() -> None:
    """SCAFFOLD, of which every client keeps 0.3 MB."""
    print("| clients | with a state | on disk, MB | peak memory, MB | of 20 | commit, ms | of 20 |")
    print("|---|---|---|---|---|---|---|")
    first: dict[str, Any] = {}
    for clients in (20, 200, 2_000):
        found = measure(clients)
        first = first or found
        seconds, base = (median(one["seconds"]) for one in (found, first))
        print(
            f"| {clients:,} | {found['states']:,} | {found['disk'] / 1e6:.0f} "
            f"| {found['peak'] / 1e6:.0f} | {found['peak'] / first['peak']:.2f} × "
            f"| {1e3 * seconds:.0f} | {seconds / base:.2f} × |",
            flush=True,
        )


if __name__ == "__main__":
    main()
