"""What crosses between server and clients: tensors and plain numbers, never code; and what may.

A method declares what its clients answer; any other answer is a failed client.

On a wire and in shared memory both are one safetensors blob, so nothing is unpickled.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from traceback import format_exception, format_exception_only
from typing import Any, TypeVar

import torch
from fedgkd_pl.storage.files import to_safetensors
from torch import Tensor

State = dict[str, Tensor]
OF_NET = "@"  # between a model's name and the number of the net it is of, where there are several
OF_GROUP = ": "  # between a group's name and that of a tensor
LR_FACTOR = "lr_factor"  # the number that clients multiply their learning rates by
_INFO, _NAMES = "info", "names"
T = TypeVar("T")


@dataclass(frozen=True)
class Message:
    """What the server sends to every client of a round.

    Attributes:
        round: the round, from 1.
        models: whole models by name; ``"global"`` is w_t, a method may add others. Where clients
            have several nets, ``"global@1"`` is the model of net 1.
        numbers: plain numbers a method adds.
        tensors: what a method adds that is no model, in groups by name.
    """

    round: int
    models: dict[str, State]
    numbers: dict[str, float] = field(default_factory=dict)
    tensors: dict[str, State] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes a client downloads."""
        return sum(map(_nbytes, (*self.models.values(), *self.tensors.values())))

    def for_nets(self, numbers: Collection[int]) -> "Message":
        """The message without the models of other nets."""
        wanted = {name: _net_of(name) for name in self.models}
        models = {n: self.models[n] for n, of in wanted.items() if of is None or of in numbers}
        return replace(self, models=models)

    def for_net(self, number: int) -> "Message":
        """What a client with this net gets: its own models, by their plain names."""
        models = self.for_nets([number]).models
        return replace(self, models={_plain(name): state for name, state in models.items()})

    def encode(self) -> bytes:
        """The message as one safetensors blob."""
        groups = {f"models.{name}": state for name, state in self.models.items()}
        groups |= {f"tensors.{name}": state for name, state in self.tensors.items()}
        return _encode(groups, {"round": self.round, "numbers": self.numbers})

    @classmethod
    def decode(cls, blob: bytes) -> "Message":
        """The inverse of :meth:`encode`."""
        groups, info = _decode(blob)
        categories: dict[str, dict[str, State]] = {"models": {}, "tensors": {}}
        for key, state in groups.items():
            category, name = key.split(".", 1)
            categories[category][name] = state
        return cls(info["round"], numbers=info["numbers"], **categories)


@dataclass
class ClientUpdate:
    """What one client answers.

    Attributes:
        num_samples: n_k, its weight in the mean.
        weights: its model after local training, buffers included.
        metrics: what it reports, such as ``loss`` and ``acc``.
        extra: tensors a method sends up beside the model.
        state: what the client keeps for its next round (not sent to the server's method).
        seconds: where its time went, by name; no result depends on it.
    """

    client: int
    num_samples: int
    weights: State
    metrics: dict[str, float] = field(default_factory=dict)
    extra: State = field(default_factory=dict)
    state: State = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes this client uploads."""
        return _nbytes(self.weights) + self.extra_nbytes

    @property
    def extra_nbytes(self) -> int:
        """The bytes of what it uploads beside its model."""
        return _nbytes(self.extra)

    def encode(self) -> bytes:
        """The update as one safetensors blob."""
        info = {
            "client": self.client,
            "num_samples": self.num_samples,
            "metrics": self.metrics,
            "seconds": self.seconds,
        }
        return _encode({"weights": self.weights, "extra": self.extra, "state": self.state}, info)

    @classmethod
    def decode(cls, blob: bytes) -> "ClientUpdate":
        """The inverse of :meth:`encode`."""
        groups, info = _decode(blob)
        others = groups.keys() - {"weights", "extra", "state"}
        if others:
            raise ValueError(f"unknown tensors: {sorted(others)[0]:.50}")
        weights, extra, state = (groups.get(name, {}) for name in ("weights", "extra", "state"))
        return cls(**info, weights=weights, extra=extra, state=state)


@dataclass(frozen=True)
class ClientFailure:
    """What comes back for a client that raised, died, ran out of time or answered nonsense.

    The reason is one line; the traceback is empty where none is known.
    """

    client: int
    reason: str
    traceback: str = ""


Answer = ClientUpdate | ClientFailure


def encode_state(state: State) -> bytes:
    """A client's state as one safetensors blob."""
    return _encode({"state": state}, {})


def decode_state(blob: bytes) -> State:
    """The inverse of :func:`encode_state`."""
    return _decode(blob)[0].get("state", {})


def joined(groups: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """Groups of named things as one, for what a client keeps: ``group: name``."""
    return {f"{g}{OF_GROUP}{n}": thing for g, named in groups.items() for n, thing in named.items()}


def grouped(things: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """The inverse of :func:`joined`."""
    groups: dict[str, dict[str, T]] = {}
    for key, thing in things.items():
        group, name = key.split(OF_GROUP, 1)
        groups.setdefault(group, {})[name] = thing
    return groups


def _net_of(name: str) -> int | None:
    """Of which net a model is; None where it is not of one of several."""
    number = name.rpartition(OF_NET)[2]
    return int(number) if OF_NET in name and number.isdecimal() else None


def _plain(name: str) -> str:
    return name if _net_of(name) is None else name.rpartition(OF_NET)[0]


def _nbytes(state: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def _encode(groups: Mapping[str, State], info: dict[str, Any]) -> bytes:
    tensors = {f"{group}/{n}": t for group, state in groups.items() for n, t in state.items()}
    text = json.dumps(info | {_NAMES: [*tensors]}).encode()
    tensors[_INFO] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return to_safetensors(tensors)


def _decode(blob: bytes) -> tuple[dict[str, State], dict[str, Any]]:
    from safetensors.torch import load

    tensors = load(blob)
    info = json.loads(tensors.pop(_INFO).numpy().tobytes())
    groups: dict[str, State] = {}
    for key in info.pop(_NAMES):  # safetensors gives them in an order of its own, each time another
        group, name = key.split("/", 1)
        groups.setdefault(group, {})[name] = tensors[key]
    return groups, info


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
