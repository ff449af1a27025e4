"""What a client may answer, as its method declares it; any other answer is a failed client."""

import re
from collections.abc import Callable, Collection, Mapping
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
USES = 1000  # how often a step may use a layer, at most


@dataclass(frozen=True)
class Spec:
    """A tensor that clients send or keep; all its entries are in [``low``, ``high``]."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    low: float = -inf
    high: float = inf

    def fault(self, tensor: Any) -> str:
        """What is wrong with a tensor, which may be anything; empty if it is as declared."""
        if type(tensor) is not Tensor:
            return f"is a {type(tensor).__name__}, not a tensor"
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            return f"is {tensor.layout} on {tensor.device}, not dense on cpu"
        if tensor.requires_grad:
            return "requires a gradient"
        if tensor.shape != self.shape:
            return f"is {tuple(tensor.shape)}, not {tuple(self.shape)}"
        if tensor.dtype != self.dtype:
            return f"is {tensor.dtype}, not {self.dtype}"
        return self._range_fault(tensor) if tensor.numel() else ""

    def _range_fault(self, tensor: Tensor) -> str:
        if tensor.dtype == torch.bool:  # its bytes may be neither 0 nor 1
            return "is not true or false" if tensor.view(torch.uint8).max() > 1 else ""
        low, high = (part.item() for part in tensor.aminmax())  # both are NaN if any entry is
        if not (isfinite(low) and isfinite(high)):
            return "is not finite"
        if low < self.low or high > self.high:
            return f"has {low if low < self.low else high:g}, not {self.low:g} to {self.high:g}"
        return ""


Specs = Mapping[str, Spec]


def like(state: State, grows: int = 0) -> dict[str, Spec]:
    """Tensors of the names, shapes and types of a state.

    Floats keep away from the limits of their type, so that sums and differences stay finite. Of
    integers, such as counts of batches, the mean keeps the largest: no entry may exceed the largest
    of now by more than ``grows``, which is what training can add.
    """
    return {name: _like(tensor, grows) for name, tensor in state.items()}


def _like(tensor: Tensor, grows: int) -> Spec:
    low, high = -inf, inf
    if tensor.is_floating_point():
        high = min(torch.finfo(tensor.dtype).max / 2, 1e280)
        low = -high
    elif tensor.dtype != torch.bool and tensor.numel() and not tensor.is_complex():
        low = min(0, int(tensor.min()))
        high = max(0, int(tensor.max())) + grows
    return Spec(tuple(tensor.shape), tensor.dtype, low, high)


@dataclass(frozen=True)
class Form:
    """What the answers of a round must be.

    Attributes:
        extra: what a client sends beside its model.
        state: what it keeps for its next round.
        metrics: the names of what it may report; None for any plain ones.
        samples: n_k of every client, where that is known.
        max_samples: the largest n_k, where it is not.
        check: what the method finds wrong with an answer that is right in all of this.
    """

    weights: Specs
    extra: Specs = field(default_factory=dict)
    state: Specs = field(default_factory=dict)
    metrics: Collection[str] | None = None
    samples: Mapping[int, int] = field(default_factory=dict)
    max_samples: int | None = None
    check: Callable[[ClientUpdate], str] = lambda update: ""

    def fault(self, update: ClientUpdate, client: int) -> str:
        """Why an answer, whose fields may be anything, cannot be used; empty if it can."""
        return (
            _client_fault(update.client, client)
            or self._samples_fault(update.num_samples, client)
            or _group_fault("model", update.weights, self.weights)
            or _group_fault("extra", update.extra, self.extra)
            or _group_fault("state", update.state, self.state)
            or self._metrics_fault(update.metrics)
            or self.check(update)
        )

    def _samples_fault(self, number: Any, client: int) -> str:
        if type(number) is not int:
            return f"reports {number!r:.50} samples, which is no whole number"
        known = self.samples.get(client, number)
        if number < 1:
            return f"reports {number} samples"
        if number != known:
            return f"reports {number} samples, but has {known}"
        if self.max_samples is not None and number > self.max_samples:
            return f"reports {number} samples, more than max_samples ({self.max_samples})"
        return ""

    def _metrics_fault(self, metrics: Any) -> str:
        if type(metrics) is not dict or len(metrics) > MOST_METRICS:
            return f"its metrics are not at most {MOST_METRICS} numbers by name"
        for name, value in metrics.items():
            if type(name) is not str or not NAME.fullmatch(name):
                return f"reports {name!r:.80}, which is no name of a metric"
            if self.metrics is not None and name not in self.metrics:
                return f"reports {name}, which client_metrics of the method does not name"
            if not is_number(value):
                return f"its {name} is {value!r:.50}"
        return ""


def is_number(value: Any) -> bool:
    """Whether something is a number that every logger can keep."""
    return type(value) in (int, float) and -LARGEST <= value <= LARGEST  # which NaN is not


def plain_seconds(seconds: Any) -> dict[str, float]:
    """Those of a client's seconds by name that are valid; no result depends on them."""
    if type(seconds) is not dict or len(seconds) > MOST_METRICS:
        return {}
    return {
        name: float(value)
        for name, value in seconds.items()
        if type(name) is str and NAME.fullmatch(name) and is_number(value) and value >= 0
    }


def _client_fault(claimed: Any, client: int) -> str:
    same = type(claimed) is int and claimed == client
    return "" if same else f"answers as client {claimed!r:.50}, not as itself"


def _group_fault(what: str, tensors: Any, specs: Specs) -> str:
    if type(tensors) is not dict:
        return f"its {what} is a {type(tensors).__name__}, not tensors by name"
    for name in sorted(specs.keys() ^ tensors.keys(), key=str):
        if name in specs:
            return f"its {what} lacks {name}"
        declared = "" if what == "model" else f": client_{what} of the method does not declare it"
        return f"its {what} has another entry, {name!s:.80}{declared}"
    for name, spec in specs.items():
        if fault := spec.fault(tensors[name]):
            return f"its {name} {fault}"
    return ""


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
        fault = form.fault(answer, client)
        if fault:
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
