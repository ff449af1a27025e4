"""The toy of the paper's first figure over five seeds: ``benchmarks.toy OUT``.

The figure claims that distillation keeps clients' models from forgetting what they do not hold, and
that it takes bias from the aggregate. Both are measured here, in the setting of ``examples/toy.py``
and in a longer one. Two minutes; what is finished is not trained again. The runs are kept in
``results/toy`` (`make results`).
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from fedgkd_pl import FederatedServer, LocalModels, build
from fedgkd_pl.data.datasets.small import sector
from fedgkd_pl.federation.message import ClientUpdate
from lightning.pytorch import Trainer

from tools.registry import add

SEEDS = range(5)
SETTINGS: dict[str, dict[str, Any]] = {  # by what stands behind the method's name
    "": {"rounds": 5, "model.buffer_size": 5},
    "for 20 rounds": {"rounds": 20, "model.buffer_size": 1},
}


class Unseen(LocalModels):
    """Also logs ``local/acc_unseen``: the mean accuracy of models outside of their own sector."""

    def on_broadcast(self, *args: Any) -> None:
        """Starts the round."""
        super().on_broadcast(*args)
        self.unseen: list[float] = []

    def on_client_end(
        self, trainer: Trainer, pl_module: FederatedServer, update: ClientUpdate, cohort_size: int
    ) -> None:
        """Evaluates a client's model."""
        super().on_client_end(trainer, pl_module, update, cohort_size)
        runner, data = self.runner_of(pl_module), pl_module.datamodule
        assert runner is not None
        logits = runner.logits(update.weights, client=update.client)
        owners = torch.from_numpy(sector(data.test.inputs.numpy(), data.num_clients))
        right = (logits.cpu().argmax(1) == data.test.targets)[owners != update.client]
        self.unseen.append(right.double().mean().item())

    def on_train_batch_end(self, trainer: Trainer, pl_module: FederatedServer, *_: Any) -> None:
        """Logs the round."""
        pl_module.log_round({"local/acc_unseen": sum(self.unseen) / len(self.unseen)})
        super().on_train_batch_end(trainer, pl_module)


def main() -> None:
    """Trains what is not there yet and keeps it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="for the runs; outside of the repository")
    given = parser.parse_args()
    kept = Path("results/toy").absolute()
    given.out.mkdir(parents=True, exist_ok=True)
    os.chdir(given.out)
    common = {"output_dir": ".", "trainer.callbacks": [{"class_path": "benchmarks.toy.Unseen"}]}
    for label, settings in SETTINGS.items():
        for method in ("FedGKD", "FedAvg"):
            mine = settings if method == "FedGKD" else {"rounds": settings["rounds"]}
            for seed in SEEDS:
                name = f"{method}-{settings['rounds']}-{seed}"
                if not (Path(name) / "version_0" / "summary.json").exists():
                    words = mine | common | {"name": name, "seed_everything": seed}
                    made = {"model": method} | ({"model.gamma": 0.2} if method == "FedGKD" else {})
                    build("protocols/toy2d", imports=["benchmarks.toy"], **made, **words).fit()
                add(Path(name), kept, {"command": "python -m benchmarks.toy OUT"}, label)


if __name__ == "__main__":
    main()
