"""Reference FedGen (Zhu et al. 2021) in functional torch, float64.

Written from ``FACTS.md`` alone; nothing is imported from the package, so that agreement means
something. The client's net is the MLP of `oracle_methods`. The generator is a dict of tensors
under the names of its ``state_dict``::

    [noise | one-hot label] → 0: Linear → 1: BatchNorm1d → ReLU → 3: Linear → latent z

z takes the place of what the classifier sees, so its width is the classifier's input width.

Gradients come from autograd; batch normalisation, Adam, SGD and the rounds are spelt out.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracles.oracle_methods import (
    Data,
    Model,
    Optimizer,
    aggregate,
    copied,
    forward,
    gradients,
    leaves_of,
)

Draw = tuple[Tensor, Tensor]  # noise (n, noise), integer labels (n,)
Head = tuple[Tensor, Tensor]  # weight (classes, latent), bias (classes,)

BN_EPS, BN_MOMENTUM = 1e-5, 0.1
PARAMETERS = ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")
STATISTICS = ("1.running_mean", "1.running_var", "1.num_batches_tracked")


def generate(
    g: Model, eps: Tensor, y: Tensor, classes: int, train: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the latents z of the labels y, and the running statistics afterwards.

    Args:
        g: The generator; left unchanged.
        eps: Noise, one row per label.
        y: Integer labels.
        classes: Number of labels.
        train: Normalise by the batch (biased variance) and move the running statistics (unbiased
            variance); otherwise normalise by the running statistics and return them as they are.

    """
    one_hot = torch.zeros(len(y), classes, dtype=eps.dtype)
    one_hot[torch.arange(len(y)), y] = 1
    h = torch.cat([eps, one_hot], dim=1) @ g["0.weight"].T + g["0.bias"]

    statistics = {name: g[name] for name in STATISTICS}
    if train:
        mean = h.mean(0)
        variance = ((h - mean) ** 2).mean(0)
        unbiased = variance.detach() * len(h) / (len(h) - 1)
        for name, value in zip(STATISTICS[:2], (mean.detach(), unbiased), strict=True):
            statistics[name] = (1 - BN_MOMENTUM) * g[name] + BN_MOMENTUM * value
        statistics["1.num_batches_tracked"] = g["1.num_batches_tracked"] + 1
    else:
        mean, variance = g["1.running_mean"], g["1.running_var"]
    h = (h - mean) / (variance + BN_EPS).sqrt() * g["1.weight"] + g["1.bias"]
    return h.relu() @ g["3.weight"].T + g["3.bias"], statistics


def _diversity(eps: Tensor, z: Tensor) -> Tensor:
    """Return exp(-mean over all pairs, i = j among them, of noise distance · latent distance).

    Distances are means over coordinates, of squared differences (noise, without a root, whose
    gradient at i = j is NaN) and of absolute differences (latents).
    """
    noise = ((eps[:, None, :] - eps[None, :, :]) ** 2).mean(2)
    latent = (z[:, None, :] - z[None, :, :]).abs().mean(2)
    return (-(noise * latent).mean()).exp()


def generator_loss(
    g: Model, eps: Tensor, y: Tensor, heads: Sequence[Head], weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the server's loss of one batch in training mode, and the new running statistics.

    The mean over rows of Σ_k w_k(y_i) · CE(head_k(z_i), y_i), plus the diversity term. A row whose
    label nobody in the cohort holds has weight zero and still counts in the mean.

    Args:
        g: The generator; the loss is differentiable in its parameters only.
        eps: Noise, one row per label.
        y: Integer labels.
        heads: Classifiers of the cohort's clients.
        weights: (clients, classes), w_k(y), in the order of heads.

    """
    z, statistics = generate(g, eps, y, classes=weights.shape[1], train=True)
    rows = z.new_zeros(len(y))
    for (weight, bias), shares in zip(heads, weights, strict=True):
        logits = z @ weight.detach().T + bias.detach()
        entropy = F.cross_entropy(logits, y, reduction="none")
        # Both (n,): against (n, 1) the product would be (n, n) and its mean lose the shares.
        assert entropy.shape == shares[y].shape == rows.shape
        rows = rows + shares[y] * entropy
    return rows.mean() + _diversity(eps, z), statistics


def train_generator(
    g: Model,
    draws: Sequence[Draw],
    heads: Sequence[Head],
    weights: Tensor,
    *,
    lr: float,
    weight_decay: float = 1e-2,
) -> Model:
    """Return the generator after one Adam step per draw, from a fresh optimizer.

    Args:
        g: The generator to start from; left unchanged.
        draws: (noise, labels) of every step.
        heads: See `generator_loss`.
        weights: See `generator_loss`.
        lr: Learning rate.
        weight_decay: Added to every parameter's gradient, as weight_decay · parameter.

    """
    adam = Optimizer("adam", lr, None, wd=weight_decay)
    for eps, y in draws:
        leaves = leaves_of({name: g[name] for name in PARAMETERS})
        loss, statistics = generator_loss(g | leaves, eps, y, heads, weights)
        g = g | statistics | adam.step({n: g[n] for n in PARAMETERS}, gradients(loss, leaves))
    return g


def _head(w: Model) -> Head:
    return w["classifier.weight"], w["classifier.bias"]


def local_loss(
    w: Model,
    x: Tensor,
    y: Tensor,
    *,
    generator: Model | None,
    fake: Draw | None,
    same: Tensor | None,
    alpha: float,
    beta: float,
) -> Tensor:
    """Return a client's loss of one batch, differentiable in w only.

    CE(w; x, y) + α·CE(head(G(ε_f, y_f)), y_f) + β·KL(softmax(head(G(ε_s, y))) ‖ softmax(w(x))), all
    means over rows, with the head of the net being trained. The α term reaches the head alone; the
    KL's target is a constant, also as a function of the head.

    Args:
        w: The net being trained.
        x: Inputs of the batch.
        y: Integer labels of the batch.
        generator: In eval mode and constant; None: the cross-entropy alone.
        fake: (ε_f, y_f), of any length; unused without a generator.
        same: ε_s, noise for the labels y; unused without a generator.
        alpha: α of this round.
        beta: β of this round.

    """
    _, logits = forward(w, x)
    loss = F.cross_entropy(logits, y)
    if generator is None:
        return loss
    weight, bias = _head(w)
    eps_fake, y_fake = fake
    with torch.no_grad():
        z_fake, _ = generate(generator, eps_fake, y_fake, len(bias), train=False)
        z_same, _ = generate(generator, same, y, len(bias), train=False)
        log_p = (z_same @ weight.T + bias).log_softmax(1)
    distance = (log_p.exp() * (log_p - logits.log_softmax(1))).sum(1).mean()
    return loss + alpha * F.cross_entropy(z_fake @ weight.T + bias, y_fake) + beta * distance


def label_shares(labels: Sequence[Tensor], classes: int) -> Tensor:
    """Return w_k(y), (clients, classes): client k's share of the samples of y among those given.

    Args:
        labels: Integer labels of every client of the cohort.
        classes: Number of labels; columns of labels that nobody holds are zero.

    """
    counts = torch.stack([y.bincount(minlength=classes) for y in labels]).double()
    return counts / counts.sum(0).clamp(min=1)


def run(
    w0: Model,
    g0: Model,
    clients: Sequence[Data],
    cohorts: Sequence[Sequence[int]],
    *,
    batches: Callable[[int, int], Sequence[Tensor]],
    lr: float,
    momentum: float,
    alpha: float,
    beta: float,
    decay: float,
    server_draws: Callable[[int], Sequence[Draw]],
    client_draws: Callable[[int, int, int], tuple[Draw, Tensor]],
    gen_lr: float,
) -> dict[str, Any]:
    """Run whole rounds.

    Round 1 is FedAvg on the clients. At the end of every round the server trains the generator on
    the heads of the cohort's clients as they are after local training; the next round's clients get
    the result. With weights α·decay^(t-1) and β·decay^(t-1), round 2 is the first to use them.

    Args:
        w0: The initial global model; left unchanged.
        g0: The initial generator; left unchanged.
        clients: (x, y) of every client; n_k is the length of y.
        cohorts: Ids of the clients that take part, one list per round.
        batches: (round from 1, client id) → index tensors of the local steps.
        lr: The clients' learning rate.
        momentum: SGD's momentum, from zero for every client and round.
        alpha: α before its decay.
        beta: β before its decay.
        decay: Factor on α and β from one round to the next.
        server_draws: Round from 1 → (ε, y) of the generator's steps.
        client_draws: (round from 1, client id, step from 0) → ((ε_f, y_f), ε_s); asked from round 2
            on only.
        gen_lr: The generator's learning rate.

    Returns:
        A dict with "models" and "generators", the global model and the generator after each round.

    """
    w, g = copied(w0), g0
    classes = len(w["classifier.bias"])
    models: list[Model] = []
    generators: list[Model] = []

    for t, cohort in enumerate(cohorts, start=1):
        factor = decay ** (t - 1)
        trained: list[Model] = []
        for k in cohort:
            local, sgd = w, Optimizer("sgd", lr, None, momentum)
            for step, batch in enumerate(batches(t, k)):
                x, y = clients[k][0][batch], clients[k][1][batch]
                fake, same = client_draws(t, k, step) if t > 1 else (None, None)
                own = {"generator": g if t > 1 else None, "fake": fake, "same": same}
                own |= {"alpha": alpha * factor, "beta": beta * factor}
                leaves = leaves_of(local)
                local = sgd.step(local, gradients(local_loss(leaves, x, y, **own), leaves))
            trained.append(local)

        labels = [clients[k][1] for k in cohort]
        w = aggregate(trained, [len(y) for y in labels])
        models.append(w)
        heads, shares = [_head(local) for local in trained], label_shares(labels, classes)
        g = train_generator(g, server_draws(t), heads, shares, lr=gen_lr)
        generators.append(g)

    return {"models": models, "generators": generators}
