"""Whatever a client answers, a round goes on: with it as declared, else without it.

For every method one genuine round is kept and played again and again, each time with another thing
wrong in the answer of one client. What the server has afterwards must be, bit for bit, what it has
after the round without that client.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import FedAvg, FedDistillPlus, LocalEngine, RunFiles
from fedgkd_pl.engines.base import Engine, Session
from fedgkd_pl.engines.worker import read
from fedgkd_pl.federation.aggregate import WeightedMean
from fedgkd_pl.federation.message import ClientFailure, ClientUpdate, Message
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from tests.conftest import Table, fit, linear
from tests.support.methods import EVERY, build, table
from tests.support.runs import of_families

VICTIM = 1  # of the clients 0, 1, 2, which have 8, 5 and 6 samples
Change = Callable[[ClientUpdate], Any]


def method(name: str) -> FedAvg:
    local: dict[str, Any] = {"optimizer": partial(SGD, lr=0.3), "engine": LocalEngine(1)}
    if name == "FedAvg":
        return FedAvg(linear(), **local)
    if name == "BatchNorm":
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        return FedAvg(net, **local)
    return build(name)


class Replay(Session):
    """What was answered before."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    def run(self, message: Message, cohort: Sequence[int]) -> Iterator[Any]:
        return iter(self.answers)


class Round:
    """A round that can be played again, with other answers."""

    def __init__(self, model: Any, cohort: list[int], step: Callable[..., None]) -> None:
        self.model, self.cohort, self.step = model, cohort, step
        self.start = self._kept()
        self.optimizer = deepcopy(model.optimizers().optimizer.state_dict())
        self.answers = [own(a) for a in model._session.run(model.broadcast(), cohort)]
        self.place = next(n for n, a in enumerate(self.answers) if a.client == VICTIM)
        self.with_all = self.play(lambda update: update)
        assert not model.results.failures
        self.without = self.play(lambda update: ClientFailure(VICTIM, "is left out"))
        assert not alike(self.with_all, self.without)

    def play(self, change: Change) -> Any:
        """What the server has after the round."""
        answers = [own(answer) for answer in self.answers]
        answers[self.place] = change(answers[self.place])
        return self.play_all(answers)

    def play_all(self, answers: list[Any]) -> Any:
        model = self.model
        model.load_state_dict(self.start["state_dict"])
        model.on_load_checkpoint(deepcopy(self.start))
        model.optimizers().optimizer.load_state_dict(deepcopy(self.optimizer))
        model.report = {}
        model._session = Replay(answers)
        self.step(self.cohort, 0)
        return self._kept() | {"report": dict(model.report)}

    def _kept(self) -> Any:
        checkpoint: dict[str, Any] = {"state_dict": self.model.state_dict()}
        self.model.on_save_checkpoint(checkpoint)
        return deepcopy(checkpoint)

    def assert_left_out(self, change: Change, what: str) -> None:
        after = self.play(change)
        assert [failure.client for failure in self.model.results.failures] == [VICTIM], what
        assert self.model.results.failures[0].reason, what
        assert alike(after, self.without), what

    def assert_harmless(self, change: Change, what: str) -> None:
        after = self.play(change)
        assert not self.model.results.failures, (what, self.model.results.failures)
        for key in self.with_all.keys() - {"report"}:
            assert alike(after[key], self.with_all[key]), what


def own(update: Any) -> Any:
    """A copy, no two parts of which are one: MOON's state is its model."""
    parts = {group: dict(getattr(update, group)) for group in ("weights", "extra", "state")}
    plain = {"metrics": dict(update.metrics), "seconds": dict(update.seconds)}
    copied = {group: {n: t.clone() for n, t in part.items()} for group, part in parts.items()}
    return ClientUpdate(update.client, update.num_samples, **copied, **plain)


def alike(a: Any, b: Any) -> bool:
    """Equal bit for bit, however nested."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


def played(name: str, trial: Callable[[Round], None], *callbacks: Any) -> None:
    """Gives a trial the second round of a run: from then on there are teachers and generators."""
    model = method(name)
    step = model.training_step

    def training_step(cohort: list[int], batch_idx: int) -> None:
        if model.round == 2:
            trial(Round(model, cohort, step))
        else:
            step(cohort, batch_idx)

    model.training_step = training_step  # type: ignore[method-assign]
    fit(model, table(), 2, callbacks=list(callbacks))


# -- every tensor -------------------------------------------------------------------------------


class Odd(torch.Tensor):
    """A tensor whose operations could be anybody's."""


def bad_tensors(tensor: torch.Tensor) -> dict[str, Any]:
    """What may come in the place of a tensor and never be used."""
    floating = tensor.is_floating_point()
    found: dict[str, Any] = {
        "another dimension": tensor[None],
        "a part": tensor.flatten()[:-1],
        "more": torch.cat([tensor.flatten()] * 2),
        "empty": tensor.new_zeros(0),
        "half": tensor.half(),
        "double": tensor.double(),
        "int32": tensor.int(),
        "bool": tensor.bool(),
        "complex": torch.complex(tensor.double(), tensor.double()),
        "sparse": tensor.to_sparse(),
        "meta": tensor.to("meta"),
        "subclass": tensor.as_subclass(Odd),
        "list": tensor.tolist(),
        "array": tensor.numpy(),
        "number": 1.0,
        "none": None,
        "text": "0",
    }
    if tensor.dtype == torch.float64:
        del found["double"]  # which it is
    if floating:
        found["quantised"] = torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)
        found["parameter"] = nn.Parameter(tensor.clone())
        found["gradient"] = tensor.clone().requires_grad_()
    largest = torch.finfo(tensor.dtype).max if floating else torch.iinfo(tensor.dtype).max
    values = {"largest": largest, "lowest": -largest}
    if floating:
        values |= {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
    else:
        values |= {"-1": -1}
    for what, value in values.items():
        found[what] = tensor.clone()
        found[what].view(-1)[-1] = value
    return found


def put(group: str, name: Any, value: Any) -> Change:
    def change(update: ClientUpdate) -> ClientUpdate:
        getattr(update, group)[name] = value
        return update

    return change


def drop(group: str, name: str, new: Any = None) -> Change:
    def change(update: ClientUpdate) -> ClientUpdate:
        tensor = getattr(update, group).pop(name)
        if new is not None:
            getattr(update, group)[new] = tensor
        return update

    return change


def replaced(**values: Any) -> Change:
    def change(update: ClientUpdate) -> ClientUpdate:
        for field, value in values.items():
            setattr(update, field, value)
        return update

    return change


def bad_fields(update: ClientUpdate) -> Iterator[tuple[str, Change]]:
    """Every tensor of an answer dropped, renamed, added, and replaced by whatever is none of it."""
    for group in ("weights", "extra", "state"):
        tensors: dict[str, torch.Tensor] = getattr(update, group)
        for name, tensor in tensors.items():
            yield f"{group} {name} dropped", drop(group, name)
            for new in (f"{name}.", "", 7, "a\nb", name * 2000):
                yield f"{group} {name} renamed", drop(group, name, new)
            for what, value in bad_tensors(tensor).items():
                yield f"{group} {name} {what}", put(group, name, value)
        for new in ("another", "", 7, "../x"):
            yield f"{group} has more", put(group, new, torch.zeros(1))
        wrong: list[Any] = [None, [], 3, "weights", [("a", torch.zeros(1))]]
        for value in [*wrong, {}] if tensors else wrong:
            yield f"{group} is {value!r}", replaced(**{group: value})


def bad_extras(update: ClientUpdate) -> Iterator[tuple[str, Change]]:
    """Of the right shape and type, and still not what a client can have."""
    for group in ("extra", "state"):
        report = getattr(update, group)
        if "holds" in report:
            means, holds = report["means"], report["holds"]
            for value in (0.5, -1.0, 2.0, 1e-30):
                one = holds.clone()
                one[0] = value
                yield f"{group} holds {value}", put(group, "holds", one)
            yield f"{group} holds nothing", put(group, "holds", torch.zeros_like(holds))
            yield f"{group} means of others", put(group, "holds", one_less(holds))
            yield f"{group} means", put(group, "means", means * 0 + 1.1e6)
    if "counts" in update.extra:
        counts = update.extra["counts"]
        for value in (counts + 1, counts * 10**15, counts * 0, counts - counts.max()):
            yield f"counts {value.tolist()}", put("extra", "counts", value)
        wrapped = torch.tensor([2**63 - 1, 2**63 - 1, 2 + update.num_samples])
        assert int(wrapped.sum()) == update.num_samples
        yield "counts that wrap", put("extra", "counts", wrapped)


def one_less(holds: torch.Tensor) -> torch.Tensor:
    less = holds.clone()
    less[int(holds.nonzero()[0])] = 0
    return less


FORMS = ("BatchNorm", "FedDistill")  # other answers than those of the families


@pytest.mark.parametrize("name", of_families(["FedAvg", "BatchNorm", *EVERY], *FORMS))
def test_tensors_that_are_not_as_declared(name: str, tmp_path: Path) -> None:
    told = 1  # the round without the client, to which all others are compared

    def trial(round: Round) -> None:
        nonlocal told
        genuine = round.answers[round.place]
        changes = [*bad_fields(genuine), *bad_extras(genuine)]
        assert len(changes) >= 2 * 24  # a tensor each for the weights and the bias
        # nothing that is reported changes here, and Lightning's log takes most of a round's time
        round.model.log = lambda *args, **kwargs: None
        for what, change in changes:
            round.assert_left_out(change, what)
        told += len(changes)
        for group in ("weights", "extra", "state"):
            for key, tensor in getattr(genuine, group).items():
                if tensor.dim() == 2:  # the same numbers, otherwise laid out
                    other = tensor.t().contiguous().t()
                    round.assert_harmless(put(group, key, other), f"{group} {key} transposed")

    played(name, trial, RunFiles(str(tmp_path)))
    rows = list(csv.DictReader((tmp_path / "failures.csv").open()))
    assert len(rows) == told and {row["client"] for row in rows} == {str(VICTIM)}
    assert all(row["round"] == "2" and 0 < len(row["reason"]) <= 500 for row in rows)
    assert all(row["reason"].isprintable() for row in rows)


# -- every number -------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(),
    st.sampled_from([0, -1, 4, 5, 6, 10**15, 2**63 - 1, 2**64, 10**400, True, 5.0]),
    st.floats(),
)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.binary(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=4,
)
KNOWN = st.sampled_from(["loss", "acc", "ce"])
ODD = st.sampled_from(["x/dataloader_idx_0", "dataloader_idx_0", "a\n", "é", "mine"])
METRICS = st.one_of(
    st.dictionaries(KNOWN, st.one_of(NUMBERS, ANYTHING), max_size=2),
    st.dictionaries(st.one_of(KNOWN, ODD, st.text(max_size=6)), NUMBERS, max_size=3),
    ANYTHING,
)


@pytest.mark.parametrize("name", of_families(["FedAvg", *EVERY]))
def test_numbers_that_are_not_as_declared(name: str) -> None:
    examples = 60 if name == "FedAvg" else 6

    def trial(round: Round) -> None:
        true = round.answers[round.place].num_samples
        few = settings(max_examples=examples, deadline=None, database=None, derandomize=True)

        @few
        @given(number=st.one_of(NUMBERS, ANYTHING))
        def samples(number: Any) -> None:
            good = type(number) is int and number == true
            (round.assert_harmless if good else round.assert_left_out)(
                replaced(num_samples=number), f"{number!r} samples"
            )

        @few
        @given(client=st.one_of(st.sampled_from([0, 2, 3, 1.0, True, "1"]), ANYTHING))
        def client(client: Any) -> None:
            good = type(client) is int and client == VICTIM
            (round.assert_harmless if good else round.assert_left_out)(
                replaced(client=client), f"client {client!r}"
            )

        @few
        @given(metrics=METRICS)
        def reported(metrics: Any) -> None:
            names = {"loss", "acc", "ce", "kd", "contrast", "proximal", "generated"}
            good = isinstance(metrics, dict) and all(
                key in names and type(value) in (int, float) and abs(value) < 3.4e38
                for key, value in metrics.items()
            )
            (round.assert_harmless if good else round.assert_left_out)(
                replaced(metrics=metrics), f"metrics {metrics!r}"
            )

        @few
        @given(seconds=METRICS)
        def took(seconds: Any) -> None:
            round.assert_harmless(replaced(seconds=seconds), f"seconds {seconds!r}")

        for test in (samples, client, reported, took):
            test()
        many = {f"a{n}": 1.0 for n in range(40)}
        round.assert_left_out(replaced(metrics=many), "more metrics than anybody has")

    played(name, trial)


class OthersMetrics(FedAvg):
    """A method with a client half of its own, which may report what FedAvg's does not."""

    def client(self) -> Any:
        return super().client()


def test_metrics_of_a_method_that_names_none() -> None:
    """Any plain name will do; one that Lightning takes for its own ended the run."""
    bad = ("x/dataloader_idx_0", "dataloader_idx_0", "", "a b", "a\n", "1a", "a" * 65, "ä", 3, None)
    model = OthersMetrics(linear(), engine=LocalEngine(1))
    step = model.training_step

    def training_step(cohort: list[int], batch_idx: int) -> None:
        round = Round(model, cohort, step)
        for name in bad:
            round.assert_left_out(put("metrics", name, 0.5), repr(name))
        for name in ("mine", "_", "A1", "a" * 64):
            round.assert_harmless(put("metrics", name, 0.5), repr(name))
            assert model.report[f"client/{name}_mean"] == 0.5
        assert alike(
            round.play(put("metrics", "loss", 10**30))["state_dict"], round.with_all["state_dict"]
        )

    model.training_step = training_step  # type: ignore[method-assign]
    fit(model, table(), 1)


# -- who answers --------------------------------------------------------------------------------


def test_one_answer_for_each_client_that_was_asked() -> None:
    def trial(round: Round) -> None:
        first, second, third = round.answers
        clients = [answer.client for answer in round.answers]
        assert clients == [0, 2, 1]  # the largest first
        cases: dict[str, tuple[list[Any], list[int]]] = {
            "no answer": ([first, second], [1]),
            "nobody": ([], [0, 2, 1]),
            "twice": ([first, second, first], [1]),
            "swapped": ([first, third, second], [2, 1]),
            "no update": ([first, second, None], [1]),
            "some text": ([first, second, "an answer"], [1]),
            "another's failure": ([first, second, ClientFailure(7, "\x1b[31mno\n" * 999)], [1]),
            "no reason": ([first, second, ClientFailure(1, None)], [1]),  # type: ignore[arg-type]
            "one more": ([first, second, third, first], []),
        }
        for what, (answers, failed) in cases.items():
            after = round.play_all([own(a) if isinstance(a, ClientUpdate) else a for a in answers])
            left_out = [failure.client for failure in round.model.results.failures]
            assert left_out == failed, what
            if failed == [1]:
                assert alike(after, round.without), what
            if not failed:
                assert alike(after, round.with_all), what
            assert all(len(f.reason) <= 500 for f in round.model.results.failures)

    played("FedAvg", trial)


# -- bytes --------------------------------------------------------------------------------------

GOOD = ClientUpdate(
    *(3, 5, {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(4)}, {"loss": 0.5}),
    **{"extra": {"e": torch.ones(2)}, "seconds": {"student": 1.0}},
).encode()


def packed(info: bytes, **tensors: torch.Tensor) -> bytes:
    from safetensors.torch import save

    return save({"info": torch.frombuffer(bytearray(info), dtype=torch.uint8), **tensors})


INFO = b'{"client": 3, "num_samples": 5, "metrics": {}, "seconds": %s}'
BLOBS = {
    "nothing": b"",
    "no header": b"\xff" * 64,
    "a header of 2^63 bytes": (2**63).to_bytes(8, "little") + b"{}",
    "half": GOOD[: len(GOOD) // 2],
    "a list": packed(b"[1, 2]"),
    "a text": packed(b'"client"'),
    "not UTF-8": packed(b"\xff\xfe"),
    "nothing in it": packed(b"{}"),
    "another key": packed(b'{"client": 3, "num_samples": 5, "weight": 1}'),
    "weights twice": packed(b'{"client": 3, "num_samples": 5, "weights": {}}'),
    "deep": packed(b"[" * 100_000),
    "digits": packed(b'{"client": 3, "num_samples": ' + b"9" * 5000 + b"}"),
    "another client": packed(INFO.replace(b"3", b"4") % b"{}"),
    "a client that is a list": packed(INFO.replace(b"3", b"[3]") % b"{}"),
    "another group": packed(INFO % b"{}", **{"weird/w": torch.zeros(1)}),
    "no group": packed(INFO % b"{}", w=torch.zeros(1)),
}


@pytest.mark.parametrize("case", BLOBS)
def test_bytes_that_are_no_answer(case: str) -> None:
    answer = read(b"=" + BLOBS[case], 3, 2.0)
    assert isinstance(answer, ClientFailure) and answer.client == 3 and answer.reason
    assert isinstance(read(BLOBS[case], 3, 2.0), ClientFailure)  # without the first byte, too


@pytest.mark.parametrize("seconds", [b"[1, 2]", b'{"a": [1]}', b'{"a": NaN}', b'{"a": "1"}', b"3"])
def test_seconds_that_are_none_are_dropped(seconds: bytes) -> None:
    answer = read(b"=" + packed(INFO % seconds), 3, 2.0)
    assert isinstance(answer, ClientUpdate) and answer.seconds == {"transfer": 2.0}


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


# -- what is declared ---------------------------------------------------------------------------


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
        weight, failures = after({VICTIM: number})
        assert len(failures) == 1 and " samples" in failures[0]
        assert not torch.equal(weight, honest)  # the mean of the two others
    assert after({VICTIM: 1000})[1] == []


def test_a_huge_weight_in_the_mean_does_not_overflow() -> None:
    """1e12 samples, a million clients and the largest float that a model may have."""
    from fedgkd_pl.engines.flower.engine import MOST
    from fedgkd_pl.federation.answers import like

    one = {"w": torch.zeros(1, dtype=torch.float64)}
    largest = like(one)["w"].high
    mean = WeightedMean()
    mean.add({"w": torch.tensor([largest], dtype=torch.float64)}, MOST * 10**6)
    mean.add({"w": torch.tensor([largest], dtype=torch.float64)}, MOST * 10**6)
    assert mean.mean()["w"].item() == pytest.approx(largest)
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        largest = like({"w": torch.zeros(1, dtype=kind)})["w"].high
        assert torch.tensor(2 * largest, dtype=kind).isfinite()  # the server's difference of two


def test_counts_grow_as_far_as_training_can() -> None:
    from fedgkd_pl.federation.answers import like

    spec = like({"n": torch.tensor([7, 9]), "p": torch.tensor([-3])}, grows=10)
    assert spec["n"].fault(torch.tensor([0, 19])) == "" == spec["p"].fault(torch.tensor([-3]))
    assert "not 0 to 19" in spec["n"].fault(torch.tensor([7, 20]))
    assert "not 0 to 19" in spec["n"].fault(torch.tensor([-1, 9]))
    assert "not -3 to 10" in spec["p"].fault(torch.tensor([-4]))


def test_a_method_of_ones_own_is_told_what_it_did_not_declare() -> None:
    from fedgkd_pl.errors import RunFailed
    from fedgkd_pl.methods.fedavg import FedAvgClient

    class Sends(FedAvgClient):
        def reply(self) -> ClientUpdate:
            update = super().reply()
            update.extra = {"mine": torch.ones(1)}
            return update

    class Careless(FedAvg):
        def client(self) -> FedAvgClient:
            return Sends(self.net, self.optimizer, self.scheduler)

    text = "its extra has another entry, mine: client_extra of the method does not declare it"
    with pytest.raises(RunFailed, match=text):
        fit(Careless(linear(), engine=LocalEngine(1)), table(), 3)


def test_reports_of_feddistill_have_one_type_and_are_sums_in_single_precision() -> None:
    """Means of 4,000 samples a label, of a net that does not move; bfloat16 rounded them."""
    model = FedDistillPlus(linear(), optimizer=partial(SGD, lr=0.0), engine=LocalEngine(1))
    data = Table(sizes=(12000, 5), batch_size=100)
    fit(model, data, 1, precision="bf16-mixed")
    x, y = data.arrays()[0]
    weight, bias = (p.detach().double().numpy() for p in model.net.parameters())
    logits = x.astype(np.float64) @ weight.T + bias
    expected = np.stack([logits[y == label].mean(0) for label in range(3)])
    assert model.reports[0]["means"].dtype == torch.float32
    np.testing.assert_allclose(model.reports[0]["means"].numpy(), expected, atol=2e-3)


# -- over Flower --------------------------------------------------------------------------------


@pytest.mark.engines
def test_nodes_that_answer_what_they_should_not(tmp_path: Path) -> None:
    """In each round something else: the run is the one in which that node failed instead."""
    pytest.importorskip("flwr", reason="the extra flower is not installed")
    from fedgkd_pl.engines.flower.records import to_arrays

    from tests.support.flower_apps import Runs, failures, weights

    nonsense: dict[int, tuple[str, dict[str, Any], str]] = {
        1: ("metrics", {"seconds.student": [1.0, 2.0], "seconds.x/y": 1.0}, ""),
        2: ("counts", {"num_samples": 10**15}, "reports 1000000000000000 samples, but has "),
        3: ("counts", {"num_samples": 3.5}, "reports 3.5 samples, which is no whole number"),
        4: ("counts", {"num_samples": [3]}, "reports [3] samples, which is no whole number"),
        5: ("metrics", {"x/dataloader_idx_0": 1.0}, "reports 'x/dataloader_idx_0', which is no na"),
        6: ("metrics", {"loss": [0.1, 0.2]}, "its loss is [0.1, 0.2]"),
        7: ("metrics", {"loss": 1e39}, "its loss is 1e+39"),
        8: ("extra", {"more": torch.zeros(1)}, "its extra has another entry, more"),
        9: ("counts", {"mark": [9, 1]}, "its state has another entry, kept by its node"),
    }

    def change(honest: bool, grid: Any) -> None:
        def answer(message: Any, node: int) -> Any:
            reply = grid._answer(message, node)
            if message.metadata.message_type != "train" or node != 12:
                return reply
            record, values, text = nonsense[message.content["task"]["round"]]
            if honest and text:
                raise ValueError("its node is gone")
            for name in [] if honest else list(reply.content.metric_records):
                client = name.split(".")[0]
                if record == "extra":
                    reply.content[f"{client}.extra"] = to_arrays(values)
                elif name.endswith(record):
                    reply.content[name].update(values)
            return reply

        grid.answer = answer

    runs = Runs(tmp_path)
    app = runs.app("FedGKD", "--rounds", str(len(nonsense)))
    for honest in (True, False):
        runs.flower(app, change=partial(change, honest))
    first, second = (tmp_path / f"flower-FedGKD/version_{n}" for n in range(2))
    assert alike(weights(first), weights(second))
    assert (first / "metrics.csv").read_text() == (second / "metrics.csv").read_text()
    told = failures(second)
    assert [row[:2] for row in told] == [row[:2] for row in failures(first)]
    assert {int(round) for round, _, _ in told} == set(range(2, 10))
    for round, client, reason in told:
        assert client in ("1", "3") and reason.startswith(nonsense[int(round)][2]), reason


@pytest.mark.engines
def test_nodes_with_data_of_their_own_need_a_cap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("flwr", reason="the extra flower is not installed")
    from tests.support.flower_apps import Runs, failures

    runs = Runs(tmp_path)
    words = ["--data.participation", "1", "--data.num_clients", "2", "--rounds", "1"]
    app = runs.app("FedGKD", *words, "--model.engine.patience", "0")
    nodes = {11: {"client": 0, "own-data": True}, 12: {"client": 1}}
    caps = {"": "no node that", "1436": "reports 1437 samples, more than max_samples (1436)"}
    for place, (cap, text) in enumerate(caps.items()):
        runs.flower(app, nodes, args=f"--model.engine.max_samples {cap}" if cap else "")
        ((_, client, reason),) = failures(tmp_path / f"flower-FedGKD/version_{place}")
        assert client == "0" and reason.startswith(text)
    text = "node 11 is not used: max_samples: must say how many samples a client with data of its"
    assert caplog.text.count(text) == 1


@pytest.mark.parametrize("number", [0, -1, 10**13])
@pytest.mark.engines
def test_a_cap_that_is_none(number: int) -> None:
    pytest.importorskip("flwr", reason="the extra flower is not installed")
    from fedgkd_pl.engines.flower.engine import FlowerEngine

    with pytest.raises(ValueError, match="max_samples: must be from 1 to"):
        FlowerEngine(max_samples=number)
