"""The small-work case on Apple's pfl-research: `python -m benchmarks.peers.pfl_small ROUNDS`.

FederatedAveraging on a SimulatedBackend in this process. pfl evaluates the cohort in iteration 0
and in no other here, so that iteration belongs to the warm-up; batches are not shuffled, and the
users of a cohort are drawn one by one, so one may come twice.
"""

import json
import sys
import time
from importlib.metadata import version
from itertools import pairwise

try:
    import numpy as np
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel
except ModuleNotFoundError:
    print("missing: pip install torch==2.13.0 && pip install 'pfl[pytorch]'", file=sys.stderr)
    raise SystemExit(3) from None

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks import small_work as work

WARMUP = 2


class Net(nn.Module):
    """The network with the two methods that pfl calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = work.net()

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Loss of a batch, to be minimised."""
        return cross_entropy(self.net(inputs), labels)

    @torch.no_grad()
    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, Weighted]:
        """Loss of a client, of which pfl asks in iteration 0 only."""
        count = len(labels)
        return {"loss": Weighted(self.loss(inputs, labels).item() * count, count)}


class Clock(TrainingProcessCallback):
    """Notes when each central iteration ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Note the time and go on."""
        self.ends.append(time.perf_counter())
        return False, Metrics()


def run(rounds: int) -> list[float]:
    """Seconds of each of that many rounds, after the warm-up."""
    torch.set_num_threads(1)
    np.random.seed(0)  # pfl draws its users from the global generator
    inputs, labels = (part.split(work.SAMPLES) for part in work.data())

    def client(key: int) -> PyTorchTensorDataset:
        return PyTorchTensorDataset((inputs[key], labels[key]), user_id=str(key))

    users = FederatedDataset(client, get_user_sampler("random", range(work.CLIENTS)))
    net, clock = Net(), Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=WARMUP + rounds,
            evaluation_frequency=WARMUP + rounds,
            train_cohort_size=work.COHORT,
            val_cohort_size=None,
        ),
        SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()]),
        PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
        NNTrainHyperParams(
            local_batch_size=work.BATCH, local_num_epochs=work.EPOCHS, local_learning_rate=work.RATE
        ),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    ends = clock.ends[WARMUP - 1 :]
    return [end - start for start, end in pairwise(ends)]


if __name__ == "__main__":
    seconds = run(int(sys.argv[1]))
    result = {"peer": "pfl", "version": version("pfl"), "seconds_per_round": seconds, "workers": 1}
    print(json.dumps(result))
