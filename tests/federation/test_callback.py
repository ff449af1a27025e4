"""The hooks of a round, and what callbacks see while they run."""

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from fedgkd_pl import FedAvg, FederatedCallback
from fedgkd_pl.engines.base import Engine, Session
from fedgkd_pl.federation.client_trainer import quiet
from fedgkd_pl.federation.message import ClientFailure, ClientUpdate
from lightning.pytorch import Callback

from tests.conftest import Table, fit, linear

LIGHTNING = logging.getLogger("lightning.pytorch.utilities.rank_zero")


class OneFails(Engine, Session):
    """Client 0 answers what it got, client 1 fails."""

    def open(self, job: Any, cohort_size: int) -> Session:
        return self

    def run(self, message: Any, cohort: Any) -> Iterator[ClientUpdate | ClientFailure]:
        yield ClientUpdate(0, 8, message.models["global"], {"loss": 2.0})
        yield ClientFailure(1, "has gone home")


class Told(FederatedCallback):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def check(self, model: Any, data: Any) -> None:
        self.calls.append(("check", type(model), data.name))

    def on_broadcast(self, trainer: Any, pl_module: Any, message: Any, cohort: Any) -> None:
        self.calls.append(("on_broadcast", message.round, list(cohort)))

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any, cohort_size: int) -> None:
        self.calls.append(("on_client_end", update.client, cohort_size))

    def on_client_failed(self, trainer: Any, pl_module: Any, failure: Any, size: int) -> None:
        self.calls.append(("on_client_failed", failure.reason, size))

    def on_evaluated(
        self, trainer: Any, pl_module: Any, split: str, values: Any, confusion: Any
    ) -> None:
        self.calls.append(("on_evaluated", split, int(confusion.sum())))


class Plain(Callback):
    """Lightning's own, with the same hooks."""

    __init__, on_broadcast, on_client_end = Told.__init__, Told.on_broadcast, Told.on_client_end
    on_client_failed, on_evaluated = Told.on_client_failed, Told.on_evaluated


def test_the_hooks_of_a_round_in_their_order() -> None:
    ours, plain = Told(), Plain()
    fit(FedAvg(linear(), engine=OneFails()), Table(), 1, callbacks=[ours, plain])
    round_ = [
        ("on_broadcast", 1, [0, 1]),
        ("on_client_end", 0, 2),
        ("on_client_failed", "has gone home", 2),
        ("on_evaluated", "test", 6),
    ]
    assert ours.calls == [("check", FedAvg, "table"), *round_]
    assert plain.calls == round_


# -- what holds while a callback runs --------------------------------------------------------------


def test_lightning_is_quiet_where_it_should_be(caplog: pytest.LogCaptureFixture) -> None:
    """Also within itself; and a warning that was shown once is not shown again after it."""
    registry: dict[Any, Any] = {}
    caplog.set_level("INFO", LIGHTNING.name)

    def speak(text: str) -> int:
        LIGHTNING.info(text)
        warnings.warn_explicit("w", UserWarning, "x.py", 1, "lightning.pytorch.x", registry)
        return len(shown)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        with quiet():
            with quiet():
                assert speak("inner") == 0
            assert speak("outer") == 0
            LIGHTNING.error("an error")
        assert speak("after") == 1
        with quiet():
            assert speak("again") == 1
        assert speak("last") == 1
    assert caplog.messages == ["an error", "after", "last"] and not LIGHTNING.filters
