"""FedDF: the server distils the clients' ensemble into their mean.

Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020. After
the mean w of the cohort's models w_k, on unlabelled public inputs x:

    w ← argmin  KL( softmax( mean_k h(w_k, x) / τ ) ‖ softmax( h(w, x) / τ ) )

by Adam with a cosine schedule, gradients clipped to 5. Every ``validate_every`` steps the model is
evaluated on the server's validation set; the best of these is kept, and without a better one for
``patience`` steps it ends. The start is no candidate.

With ``nets``, w is the model of one of them, a prototype: the mean of the clients that have it. All
clients of the round teach every prototype that has one in it; the others stay as they are. What is
evaluated is the mean of the prototypes' logits.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from fedgkd_pl.data.examples import Examples
from fedgkd_pl.errors import at_least, not_negative, positive
from fedgkd_pl.federation.message import ClientUpdate, State
from fedgkd_pl.federation.nets import ClientNets, server_net
from fedgkd_pl.federation.server_training import (
    Answer,
    answered_batches,
    as_input,
    server_adam,
    server_steps,
    validation_scores,
)
from fedgkd_pl.federation.teachers import FrozenNet
from fedgkd_pl.methods.fedavg import FedAvg, FedAvgClient, Weighting
from fedgkd_pl.methods.fedgkd import distillation
from fedgkd_pl.seeds import derive
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR


class FedDF(FedAvg):
    """FedDF: FedAvg, then ensemble distillation on public data.

    Args:
        net: the model to learn; any module from inputs to logits; or ``nets``, a prototype each.
        distil_steps: the server's steps in a round, at most; 0 is FedAvg.
        distil_lr: their rate, at the start of the cosine.
        distil_batch_size: public inputs a step (authors: the clients' 64).
        distil_clip: largest norm of the server's gradients.
        temperature: τ, which divides all logits.
        validate_every: steps from one evaluation to the next.
        patience: steps without a better evaluation that end the round's distillation.
        weighting: of the clients in their mean: ``uniform`` (authors), or by their ``samples``.
        nets: of clients that have different nets, in turn.
        nets_of: the number of every client's net, from 0, if not in turn.
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedDF"
    citation = "Lin et al., NeurIPS 2020"
    exchanges = ()
    colour = 22
    takes_modules = False
    takes_sequences = False
    tasks = ("classes",)
    public_inputs = 1

    def __init__(
        self,
        net: nn.Module | None = None,
        distil_steps: int = 10_000,
        distil_lr: float = 1e-3,
        distil_batch_size: int = 64,
        distil_clip: float | None = 5.0,
        temperature: float = 1.0,
        validate_every: int = 100,
        patience: int = 1_000,
        weighting: Weighting = "uniform",
        nets: list[nn.Module] | None = None,
        nets_of: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(server_net("per_net", net, nets), weighting=weighting, **kwargs)
        self.client_nets = ClientNets("per_net", nets, nets_of)
        not_negative(distil_steps=distil_steps)
        positive(distil_lr=distil_lr, temperature=temperature)
        at_least(1, validate_every=validate_every, patience=patience)
        at_least(1, distil_batch_size=distil_batch_size)
        if distil_clip is not None:
            positive(distil_clip=distil_clip)
        self.distil_steps, self.distil_lr = distil_steps, distil_lr
        self.distil_batch_size = distil_batch_size
        self.distil_clip = distil_clip
        self.temperature = temperature
        self.validate_every = validate_every
        self.patience = patience

    def on_update(self, update: ClientUpdate) -> None:
        """Keeps a client's model until it has taught."""
        if self.distil_steps:
            self.answers.append((self.nets[self.net_index(update.client)], update.weights))

    def server_step(self, mean: State) -> None:
        """As FedAvg; then the ensemble teaches the mean of every net that had a client."""
        super().server_step(mean)
        if not self.distil_steps:
            return
        present = {id(net) for net, _ in self.answers}
        answer = mean_answer(self.answers, self.device)
        for net, label in zip(self.nets, self.net_names, strict=True):
            if id(net) not in present:
                continue
            name = "server" if self.client_nets.index is None else f"server/{label}"
            best = Best(self, net, name)
            optimizer = server_adam(net.parameters(), self.distil_lr)
            distil(
                *(self, net, answer, (self.public, self.distil_batch_size)),
                *(optimizer, self.distil_steps),
                loss=partial(distillation, temperature=self.temperature),
                clip=self.distil_clip,
                scheduler=CosineAnnealingLR(optimizer, self.distil_steps),
                stop=best,
                name=name,
            )
            best.restore()


def distil(
    server: FedAvg,
    net: nn.Module,
    answer: Answer,
    batches: tuple[Examples, int],
    optimizer: Optimizer,
    steps: int,
    loss: Callable[[Tensor, Tensor], Tensor] = distillation,
    known: Tensor | None = None,
    **options: Any,
) -> None:
    """Trains a net of the server towards what is said of public data.

    Args:
        answer: what is said of inputs and, where it is given, of their rows of ``known``.
        batches: the public data, and how many inputs a step takes.
        loss: of the net's logits and the answers.
        options: those of ``server_steps``.
    """

    def step_loss(x: Tensor, target: Tensor) -> Tensor:
        return loss(net(x), target)

    random = torch.Generator().manual_seed(derive(server.datamodule.seed, "server", server.round))
    answered = answered_batches(*batches, random, answer, next(net.parameters()), known)
    server_steps(server, optimizer, answered, step_loss, steps, **options)


def mean_answer(models: list[tuple[nn.Module, State]], device: torch.device) -> Answer:
    """The mean of the models' logits, weighted where every input has its weights.

    ``models``, each with its net, are given away with it.
    """
    teachers = []
    while models:
        net, model = models.pop(0)
        teachers.append(FrozenNet(net))
        teachers[-1].load(model, device)

    def answer(x: Tensor, shares: Tensor | None = None) -> Tensor:
        logits = torch.stack([teacher(x) for teacher in teachers])
        return logits.mean(0) if shares is None else weighted_mean(logits, shares)

    return answer


class Best:
    """Evaluates a net every so many steps, and remembers the best; logs it below ``name``."""

    def __init__(self, server: FedDF, net: nn.Module, name: str) -> None:
        self.server, self.net, self.name = server, net, name
        self.step, self.accuracy = 0, -1.0
        self.model: State | None = None

    def __call__(self, step: int) -> bool:
        """After a step: whether to end."""
        if step % self.server.validate_every or not len(self.server.datamodule.val):
            return False
        accuracy, _ = validation_scores(self.server, self.net)
        if accuracy > self.accuracy:
            self.step, self.accuracy = step, accuracy
            self.model = {n: t.clone() for n, t in self.net.state_dict().items()}
        return step - self.step >= self.server.patience

    def restore(self) -> None:
        """Takes the best model; the last, if none was evaluated."""
        if self.model is not None:
            self.net.load_state_dict(self.model)
            self.server.log_round({f"{self.name}/best_step": self.step})


def weighted_mean(logits: Tensor, shares: Tensor) -> Tensor:
    """Σ_k s_k z_k / Σ_k s_k, from clients × rows × classes and rows × clients."""
    scores = shares.T[:, :, None].to(logits)
    return (scores * logits).sum(0) / scores.sum(0)


class PublicClient(FedAvgClient):
    """A client that learns from public data before its own."""

    uses_public = True
    public: Examples

    def random(self) -> torch.Generator:
        """What public data is shuffled by."""
        return torch.Generator().manual_seed(int(torch.randint(2**62, ())))

    def learn(
        self,
        batches: Iterable[Sequence[Tensor]],
        optimizer: Optimizer,
        loss: Callable[..., Tensor],
        samples: int,
    ) -> float:
        """Takes a step a batch; returns the mean loss over so many samples.

        Args:
            batches: inputs and what else ``loss`` takes after the net's logits.
        """
        weight, total = next(self.net.parameters()), 0.0
        for x, *given in batches:
            self.norms.expect(len(x))
            optimizer.zero_grad()
            value = loss(self.net(as_input(x, weight)), *given)
            value.backward()
            optimizer.step()
            total += value.item() * len(x) / samples
        optimizer.zero_grad()
        return total
