"""Data that is read sample by sample: what is read, with which randomness, and what is refused."""

import logging
import os
import random
import signal
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
from fedgkd_pl import (
    ByKey,
    FedAvg,
    FederatedData,
    FedGKD,
    HeldOut,
    LocalEngine,
    SquaredError,
    TorchDataset,
)
from fedgkd_pl.data.examples import Batches, Examples
from fedgkd_pl.data.lazy import LazyExamples
from fedgkd_pl.data.loading import SampleLoader
from fedgkd_pl.data.reading import Batch, Task, as_input, as_label
from fedgkd_pl.data.sources.dataset import known_labels, lazy_examples
from fedgkd_pl.engines.worker import Worker
from fedgkd_pl.errors import RunFailed, SettingError
from fedgkd_pl.federation.callback import FederatedCallback
from fedgkd_pl.federation.client_trainer import Job
from fedgkd_pl.federation.message import ClientUpdate, Message, encode_state
from fedgkd_pl.runs.files import RunFiles
from fedgkd_pl.seeds import next_seed, sample_seeds
from lightning.pytorch import LightningDataModule
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from tests.conftest import REPO, fit, linear, same
from tests.support.lazy import Bad, Pid, Points, Unlabelled, Unsendable, Wholes
from tests.support.runs import Run, version
from tests.support.sources import write_config, write_images


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def federated(dataset: Any, **kwargs: Any) -> TorchDataset:
    return FederatedData.from_dataset(dataset, **({"num_clients": 4, "batch_size": 16} | kwargs))


def trained(data: Any, workers: int = 1, method: Any = FedAvg) -> Any:
    """The model of two rounds of two local epochs."""
    model = method(linear(4, 2), local_epochs=2, engine=LocalEngine(workers=workers))
    fit(model, data, 2)
    assert model.report["client/failed"] == 0
    return model


def inputs_of(batches: Batches) -> Tensor:
    return torch.cat([x for x, _ in batches])


# -- what is read, and when ----------------------------------------------------------------------


@pytest.mark.parametrize(("loader_workers", "workers"), [(0, 1), (2, 1), (0, 2), (1, 2)])
def test_the_same_numbers_train_to_the_bits_of_arrays(loader_workers: int, workers: int) -> None:
    points = Points()
    arrays = FederatedData.from_arrays(points.x, points.targets, num_clients=4, batch_size=16)
    expected = trained(arrays)
    model = trained(federated(points, loader_workers=loader_workers), workers)
    assert torch.equal(model.net.weight, expected.net.weight)
    for name in ("val/loss", "test/loss", "client/loss_mean"):
        assert model.report[name] == expected.report[name]


def test_only_what_a_batch_needs_is_read() -> None:
    points = Points(log="read")
    data = federated(points)
    data.setup()
    # for its form the first, then first, middle and last; two of train and two of test as input
    assert len(points.rows_read()) == 8
    data.fingerprint()
    data.summary()
    assert points.rows_read() == []
    owned = data.client_data.owned(1)
    assert isinstance(owned, LazyExamples) and owned.rows is not None
    batches = data.client_data.batches(1, round=1)
    order = torch.randperm(
        36, generator=torch.Generator().manual_seed(batches.generator.initial_seed())
    )
    first = iter(batches)
    next(first)
    assert points.rows_read() == owned.rows[order][:16].tolist()
    list(first)
    assert points.rows_read() == owned.rows[order][16:].tolist()


def test_a_few_rows_can_be_taken_into_memory() -> None:
    points = Points()
    data = federated(points, val_fraction=0)
    data.setup()
    examples = data.client_data.examples
    few = examples[torch.tensor([3, 5])]
    assert type(few) is Examples and few.inputs.shape == (2, 4)
    rows = examples.rows[torch.tensor([3, 5])].numpy()
    assert torch.equal(few.inputs, torch.from_numpy(points.x[rows]))
    assert torch.equal(examples.inputs[7:9], torch.from_numpy(points.x[7:9]))  # of the dataset
    assert examples.inputs.shape == (200, 4) and examples.inputs.is_floating_point()
    with pytest.raises(SettingError, match=r"data: inputs that are read sample by sample .*numpy"):
        examples.inputs.numpy()
    assert examples[:0].inputs.shape == (0, 4)


def test_owners_test_and_val_sets_names_and_a_transform() -> None:
    points = Points()
    owners = np.array(["ann", "bob"])[np.arange(200) % 2]
    points.classes = ["left", "right"]  # type: ignore[attr-defined]
    data = federated(
        points,
        test=Subset(points, range(10)),
        val=Subset(points, range(10, 30)),
        owners=owners,
        num_clients=2,
        partition=ByKey(),
        transform=lambda x, generator: x[:, :2] * 2,
    )
    data.setup()
    assert data.class_names == ["left", "right"] and data.num_classes == 2
    assert sorted(data.client_data.owned(1).rows.tolist()) == list(range(1, 200, 2))
    ((x, y),) = list(data.test_dataloader())
    assert torch.equal(x, 2 * torch.from_numpy(points.x[:10, :2]))
    assert y.tolist() == points.targets[:10].tolist() and len(data.val) == 20


def test_bytes_become_shares_as_for_arrays() -> None:
    pixels = torch.full((20, 4), 51, dtype=torch.uint8)
    data = federated(TensorDataset(pixels, torch.arange(20) % 2), num_clients=2)
    data.setup()
    x, _ = next(iter(data.test_dataloader()))
    assert x.dtype == torch.float32 and torch.allclose(x, torch.tensor(0.2))


# -- labels --------------------------------------------------------------------------------------


def test_labels_are_found_without_reading() -> None:
    points = Points(20, log="read")
    y = torch.from_numpy(points.targets)
    again = Points(20)
    again.labels = again.targets.tolist()  # type: ignore[attr-defined]
    del again.targets
    nested = ConcatDataset([Subset(points, [4, 2, 7]), again, TensorDataset(torch.zeros(20, 1), y)])
    assert known_labels(nested).tolist() == [*y[[4, 2, 7]].tolist(), *y.tolist(), *y.tolist()]
    assert known_labels(ConcatDataset([points, Unlabelled(3)])) is None
    again.labels = [{"box": 1}] * 20  # type: ignore[attr-defined]  # of the name, but no labels
    assert known_labels(again) is None
    assert points.rows_read() == []


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_labels_that_nobody_tells_are_read_once(
    loader_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    hidden = Unlabelled(log="read")
    with caplog.at_level(logging.WARNING, "fedgkd_pl"):
        data = federated(hidden, loader_workers=loader_workers)
        data.setup()
    assert "train does not tell its labels: reading all 200 samples once" in caplog.text
    assert "give targets to avoid it" in caplog.text
    assert len(hidden.rows_read()) == 200 + 8  # see above
    assert data.fingerprint() == federated(Points()).fingerprint()
    caplog.clear()
    federated(hidden, targets=hidden.secret).setup()
    assert "labels" not in caplog.text and len(hidden.rows_read()) == 8


# -- randomness ----------------------------------------------------------------------------------


def test_random_transforms_give_the_same_bits_whoever_reads() -> None:
    models = {
        (loader_workers, workers): trained(
            federated(Points(noise=0.3), loader_workers=loader_workers), workers
        )
        for loader_workers in (0, 1, 2)
        for workers in (1, 2)
    }
    first = models[0, 1]
    for model in models.values():
        assert torch.equal(model.net.weight, first.net.weight)
        assert model.report["test/loss"] == first.report["test/loss"]
    other = trained(federated(Points(noise=0.3), seed=1, partition_seed=0))
    assert not torch.equal(other.net.weight, first.net.weight)


def test_every_epoch_round_and_client_draws_anew_and_evaluation_never() -> None:
    data = federated(Points(noise=1.0))
    data.setup()
    clients = data.client_data
    everything = torch.arange(144)

    def passes(round: int, client: int) -> tuple[Tensor, Tensor]:
        """The noise of two epochs of all samples: their inputs without the points."""
        generator = clients.batches(client, round).generator
        both = []
        for _ in range(2):
            drawn = torch.cat([*clients.examples.batches([everything], generator)])
            torch.randperm(144, generator=generator)  # as a pass does
            both.append(drawn - torch.from_numpy(data.datasets["train"].x[clients.examples.rows]))
        return both[0], both[1]

    seen = [*passes(1, 0), *passes(1, 1), *passes(2, 0)]
    noises = torch.stack([noise[:, 0] for noise in seen])
    assert len(noises.flatten().unique()) == 6 * 144  # each sample has its own, each time
    assert 1.35 < noises.mean() < 1.65  # three uniform numbers
    assert torch.equal(torch.stack(passes(1, 1)), torch.stack(seen[2:4]))
    first, second = (inputs_of(data.val_dataloader()[0]) for _ in range(2))
    assert torch.equal(first, second)
    in_pieces = torch.cat([data.val[n : n + 1].inputs for n in range(len(data.val))])
    assert torch.equal(first, in_pieces)


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_the_generators_of_the_process_stay(loader_workers: int) -> None:
    data = federated(Points(noise=1.0), loader_workers=loader_workers)
    data.setup()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    list(data.client_data.batches(0, 1))
    list(data.test_dataloader())
    data.teardown("fit")
    drawn = torch.rand(3), np.random.rand(3), random.random()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    assert torch.equal(drawn[0], torch.rand(3)) and drawn[2] == random.random()
    assert drawn[1].tolist() == np.random.rand(3).tolist()


def test_seeds_of_samples_are_those_of_splitmix64() -> None:
    # the first numbers of the published generator with seed 0
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert sample_seeds(0, np.arange(3)).tolist() == expected
    assert sample_seeds(2**63 - 2, np.array([7]))[0] != sample_seeds(2**63 - 3, np.array([7]))[0]


def test_asking_for_the_next_seed_draws_nothing() -> None:
    one, two = (torch.Generator().manual_seed(3) for _ in range(2))
    asked = next_seed(one), next_seed(one)
    assert asked[0] == asked[1] and torch.equal(
        torch.rand(4, generator=one), torch.rand(4, generator=two)
    )
    assert next_seed(one) != asked[0]


def test_a_resumed_run_draws_the_same(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(REPO)
    points = {"class_path": "tests.support.lazy.Points", "init_args": {"noise": 0.3}}
    config = write_config(
        tmp_path, "TorchDataset", 4, train=points, num_clients=3, loader_workers=1
    )
    words = ("fit", "--import", "tests.support.lazy", "--config", config)
    code, _, err = run(*words, "--rounds", "3", "--name", "whole")
    assert code == 0, err
    code, _, err = run(*words)
    assert code == 0, err
    more = ("--import", "tests.support.lazy", "--rounds", "3")
    code, _, err = run("fit", *more, "--resume", "runs/own/version_0", "--data.loader_workers", "0")
    assert code == 0, err
    for name in ("global.safetensors", "metrics.csv"):
        files = [version(tmp_path, run_name) / name for run_name in ("own", "whole")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_teachers_run_once_only_if_the_user_says_that_nothing_is_random() -> None:
    points = Points()
    assert not federated(points).client_data.examples.repeat
    assert federated(points, random=False).client_data.examples.repeat
    arrays = FederatedData.from_arrays(points.x, points.targets, num_clients=4, batch_size=16)
    model = trained(federated(points, random=False, loader_workers=1), method=FedGKD)
    assert torch.equal(model.net.weight, trained(arrays, method=FedGKD).net.weight)


def test_getitems_is_used_where_nothing_is_random() -> None:
    for is_random, calls in ((False, 3), (True, 0)):
        wholes = Wholes(40)
        data = federated(wholes, random=is_random, num_clients=1, val_fraction=0, batch_size=11)
        clients = data.client_data
        wholes.calls = 0
        batches = list(clients.batches(0, 1))
        assert wholes.calls == calls and [len(y) for _, y in batches] == [11, 11, 10]
        for x, y in batches:
            assert torch.equal((x[:, 0] > 0).long(), y)


# -- the processes that read ---------------------------------------------------------------------


def loader_of(dataset: Any, workers: int, **kwargs: Any) -> SampleLoader:
    return lazy_examples(dataset, "train", workers=workers, **kwargs).inputs.loader


def tasks(*rows: list[int]) -> list[Task]:
    return [Task(np.array(part), np.array(part, np.uint64)) for part in rows]


def test_workers_stay_for_all_passes_and_end_when_it_is_closed() -> None:
    data = federated(Pid(), loader_workers=2)
    clients = data.client_data
    pids = [
        set(inputs_of(clients.batches(c, r)).flatten().tolist()) for c in (0, 1) for r in (1, 2)
    ]
    assert len(pids[0]) == 2 and os.getpid() not in pids[0] and pids == [pids[0]] * 4
    half = iter(clients.batches(0, 3))  # a pass that nobody finishes
    next(half)
    del half
    assert set(inputs_of(clients.batches(1, 3)).flatten().tolist()) == pids[0]
    data.teardown("fit")
    assert not any(psutil.pid_exists(int(pid)) for pid in pids[0])
    again = set(inputs_of(clients.batches(0, 1)).flatten().tolist())
    assert not again & pids[0]
    data.teardown("fit")


def test_two_passes_at_a_time() -> None:
    loader = loader_of(Points(noise=1.0), 1)
    parts = tasks([1, 2], [3], [4, 5])
    alone = torch.cat([batch.inputs for batch in loader.read(parts)])
    pairs = list(zip(loader.read(parts), loader.read(parts), strict=True))
    for side in (0, 1):
        assert torch.equal(torch.cat([pair[side].inputs for pair in pairs]), alone)
    stopped = loader.read(parts)
    next(stopped)
    loader.close()
    assert torch.equal(torch.cat([batch.inputs for batch in loader.read(parts)]), alone)
    with pytest.raises(RunFailed, match="closed"):
        next(stopped)
    loader.close()


def test_a_worker_that_dies_is_named_and_replaced() -> None:
    loader = loader_of(Pid(), 1)
    parts = tasks(*[[n] for n in range(40)])
    reading = loader.read(parts)
    os.kill(int(next(reading).inputs[0]), signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"a process that reads samples failed .*loader_workers"):
        list(reading)
    assert len(list(loader.read(parts))) == 40
    loader.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool])
def test_batches_travel_by_value(dtype: torch.dtype) -> None:
    """Not by the name of something in /dev/shm."""
    inputs = torch.arange(6000).remainder(2).view(2, 30, 100).transpose(1, 2).to(dtype)
    packed = Batch(inputs, [1, 0]).pack()
    sent = ForkingPickler.dumps(packed)
    assert len(sent) > inputs.numel() * inputs.element_size()
    back = ForkingPickler.loads(sent).unpack()
    assert torch.equal(back.inputs, inputs) and back.inputs.dtype == dtype and back.labels == [1, 0]
    back.inputs.zero_()  # writable, as any batch


# -- other engines -------------------------------------------------------------------------------


def test_a_worker_elsewhere_gets_the_dataset_and_row_numbers() -> None:
    """As the Ray engine does it: the job once, without samples, and each client's content."""
    data = federated(Points(noise=0.3))
    clients = data.client_data
    model = FedAvg(linear(4, 2))
    arguments = {"max_epochs": 1, "max_steps": -1}
    nobody = clients.only(-1, clients.examples.portable(torch.empty(0, dtype=torch.int64)))
    host = torch.device("cpu")
    packed = cloudpickle.dumps(Job(model.client(), nobody, host, arguments, {}))
    message = Message(1, {"global": model.net.state_dict()})
    part = encode_state(clients.owned(2).portable(slice(None)).content())
    assert len(part) < 2 * 8 * 36 + 300  # a number and a label for each
    elsewhere = Worker(lambda: cloudpickle.loads(packed))
    answer = elsewhere.train(message, 2, encode_state({}), part)
    here = Worker(lambda: Job(model.client(), clients, host, arguments, {}))
    assert answer[:1] == b"="
    one, two = (
        ClientUpdate.decode(a[1:]) for a in (answer, here.train(message, 2, encode_state({})))
    )
    assert torch.equal(one.weights["weight"], two.weights["weight"]) and one.num_samples == 36


def test_public_data_is_not_read_before_it_is_needed() -> None:
    points = Points(log="read")
    data = federated(points, public=HeldOut(0.25), val_fraction=0)
    data.setup()
    assert len(points.rows_read()) == 8
    assert data.public is not None and len(data.public) == 40
    batches = list(Batches(data.public, 16))
    assert all((y == 0).all() for _, y in batches)  # nobody's labels
    assert not set(points.rows_read()) & set(data.client_data.examples.rows.tolist())


@pytest.mark.parametrize(("loader_workers", "workers"), [(1, 1), (0, 2)])
def test_what_cannot_be_sent_is_named(loader_workers: int, workers: int) -> None:
    data = federated(Unsendable(), loader_workers=loader_workers)
    model = FedAvg(linear(4, 2), engine=LocalEngine(workers=workers))
    with pytest.raises(SettingError) as raised:
        fit(model, data, 1)
    text = str(raised.value)
    assert text.startswith("train: Unsendable cannot be sent to another process (") and (
        "loader_workers 0, engine.workers 1" in text
    )
    trained(federated(Unsendable()))


# -- what is refused -----------------------------------------------------------------------------

FAULTS = {
    "shape": "is torch.float32 of shape (3,), the first is torch.float32 of shape (4,)",
    "type": "is torch.float64 of shape (4,), the first is torch.float32 of shape (4,)",
    "nan": "has NaN or Inf",
    "label": "has the label 7, but its target is ",
    "no pair": "must be (x, y), and is a Tensor",
    "text": "has a str as its input",
    "no label": "has 'cat' as its label, not a class number",
    "error": "cannot be read: OSError: file ",
}


class Failures(FederatedCallback):
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def on_client_failed(
        self, trainer: Any, pl_module: Any, failure: Any, cohort_size: int
    ) -> None:
        self.reasons.append(failure.reason)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_sample_of_a_client_is_named(fault: str) -> None:
    good = federated(Points(), val_fraction=0)
    row = int(good.client_data.owned(2).rows[5])
    workers = ["nan", "error"].index(fault) + 1 if fault in ("nan", "error") else 1
    data = federated(Bad(row, fault), val_fraction=0, loader_workers=int(fault == "error"))
    model = FedAvg(linear(4, 2), engine=LocalEngine(workers=workers))
    failures = Failures()
    fit(model, data, 1, callbacks=[failures])
    assert model.report["client/failed"] == 1
    (reason,) = failures.reasons
    assert f"train: sample {row} {FAULTS[fault]}" in reason


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_sample_at_setup_is_named(fault: str) -> None:
    for row in (0, 100):  # the first, which sets the form, and one that is compared with it
        if row == 0 and fault in ("shape", "type"):
            continue
        with pytest.raises(SettingError) as raised:
            federated(Bad(row, fault)).setup()
        assert f"data: train: sample {row} {FAULTS[fault]}" in str(raised.value)


def test_a_bad_sample_of_the_test_set_ends_the_run_in_one_line() -> None:
    data = federated(Points(), test=Bad(7, "nan"))
    model = FedAvg(linear(4, 2), engine=LocalEngine(workers=1))
    with pytest.raises(RunFailed, match=r"^test: sample 7 has NaN or Inf: drop or fix it$"):
        fit(model, data, 1, callbacks=[RunFiles("run")])
    assert "test: sample 7 has NaN or Inf" in Path("run/error.txt").read_text()


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"train": Endless()}, "train: must be a map-style dataset, with len() and samples by"),
        ({"train": []}, "train: has no samples"),
        ({"test": Endless()}, "test: must be a map-style dataset"),
        (
            {"targets": [0, 1]},
            "targets: there are 200 samples of train: give a label for each (got 2",
        ),
        (
            {"targets": np.zeros(200)},
            "data: train: sample 0 has the label 1, but its target",
        ),
        (
            {"targets": np.ones(200, int) * 5},
            "data: train: sample 0 has the label 1, but its target",
        ),
        ({"num_classes": 1}, "data: train label at"),
        ({"owners": [1]}, "owners: must be one number or name for each of 200 samples"),
        ({"loader_workers": -1}, "loader_workers: must not be negative (got -1)"),
    ],
)
def test_datasets_that_do_not_fit(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(SettingError) as raised:
        FederatedData.from_dataset(**({"train": Points()} | arguments)).setup()
    assert str(raised.value).startswith(error)


def test_splits_that_are_not_alike() -> None:
    other = TensorDataset(torch.zeros(9, 5), torch.zeros(9, dtype=torch.int64))
    with pytest.raises(SettingError, match="data: test inputs must be like those of train"):
        federated(Points(), test=other).setup()


def test_what_a_sample_may_be() -> None:
    assert as_input(np.arange(6.0)[::-2]).tolist() == [5, 3, 1]  # type: ignore[union-attr]
    assert as_input(0.5).dtype == torch.float32 and as_input(3).shape == ()  # type: ignore[union-attr]
    assert as_input(Image.new("L", (2, 2))) is None and as_input(np.array(["a"])) is None
    assert [
        as_label(y) for y in (3, np.int8(3), torch.tensor(3), torch.tensor([3]), np.array(3))
    ] == [3] * 5
    assert [as_label(y) for y in (torch.tensor([3, 1]), "3", None, [[1.0]], [1.0, "a"])] == [
        None
    ] * 5
    for y in (0.1, np.float64(0.1), torch.tensor(0.1), torch.tensor([0.1]), [0.1]):
        number: Any = as_label(y)
        assert number.dtype == np.float32 and number.item() == np.float32(0.1)


@pytest.mark.parametrize("told", [True, False])
def test_numbers_to_learn_are_read_like_labels(told: bool) -> None:
    """As arrays of the same numbers, whether the dataset tells them or not."""
    x, rows = Points().x, Points().x[:, :1] * 2 + 1
    pairs: Any = TensorDataset(torch.from_numpy(x), torch.from_numpy(rows))
    nets = []
    for data in (
        federated(pairs if told else [*pairs]),
        FederatedData.from_arrays(x, rows, num_clients=4, batch_size=16, seed=0),
    ):
        model = FedAvg(linear(4, 1), loss=SquaredError(), engine=LocalEngine(1))
        fit(model, data, 2)
        assert data.num_classes == 0 and model.report["test/mae"] < 1.5
        nets.append(model.global_state())
    assert same(*nets)


# -- other sources that can be lazy --------------------------------------------------------------


class Mine(LightningDataModule):
    def __init__(self, collate: Any = None, train: Any = None) -> None:
        super().__init__()
        self.collate, self.points = collate, train or Points()

    def train_dataloader(self) -> Any:
        return DataLoader(self.points, 8, shuffle=True, collate_fn=self.collate)

    def test_dataloader(self) -> Any:
        return DataLoader(Subset(self.points, range(20)))


def test_a_lightning_datamodule_may_be_lazy() -> None:
    points = Points(noise=0.3)
    kwargs = {"num_clients": 4, "batch_size": 16}
    data = FederatedData.from_datamodule(Mine(train=points), lazy=True, loader_workers=1, **kwargs)
    assert isinstance(data.client_data.examples, LazyExamples)
    same = federated(points, test=Subset(points, range(20)))
    assert torch.equal(trained(data).net.weight, trained(same).net.weight)
    with pytest.raises(SettingError, match=r"lazy: its train_dataloader.. has a collate_fn"):
        FederatedData.from_datamodule(Mine(collate=list), lazy=True).setup()
    with pytest.raises(SettingError, match="loader_workers: all samples are in memory"):
        FederatedData.from_datamodule(Mine(), loader_workers=2)


@pytest.mark.parametrize("augment", [False, True])
def test_lazy_image_folders_train_to_the_same_bits(augment: bool) -> None:
    write_images(Path("images/train"), number=12)
    write_images(Path("images/test"), number=4)
    models, kwargs = [], {"num_clients": 2, "batch_size": 8, "augment": augment}
    for settings in ({}, {"lazy": True}, {"lazy": True, "loader_workers": 1}):
        data = FederatedData.from_image_folder("images", **kwargs, **settings)
        net = torch.nn.Sequential(torch.nn.Flatten(), linear(192, 2))
        model = FedGKD(net, local_epochs=2, engine=LocalEngine(workers=1))
        fit(model, data, 2)
        assert data.client_data.examples.repeat is not augment
        models.append(model)
    assert isinstance(data.client_data.examples, LazyExamples)
    for model in models:
        assert torch.equal(model.net[1].weight, models[0].net[1].weight)
        assert model.report["test/loss"] == models[0].report["test/loss"]


@pytest.mark.parametrize("val_fraction", [0.0, 0.25])
def test_every_lazy_image_is_read_before_the_run(val_fraction: float) -> None:
    """Also those of validation and test, which the first evaluation would else find broken."""
    write_images(Path("images"), number=8)
    kwargs = {"lazy": True, "num_clients": 2, "val_fraction": val_fraction}
    for file in sorted(Path("images").glob("*/*.png")):
        content = file.read_bytes()
        file.write_text("no image")
        with pytest.raises(SettingError, match=rf"cannot be read: {file} cannot be decoded$"):
            FederatedData.from_image_folder("images", **kwargs).setup()
        file.write_bytes(content)


def test_lazy_images_that_do_not_fit_are_named() -> None:
    write_images(Path("images"), number=20)
    Image.new("RGB", (9, 7)).save("images/red/3.png")
    error = r"images/red/3.png is 7 × 9 \(height × width\), images/blue/0.png is another: give size"
    with pytest.raises(SettingError, match=error):
        FederatedData.from_image_folder("images", lazy=True, num_clients=2).setup()
    Path("images/red/3.png").write_text("no image")
    with pytest.raises(SettingError, match=r"images/red/3.png cannot be decoded"):
        FederatedData.from_image_folder("images", lazy=True, num_clients=2).setup()
