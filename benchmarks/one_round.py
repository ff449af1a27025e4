"""One round of the paper's last cohort from a good model: ``benchmarks.one_round DATA OUT``.

Round 100 of the paper's Table 6 is of clients 4, 5, 7 and 14, who hold no ship, no truck and 49
airplanes. Which local loss explains what it has there? One model is trained to about 70 % on all
images, and these clients train it for one round: with cross-entropy alone, with a proximal term,
with distillation from that model, and with both, which the parser's default of the authors' code
(0.1) would mean. DATA holds cifar-10-batches-py. About 20 CPU-minutes with bf16 instructions; what
is finished is not trained again. The runs are kept in ``results/one_round`` (`make results`).
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from fedgkd_pl import (
    FederatedServer,
    FedGKD,
    FedGKDClient,
    FedProxClient,
    LocalModels,
    build,
    load_run,
)
from lightning.pytorch import Trainer
from torch import nn

from tools.registry import add

COHORT = [3, 4, 6, 13]  # clients 4, 5, 7 and 14, counted from 1
KD: dict[str, Any] = {"model.teach_from_start": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # by what stands behind the method's name
    "ce": ("", {"model": "FedAvg"}),
    "prox": ("μ=0.01", {"model": "FedProx", "model.mu": 0.01}),
    "prox_default": ("μ=0.1", {"model": "FedProx", "model.mu": 0.1}),
    "kd": ("", {"model": "FedGKD", **KD}),
    "kd_prox": ("μ=0.1", {"model": "benchmarks.one_round.FedGKDProx", **KD, "model.mu": 0.1}),
}


class BothClient(FedProxClient, FedGKDClient):
    """CE + γ/2 KL + μ/2 ‖w − w_t‖²."""


class FedGKDProx(FedGKD):
    """FedGKD with FedProx's term."""

    def __init__(self, net: nn.Module | None = None, mu: float = 0.1, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.mu = mu

    def client(self) -> BothClient:
        """The client half."""
        return BothClient.like(super().client(), mu=self.mu)


class OfClients(LocalModels):
    """Logs every client's accuracy under the number that the paper's code gives it."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: FederatedServer, *_: Any) -> None:
        """Before the mean is logged and the round's rows are put away."""
        for row in self.results:
            name = f"local/acc_client{int(row['client']) + 1}"
            pl_module.log_round({name: row["acc"]})
        super().on_train_batch_end(trainer, pl_module)


def train(name: str, settings: dict[str, Any], start: Path | None = None) -> Path:
    """A run's folder, of a run that is finished or begun now, from the model of another run."""
    folder = Path(name) / "version_0"
    if (folder / "summary.json").exists():
        return folder
    common = {"output_dir": ".", "name": name, "trainer.precision": "bf16-mixed"}
    common |= {"model.engine.workers": 1, "data.download": False}
    experiment = build("protocols/cifar10", imports=["benchmarks.one_round"], **settings, **common)
    if start is not None:
        experiment.model.net.load_state_dict(load_run(start).net.state_dict())
    made = experiment.fit()
    assert made is not None
    return made.path


def main() -> None:
    """Trains what is not there yet and keeps it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="the folder with cifar-10-batches-py")
    parser.add_argument("out", type=Path, help="for the runs; outside of the repository")
    parser.add_argument("--start", type=float, default=0.7, help="validation accuracy to start at")
    parser.add_argument("--commit", default="", help="that trains, if not this checkout's")
    given = parser.parse_args()
    kept, data = Path("results/one_round").absolute(), str(given.data.absolute())
    given.out.mkdir(parents=True, exist_ok=True)
    os.chdir(given.out)
    threshold = {"monitor": "val/acc", "mode": "max", "patience": 100}
    stop = {"class_path": "lightning.pytorch.callbacks.EarlyStopping"}
    stop["init_args"] = threshold | {"stopping_threshold": given.start}  # type: ignore[assignment]
    settings = {"data.data_dir": data, "rounds": 40, "trainer.callbacks": [stop]}
    settings |= {"model.local_epochs": 1, "data.num_clients": 1, "data.participation": 1}
    start = train("start", settings | {"data.partition": "IID"})
    Path("cohorts.json").write_text(json.dumps([COHORT]))
    command = {"command": "python -m benchmarks.one_round DATA OUT", "commit": given.commit}
    add(start.parent, kept, command, "with all images")
    for name, (label, model) in VARIANTS.items():
        settings = {"data.data_dir": data, "rounds": 1, **model}
        settings |= {"data.partition": "AuthorsDirichlet", "data.cohorts": "CohortsFromFile"}
        settings |= {"data.cohorts.path": "cohorts.json"}
        settings["trainer.callbacks"] = [{"class_path": "benchmarks.one_round.OfClients"}]
        made = train(name, settings, start)
        add(made.parent, kept, command, label)


if __name__ == "__main__":
    main()
