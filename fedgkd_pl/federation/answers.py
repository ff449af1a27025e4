"""What a client may answer, as its method declares it; any other answer is a failed client."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from traceback import format_exception, format_exception_only
from typing import Any

import torch
from fedgkd_pl.federation.message import Answer, ClientFailure, ClientUpdate, State
from torch import Tensor

# Lightning takes "…/dataloader_idx_…" for its own
NAME = re.compile(r"(?!dataloader_idx_)[A-Za-z_][A-Za-z0-9_]{0,63}")
MOST_METRICS = 32
LARGEST = torch.finfo(torch.float32).max  # loggers keep float32
NOT_FINITE = "is not finite"


@dataclass(frozen=True)
class Spec:
    """A tensor that clients send or keep; all its entries are in [``low``, ``high``]."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    low: float = -inf
    high: float = inf

    def fault(self, tensor: Any) -> str:
        """What is wrong with a tensor, which may be anything; empty if it is as declared."""
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta:
            return "is not a dense tensor"
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            given = f"{tensor.dtype} {tuple(tensor.shape)}"
            return f"is {given}, not {self.dtype} {tuple(self.shape)}"
        if tensor.dtype == torch.bool or not tensor.numel():
            return ""
        low, high = (part.item() for part in tensor.aminmax())  # both are NaN if any entry is
        if not (isfinite(low) and isfinite(high)):
            return NOT_FINITE
        inside = self.low <= low and high <= self.high
        return "" if inside else f"has entries outside of [{self.low:g}, {self.high:g}]"


Specs = Mapping[str, Spec]


def like(state: State) -> dict[str, Spec]:
    """Tensors of the names, shapes and types of a state.

    Floats keep away from the limits of their type, so that sums and differences stay finite.
    """
    largest = {
        name: min(torch.finfo(t.dtype).max / 2, 1e280) if t.is_floating_point() else inf
        for name, t in state.items()
    }
    return {n: Spec(tuple(t.shape), t.dtype, -largest[n], largest[n]) for n, t in state.items()}


@dataclass(frozen=True)
class Form:
    """What the answers of a round must be.

    Attributes:
        extra: what a client sends beside its model.
        state: what it keeps for its next round.
        samples: n_k of every client, where that is known.
        max_samples: the largest n_k, where it is not.
        check: what the method finds wrong with an answer that is right in all of this.
    """

    weights: Specs
    extra: Specs = field(default_factory=dict)
    state: Specs = field(default_factory=dict)
    samples: Mapping[int, int] = field(default_factory=dict)
    max_samples: int | None = None
    check: Callable[[ClientUpdate], str] = lambda update: ""

    def fault(self, update: ClientUpdate, client: int) -> str:
        """Why an answer, whose fields may be anything, cannot be used; empty if it can."""
        if type(update.client) is not int or update.client != client:
            return f"answers as client {update.client!r:.50}"
        samples, most = update.num_samples, self.max_samples or inf
        if type(samples) is not int or not 1 <= samples <= most:
            return f"reports {samples!r:.50} samples, not 1 to {most}"
        if samples != self.samples.get(client, samples):
            return f"reports {samples} samples, but has {self.samples[client]}"
        return (
            _group_fault("model", update.weights, self.weights)
            or _group_fault("extra", update.extra, self.extra)
            or _group_fault("state", update.state, self.state)
            or _metrics_fault(update.metrics)
            or self.check(update)
        )


def _group_fault(what: str, tensors: Any, specs: Specs) -> str:
    if type(tensors) is not dict:
        return f"its {what} is a {type(tensors).__name__}, not tensors by name"
    for name in sorted(specs.keys() ^ tensors.keys(), key=str):
        return f"its {what} {'lacks' if name in specs else 'has an undeclared'} {name!s:.80}"
    faults = ((name, spec.fault(tensors[name])) for name, spec in specs.items())
    return next((f"its {name} {fault}" for name, fault in faults if fault), "")


def _metrics_fault(metrics: Any) -> str:
    if not isinstance(metrics, dict) or len(metrics) > MOST_METRICS:
        return f"its metrics are not at most {MOST_METRICS} numbers by name"
    for name, value in metrics.items():
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            return f"reports {name!r:.80}, which is not a valid metric name"
        if not (type(value) in (int, float) and -LARGEST <= value <= LARGEST):  # as NaN is not
            return f"its {name} {NOT_FINITE}"
    return ""


def plain_seconds(seconds: Any) -> dict[str, float]:
    """A client's seconds by name, or none if one is not valid; no result depends on them."""
    fits = not _metrics_fault(seconds) and all(value >= 0 for value in seconds.values())
    return {name: float(value) for name, value in seconds.items()} if fits else {}


def failure(client: int, error: Exception) -> ClientFailure:
    """The failure of a client that raised an error."""
    reason = format_exception_only(error)[-1].splitlines()[0]
    return ClientFailure(client, _one_line(reason), "".join(format_exception(error)))


def checked(answer: Any, client: int, form: Form) -> Answer:
    """An engine's answer for a client, if it is of the declared form, or why it is not.

    All answers of all engines pass here before a method or a callback sees them.
    """
    try:
        if isinstance(answer, ClientFailure):
            return ClientFailure(client, _one_line(answer.reason), str(answer.traceback))
        if not isinstance(answer, ClientUpdate):
            return ClientFailure(client, f"its engine gave a {type(answer).__name__}")
        if fault := form.fault(answer, client):
            return ClientFailure(client, _one_line(fault))
        answer.metrics = {name: float(value) for name, value in answer.metrics.items()}
        answer.seconds = plain_seconds(answer.seconds)
    except Exception as error:  # of something that is no tensor or number
        return failure(client, error)
    return answer


def _one_line(text: Any) -> str:
    """Printable text of at most 500 characters, whoever wrote it."""
    plain = "".join(c if c.isprintable() else " " for c in str(text)[:5000])
    return " ".join(plain.split())[:500]
