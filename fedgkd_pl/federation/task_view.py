"""Where data has tasks, the one place in which a client's nets are told the classes of its task."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from fedgkd_pl.data.tasks import FAR
from torch import Tensor, nn


class TaskView:
    """Hides the outputs of all classes that the task at hand does not have.

    It is a forward hook of the net that a client half is made with, and so of all copies of it,
    student and teachers. They share it: a copy of a hook is the hook. So losses and distillation
    see a head per task, and no method has to know of tasks.
    """

    def __init__(self) -> None:
        self.hidden: Tensor | None = None

    def __deepcopy__(self, memo: Any) -> "TaskView":
        return self

    def __call__(self, module: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
        """As a forward hook."""
        return self.only(outputs)

    def only(self, outputs: Tensor) -> Tensor:
        """The outputs, those of other classes far below all."""
        return outputs if self.hidden is None else outputs.masked_fill(self.hidden, FAR)

    def show(self, classes: Sequence[int], num_classes: int, device: torch.device) -> None:
        """From now on, these classes are seen."""
        hidden = torch.ones(num_classes, dtype=torch.bool)
        hidden[list(classes)] = False
        self.hidden = hidden.to(device)

    @contextmanager
    def on(self, net: nn.Module) -> Iterator[None]:
        """Copies of the net that are made inside have this view; the net itself does not keep it.

        What the server evaluates is seen through the task of each sample instead.
        """
        handle = net.register_forward_hook(self)
        try:
            yield
        finally:
            handle.remove()
