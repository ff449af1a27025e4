"""What crosses between server and clients: tensors and plain numbers, never code.

On a wire and in shared memory both are one safetensors blob, so nothing is unpickled.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from fedgkd_pl.storage.tensors import to_safetensors
from torch import Tensor

State = dict[str, Tensor]
OF_NET = "@"  # between a model's name and the number of the net it is of, where there are several
OF_GROUP = ": "  # between a group's name and that of a tensor
LR_FACTOR = "lr_factor"  # the number that clients multiply their learning rates by
_INFO = "info"
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
    text = json.dumps(info).encode()
    tensors[_INFO] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return to_safetensors(tensors)


def _decode(blob: bytes) -> tuple[dict[str, State], dict[str, Any]]:
    from safetensors.torch import load

    tensors = load(blob)
    info = json.loads(tensors.pop(_INFO).numpy().tobytes())
    groups: dict[str, State] = {}
    for key, tensor in tensors.items():
        group, name = key.split("/", 1)
        groups.setdefault(group, {})[name] = tensor
    return groups, info
