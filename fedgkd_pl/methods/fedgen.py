"""FedGen: a generator on the server learns what the clients' heads agree on.

Zhu et al., Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021.
Server, after averaging, with head_k the classifiers of the cohort and w_k(y) client k's share of
label y in it:

    G ← argmin  E_{ε,y} Σ_k w_k(y) · CE(head_k(G(ε, y)), y)
                + exp( −mean_{i,j} ‖ε_i − ε_j‖² · ‖z_i − z_j‖₁ )       means inside the norms

Client, from round 2 on, with α_t = α·decay^{t−1} and β_t alike:

    CE(w) + α_t · CE(head(G(ỹ)), ỹ) + β_t · KL( head(G(y)) ‖ h(w, x) )   the target detached

Clients report how many samples of each label they hold. Labels are drawn uniformly from those that
anybody has reported so far.
"""

from typing import Any

import torch
from fedgkd_pl.errors import at_least, not_negative, require
from fedgkd_pl.federation.client import Objective
from fedgkd_pl.federation.hardware import wide
from fedgkd_pl.federation.message import ClientUpdate, Message, Spec, Specs, State
from fedgkd_pl.federation.server_training import server_adam
from fedgkd_pl.federation.teachers import FrozenNet
from fedgkd_pl.methods.fedavg import FedAvg, FedAvgClient
from fedgkd_pl.methods.fedgkd import distillation
from fedgkd_pl.models.heads import require_classifier
from fedgkd_pl.seeds import derive
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot


class Generator(nn.Sequential):
    """[noise ‖ one-hot label] → Linear → BatchNorm → ReLU → Linear → what a classifier sees."""

    def __init__(self, num_classes: int, latent: int, noise: int, hidden: int) -> None:
        super().__init__(
            nn.Linear(noise + num_classes, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, latent),
        )
        self.num_classes, self.noise = num_classes, noise

    def forward(self, noise: Tensor, labels: Tensor | None = None) -> Tensor:
        """Features that a sample of these labels might have."""
        if labels is not None:
            noise = torch.cat([noise, one_hot(labels, self.num_classes).to(noise)], dim=1)
        return super().forward(noise)  # type: ignore[no-untyped-call,no-any-return]


class FedGenClient(FedAvgClient):
    """The client module of FedGen."""

    labels: Tensor | None = None  # to draw from; None while there is no generator
    weights: Tensor  # α_t and β_t
    counts: Tensor | None = None  # samples of each label

    def __init__(self, *args: Any, generator: Generator, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.generator = FrozenNet(generator)
        self.noise, self.num_classes = generator.noise, generator.num_classes

    def receive(self, message: Message, state: State) -> None:
        """Loads w_t and the generator."""
        super().receive(message, state)
        self.counts = self.labels = None
        if "generator" in message.models:
            self.generator.load(message.models["generator"], self.device)
            self.labels = message.tensors["labels"]["labels"]
            self.weights = self.as_tensor([message.numbers["alpha"], message.numbers["beta"]])

    def on_train_epoch_start(self) -> None:
        """Counts labels over one pass; the report is of the last."""
        super().on_train_epoch_start()
        self.counts = torch.zeros(self.num_classes, dtype=torch.int64, device=self.device)

    def observe(self, y: Tensor, outputs: Tensor | None) -> None:
        """Counts the labels."""
        assert self.counts is not None
        self.counts.index_add_(0, y, torch.ones_like(y))  # unlike bincount, without waiting

    def objective(self, x: Tensor, y: Tensor, teacher_output: Tensor | None) -> Objective:
        """CE(w) + α_t · CE(head(G(ỹ)), ỹ) + β_t · KL(head(G(y)) ‖ h(w, x))."""
        if self.labels is None:
            return super().objective(x, y, teacher_output)
        logits = self.net(x)
        choice = torch.randint(len(self.labels), (self.generated,))
        fake = self.labels[choice].to(y.device, non_blocking=True)
        # float32: the same at every precision
        noise = torch.rand(self.generated + len(y), self.noise, dtype=torch.float32)
        noise = noise.to(self.weights, non_blocking=True)
        labels = one_hot(torch.cat([fake, y]), self.num_classes).to(noise)
        both = self.generator(torch.cat([noise, labels], 1))
        head = self.net.classifier
        learnt = cross_entropy(wide(head(both[: self.generated])), fake)  # type: ignore[operator]
        target = head(both[self.generated :]).detach()  # type: ignore[operator]
        kd = distillation(logits, target)
        alpha, beta = self.weights
        ce, parts = self.loss_of(logits, y)
        parts |= {"generated": learnt, "kd": kd}
        return ce + alpha * learnt + beta * kd, parts

    def reply(self) -> ClientUpdate:
        """Reports how many samples of each label the client holds."""
        update = super().reply()
        if self.counts is not None and self.generated:
            update.extra = {"counts": self.counts.cpu()}
        return update


class FedGen(FedAvg):
    """FedGen: clients are regularised by a generator of features that the server trains.

    Args:
        net: a net with ``features`` and a ``Linear`` ``classifier``.
        alpha: α, the weight of the generated samples in the client's loss (tuned in the paper over
            0.1, 1, 10).
        beta: β, the weight of the distillation from them.
        decay: both shrink by this factor every round.
        noise: width of the generator's noise.
        hidden: width of its hidden layer (paper: 512 for ResNet-8, 2048 for ResNet-50, 768 for
            DistilBERT).
        generator_steps: Adam steps of the generator after every round.
        generator_lr: their rate.
        generator_weight_decay: their weight decay.
        generator_batch_size: generated samples per step, on the server and on clients.
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedGen"
    citation = "Zhu et al., ICML 2021"
    exchanges = ("share",)
    colour = 5
    client_class = FedGenClient
    client_settings = ("generator", "generated")
    takes_modules = False
    tasks = ("classes",)
    takes_sequences = False
    keeps = ("labels",)  # the generator is a part of the module

    def __init__(
        self,
        net: nn.Module,
        alpha: float = 1.0,
        beta: float = 1.0,
        decay: float = 0.98,
        noise: int = 64,
        hidden: int = 512,
        generator_steps: int = 50,
        generator_lr: float = 1e-4,
        generator_weight_decay: float = 1e-2,
        generator_batch_size: int = 32,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, **kwargs)
        not_negative(alpha=alpha, beta=beta)
        require(0 < decay <= 1, "decay", "must be in (0, 1]", decay)
        at_least(2, generator_batch_size=generator_batch_size)
        last = require_classifier(net, "FedGen")
        self.alpha, self.beta, self.decay = alpha, beta, decay
        self.generator_steps, self.generator_lr = generator_steps, generator_lr
        self.generator_weight_decay = generator_weight_decay
        self.generator_batch_size = generator_batch_size
        self.generator = Generator(last.out_features, last.in_features, noise, hidden)
        self._fresh = {n: t.clone() for n, t in self.generator.state_dict().items()}
        self.labels: list[int] = []  # that somebody has reported

    @property
    def generated(self) -> int:
        """The generated samples a step of a client."""
        return self.generator_batch_size if self.regularises else 0

    @property
    def regularises(self) -> bool:
        """Whether the generator is used at all."""
        return self.alpha > 0 or self.beta > 0

    def reset(self) -> None:
        """Starts the generator anew, too."""
        super().reset()
        self.generator.load_state_dict(self._fresh)
        self.labels = []

    def broadcast(self) -> Message:
        """w_t and, once it has learned, the generator."""
        message = super().broadcast()
        if self.labels:
            shrink = self.decay ** (self.round - 1)
            message.models["generator"] = self.generator.state_dict()
            message.tensors["labels"] = {"labels": torch.tensor(self.labels)}
            message.numbers.update(alpha=self.alpha * shrink, beta=self.beta * shrink)
        return message

    def on_update(self, update: ClientUpdate) -> None:
        """Keeps a client's head and label counts until the generator has learned from them."""
        if self.regularises:
            weights = update.weights
            head = weights["classifier.weight"], weights["classifier.bias"]
            self.answers.append((*head, update.extra["counts"]))

    def server_step(self, mean: State) -> None:
        """As FedAvg; then the generator learns from the cohort's heads."""
        super().server_step(mean)
        if self.regularises:
            counts = torch.stack([counts for *_, counts in self.answers])
            present = counts.sum(0).nonzero().flatten()
            self.labels = sorted({*self.labels, *present.tolist()})
            self.train_generator(counts, present)

    def train_generator(self, counts: Tensor, present: Tensor) -> None:
        """The generator's steps of one round; all its randomness comes from (seed, round)."""
        like = next(self.generator.parameters())
        shares = (counts / counts.sum(0).clamp(min=1)).to(like)
        heads = [(weight.to(like), bias.to(like)) for weight, bias, _ in self.answers]
        random = torch.Generator().manual_seed(
            derive(self.datamodule.seed, "generator", self.round)
        )
        size, decay = self.generator_batch_size, self.generator_weight_decay
        optimizer = server_adam(self.generator.parameters(), self.generator_lr, decay)
        self.generator.train()
        with torch.enable_grad():
            for _ in range(self.generator_steps):
                noise = torch.rand(
                    size, self.generator.noise, generator=random, dtype=torch.float32
                ).to(like)
                labels = present[torch.randint(len(present), (size,), generator=random)]
                labels = labels.to(like.device)
                optimizer.zero_grad()
                z = self.generator(noise, labels)
                generator_loss(z, noise, labels, heads, shares).backward()
                optimizer.step()
        optimizer.zero_grad()

    def client_extra(self) -> Specs:
        """How many samples of each label a client holds."""
        counts = Spec((self.generator.num_classes,), torch.int64, low=0)
        return {"counts": counts} if self.regularises else {}

    def client_fault(self, update: ClientUpdate) -> str:
        """Counts that are not those of n_k samples; of some of them, where epochs are not whole."""
        if not self.regularises:
            return ""
        counted, samples = sum(update.extra["counts"].tolist()), update.num_samples
        fits = (samples if self.local_steps is None else 1) <= counted <= samples
        return "" if fits else f"its counts are of {counted} samples, not of {samples}"


def generator_loss(
    z: Tensor, noise: Tensor, labels: Tensor, heads: list[tuple[Tensor, Tensor]], shares: Tensor
) -> Tensor:
    """How little the clients' heads believe the generated features, and how alike these are.

    Args:
        z: generated features, with a gradient.
        heads: weight and bias of every client's classifier.
        shares: clients × classes: w_k(y).
    """
    believed = torch.stack(
        [
            shares[client, labels] * cross_entropy(z @ weight.T + bias, labels, reduction="none")
            for client, (weight, bias) in enumerate(heads)
        ]
    )
    apart = (noise[:, None] - noise[None]).square().mean(2)
    different = (z[:, None] - z[None]).abs().mean(2)
    return believed.sum(0).mean() + (-(apart * different).mean()).exp()
