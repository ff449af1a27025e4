"""FedAUX: the clients' ensemble, weighted by how sure each is of an input.

Sattler et al., FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning, 2021. The public
data is split into D⁻ and D. Once, client k with its data D_k, h the features of the initial net
(pre-trained without labels, if wanted) divided by their largest norm over D_k and D⁻:

    v_k = argmin_v  mean log-loss of σ(v·h(x)) on D_k (1) and D⁻ (0) + λ/2 ‖v‖²
    s_k(x) = σ( (v_k + N(0, σ²I))·h(x) ) + 10⁻⁸   for x in D,
    σ² = 2 ln(1.25/δ) Δ²/ε²,  Δ = 2/(λ (|D_k| + |D⁻|))       (ε, δ)-private scores

In every round, after the uniform mean w of the cohort's models w_k:

    w ← argmin  KL( softmax( Σ_k s_k(x) h(w_k, x) / Σ_k s_k(x) ) ‖ h(w, x) )   over D

by Adam, whose state lasts over rounds. Only the scores are private, not the models; the largest
norm, by which the features are divided, is not, and the noise comes from the run's seed: whoever
knows that can subtract it.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from fedgkd_pl.data.examples import Batches, Examples
from fedgkd_pl.errors import at_least, not_negative, positive, require
from fedgkd_pl.federation.message import ClientUpdate, Message, Spec, Specs, State
from fedgkd_pl.federation.server_training import KeptOptimizer, as_input, server_adam, server_steps
from fedgkd_pl.federation.teachers import FrozenNet
from fedgkd_pl.methods.fedavg import FedAvg, FedAvgClient, Weighting
from fedgkd_pl.methods.feddf import distil, mean_answer
from fedgkd_pl.models.heads import require_classifier
from fedgkd_pl.seeds import derive
from fedgkd_pl.storage.recorded import Recorded
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, pad

SMALLEST = 1e-8  # of a score


class SimCLR(Recorded):
    """Contrastive pre-training of a net's features (Chen et al., ICML 2020).

    Two views of an input should be nearer to each other than to the views of all others: with z the
    normalised outputs of a head on the features, which is thrown away afterwards, and i' the other
    view of i, the mean over all 2B views of

        −log( e^{z_i·z_i'/τ} / Σ_{j≠i} e^{z_i·z_j/τ} )

    A view is the data's own augmentation, where it has one, an image moved by up to ``shift``
    pixels, and noise.

    Args:
        epochs: passes over the public data.
        batch_size: inputs a step, each twice.
        lr: Adam's rate.
        temperature: τ.
        shift: pixels, of inputs that are images.
        noise: its standard deviation, in units of the net's input.
        width: of the head's output.
    """

    def __init__(
        self,
        epochs: int = 100,
        batch_size: int = 128,
        lr: float = 1e-3,
        temperature: float = 0.5,
        shift: int = 1,
        noise: float = 0.1,
        width: int = 128,
    ) -> None:
        at_least(1, epochs=epochs, width=width)
        at_least(2, batch_size=batch_size)
        positive(lr=lr, temperature=temperature)
        not_negative(shift=shift, noise=noise)
        self.epochs, self.batch_size, self.lr = epochs, batch_size, lr
        self.temperature, self.shift, self.noise, self.width = temperature, shift, noise, width

    def __call__(self, server: FedAvg, examples: Examples, features: int) -> None:
        """Trains ``features`` of the server's net, which are so many; its classifier stays."""
        net, like = server.net, next(server.net.parameters())
        random = torch.Generator().manual_seed(derive(server.datamodule.seed, "public", 1))
        head = nn.Sequential(
            nn.Linear(features, features), nn.ReLU(), nn.Linear(features, self.width)
        )
        for parameter in head.parameters():
            nn.init.normal_(parameter, std=features**-0.5, generator=random)
        head.to(like)
        optimizer = server_adam([*net.parameters(), *head.parameters()], self.lr)
        examples = examples.to(like.device)
        batches = Batches(examples, self.batch_size, random)

        def views() -> Iterator[tuple[Tensor]]:
            for _ in range(self.epochs):
                for x, y in batches:
                    if len(y) > 1:
                        yield (x,)

        def loss(x: Tensor) -> Tensor:
            both = torch.cat([self.view(as_input(x, like), random) for _ in range(2)])
            return contrastive(head(net.features(both)), self.temperature)  # type: ignore[operator]

        steps = self.epochs * len(batches)
        server_steps(server, optimizer, views(), loss, steps, name="pretraining")
        net.zero_grad()

    def view(self, x: Tensor, random: torch.Generator) -> Tensor:
        """An input, moved and noisy."""
        if self.shift and x.dim() == 4:
            height, width = x.shape[2:]
            padded = pad(x, [self.shift] * 4)
            top, left = torch.randint(2 * self.shift + 1, (2,), generator=random).tolist()
            x = padded[:, :, top : top + height, left : left + width]
        return x + self.noise * torch.randn(x.shape, generator=random, dtype=torch.float32).to(x)


def contrastive(outputs: Tensor, temperature: float) -> Tensor:
    """SimCLR's loss; the second half of the rows are the other views of the first."""
    z = normalize(outputs, dim=1)
    similarity = z @ z.T / temperature
    similarity = similarity.masked_fill(torch.eye(len(z), device=z.device).bool(), float("-inf"))
    return cross_entropy(similarity, torch.arange(len(z), device=z.device).roll(len(z) // 2))


class FedAUXClient(FedAvgClient):
    """The client module of FedAUX: FedAvg's, with scores that it keeps."""

    uses_public = True

    def __init__(self, net: nn.Module, *args: Any, **settings: Any) -> None:
        super().__init__(net, *args, **settings)
        self.scorer = FrozenNet(net)

    def receive(self, message: Message, state: State) -> None:
        """Loads w_t, and the scores if there are any."""
        super().receive(message, state)
        self.scoring = message.models.get("start", self.start)
        self.scores: Tensor | None = state.get("scores")

    def on_train_start(self) -> None:
        """Scores the public data in the client's first round."""
        super().on_train_start()
        if self.scores is None:
            own: Any = self.trainer.train_dataloader
            assert self.public is not None
            negatives, examples = split_public(self.public, self.negatives, self.run_seed)
            self.scorer.load(self.scoring, self.device)
            local, others, rest = (
                self._features(each) for each in (own.examples, negatives, examples)
            )
            samples = len(local) + len(others)
            noise = torch.randn(local.shape[1], dtype=torch.float64)
            noise *= sigma(samples, self.lam, self.epsilon, self.delta) if self.epsilon else 0.0
            self.scores = certainty(local, others, rest, self.lam, noise)

    @torch.no_grad()
    def _features(self, examples: Examples) -> Tensor:
        like = next(self.net.parameters())
        batches = Batches(examples.to(like.device), 256)
        features = [self.scorer.features(as_input(x, like)) for x, _ in batches]
        return torch.cat(features).flatten(1).cpu().double()

    def reply(self) -> ClientUpdate:
        """Sends the scores with the model, and keeps them."""
        update = super().reply()
        assert self.scores is not None
        update.extra = {"scores": self.scores}
        update.state = {"scores": self.scores}
        return update


class FedAUX(FedAvg):
    """FedAUX: FedDF whose teachers count by certainty scores.

    Args:
        net: a net with ``features`` and a ``Linear`` ``classifier``.
        negatives: the part of the public data that is D⁻.
        lam: λ of the logistic regression.
        epsilon: ε of the scores' privacy (paper: 0.1); null for none.
        delta: δ.
        pretraining: of the net on the public data, before the first round.
        distil_epochs: passes over D in a round; 0 is FedAvg.
        distil_lr: Adam's rate.
        distil_batch_size: public inputs a step.
        weighting: of the clients in their mean: ``uniform`` (authors), or by their ``samples``.
        kwargs: those of :class:`FedAvg`.
    """

    title = "FedAUX"
    citation = "Sattler et al., 2021"
    exchanges = ()
    colour = 20
    client_class = FedAUXClient
    client_settings = ("negatives", "lam", "epsilon", "delta")
    takes_modules = False
    takes_sequences = False
    tasks = ("classes",)
    keeps = ("start", "adam")
    public_inputs = 2

    def __init__(
        self,
        net: nn.Module,
        negatives: float = 0.2,
        lam: float = 0.01,
        epsilon: float | None = 0.1,
        delta: float = 1e-5,
        pretraining: SimCLR | None = None,
        distil_epochs: int = 1,
        distil_lr: float = 5e-5,
        distil_batch_size: int = 128,
        weighting: Weighting = "uniform",
        **kwargs: Any,
    ) -> None:
        features = require_classifier(net, "FedAUX").in_features
        super().__init__(net, weighting=weighting, **kwargs)
        at_least(0, distil_epochs=distil_epochs)
        at_least(1, distil_batch_size=distil_batch_size)
        positive(distil_lr=distil_lr, lam=lam)
        require(0 < negatives < 1, "negatives", "must be in (0, 1)", negatives)
        if epsilon is not None:
            positive(epsilon=epsilon)
        require(0 < delta < 1, "delta", "must be in (0, 1)", delta)
        self.negatives, self.lam, self.epsilon, self.delta = negatives, lam, epsilon, delta
        self.pretraining, self.features = pretraining, features
        self.distil_epochs, self.distil_batch_size = distil_epochs, distil_batch_size
        self.adam = KeptOptimizer(partial(server_adam, lr=distil_lr))

    def on_train_start(self) -> None:
        """Pre-trains the net of a new run, and opens the engine."""
        if self.pretraining is not None and self.current_epoch == 0:
            self.pretraining(self, self.public, self.features)
            self.start = self.global_copy()
        super().on_train_start()

    @property
    def is_half_done(self) -> bool:
        """As in all methods; and until a pre-trained model has learned a round."""
        new = self.trainer.state.fn == "fit" and self.trainer.global_step == 0
        return super().is_half_done or (new and self.pretraining is not None)

    def broadcast(self) -> Message:
        """w_t and, where it is not the one that clients know, the net that scores."""
        message = super().broadcast()
        if self.pretraining is not None:
            message.models["start"] = self.start
        return message

    def on_update(self, update: ClientUpdate) -> None:
        """Keeps a client's model and scores until they have taught."""
        if self.distil_epochs:
            self.answers.append((update.weights, update.extra["scores"]))

    def server_step(self, mean: State) -> None:
        """As FedAvg; then the ensemble, weighted by its scores, teaches the mean."""
        super().server_step(mean)
        if not self.distil_epochs:
            return
        _, examples = split_public(self.public, self.negatives, self.datamodule.seed)
        steps = self.distil_epochs * math.ceil(len(examples) / self.distil_batch_size)
        like = next(self.net.parameters())  # some devices have no doubles
        weights = torch.stack([scores for _, scores in self.answers], dim=1).to(like)
        models, self.answers = [(self.net, model) for model, _ in self.answers], []
        answer = mean_answer(models, self.device)
        batches, optimizer = (examples, self.distil_batch_size), self.adam.of(self.net)
        distil(self, self.net, answer, batches, optimizer, steps, known=weights)

    def client_extra(self) -> Specs:
        """The scores of all public inputs that are distilled on."""
        scored = len(self.public) - number_of_negatives(self.public, self.negatives)
        return {"scores": Spec((scored,), torch.float64, SMALLEST, 1 + SMALLEST)}

    def client_state(self, number: int = 0) -> Specs:
        """The scores, which are computed once."""
        return self.client_extra()


def split_public(public: Examples, negatives: float, seed: int) -> tuple[Examples, Examples]:
    """D⁻ and D, of which none is empty, drawn by the seed."""
    random = torch.Generator().manual_seed(derive(seed, "public"))
    order = torch.randperm(len(public), generator=random)
    first = number_of_negatives(public, negatives)
    return public.view(order[:first].sort().values), public.view(order[first:].sort().values)


def number_of_negatives(public: Examples, negatives: float) -> int:
    """The size of D⁻; it and D have an input at least."""
    return min(max(1, round(negatives * len(public))), len(public) - 1)


def sigma(samples: int, lam: float, epsilon: float, delta: float) -> float:
    """The noise that makes a regression over so many samples (ε, δ)-private."""
    return math.sqrt(2 * math.log(1.25 / delta)) * 2 / (lam * samples) / epsilon


def certainty(local: Tensor, others: Tensor, rest: Tensor, lam: float, noise: Tensor) -> Tensor:
    """How much each row of ``rest`` looks like ``local`` and not like ``others``; in (0, 1]."""
    both = torch.cat([local, others])
    largest = both.norm(dim=1).max().clamp(min=1e-300)
    labels = torch.cat([torch.ones(len(local)), torch.zeros(len(others))]).to(local)
    weights = logistic_regression(both / largest, labels, lam)
    scores: Tensor = (rest / largest @ (weights + noise)).sigmoid() + SMALLEST
    return scores


def logistic_regression(x: Tensor, labels: Tensor, lam: float) -> Tensor:
    """argmin_v mean log-loss + λ/2 ‖v‖², by Newton's method with halved steps where needed."""
    weights = x.new_zeros(x.shape[1])
    signs = 1 - 2 * labels

    def loss(v: Tensor) -> Tensor:
        return nn.functional.softplus(signs * (x @ v), threshold=1e9).mean() + lam / 2 * v @ v

    for _ in range(100):
        p = (x @ weights).sigmoid()
        gradient = x.T @ (p - labels) / len(x) + lam * weights
        if gradient.norm() < 1e-14:
            break
        curvature = (x.T * (p * (1 - p))) @ x / len(x)
        step = torch.linalg.solve(curvature + lam * torch.eye(len(weights)).to(x), gradient)
        length, before = 1.0, loss(weights)
        while loss(weights - length * step) > before and length > 1e-9:
            length /= 2
        if length <= 1e-9:
            break  # as near as rounding lets it come
        weights = weights - length * step
    return weights
