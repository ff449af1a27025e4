"""Memory and time against the number of clients: ``python -m benchmarks.scale``.

Every run is a process of its own: 1,000,000 samples of 64 bytes, a cohort of 10, FedAvg on a linear
net, no evaluation, clients in the process itself so that its peak memory is all there is.
"""

import json
import resource
import subprocess
import sys
import time
from statistics import median
from typing import Any

SAMPLES, COHORT, ROUNDS, LONG = 1_000_000, 10, 30, 200


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
    from fedgkd_pl.data.examples import Batches, ClientData, Examples, Splits
    from fedgkd_pl.data.transforms import Scale
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
        num_clients=clients,
        participation=COHORT / clients,
        batch_size=10,
        val_fraction=0.0,
        seed=0,
    )
    model = FedAvg(nn.Linear(64, 10), engine=LocalEngine(workers=1))
    watch = Watch()
    Trainer(max_epochs=rounds, callbacks=[watch], **BARE).fit(model, data)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"peak": peak, "seconds": watch.seconds, "memory": watch.memory}))


def measure(clients: int, used: int, rounds: int) -> dict[str, Any]:
    """The same, in a process of its own."""
    words = [sys.executable, "-W", "ignore", "-m", "benchmarks.scale", str(clients), str(used)]
    done = subprocess.run([*words, str(rounds)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Prints Markdown."""
    if len(sys.argv) > 1:
        run(*map(int, sys.argv[1:]))
        return
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


if __name__ == "__main__":
    main()
