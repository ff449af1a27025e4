"""The mean, the messages, the seeds."""

import itertools
from copy import deepcopy

import pytest
import torch
from fedgkd_pl.federation.message import ClientUpdate, Message, decode_state, encode_state
from fedgkd_pl.federation.teachers import TeacherBuffer, WeightedMean
from fedgkd_pl.seeds import derive

from tests.conftest import same


def test_weighted_mean_by_hand() -> None:
    mean = WeightedMean()
    first = {"w": torch.tensor([1.0, 4.0]), "n": torch.tensor(7)}
    mean.add(first, 1)
    mean.add({"w": torch.tensor([4.0, 1.0]), "n": torch.tensor(5)}, 3)
    result = mean.mean()
    assert result["w"].tolist() == [3.25, 1.75] and result["w"].dtype == torch.float32
    assert result["n"] == 7 and result["n"].dtype == torch.int64
    assert mean.mean(exact=True)["w"].dtype == torch.float64
    assert first["w"].tolist() == [1, 4], "the models are not changed"


def test_order_changes_nothing_that_single_precision_shows() -> None:
    torch.manual_seed(0)
    models = [{"w": torch.randn(500)} for _ in range(4)]
    results = []
    for order in itertools.permutations(range(4)):
        mean = WeightedMean()
        for number in order:
            mean.add(models[number], number + 1)
        results.append(mean.mean())
    assert all(same(results[0], other) for other in results)


def test_message_and_update_survive_the_wire() -> None:
    state = {"a.weight": torch.randn(2, 3), "steps": torch.tensor(4), "f": torch.tensor([True])}
    message = Message(3, {"global": state, "teacher": state}, {"distil": 1.0})
    back = Message.decode(message.encode())
    assert (back.round, back.numbers) == (3, {"distil": 1.0})
    assert same(back.models["global"], state) and same(back.models["teacher"], state)
    assert message.nbytes == 2 * (6 * 4 + 8 + 1) and back.tensors == {}

    other = Message(3, {"global": state}, {}, {"global": {"x/y.z": torch.arange(5)}, "b": state})
    back = Message.decode(other.encode())
    assert same(back.models["global"], state) and back.models.keys() == {"global"}
    assert same(back.tensors["global"], {"x/y.z": torch.arange(5)})
    assert same(back.tensors["b"], state) and other.nbytes == 2 * (6 * 4 + 8 + 1) + 5 * 8

    update = ClientUpdate(7, 12, state, {"loss": 0.1 + 0.2}, extra={"e": torch.ones(2)})
    again = ClientUpdate.decode(update.encode())
    assert (again.client, again.num_samples, again.metrics) == (7, 12, {"loss": 0.1 + 0.2})
    assert same(again.weights, state) and same(again.extra, update.extra) and again.state == {}
    assert update.nbytes == 6 * 4 + 8 + 1 + 8
    assert same(decode_state(encode_state(state)), state) and decode_state(encode_state({})) == {}


def test_seeds_differ_by_every_part() -> None:
    keys = itertools.product((0, 1), ("partition", "cohort", "batches", "model"), (0, 1), (0, 1))
    seeds = [derive(seed, purpose, round, client) for seed, purpose, round, client in keys]  # type: ignore[arg-type]
    assert len(set(seeds)) == len(seeds) == 32
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("size", [1, 3])
def test_teacher_buffer_forgets(size: int) -> None:
    buffer = TeacherBuffer(maxlen=size)
    for value in (1.0, 2.0, 6.0, 7.0):
        state = {"w": torch.tensor([value])}
        buffer.append(state)
        state["w"].zero_()  # a copy was taken
    assert len(buffer) == size
    assert buffer.mean()["w"].item() == {1: 7.0, 3: 5.0}[size]
    other = TeacherBuffer(maxlen=size)
    other.append({"w": torch.tensor([100.0])})
    other.load_state_dict(buffer.state_dict())  # as a list of models, which checkpoints keep
    assert type(buffer.state_dict()) is list and other.mean()["w"].item() == buffer.mean()["w"]
    copied = deepcopy(buffer)
    buffer.reset()
    assert (len(buffer), len(other), len(copied)) == (0, size, size)
    assert copied.maxlen == size and copied.mean()["w"].item() == {1: 7.0, 3: 5.0}[size]
