"""The small-work case on Flower: `python -m benchmarks.peers.flower_small ROUNDS [WORKERS]`.

Its simulation runtime with FedAvg of the Message API: a server thread here and ray workers of one
CPU each, one unless told otherwise. The local loop is the user's own in Flower, and as lean as can
be: a worker keeps one network and all data. A round polls twice, every 0.1 s, which is Flower's.
"""

import json
import logging
import os
import sys
import time
from functools import cache
from importlib.metadata import version
from itertools import pairwise

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}  # read on import

try:
    import ray  # noqa: F401
    import torch
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation
except ModuleNotFoundError:
    print("missing: pip install torch==2.13.0 && pip install 'flwr[simulation]'", file=sys.stderr)
    raise SystemExit(3) from None

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks import small_work as work

WARMUP = 2

client_app = ClientApp()


@cache
def setup() -> tuple[nn.Module, Tensor, Tensor]:
    """What a worker keeps from client to client: network, inputs and labels."""
    torch.set_num_threads(1)
    return work.net(), *work.data()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client from the arrays of the message and reply with its own."""
    net, inputs, labels = setup()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=work.RATE)
    first = int(context.node_config["partition-id"]) * work.SAMPLES
    for _ in range(work.EPOCHS):
        for start in range(first, first + work.SAMPLES, work.BATCH):
            rows = slice(start, start + work.BATCH)
            optimizer.zero_grad()
            cross_entropy(net(inputs[rows]), labels[rows]).backward()
            optimizer.step()
    arrays, metrics = ArrayRecord(net.state_dict()), MetricRecord({"num-examples": work.SAMPLES})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def run(rounds: int, workers: int) -> list[float]:
    """Seconds of each of that many rounds, after the warm-up."""
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    server_app = ServerApp()
    ends: list[float] = []

    def note(server_round: int, arrays: ArrayRecord) -> None:
        ends.append(time.perf_counter())  # called before round 1 and after every round

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=work.COHORT / work.CLIENTS,
            fraction_evaluate=0.0,
            min_train_nodes=work.COHORT,
            min_available_nodes=work.CLIENTS,
        )
        arrays = ArrayRecord(work.net().state_dict())
        strategy.start(grid, arrays, num_rounds=WARMUP + rounds, evaluate_fn=note)

    resources = {"num_cpus": 1, "num_gpus": 0.0}
    config = {"client_resources": resources, "init_args": {"num_cpus": workers}}
    run_simulation(server_app, client_app, work.CLIENTS, backend_config=config)
    return [end - start for start, end in pairwise(ends[WARMUP:])]


def report(rounds: int, workers: int = 1) -> None:
    """Run the case and print its line."""
    result = {"peer": "flower", "version": version("flwr")}
    print(json.dumps(result | {"seconds_per_round": run(rounds, workers), "workers": workers}))


if __name__ == "__main__":
    # by its full name, so that ray sends the client app as a reference, not its code and caches
    from benchmarks.peers import flower_small

    flower_small.report(*map(int, sys.argv[1:]))
