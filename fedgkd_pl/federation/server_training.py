"""What the server trains itself, after the clients of a round have answered."""

import time
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from fedgkd_pl.data.examples import Batch, Batches, Examples
from fedgkd_pl.federation.callback import call_hooks
from fedgkd_pl.federation.client import BatchNorms
from fedgkd_pl.federation.hardware import in_eval_mode, plain_precision
from fedgkd_pl.federation.own_module import is_own_module, outputs_of
from fedgkd_pl.seeds import derive, seeded
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam, Optimizer

if TYPE_CHECKING:
    from fedgkd_pl.federation.server import FederatedServer

Answer = Callable[..., Tensor]  # inputs and what is known of them → what a net should say


class KeptOptimizer:
    """An optimizer of the server's own whose state lasts over rounds and is in checkpoints."""

    def __init__(self, build: OptimizerCallable) -> None:
        self.build = build
        self.reset()

    def reset(self) -> None:
        """Starts anew."""
        self.optimizer: Optimizer | None = None
        self.saved: dict[str, Any] = {}

    def of(self, net: nn.Module) -> Optimizer:
        """The optimizer of a net, which must be the same in every round."""
        if self.optimizer is None:
            self.optimizer = self.build(net.parameters())
            if self.saved:
                self.optimizer.load_state_dict(self.saved)
        return self.optimizer

    def state_dict(self) -> dict[str, Any]:
        """Its state; empty before the first step."""
        return self.saved if self.optimizer is None else self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.optimizer, self.saved = None, state


def server_adam(parameters: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0) -> Adam:
    """Adam with torch's other defaults, but for an ε that float16 can hold."""
    weights = list(parameters)
    eps = max(1e-8, torch.finfo(weights[0].dtype).tiny)
    return Adam(weights, lr=lr, eps=eps, weight_decay=weight_decay)


def server_steps(
    server: "FederatedServer",
    optimizer: Optimizer,
    batches: Iterable[Batch],
    loss: Callable[..., Tensor],
    total: int,
    clip: float | None = None,
    scheduler: Any = None,
    stop: Callable[[int], bool] = lambda step: False,
    name: str = "server",
) -> None:
    """Trains the server's net, a step a batch, in float32 or as wide as its weights are.

    Random numbers come from (seed, round). Steps are counted, timed and shown; what was done is
    committed with the round, so that an interrupted one is done again as a whole.

    Args:
        batches: what ``loss`` takes, at least ``total`` of them.
        clip: largest norm of the gradient.
        scheduler: of the learning rate, stepped after every step.
        stop: asked after every step whether that was the last.
        name: under which steps and loss are logged.
    """
    start = time.perf_counter()
    seed = derive(server.datamodule.seed, "server", server.round)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norms = BatchNorms(server.net)
    done, losses = 0, 0.0
    with plain_precision(server.device), seeded(seed), torch.enable_grad():
        for done, batch in enumerate(islice(batches, total), 1):
            norms.expect(len(batch[0]))
            optimizer.zero_grad()
            value = loss(*batch)
            value.backward()
            if clip is not None:
                clip_grad_norm_(parameters, clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            losses += value.item()
            call_hooks(server, "on_server_step", done, total)
            if stop(done):
                break
    optimizer.zero_grad()
    norms.expect()
    server.trained += time.perf_counter() - start
    server.log_round({f"{name}/steps": done, f"{name}/loss": losses / max(1, done)})


def answered_batches(
    examples: Examples,
    batch_size: int,
    generator: torch.Generator,
    answer: Answer,
    like: Tensor,
    known: Tensor | None = None,
) -> Iterator[Batch]:
    """Endless shuffled batches of (inputs, what to say of them), of the type and device of weights.

    Where every pass sees the same inputs, each is answered once. ``known``, with a row a sample, is
    what ``answer`` gets beside the inputs.
    """
    batches = Batches(examples.to(like.device), batch_size, generator)
    batches.teacher_output = known
    if examples.repeat:
        whole = Batches(batches.examples, max(batch_size, 256))
        whole.teacher_output = known
        with torch.no_grad():
            answers = [answer(as_input(x, like), *given) for x, _, *given in whole]
        batches.teacher_output = torch.cat(answers)
    while True:
        for x, _, *given in batches:
            x = as_input(x, like)
            if examples.repeat:
                yield x, given[0]
            else:
                with torch.no_grad():
                    target = answer(x, *given)
                yield x, target


def as_input(x: Tensor, like: Tensor) -> Tensor:
    """Inputs in the type of weights, unless they are numbers of words."""
    return x.to(like) if x.is_floating_point() else x.to(like.device)


def validation_scores(
    server: "FederatedServer", model: nn.Module | None = None
) -> tuple[float, float]:
    """The accuracy and the mean loss of a net, by default the global one, on the validation set."""
    given = server.net if model is None else model
    data, like = server.datamodule, next(given.parameters())
    net = deepcopy(given).requires_grad_(False).eval()
    if is_own_module(net):
        scores = server.new_scores(data).to(server.device)
        batches = Batches(data.val.to(server.device), data.eval_batch_size)
        with torch.no_grad():
            for index, (x, y) in enumerate(batches):
                scores.step(net, (as_input(x, like), y), index, "val")
        values = scores.finish(net)[0]
        return values.get("acc", 0.0), values["loss"]
    hits, loss, tasks = 0, 0.0, data.client_data.tasks
    with torch.no_grad():
        for x, y in Batches(data.val.to(server.device), data.eval_batch_size):
            logits = outputs_of(net, as_input(x, like))
            logits = logits if tasks is None else tasks.known(logits, y)
            loss += nn.functional.cross_entropy(logits, y, reduction="sum").item()
            hits += int((logits.argmax(1) == y).sum())
    return hits / len(data.val), loss / len(data.val)


@torch.no_grad()
def logits_of(net: nn.Module, examples: Examples) -> Tensor:
    """What a net says of examples in eval mode, each as it is; its layers keep their modes."""
    like = next(net.parameters())
    with in_eval_mode(net):
        batches = Batches(examples.to(like.device), 256)
        return torch.cat([net(as_input(x, like)) for x, _ in batches])
