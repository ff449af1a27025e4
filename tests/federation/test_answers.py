"""Bytes that are no answer, and how many samples a client may claim."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from fedgkd_pl import FedAvg, LocalEngine
from fedgkd_pl.engines.base import Engine, Session, read
from fedgkd_pl.federation.message import ClientFailure, ClientUpdate, Message
from fedgkd_pl.federation.teachers import WeightedMean
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD

from tests.conftest import fit, linear
from tests.support.methods import table

WEIGHTS = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(4)}
GOOD = ClientUpdate(3, 5, WEIGHTS, {"loss": 0.5}, extra={"e": torch.ones(2)}).encode()


def packed(info: bytes, **tensors: torch.Tensor) -> bytes:
    from safetensors.torch import save

    return save({"info": torch.frombuffer(bytearray(info), dtype=torch.uint8), **tensors})


INFO = b'{"client": 3, "num_samples": 5, "metrics": {}, "seconds": %s}'
BLOBS = {
    "nothing": b"",
    "a header of 2^63 bytes": (2**63).to_bytes(8, "little") + b"{}",
    "weights twice": packed(b'{"client": 3, "num_samples": 5, "weights": {}}'),
    "deep": packed(b"[" * 100_000),
    "another client": packed(INFO.replace(b"3", b"4") % b"{}"),
    "no group": packed(INFO % b"{}", w=torch.zeros(1)),
}


@pytest.mark.parametrize("case", BLOBS)
def test_bytes_that_are_no_answer(case: str) -> None:
    answer = read(b"=" + BLOBS[case], 3, 2.0)
    assert isinstance(answer, ClientFailure) and answer.client == 3 and answer.reason
    assert isinstance(read(BLOBS[case], 3, 2.0), ClientFailure)  # without the first byte, too


def test_the_failure_of_a_worker_is_read_whatever_it_says() -> None:
    assert read(b'!["a reason", "a trace"]', 3, 0.0) == ClientFailure(3, "a reason", "a trace")
    for text in (b"![1]", b"!{}", b"!", b"!NaN", b"![1, 2, 3]", b"!" + b"[" * 100_000):
        answer = read(text, 3, 0.0)
        assert isinstance(answer, ClientFailure) and "cannot be read" in answer.reason


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(place=st.integers(0, len(GOOD) - 1), byte=st.integers(0, 255), cut=st.booleans())
def test_damaged_bytes(place: int, byte: int, cut: bool) -> None:
    blob = GOOD[:place] if cut else GOOD[:place] + bytes([byte]) + GOOD[place + 1 :]
    answer = read(b"=" + blob, 3, 2.0)
    assert answer.client == 3 and isinstance(answer, ClientUpdate | ClientFailure)


class Claims(Engine):
    """Where clients have data of their own: they say how much."""

    max_samples: int | None = 1000

    def __init__(self, claims: dict[int, int]) -> None:
        self.claims = claims

    def open(self, job: Any, cohort_size: int) -> Session:
        inner, claims = LocalEngine(1).open(job, cohort_size), self.claims

        class Claiming(Session):
            def run(self, message: Message, cohort: Sequence[int]) -> Iterator[Any]:
                for answer in inner.run(message, cohort):
                    assert isinstance(answer, ClientUpdate)
                    answer.num_samples = claims.get(answer.client, answer.num_samples)
                    yield answer

        return Claiming()


def test_where_the_server_does_not_know_how_much_clients_have_there_is_a_cap() -> None:
    def after(claims: dict[int, int]) -> tuple[torch.Tensor, list[str]]:
        model = FedAvg(linear(), optimizer=partial(SGD, lr=0.3), engine=Claims(claims))
        fit(model, table(), 1)
        return model.net.weight.detach(), [f.reason for f in model.results.failures]

    honest, failures = after({})
    assert failures == []
    for number in (1001, 10**15, 10**400, 0, -5):
        weight, failures = after({1: number})
        assert len(failures) == 1 and " samples" in failures[0]
        assert not torch.equal(weight, honest)  # the mean of the two others
    assert after({1: 1000})[1] == []


def test_a_huge_weight_in_the_mean_does_not_overflow() -> None:
    """1e12 samples, a million clients and the largest float that a model may have."""
    from fedgkd_pl.engines.flower.engine import MOST
    from fedgkd_pl.federation.message import like

    one = {"w": torch.zeros(1, dtype=torch.float64)}
    largest = like(one)["w"].high
    mean = WeightedMean()
    mean.add({"w": torch.tensor([largest], dtype=torch.float64)}, MOST * 10**6)
    mean.add({"w": torch.tensor([largest], dtype=torch.float64)}, MOST * 10**6)
    assert mean.mean()["w"].item() == pytest.approx(largest)
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        largest = like({"w": torch.zeros(1, dtype=kind)})["w"].high
        assert torch.tensor(2 * largest, dtype=kind).isfinite()  # the server's difference of two
