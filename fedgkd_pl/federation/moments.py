"""What an optimizer remembers of every parameter, for methods whose clients' optimizers go on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from fedgkd_pl.errors import require
from fedgkd_pl.federation.answers import Spec, Specs
from fedgkd_pl.federation.message import State
from fedgkd_pl.federation.steps import first_optimizer
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

NUMBER = 1e30  # the largest of what is no moment, such as the number of steps


@dataclass(frozen=True)
class KeptMoments:
    """What an optimizer has for every parameter, such as Adam's moments, kept between rounds.

    Attributes:
        fields: its names, each with whether it has the parameter's shape; if not, it is a number.
    """

    fields: dict[str, bool]

    def specs(self, trained: Specs) -> dict[str, Spec]:
        """What is kept of parameters like these."""
        number = Spec((), torch.float32, -NUMBER, NUMBER)
        return {
            f"{key}/{field}": spec if shaped else number
            for key, spec in trained.items()
            for field, shaped in self.fields.items()
        }

    def read(self, optimizer: Any, trained: Mapping[str, nn.Parameter]) -> State:
        """What an optimizer has after its steps; zeros of a parameter that it never moved."""
        kept: State = {}
        for key, parameter in trained.items():
            held = optimizer.state.get(parameter, {})
            for field, shaped in self.fields.items():
                none = torch.zeros_like(parameter) if shaped else torch.zeros(())
                value = held.get(field)
                value = (none if value is None else value).detach().cpu().clone()
                kept[f"{key}/{field}"] = value if shaped else value.float()
        return kept

    def load(self, configured: Any, trained: Mapping[str, nn.Parameter], kept: State) -> None:
        """Gives what was kept to a new optimizer, or to what ``configure_optimizers`` gave."""
        optimizer = first_optimizer(configured)
        group = optimizer.param_groups[0]
        on_device = group.get("fused") or group.get("capturable")
        for key, parameter in trained.items():
            device = parameter.device if on_device else torch.device("cpu")
            for field, shaped in self.fields.items():
                if f"{key}/{field}" in kept:
                    like = parameter.detach() if shaped else torch.empty((), device=device)
                    value = torch.empty_like(like).copy_(kept[f"{key}/{field}"])
                    optimizer.state[parameter][field] = value


def moments_of(optimizer: OptimizerCallable | None) -> KeptMoments:
    """What such an optimizer keeps, found by a step of it; refused if that is of no simple form."""
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = torch.zeros(2, 3)
    fields: dict[str, bool] = {}
    simple = optimizer is not None
    if optimizer is not None:
        made = optimizer([parameter])
        made.step()
        held = {name: value for name, value in made.state[parameter].items() if value is not None}
        simple = all(isinstance(v, Tensor) and v.shape in ((), (2, 3)) for v in held.values())
        fields = {name: value.shape == (2, 3) for name, value in held.items()} if simple else {}
    text = "keeps what cannot be saved between rounds: set keep_optimizer to false"
    require(simple, "optimizer", text)
    return KeptMoments(fields)
