"""Reference rounds, functional torch, float64, with public data at the server: CFD, FedAUX.

Written from ``FACTS.md`` and ``METHODS.md`` alone; nothing is imported from the package, so that
agreement means something. The net is the MLP of `oracle_methods`. Gradients come from autograd;
SGD, Adam, schedule, quantiser, code lengths, scores and rounds are spelt out.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracles.oracle_methods import (
    Data,
    Model,
    Optimizer,
    aggregate,
    complete,
    copied,
    forward,
    gradients,
    leaves_of,
)
from tests.oracles.oracle_more import kl

Loss = Callable[[Tensor, Tensor], Tensor]  # (target, the trained model's logits) → scalar

P_MIN = 1e-7  # CFD: a smaller probability counts as this one in the logarithm
XI = 1e-8  # FedAUX: added to every score

# The settings each method of `run` takes, with their defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "cfd": {"client_steps": 2000, "server_steps": 1000, "bits_up": 1, "bits_down": 1}
    | {"distil_lr": 1e-3},
    "fedaux": {"negatives": None, "lam": 0.01, "noise": None, "epochs": 1, "distil_lr": 5e-5},
}


def ce(target: Tensor, logits: Tensor) -> Tensor:
    """Return the mean cross-entropy; target: integer labels."""
    return F.cross_entropy(logits, target)


def soft_ce(target: Tensor, logits: Tensor) -> Tensor:
    """Return CFD's -Σ_c y_c · log(max(p_c, 1e-7)), mean over the rows; target: probabilities y."""
    return -(target * logits.softmax(1).clamp(min=P_MIN).log()).sum(1).mean()


def train(
    w: Model, x: Tensor, target: Tensor, batches: Iterable[Tensor], loss: Loss, by: Optimizer
) -> Model:
    """Return w after one step per batch on loss(target, logits of x), local or distillation."""
    for batch in batches:
        leaves = leaves_of(w)
        value = loss(target[batch], forward(leaves, x[batch])[1])
        w = by.step(w, gradients(value, leaves))
    return w


def take(batches: Iterable[Tensor], amount: int, rows: bool = False) -> Iterator[Tensor]:
    """Yield that many batches, or batches of that many rows together; raise if it cannot be."""
    source = iter(batches)
    while amount > 0 and (batch := next(source, None)) is not None:
        amount -= len(batch) if rows else 1
        yield batch
    if amount:
        raise ValueError(f"the public batches miss the amount wanted by {amount}")


def logits_of(w: Model, x: Tensor) -> Tensor:
    """Return the logits of a model that is not being trained."""
    with torch.no_grad():
        return forward(w, x)[1]


def mixed_logits(logits: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> Tensor:
    """Return Σ_i s_i z_i / Σ_i s_i for every row, s_i one number per row; without s the mean."""
    if weights is None:
        return sum(logits) / len(logits)
    total = sum(s[:, None] * z for s, z in zip(weights, logits, strict=True))
    return total / sum(weights)[:, None]


def quantise(p: Tensor, bits: int) -> Tensor:
    """Return the nearest rows, in the sum of absolute differences, of multiples of 1/(2^bits - 1).

    With N = 2^bits - 1 an entry gets ⌊N p⌋ units; the units that are left go, one each, to the
    largest remainders, the lowest index first among equals. One bit is the one-hot argmax. 32 bits
    are the identity.
    """
    if bits == 32:
        return p.clone()
    scaled = (2**bits - 1) * p.double()
    units = scaled.floor()
    for row, rest in zip(units, scaled - units, strict=True):
        left = 2**bits - 1 - int(row.sum())
        row[rest.argsort(descending=True, stable=True)[:left]] += 1
    return units / (2**bits - 1)


def coded_bits(rows: Tensor, previous: Tensor | None = None) -> float:
    """Return n · H: n symbols, H their empirical entropy in bits within this message.

    A symbol is a whole row (an entry, if rows is a vector). With a previous message of the same
    length, the rows that equal the previous one at their place are all the same symbol "0".
    """
    symbols: list[Any] = [tuple(torch.atleast_1d(row).tolist()) for row in rows]
    for i in range(len(rows)) if previous is not None else ():
        if torch.equal(rows[i], previous[i]):
            symbols[i] = "0"
    counts = Counter(symbols).values()
    return sum(count * math.log2(len(rows) / count) for count in counts)


def sigma(n: int, lam: float = 0.01, eps: float = 0.1, delta: float = 1e-5) -> float:
    """Return σ of FedAUX's noise: σ² = 2 ln(1.25/δ) Δ²/ε², Δ = 2/(n λ), n = |D_i| + |D-|."""
    return 2 / (n * lam) * math.sqrt(2 * math.log(1.25 / delta)) / eps


def logistic_regression(h: Tensor, y: Tensor, lam: float) -> Tensor:
    """Return argmin_w mean log-loss(y, w·h) + (λ/2)‖w‖², no intercept, by damped Newton steps."""
    y, w = y.to(h.dtype), h.new_zeros(h.shape[1])

    def objective(w: Tensor) -> float:
        return float(F.softplus((1 - 2 * y) * (h @ w)).mean() + lam / 2 * w @ w)

    for _ in range(100):
        p = (h @ w).sigmoid()
        gradient = h.T @ (p - y) / len(y) + lam * w
        hessian = (h.T * (p * (1 - p))) @ h / len(y) + lam * torch.eye(len(w), dtype=h.dtype)
        step = torch.linalg.solve(hessian, gradient)
        while objective(w - step) > objective(w) + 1e-14:
            step = step / 2
        w = w - step
        if float(step.norm()) <= 1e-15 * float(w.norm()):
            break
    if not float(gradient.norm()) <= 1e-13:  # also when it is not a number
        raise ArithmeticError(f"Newton's method ended at a gradient of {float(gradient.norm())}")
    return w


def scores(
    local: Tensor, negatives: Tensor, distil: Tensor, lam: float, noise: Tensor | None = None
) -> Tensor:
    """Return s = sigmoid(w·h) + 1e-8 of a client, w its separator, noise added.

    The inputs are the initial net's features: of the client's own rows (label 1), of D- (label 0),
    of D_distill. All three are divided by the largest norm in the first two.
    """
    both = torch.cat([local, negatives])
    scale = both.norm(dim=1).max()
    y = torch.cat([torch.ones(len(local)), torch.zeros(len(negatives))])
    w = logistic_regression(both / scale, y, lam)
    w = w if noise is None else w + noise
    return (distil / scale @ w).sigmoid() + XI


def run(
    method: str,
    w0: Model,
    clients: Sequence[Data],
    cohorts: Sequence[Sequence[int]],
    *,
    batches: Callable[[int, int], Sequence[Tensor]],
    public: Tensor,
    public_batches: Callable[[int, int | str], Iterable[Tensor]],
    lr: float,
    momentum: float = 0.0,
    **settings: Any,
) -> dict[str, Any]:
    """Run whole rounds of one method; its settings and their defaults are in `SETTINGS`.

    - "cfd": clients start at w_0, from round 2 on after client_steps towards the last labels down,
      with a new Adam; the labels up are averaged, and the server's own model, w_0 at first, makes
      server_steps with one Adam for all rounds. A message is coded against the last one of (down:
      to) that client; 32 bits are never coded and count rows · classes · 32.
    - "fedaux": the first `negatives` public rows (None: a fifth, rounded down) are D-, the others
      D_distill. From the cohort's uniform mean, one Adam for all rounds goes towards the score-
      weighted mean of its logits, for `epochs` passes counted in rows.
      noise: client → vector.

    Args:
        method: One of the names above.
        w0: The initial global model; left unchanged.
        clients: (x, y) of every client.
        cohorts: Ids of the clients that take part, one list per round.
        batches: (round from 1, client id) → index tensors of the local cross-entropy steps.
        public: Public inputs (n, d).
        public_batches: (round from 1, "server" or, in "cfd", a client id) → one index tensor per
            distillation step, of rows of `public`; in "fedaux" of rows of D_distill, from 0.
        lr: Of local training, as momentum: distillation has its own.
        **settings: The method's own.

    Returns:
        One entry per round in each: "models" (evaluated), "means" (not "cfd"), in "cfd" "bits_up",
        "bits_down" (client → bits; none down in round 1) and "labels_down".

    """
    o = complete(SETTINGS[method], settings)
    w = start = copied(w0)
    x = public.double()
    adam = partial(Optimizer, "adam", o["distil_lr"], None)
    server_adam = adam()
    out: dict[str, Any] = defaultdict(list)
    last: dict[tuple[str, int], Tensor] = {}  # "cfd": newest labels by direction and client

    def bits(way: str, k: int, labels: Tensor) -> float:
        previous, last[way, k] = last.get((way, k)), labels
        if o[f"bits_{way}"] == 32:
            return 32.0 * labels.numel()
        return coded_bits(labels, previous)

    if method == "fedaux":
        cut = len(x) // 5 if o["negatives"] is None else o["negatives"]
        negatives, x = x[:cut], x[cut:]
        certain = {}
        for k, (own, _) in enumerate(clients):
            h = [forward(start, part)[0] for part in (own.double(), negatives, x)]
            noise = None if o["noise"] is None else o["noise"][k]
            certain[k] = scores(*h, o["lam"], noise)

    for t, cohort in enumerate(cohorts, start=1):
        starts = dict.fromkeys(cohort, start if method == "cfd" else w)
        if method == "cfd":
            out["bits_down"].append({})
            for k in cohort if t > 1 else ():
                down = out["labels_down"][-1]
                out["bits_down"][-1][k] = bits("down", k, down)
                steps = take(public_batches(t, k), o["client_steps"])
                starts[k] = train(start, x, down, steps, soft_ce, adam())

        trained = {}
        for k, (own, y) in ((k, clients[k]) for k in cohort):
            new = Optimizer("sgd", lr, None, momentum)
            trained[k] = train(starts[k], own.double(), y, batches(t, k), ce, new)
        logits = {k: logits_of(model, x) for k, model in trained.items()}

        steps = public_batches(t, "server")
        if method == "cfd":
            up = {k: quantise(z.softmax(1), o["bits_up"]) for k, z in logits.items()}
            out["bits_up"].append({k: bits("up", k, labels) for k, labels in up.items()})
            target = sum(up.values()) / len(up)
            steps = take(steps, o["server_steps"])
            w = train(w, x, target, steps, soft_ce, server_adam)
            out["labels_down"].append(quantise(logits_of(w, x).softmax(1), o["bits_down"]))
        else:
            w = aggregate(list(trained.values()), [1] * len(cohort))
            out["means"].append(w)
            target = mixed_logits(list(logits.values()), [certain[k] for k in cohort])
            steps = take(steps, o["epochs"] * len(x), rows=True)
            w = train(w, x, target, steps, kl, server_adam)
        out["models"].append(w)
    return dict(out)
