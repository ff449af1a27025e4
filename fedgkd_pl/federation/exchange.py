"""What of a model travels, and what stays with each client.

Every name of a net's state is one of three:

- *shared*: it travels and is averaged; buffers of teachers and control variates hold nothing else;
- *personal*: every client keeps its own between its rounds; before its first one it is that of w_0;
- *fixed*: with everybody as it was when the run began, such as a frozen encoder.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal

from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.federation.message import OF_GROUP, Specs, State, joined, like
from fedgkd_pl.storage.files import to_safetensors
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

PERSONAL = "personal"  # the group of a client's own parts in its state
NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)  # _NormBase: BatchNorm, InstanceNorm


Personal = Literal["norms", "head"] | list[str]


@dataclass(frozen=True)
class Exchange:
    """Which names of a model travel, and which stay with each client.

    Patterns are those of a shell, such as ``encoder.*``. What is trained and not shared is
    personal.

    Attributes:
        share: ``all``, ``trainable`` (what optimizers move, and buffers), or patterns.
        personal: ``norms``, ``head`` (the last layer), or patterns; they are not shared.
    """

    share: Literal["all", "trainable"] | list[str] = "all"
    personal: Personal = field(default_factory=list)

    def split(self, net: nn.Module) -> "Split | None":
        """The names of a net by what becomes of them; None where all are shared."""
        if self == Exchange():
            return None
        names = list(net.state_dict())
        frozen = {name for name, weight in net.named_parameters() if not weight.requires_grad}
        own = self._personal(net, names)
        if self.share == "all":
            shared = set(names)
        elif self.share == "trainable":
            shared = {*names} - frozen
        else:
            shared = matching("exchange.share", self.share, names)
        shared -= own
        require(len(shared) > 0, "exchange", "leaves nothing to share")
        own |= {name for name, _ in net.named_parameters()} - frozen - shared
        return Split(_in_order(names, shared), _in_order(names, own))

    def _personal(self, net: nn.Module, names: list[str]) -> set[str]:
        if not isinstance(self.personal, str):
            return matching("exchange.personal", self.personal, names)
        chosen = {n for n, module in net.named_modules() if isinstance(module, NORMS)}
        if self.personal == "head":
            chosen = {n for n, module in net.named_modules() if module is last_layer(net)}
        return {name for name in names if name.rpartition(".")[0] in chosen}


@dataclass(frozen=True)
class Split:
    """The names of a net's state that are shared and personal; the others are fixed."""

    shared: tuple[str, ...]
    personal: tuple[str, ...]

    def of(self, state: State) -> State:
        """The shared part of a whole state."""
        return {name: state[name] for name in self.shared}

    def digest_of_rest(self, state: State) -> str:
        """The SHA-256 of what does not travel, the same in every precision of a run."""
        stays = {name: tensor for name, tensor in state.items() if name not in self.shared}
        plain = {n: t.bfloat16() if t.is_floating_point() else t for n, t in stays.items()}
        return hashlib.sha256(to_safetensors(plain)).hexdigest()

    def specs(self, net: nn.Module) -> Specs:
        """The form of what a client keeps of its own."""
        state = net.state_dict()
        return joined({PERSONAL: like({name: state[name] for name in self.personal})})


def last_layer(net: nn.Module) -> nn.Module:
    """The last module that has parameters of its own, which classifies."""
    layers = [module for module in net.modules() if [*module.parameters(recurse=False)]]
    require(len(layers) > 0, "net", "has no parameters")
    return layers[-1]


def taken_apart(state: State) -> tuple[State, State]:
    """What a client keeps: its own parts of the model, and what its method keeps."""
    prefix = PERSONAL + OF_GROUP
    own = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
    return own, {name: t for name, t in state.items() if not name.startswith(prefix)}


def matching(key: str, patterns: Iterable[str], names: list[str]) -> set[str]:
    """The names that match a pattern; a pattern that none matches is an error."""
    found: set[str] = set()
    for pattern in patterns:
        fits = {name for name in names if fnmatchcase(name, pattern)}
        if not fits:
            near = get_close_matches(pattern, names, n=3, cutoff=0.3) or names[-3:]
            raise SettingError(
                key, f"matches no name of the net, such as {', '.join(near)}", pattern
            )
        found |= fits
    return found


def _in_order(names: list[str], chosen: set[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in chosen)
