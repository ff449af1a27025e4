"""One contender of ``benchmarks.speed``, in a process that trains a round whenever it is told to.

``python -m benchmarks.contender NAME FILE`` prints ``ready`` once it is warm (pool started, code
compiled, teachers there), then answers every line that it reads with the seconds of a round as
JSON. FILE gets the model after the first round.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from fedgkd_pl import FedAvg, FedGKD, FedGKDVote, LocalEngine, ResNet8
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.examples import Batches, ClientData, Examples, ImageTransform, Scale, Splits
from fedgkd_pl.data.partition import ClientIndex, Indices, Labels, Partition
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.optim import SGD

from benchmarks import small_work
from benchmarks.plain import Plain, Work

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)

BARE: dict[str, Any] = {  # a Trainer that trains and nothing else
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
}


@dataclass(frozen=True)
class Case:
    """The work of a contender, and who does it.

    Attributes:
        method: ``plain`` or a method of ours.
        clients: in the data.
        cohort: of them in a round.
        samples: of a client.
        epochs: of a client.
        batch: samples a step.
        augment: crop and flip; without it the samples come in stored order, too.
        compile: whether steps are compiled.
        tuned: whether the plain loop has our kernel settings.
        small: the CNN of the small-work case.
        workers: processes.
        warm: rounds before the first that counts.
        precision: of training; ``64-true`` where rounding shall hide no other work.
        teacher: precision of FedGKD's teacher.
        cpu: answer seconds of this process's CPU, not of the clock.
    """

    method: str
    clients: int = 4
    cohort: int = 4
    samples: int = 2250
    epochs: int = 1
    batch: int = 64
    augment: bool = False
    compile: bool = False
    tuned: bool = False
    small: bool = False
    workers: int = 2
    warm: int = 1
    precision: str = "32-true"
    teacher: str = "same"
    cpu: bool = False


_SMALL: dict[str, Any] = {
    **dict(clients=small_work.CLIENTS, cohort=small_work.COHORT, samples=small_work.SAMPLES),
    **dict(epochs=small_work.EPOCHS, batch=small_work.BATCH, small=True),
}
# one client in this process, measured by its CPU time: what runs beside it matters less
_ONE: dict[str, Any] = dict(clients=1, cohort=1, workers=1, cpu=True)
_HALF: dict[str, Any] = {**_ONE, "precision": "bf16-mixed"}
_LONG: dict[str, Any] = {"samples": 256, "epochs": 20}  # what a cache saves depends on the epochs
CASES = {
    "plain": Case("plain"),
    "plain, double": Case("plain", precision="64-true", warm=1),
    "FedAvg, double": Case("FedAvg", precision="64-true", warm=1),
    "plain, our kernels": Case("plain", tuned=True),
    "plain, our kernels, compiled": Case("plain", tuned=True, compile=True, warm=2),
    "FedAvg": Case("FedAvg"),
    "FedAvg, compiled": Case("FedAvg", compile=True, warm=2),
    "FedAvg, augmented": Case("FedAvg", augment=True),
    "FedGKD, augmented": Case("FedGKD", augment=True, warm=2),
    "FedAvg, augmented, compiled": Case("FedAvg", augment=True, compile=True, warm=2),
    "FedGKD, augmented, compiled": Case("FedGKD", augment=True, compile=True, warm=3),
    "FedAvg, 20 epochs": Case("FedAvg", **_LONG),
    "FedGKD, 20 epochs, cached": Case("FedGKD", **_LONG, warm=2),
    "Vote M=5, 20 epochs, cached": Case("FedGKDVote", **_LONG, warm=6),
    "plain, small": Case("plain", **_SMALL, workers=1),
    "plain, our kernels, small": Case("plain", **_SMALL, tuned=True, workers=1),
    "FedAvg, small": Case("FedAvg", **_SMALL, workers=1),
    "plain, small, two processes": Case("plain", **_SMALL),
    "FedAvg, small, two processes": Case("FedAvg", **_SMALL),
    "plain, alone": Case("plain", **_ONE),
    "plain, alone, again": Case("plain", **_ONE),
    "plain, alone, bf16": Case("plain", **_HALF),
    "FedAvg, alone": Case("FedAvg", **_ONE),
    "FedAvg, alone, bf16": Case("FedAvg", **_HALF),
    "FedAvg, alone, augmented": Case("FedAvg", **_ONE, augment=True),
    "FedAvg, alone, augmented, bf16": Case("FedAvg", **_HALF, augment=True),
    "FedGKD, alone, augmented": Case("FedGKD", **_ONE, augment=True, warm=2),
    "FedGKD, alone, augmented, bf16": Case("FedGKD", **_HALF, augment=True, warm=2),
    "FedGKD, alone, augmented, bf16 teacher": Case(
        "FedGKD", **_ONE, augment=True, teacher="bf16", warm=2
    ),
}


class _Blocks(Partition):
    """Client k owns the k-th block of samples, in stored order."""

    def __call__(self, labels: Labels, num_clients: int, *_: Any) -> ClientIndex:
        return ClientIndex(list(self.split(labels, num_clients, np.random.default_rng(0))))

    def split(self, labels: Labels, num_clients: int, generator: Any) -> Any:
        rows: Indices = np.arange(len(labels))
        yield from np.split(rows, num_clients)


class _InOrder(ClientData):
    def batches(self, client: int, round: int) -> Batches:
        rows = torch.from_numpy(self.index[client])
        return Batches(self.examples[rows], self.batch_size)


class _Data(FederatedDataModule):
    """Random images: how long a step takes does not depend on what is in them."""

    name, num_classes = "random", 10

    def __init__(self, case: Case) -> None:
        self.case = case
        super().__init__(
            num_clients=case.clients,
            partition=_Blocks(),
            participation=case.cohort / case.clients,
            batch_size=case.batch,
            val_fraction=0.0,
            seed=0,
        )

    def load(self) -> Splits:
        case = self.case
        if case.small:
            inputs, labels = small_work.data()
            train = Examples(inputs, labels, Scale(1.0))
        else:
            inputs, labels = images(case.clients * case.samples)
            padding = 4 if case.augment else 0
            transform = ImageTransform(MEAN, STD, padding=padding, flip=case.augment)
            train = Examples(inputs, labels, transform)
        return Splits(train, train[:10], train[:10])  # Vote weighs its teachers by validation

    def setup(self, stage: str | None = None) -> None:
        first = self.clients is None
        super().setup(stage)
        if first and not self.case.augment:
            self.clients = _InOrder(**vars(self.client_data))


def images(count: int) -> tuple[Tensor, Tensor]:
    """Random bytes in the shape of CIFAR-10."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return pixels, torch.randint(10, (count,), generator=generator)


def resnet() -> nn.Module:
    """ResNet-8, the same every time."""
    torch.manual_seed(0)
    return ResNet8(num_classes=10)


class _Paced(Callback):
    """Starts a round when told to, and tells how long its local training took."""

    def __init__(self, case: Case, file: str) -> None:
        self.warm, self.file = case.warm, file
        self.clock = time.process_time if case.cpu else time.perf_counter

    def on_train_batch_start(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if module.round > self.warm and not sys.stdin.readline():
            os._exit(0)  # the workers end with this process
        self.start = self.clock()

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        seconds = self.clock() - self.start
        if module.round == 1:
            torch.save(module.net.state_dict(), self.file)
        if module.round >= self.warm:
            say("ready" if module.round == self.warm else seconds)


def say(answer: object) -> None:
    """One line to the parent."""
    print(json.dumps(answer), flush=True)


def run_plain(case: Case, file: str) -> None:
    """The plain loop."""
    shape = (1, 3, 1, 1)
    inputs, labels = small_work.data() if case.small else images(case.clients * case.samples)
    n = case.samples
    work = Work(
        net=small_work.net if case.small else resnet,
        images=inputs,
        labels=labels,
        rows=[range(k * n, (k + 1) * n) for k in range(case.clients)],
        batch=case.batch,
        epochs=case.epochs,
        mean=None if case.small else torch.tensor(MEAN).view(shape),
        std=None if case.small else torch.tensor(STD).view(shape),
        momentum=0.0 if case.small else 0.9,
        clip=0.0 if case.small else 10.0,
        tuned=case.tuned,
        compile=case.compile,
        dtype=torch.float64 if case.precision == "64-true" else torch.float32,
        half=case.precision == "bf16-mixed",
        cpu=case.cpu,
    )
    plain = Plain(work, case.workers)
    sampler = np.random.default_rng(0)
    for number in range(1, 1_000_000):
        cohort = sorted(sampler.choice(case.clients, case.cohort, replace=False).tolist())
        if number > case.warm and not sys.stdin.readline():
            break
        seconds = plain.round(cohort)
        if number == 1:
            torch.save(plain.state, file)
        if number >= case.warm:
            say("ready" if number == case.warm else seconds)
    plain.close()


def run_ours(case: Case, file: str) -> None:
    """A method of ours, under a real Trainer."""
    gkd = partial(FedGKD, buffer_size=5, teacher_precision=case.teacher)  # type: ignore[arg-type]
    method = {"FedAvg": FedAvg, "FedGKD": gkd, "FedGKDVote": FedGKDVote}
    sgd = (
        partial(SGD, lr=0.05)
        if case.small
        else partial(SGD, lr=0.05, momentum=0.9, weight_decay=1e-5)
    )
    model = method[case.method](
        small_work.net() if case.small else resnet(),
        local_epochs=case.epochs,
        optimizer=sgd,
        engine=LocalEngine(workers=case.workers),
        compile=case.compile,
    )
    trainer = Trainer(
        max_epochs=1_000_000,
        **BARE,
        precision=case.precision,
        gradient_clip_val=None if case.small else 10.0,
        callbacks=[_Paced(case, file)],
    )
    trainer.fit(model, _Data(case))


def main() -> None:
    """Runs a contender until its input ends."""
    name, file = sys.argv[1:3]
    case = CASES[name]
    (run_plain if case.method == "plain" else run_ours)(case, file)


if __name__ == "__main__":
    main()
