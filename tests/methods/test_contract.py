"""What every method owes to the round, in process, on a tiny table.

For every method the second round of a run is kept and played again, each time with another answer
of one client. What the server has afterwards must be, bit for bit, what the contract says.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fedgkd_pl import FedAvg, LocalEngine
from fedgkd_pl.engines.base import Session
from fedgkd_pl.federation.message import ClientFailure, ClientUpdate, Message
from fedgkd_pl.storage.checkpoint import HALF, SafeCheckpointIO, load_newest
from torch import nn
from torch.optim import SGD

from tests.conftest import fit
from tests.support.methods import EVERY, build, table

VICTIM = 1  # of the clients 0, 1, 2, which have 8, 5 and 6 samples
GROUPS = ("weights", "extra", "state")
Change = Callable[[ClientUpdate], Any]


def method(name: str) -> FedAvg:
    if name in ("FedAvg", "BatchNorm"):
        torch.manual_seed(0)
        norm = [nn.BatchNorm1d(5)] if name == "BatchNorm" else []
        net = nn.Sequential(nn.Linear(4, 5), *norm, nn.Linear(5, 3))
        return FedAvg(net, optimizer=partial(SGD, lr=0.3), engine=LocalEngine(1))
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
        self.start = self.kept()
        self.message = model.broadcast()
        self.answers = [own(a) for a in model._session.run(self.message, cohort)]
        self.place = next(n for n, a in enumerate(self.answers) if a.client == VICTIM)
        self.genuine = self.answers[self.place]
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
        model.optimizers().optimizer.load_state_dict(deepcopy(self.start["optimizer"]))
        model.report = {}
        model._session = Replay(answers)
        self.step(self.cohort, 0)
        return self.kept() | {"report": dict(model.report)}

    def kept(self) -> Any:
        checkpoint: dict[str, Any] = {"state_dict": self.model.state_dict()}
        self.model.on_save_checkpoint(checkpoint)
        checkpoint["fedgkd_pl"].pop(HALF, None)  # which it is, and here may be
        checkpoint["fedgkd_pl"] |= {"first_loss": None, "diverged_round": None}  # tell of a NaN
        checkpoint["optimizer"] = self.model.optimizers().optimizer.state_dict()
        return deepcopy(checkpoint)

    def assert_left_out(self, change: Change, what: str) -> None:
        after = self.play(change)
        assert [failure.client for failure in self.model.results.failures] == [VICTIM], what
        assert self.model.results.failures[0].reason, what
        assert alike(after, self.without), what


def own(update: Any) -> Any:
    """A copy, no two parts of which are one: MOON's state is its model."""
    parts = {group: dict(getattr(update, group)) for group in GROUPS}
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


def played(name: str, trial: Callable[[Round], None]) -> None:
    """Gives a trial the second round of a run: from then on there are teachers and generators."""
    model = method(name)
    step = model.training_step

    def training_step(cohort: list[int], batch_idx: int) -> None:
        if model.round == 2:
            trial(Round(model, cohort, step))
        else:
            step(cohort, batch_idx)

    model.training_step = training_step  # type: ignore[method-assign]
    fit(model, table(), 2)


def put(group: str, name: Any, value: Any) -> Change:
    def change(update: ClientUpdate) -> ClientUpdate:
        getattr(update, group)[name] = value
        return update

    return change


def drop(group: str, name: str) -> Change:
    def change(update: ClientUpdate) -> ClientUpdate:
        getattr(update, group).pop(name)
        return update

    return change


def replaced(**values: Any) -> Change:
    def change(update: ClientUpdate) -> ClientUpdate:
        for field, value in values.items():
            setattr(update, field, value)
        return update

    return change


def bad_tensors(tensor: torch.Tensor) -> dict[str, Any]:
    """What may come in the place of a tensor and never be used."""
    found: dict[str, Any] = {
        "another dimension": tensor[None],
        "a part": tensor.flatten()[:-1],
        "bool": tensor.bool(),
        "half": tensor.half(),
        "sparse": tensor.to_sparse(),
        "meta": tensor.to("meta"),
        "array": tensor.numpy(),
        "none": None,
    }
    values = ("nan", "inf", "-inf") if tensor.is_floating_point() else ()
    for value in values:
        found[value] = tensor.clone()
        found[value].view(-1)[-1] = float(value)
    return found


def bad_answers(update: ClientUpdate) -> Iterator[tuple[str, Change]]:
    """One tensor of every group dropped, added, and replaced by what it is not."""
    for group in GROUPS:
        tensors: dict[str, torch.Tensor] = getattr(update, group)
        for name in list(tensors)[-1:]:
            yield f"{group} {name} dropped", drop(group, name)
            for what, value in bad_tensors(tensors[name]).items():
                yield f"{group} {name} {what}", put(group, name, value)
        yield f"{group} has more", put(group, "../x", torch.zeros(1))
        yield f"{group} is none", replaced(**{group: None})
    holds = update.extra.get("holds")
    if holds is not None:  # FedDistill's: a label is held or not, and has logits if it is
        yield "holds half", put("extra", "holds", holds * 0.5)
        yield "means of others", put("extra", "holds", torch.zeros_like(holds))
    counts = update.extra.get("counts")
    if counts is not None:  # FedGen's: of n_k samples
        yield "counts of more", put("extra", "counts", counts + 1)
        wrapped = torch.tensor([2**63 - 1, 2**63 - 1, 2 + update.num_samples])
        yield "counts that wrap", put("extra", "counts", wrapped)
    labels = update.extra.get("labels")
    if labels is not None:  # CFD's: probabilities, of so many bits
        yield "labels that do not sum to 1", put("extra", "labels", labels * 0.5)
    for samples in (0, -1, update.num_samples + 1, 10**400, 5.0, True, None):
        yield f"{samples} samples", replaced(num_samples=samples)
    for client in (0, 7, 1.0, True, "1"):
        yield f"client {client!r}", replaced(client=client)
    for name in ("x/dataloader_idx_0", "", "a b", "a\n", 3):
        yield f"metric {name!r}", put("metrics", name, 0.5)
    for number in (float("nan"), 1e39, "1", None):
        yield f"loss {number!r}", put("metrics", "loss", number)


@pytest.mark.parametrize("name", ["FedAvg", "BatchNorm", *EVERY])
def test_the_contract_of_a_method(name: str, tmp_path: Path) -> None:
    def trial(round: Round) -> None:
        model = round.model
        # the wire: message and answers are what they were
        message = Message.decode(round.message.encode())
        assert message.round == 2 and message.numbers == round.message.numbers
        assert alike(message.models, round.message.models)
        assert alike(message.tensors, round.message.tensors)
        sent = ClientUpdate.decode(round.genuine.encode())
        assert all(alike(getattr(sent, g), getattr(round.genuine, g)) for g in GROUPS)
        # the checkpoint: what a method keeps comes back
        SafeCheckpointIO().save_checkpoint(round.with_all, tmp_path / "kept.ckpt")
        saved = load_newest(tmp_path / "kept.ckpt", states=True)[0]
        model.on_load_checkpoint(saved)
        assert alike(round.kept()["fedgkd_pl"], round.with_all["fedgkd_pl"])
        # nothing that is reported changes here, and Lightning's log takes most of a round's time
        model.log = lambda *args, **kwargs: None
        # a round without enough clients changes nothing but that it has failed
        model.min_clients = 4
        void, start = round.play(lambda update: update), round.start
        model.min_clients = 1
        assert all(alike(void[part], start[part]) for part in ("state_dict", "optimizer"))
        changed = {
            key
            for key in start["fedgkd_pl"]
            if not alike(start["fedgkd_pl"][key], void["fedgkd_pl"][key])
        }
        assert changed == {"bytes_down", "bytes_up", "failed_rounds"}
        # a wrong answer is a client that has failed
        for what, change in bad_answers(round.genuine):
            round.assert_left_out(change, what)

    played(name, trial)


def test_one_answer_for_each_client_that_was_asked() -> None:
    def trial(round: Round) -> None:
        first, second, third = round.answers
        assert [answer.client for answer in round.answers] == [0, 2, 1]  # the largest first
        cases: dict[str, tuple[list[Any], list[int]]] = {
            "no answer": ([first, second], [1]),
            "nobody": ([], [0, 2, 1]),
            "twice": ([first, second, first], [1]),
            "swapped": ([first, third, second], [2, 1]),
            "some text": ([first, second, "an answer"], [1]),
            "another's failure": ([first, second, ClientFailure(7, "\x1b[31mno\n" * 999)], [1]),
            "one more": ([first, second, third, first], []),
        }
        for what, (answers, failed) in cases.items():
            after = round.play_all([own(a) if isinstance(a, ClientUpdate) else a for a in answers])
            failures = round.model.results.failures
            assert [failure.client for failure in failures] == failed, what
            assert all(f.reason.isprintable() and len(f.reason) <= 500 for f in failures)
            if failed in ([], [1]):
                assert alike(after, round.without if failed else round.with_all), what

    played("FedAvg", trial)
