"""Reference federated rounds in NumPy float64, from the paper's equations: FedAvg and FedGKD.

The model is a linear softmax classifier shaped like ``torch.nn.Linear``: z = x Wᵀ + b. Gradients
are written out by hand and nothing is imported from the package, so that agreement means something.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray
Model = dict[str, Array]  # {"weight": (classes, features), "bias": (classes,)}
Data = tuple[Array, Array]  # x (n, features), y (n,) integer labels


def _logits(w: Model, x: Array) -> Array:
    return x @ w["weight"].T + w["bias"]


def _log_softmax(z: Array) -> Array:
    z = z - z.max(axis=1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def _float64(w: Model) -> Model:
    return {name: np.array(value, dtype=np.float64) for name, value in w.items()}


def gradient(
    w: Model,
    x: Array,
    y: Array,
    *,
    gamma: float = 0.0,
    teacher: Model | None = None,
    distance: str = "kl",
    temperature: float = 1.0,
) -> Model:
    """Return ∂L/∂w of L = CE + (γ/2)·distance(teacher, student) on one batch.

    With q = softmax(z_S/τ), p = softmax(z_T/τ), B rows and C classes, per logit:

    - CE: (softmax(z_S) - onehot(y)) / B
    - kl, mean over rows of KL(p ‖ q), no τ²: (q - p) / (τB)
    - mse, mean over all B·C logits, τ unused: 2 (z_S - z_T) / (BC)

    The teacher is a constant. Without one, or with γ = 0, the loss is the cross-entropy.

    Args:
        w: The student.
        x: Inputs of the batch.
        y: Integer labels of the batch.
        gamma: γ of the paper; the factor on the distance is γ/2.
        teacher: The distilled model, w̄_t.
        distance: "kl" or "mse".
        temperature: τ, for "kl" only.
    """
    w, x, y = _float64(w), np.asarray(x, dtype=np.float64), np.asarray(y)
    rows = np.arange(len(y))
    z = _logits(w, x)
    dz = np.exp(_log_softmax(z))
    dz[rows, y] -= 1.0
    dz /= len(y)

    if teacher is not None and gamma != 0.0:
        z_teacher = _logits(_float64(teacher), x)
        if distance == "kl":
            log_t, log_s = _log_softmax(z_teacher / temperature), _log_softmax(z / temperature)
            dgap = (np.exp(log_s) - np.exp(log_t)) / (temperature * len(y))
        else:
            dgap = 2.0 * (z - z_teacher) / z.size
        dz += gamma / 2 * dgap

    return {"weight": dz.T @ x, "bias": dz.sum(axis=0)}


def local_update(
    w: Model,
    data: Data,
    *,
    batches: Sequence[Array],
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: float | None = None,
    **loss: Any,
) -> Model:
    """ClientUpdate of Algorithm 1: one SGD step per batch, from a fresh optimizer.

    As in torch: gradients are clipped to a total norm first (factor min(1, clip / (norm + 1e-6))),
    weight decay is added inside the optimizer, and the momentum buffer starts as the first
    gradient, decay included.

    Args:
        w: The global model; left unchanged.
        data: The client's (x, y).
        batches: Index arrays into the data, in the order of the steps.
        lr: Learning rate.
        momentum: Momentum: buffer ← momentum · buffer + g.
        weight_decay: L2 coefficient, on weight and bias.
        clip: Largest total gradient norm; None for no clipping.
        **loss: Passed to `gradient`.
    """
    x, y = np.asarray(data[0]), np.asarray(data[1])
    w = _float64(w)
    buffer: Model = {}
    for batch in batches:
        grad = gradient(w, x[batch], y[batch], **loss)
        if clip is not None:
            norm = np.sqrt(sum((g**2).sum() for g in grad.values()))
            scale = min(1.0, clip / (norm + 1e-6))
            grad = {name: scale * g for name, g in grad.items()}
        grad = {name: g + weight_decay * w[name] for name, g in grad.items()}
        if buffer:
            buffer = {name: momentum * buffer[name] + g for name, g in grad.items()}
        else:
            buffer = grad
        w = {name: w[name] - lr * buffer[name] for name in w}
    return w


def aggregate(models: Sequence[Model], counts: Sequence[int]) -> Model:
    """Return Σ_k (n_k / n) w_k, with n = Σ n_k over the models given (the cohort)."""
    n = float(sum(counts))
    total = {name: np.zeros_like(value) for name, value in _float64(models[0]).items()}
    for w_k, n_k in zip(map(_float64, models), counts, strict=True):
        total = {name: total[name] + n_k / n * w_k[name] for name in total}
    return total


def teacher_of(history: Sequence[Model], buffer_size: int) -> Model | None:
    """Return w̄_t, the plain mean of the newest global models; None before there is one.

    Args:
        history: Aggregated global models so far, newest last. The random w_0 is not among them.
        buffer_size: M; while fewer models exist the mean is over those there are.
    """
    newest = list(history)[-buffer_size:]
    return aggregate(newest, [1] * len(newest)) if newest else None


def run(
    w0: Model,
    clients: Sequence[Data],
    cohorts: Sequence[Sequence[int]],
    *,
    batches: Callable[[int, int], Sequence[Array]],
    buffer_size: int = 1,
    **local: Any,
) -> list[Model]:
    """Run the rounds of Algorithm 1 and return the global model after each.

    FedAvg is γ = 0. With γ > 0 round 1 is still FedAvg, since nothing has been aggregated to teach.

    Args:
        w0: The initial global model; left unchanged.
        clients: (x, y) of every client; n_k is the length of y.
        cohorts: Ids of the clients that take part, one list per round.
        batches: (round from 1, client id) → index arrays of the local steps.
        buffer_size: M, the number of global models averaged into the teacher.
        **local: Passed to `local_update`: lr, momentum, weight_decay, clip, gamma, ...
    """
    w = _float64(w0)
    history: list[Model] = []
    for t, cohort in enumerate(cohorts, start=1):
        teacher = teacher_of(history, buffer_size)
        trained = [
            local_update(w, clients[k], batches=batches(t, k), teacher=teacher, **local)
            for k in cohort
        ]
        w = aggregate(trained, [len(clients[k][1]) for k in cohort])
        history.append(w)
    return history
