"""Data that is read sample by sample: what is read, with which randomness, and what is refused."""

import logging
import os
import random
import signal
from collections import Counter
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
from fedgkd_pl import (
    MLP,
    ByKey,
    FedAUX,
    FedAvg,
    FederatedData,
    FedGKD,
    HeldOut,
    LocalEngine,
    TorchDataset,
)
from fedgkd_pl.data.examples import Batches, Examples
from fedgkd_pl.data.sources import dataset as lazy
from fedgkd_pl.data.sources.dataset import (
    LazyExamples,
    SampleReader,
    as_input,
    as_label,
    known_labels,
    lazy_examples,
)
from fedgkd_pl.engines.base import Worker
from fedgkd_pl.errors import RunFailed, SettingError
from fedgkd_pl.federation.client_trainer import Job
from fedgkd_pl.federation.message import ClientUpdate, Message, encode_state
from fedgkd_pl.seeds import sample_seeds
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset

from tests.conftest import REPO, fit, linear
from tests.support.lazy import Bad, Pid, Points, Unsendable
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


def test_the_same_numbers_train_to_the_bits_of_arrays() -> None:
    points = Points()
    arrays = FederatedData.from_arrays(points.x, points.y, num_clients=4, batch_size=16)
    expected = trained(arrays, method=FedGKD)
    for loader_workers, workers, random_ in ((0, 2, True), (1, 1, False)):
        data = federated(points, random=random_, loader_workers=loader_workers)
        model = trained(data, workers, FedGKD)
        assert torch.equal(model.net.weight, expected.net.weight)
        for name in ("val/loss", "test/loss", "client/loss_mean"):
            assert model.report[name] == expected.report[name]
        assert data.client_data.examples.repeat is not random_  # teachers run once per sample


def test_only_what_a_batch_needs_is_read() -> None:
    points = Points(log="read")
    data = federated(points, public=HeldOut(0.25))
    data.setup()
    # the first, the middle and the last; two of train and two of test as input
    assert len(points.rows_read()) == 7
    data.fingerprint()
    data.summary()
    assert points.rows_read() == []
    owned = data.client_data.owned(1)
    assert isinstance(owned, LazyExamples) and owned.rows is not None
    batches = data.client_data.batches(1, round=1)
    seed = batches.generator.initial_seed()
    order = torch.randperm(len(owned), generator=torch.Generator().manual_seed(seed))
    first = iter(batches)
    next(first)
    assert points.rows_read() == owned.rows[order][:16].tolist()
    list(first)
    assert points.rows_read() == owned.rows[order][16:].tolist()
    assert data.public is not None
    assert all((y == 0).all() for _, y in Batches(data.public, 16))  # nobody's labels
    assert not set(points.rows_read()) & set(data.client_data.examples.rows.tolist())


def test_a_few_rows_can_be_taken_into_memory() -> None:
    points = Points()
    examples = federated(points, val_fraction=0).client_data.examples
    few = examples[torch.tensor([3, 5])]
    rows = examples.rows[torch.tensor([3, 5])].numpy()
    assert type(few) is Examples and torch.equal(few.inputs, torch.from_numpy(points.x[rows]))
    assert examples.inputs.shape == (200, 4) and examples[:0].inputs.shape == (0, 4)
    with pytest.raises(NotImplementedError):  # never made-up numbers
        examples.inputs[:2].tolist()


def test_owners_test_and_val_sets_names_and_a_transform() -> None:
    points = Points()
    points.classes = ["left", "right"]  # type: ignore[attr-defined]
    data = federated(
        points,
        test=Subset(points, range(10)),
        val=Subset(points, range(10, 30)),
        owners=np.array(["ann", "bob"])[np.arange(200) % 2],
        num_clients=2,
        partition=ByKey(),
        transform=lambda x, generator: x[:, :2] * 2,
    )
    data.setup()
    assert data.class_names == ["left", "right"] and data.num_classes == 2
    assert sorted(data.client_data.owned(1).rows.tolist()) == list(range(1, 200, 2))
    ((x, y),) = list(data.test_dataloader())
    assert torch.equal(x, 2 * torch.from_numpy(points.x[:10, :2]))
    assert y.tolist() == points.y[:10].tolist() and len(data.val) == 20


# -- labels --------------------------------------------------------------------------------------


def test_labels_are_found_without_reading() -> None:
    points = Points(20, log="read")
    y = torch.from_numpy(points.y)
    again = Points(20, told=False)
    assert known_labels(again) is None
    again.labels = again.y.tolist()  # type: ignore[attr-defined]
    for dataset in (again, TensorDataset(torch.zeros(20, 1), y)):
        assert known_labels(Subset(dataset, [4, 2, 7])).tolist() == y[[4, 2, 7]].tolist()
    again.labels = [{"box": 1}] * 20  # type: ignore[attr-defined]  # of the name, but no labels
    assert known_labels(again) is None
    assert points.rows_read() == []


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_labels_that_nobody_tells_are_read_once(
    loader_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    hidden = Points(log="read", told=False)
    with caplog.at_level(logging.WARNING, "fedgkd_pl"):
        data = federated(hidden, loader_workers=loader_workers)
        data.setup()
    assert "train has no attribute targets" in caplog.text
    assert len(hidden.rows_read()) == 200 + 7  # see above
    assert data.fingerprint() == federated(Points()).fingerprint()
    data.teardown("fit")


# -- randomness ----------------------------------------------------------------------------------


def test_random_transforms_give_the_same_bits_whoever_reads() -> None:
    models = [
        trained(federated(Points(noise=0.3), loader_workers=loader_workers), workers)
        for loader_workers, workers in ((0, 1), (1, 2), (2, 1))
    ]
    for model in models:
        assert torch.equal(model.net.weight, models[0].net.weight)
        assert model.report["test/loss"] == models[0].report["test/loss"]
    other = trained(federated(Points(noise=0.3), seed=1, partition_seed=0))
    assert not torch.equal(other.net.weight, models[0].net.weight)


def test_every_epoch_round_and_client_draws_anew_and_evaluation_never() -> None:
    data = federated(Points(noise=1.0))
    data.setup()
    clients = data.client_data
    everything = torch.arange(144)
    plain = torch.from_numpy(data.datasets["train"].x[clients.examples.rows])

    def passes(round: int, client: int) -> list[Tensor]:
        """The noise of two epochs of all samples."""
        generator = clients.batches(client, round).generator
        both = []
        for _ in range(2):
            both.append(torch.cat([*clients.examples.batches([everything], generator)]) - plain)
            torch.randperm(144, generator=generator)  # as a pass does
        return both

    seen = torch.stack([*passes(1, 0), *passes(1, 1), *passes(2, 0)])
    assert len(seen[:, :, 0].unique()) == 6 * 144  # each sample has its own, each time
    assert 1.35 < seen.mean() < 1.65  # three uniform numbers
    assert torch.equal(torch.stack(passes(1, 1)), seen[2:4])
    first, second = (inputs_of(data.val_dataloader()[0]) for _ in range(2))
    assert torch.equal(first, second)
    in_pieces = torch.cat([data.val[n : n + 1].inputs for n in range(len(data.val))])
    assert torch.equal(first, in_pieces)


class Seen(Points):
    """Points that remember every input that they have given, with its row."""

    def __init__(self) -> None:
        super().__init__(noise=1.0)
        self.given = set[tuple[float, ...]]()

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        x, y = super().__getitem__(row)
        self.given.add((row, *x.tolist()))
        return x, y


def test_every_pass_of_fedaux_over_public_data_draws_anew() -> None:
    points = Seen()
    data = federated(points, num_clients=2, public=HeldOut(0.25))
    engine = LocalEngine(workers=1)
    fit(FedAUX(MLP(4, [5], 2), distil_epochs=3, distil_batch_size=8, engine=engine), data, 2)
    assert data.public is not None
    times = Counter(row for row, *_ in points.given)
    passes = Counter(times[row] for row in data.public.rows.tolist())  # type: ignore[union-attr]
    # all 36 as in evaluation, in which clients score them; 29 of them in three passes of two rounds
    assert passes == {1: 7, 1 + 2 * 3: 29}


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_the_generators_of_the_process_stay(loader_workers: int) -> None:
    data = federated(Points(noise=1.0), loader_workers=loader_workers)
    data.setup()
    drawn = []
    for read in (True, False):
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        if read:
            list(data.client_data.batches(0, 1))
            list(data.test_dataloader())
        drawn.append((*torch.rand(3).tolist(), *np.random.rand(3).tolist(), random.random()))
    data.teardown("fit")
    assert drawn[0] == drawn[1]


def test_seeds_of_samples_are_those_of_splitmix64() -> None:
    # the first numbers of the published generator with seed 0
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert sample_seeds(0, np.arange(3)).tolist() == expected


def test_a_resumed_run_draws_the_same(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(REPO)
    points = {"class_path": "tests.support.lazy.Points", "init_args": {"noise": 0.3}}
    config = write_config(
        tmp_path, "TorchDataset", 4, train=points, num_clients=3, loader_workers=1
    )
    words = ("fit", "--import", "tests.support.lazy")
    for more in (
        ("--config", config, "--rounds", "3", "--name", "whole"),
        ("--config", config),
        ("--rounds", "3", "--resume", "runs/own/version_0"),
    ):
        code, _, err = run(*words, *more)
        assert code == 0, err
    for name in ("global.safetensors", "metrics.csv"):
        files = [version(tmp_path, run_name) / name for run_name in ("own", "whole")]
        assert files[0].read_bytes() == files[1].read_bytes()


# -- the processes that read ---------------------------------------------------------------------


def tasks(*rows: list[int]) -> list[Any]:
    return [(np.array(part), np.array(part, np.uint64)) for part in rows]


def test_processes_stay_for_all_passes_and_end_when_it_is_closed() -> None:
    data = federated(Pid(), loader_workers=2)
    clients = data.client_data
    half = iter(clients.batches(0, 3))  # a pass that nobody finishes
    next(half)
    del half
    passes = [inputs_of(clients.batches(c, r)) for c in (0, 1) for r in (1, 2)]
    pids = {int(pid) for pid in torch.cat(passes).flatten().tolist()}
    assert len(pids) <= 2 and os.getpid() not in pids
    data.teardown("fit")
    assert not any(map(psutil.pid_exists, pids))


def test_two_passes_at_a_time_and_a_process_that_dies() -> None:
    reader = lazy_examples(Points(noise=1.0), "train", workers=1).reader
    parts = tasks([1, 2], [3], [4, 5])
    alone = torch.cat([inputs for inputs, _ in reader.read(parts)])
    pairs = list(zip(reader.read(parts), reader.read(parts), strict=True))
    for side in (0, 1):
        assert torch.equal(torch.cat([pair[side][0] for pair in pairs]), alone)
    reader.close()
    reader = lazy_examples(Pid(), "train", workers=1).reader
    parts = tasks(*[[n] for n in range(40)])
    reading = reader.read(parts)
    os.kill(int(next(reading)[0][0]), signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"loader_workers"):
        list(reading)
    assert len(list(reader.read(parts))) == 40  # by another one
    reader.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool])
def test_batches_travel_by_value(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the name of something in /dev/shm."""
    inputs = torch.arange(6000).remainder(2).view(2, 30, 100).transpose(1, 2).to(dtype)
    reader = SampleReader([(x, 1) for x in inputs], "train", False, 1, first=inputs[0].to("meta"))
    parts = tasks([0, 1], [1])
    with monkeypatch.context() as patch:
        patch.setattr(lazy, "_readers", [reader])
        sent = ForkingPickler.dumps(lazy._answer(parts[0]))
    assert len(sent) > inputs.numel() * inputs.element_size()
    (back, labels), _ = reader.read(parts)
    assert torch.equal(back, inputs) and back.dtype == dtype and labels == [1, 1]
    reader.close()


def test_a_worker_elsewhere_gets_the_dataset_and_row_numbers() -> None:
    """As the Ray engine does it: the job once, without samples, and each client's content."""
    clients = federated(Points(noise=0.3)).client_data
    model = FedAvg(linear(4, 2))
    arguments = {"max_epochs": 1, "max_steps": -1}
    nobody = clients.only(-1, clients.examples.portable(torch.empty(0, dtype=torch.int64)))
    host = torch.device("cpu")
    packed = cloudpickle.dumps(Job(model.client(), nobody, host, arguments, {}))
    message = Message(1, {"global": model.net.state_dict()})
    part = encode_state(clients.owned(2).portable(slice(None)).content())
    assert len(part) < 2 * 8 * 36 + 300  # a number and a label for each
    elsewhere = Worker(lambda: cloudpickle.loads(packed))
    here = Worker(lambda: Job(model.client(), clients, host, arguments, {}))
    answers = [
        elsewhere.train(message, 2, encode_state({}), part),
        here.train(message, 2, encode_state({})),
    ]
    one, two = (ClientUpdate.decode(answer[1:]) for answer in answers)
    assert torch.equal(one.weights["weight"], two.weights["weight"]) and one.num_samples == 36


@pytest.mark.parametrize(("loader_workers", "workers"), [(1, 1), (0, 2)])
def test_what_cannot_be_sent_is_named(loader_workers: int, workers: int) -> None:
    data = federated(Unsendable(), loader_workers=loader_workers)
    model = FedAvg(linear(4, 2), engine=LocalEngine(workers=workers))
    with pytest.raises(SettingError, match=r"^train: Unsendable .*loader_workers 0"):
        fit(model, data, 1)


# -- what is refused -----------------------------------------------------------------------------

FAULTS = ("shape", "type", "nan", "label", "no pair", "error")


@pytest.mark.parametrize(("fault", "readers"), [("nan", 0), ("error", 1)])
def test_a_bad_sample_of_a_client_is_named_and_fails_the_client(fault: str, readers: int) -> None:
    row = int(federated(Points(), val_fraction=0).client_data.owned(2).rows[5])
    data = federated(Bad(row, fault), val_fraction=0, loader_workers=readers)
    model = FedAvg(linear(4, 2), engine=LocalEngine(workers=1))
    fit(model, data, 1)
    (failure,) = model.results.failures
    assert f"train: sample {row} " in failure.reason and "\n" not in failure.reason


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_sample_at_setup_is_named(fault: str) -> None:
    rows = (100,) if fault in ("shape", "type") else (0, 100)  # the first sets shape and type
    for row in rows:
        with pytest.raises(SettingError, match=f"^data: train: sample {row} ") as raised:
            federated(Bad(row, fault)).setup()
        assert "\n" not in str(raised.value)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield torch.zeros(2), 0


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"train": Endless()}, "train"),
        ({"test": 5}, "test"),
        ({"targets": [0, 1]}, "targets"),
        ({"num_classes": 0}, "num_classes"),
        ({"loader_workers": -1}, "loader_workers"),
        ({"train": [(torch.zeros(2), 0)] * 9 + [(torch.zeros(2), [0.5, 1.0])]}, "targets"),
    ],
)
def test_datasets_that_do_not_fit(arguments: dict[str, Any], key: str) -> None:
    with pytest.raises(SettingError) as raised:
        FederatedData.from_dataset(**({"train": Points()} | arguments)).setup()
    assert raised.value.key == key


def test_what_a_sample_may_be() -> None:
    assert as_input(np.arange(6.0)[::-2]).tolist() == [5, 3, 1]  # type: ignore[union-attr]
    assert as_input(0.5).dtype == torch.float32 and as_input(3).shape == ()  # type: ignore[union-attr]
    assert as_input(Image.new("L", (2, 2))) is None and as_input(np.array(["a"])) is None
    assert [as_label(y) for y in (3, np.int8(3), torch.tensor([3]))] == [3, 3, 3]
    assert [as_label(y) for y in (torch.tensor([3, 1]), "3", None, [1.0, "a"])] == [None] * 4
    for y in (0.1, torch.tensor([0.1])):
        number: Any = as_label(y)
        assert number.dtype == np.float32 and number.item() == np.float32(0.1)


# -- other sources that can be lazy --------------------------------------------------------------


@pytest.mark.parametrize("augment", [False, True])
def test_lazy_image_folders_train_to_the_same_bits(augment: bool) -> None:
    write_images(Path("images/train"), number=12)
    write_images(Path("images/test"), number=4)
    models, kwargs = [], {"num_clients": 2, "batch_size": 8, "augment": augment}
    for settings in ({}, {"lazy": True, "loader_workers": int(augment)}):
        data = FederatedData.from_image_folder("images", **kwargs, **settings)
        net = torch.nn.Sequential(torch.nn.Flatten(), linear(192, 2))
        model = FedGKD(net, local_epochs=2, engine=LocalEngine(workers=1))
        fit(model, data, 2)
        assert data.client_data.examples.repeat is not augment
        models.append(model)
    assert isinstance(data.client_data.examples, LazyExamples)
    assert torch.equal(models[0].net[1].weight, models[1].net[1].weight)
    assert models[0].report["test/loss"] == models[1].report["test/loss"]


def test_every_lazy_image_is_read_before_the_run() -> None:
    """Also those of validation and test, which the first evaluation would else find broken."""
    write_images(Path("images"), number=6)
    kwargs = {"lazy": True, "num_clients": 2, "val_fraction": 0.25}
    for file in sorted(Path("images").glob("*/*.png")):
        content = file.read_bytes()
        file.write_text("no image")
        with pytest.raises(SettingError, match=str(file)):
            FederatedData.from_image_folder("images", **kwargs).setup()
        file.write_bytes(content)
    Image.new("RGB", (9, 7)).save("images/red/3.png")
    with pytest.raises(SettingError, match=r"images/red/3.png .*give size"):
        FederatedData.from_image_folder("images", **kwargs).setup()
