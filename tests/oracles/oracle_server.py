"""Reference rounds, functional torch, float64, with public data at the server: FedDF, CFD, FedAUX.

Written from ``FACTS.md`` and ``METHODS.md`` alone; nothing is imported from the package, so that
agreement means something. The net is the MLP of `oracle_methods`. Gradients come from autograd;
SGD, Adam, schedule, quantiser, code lengths, scores and rounds are spelt out.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracles.oracle_methods import Data, Model, aggregate, forward

Loss = Callable[[Tensor, Tensor], Tensor]  # (target, the trained model's logits) → scalar
Options = Mapping[str, Any]

BETA_1, BETA_2, ADAM_EPS = 0.9, 0.999, 1e-8
P_MIN = 1e-7  # CFD: a smaller probability counts as this one in the logarithm
XI = 1e-8  # FedAUX: added to every score

# The settings each method of `run` takes, with their defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "feddf": {"steps": 10_000, "distil_lr": 1e-3, "distil_clip": 5.0, "tau": 1.0}
    | {"validate_every": 100, "patience": 1000, "weighted": False, "optimizer": "sgd"},
    "cfd": {"client_steps": 2000, "server_steps": 1000, "bits_up": 1, "bits_down": 1}
    | {"delta": True, "distil_lr": 1e-3, "distil_clip": None, "optimizer": "sgd"},
    "fedaux": {"negatives": None, "lam": 0.01, "noise": None, "epochs": 1, "steps": None}
    | {"distil_lr": 5e-5, "distil_clip": None, "optimizer": "sgd"},
}


class Optimizer:
    """SGD or Adam, as torch has them, behind a clip; a new one for a new state.

    The gradient of all tensors together is multiplied by min(1, clip / (norm + 1e-6)), then
    weight_decay · w is added. SGD: v ← momentum · v + g, the first v being g; w ← w - lr · v. Adam:
    w ← w - lr · m̂ / (√v̂ + ε), with the moments m̂, v̂ corrected for their start at zero.
    """

    def __init__(self, kind: str, lr: float, clip: float | None, rho: float = 0, wd: float = 0):
        self.kind, self.lr, self.clip, self.momentum, self.weight_decay = kind, lr, clip, rho, wd
        self.steps, self.m, self.v = 0, Model(), Model()

    def step(self, w: Model, grads: Model) -> Model:
        self.steps += 1
        norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
        factor = 1.0 if self.clip is None else min(1.0, self.clip / (norm + 1e-6))
        new = Model()
        for name, value in w.items():
            g = factor * grads[name] + self.weight_decay * value
            if self.kind == "sgd":
                self.v[name] = g if self.steps == 1 else self.momentum * self.v[name] + g
                new[name] = value - self.lr * self.v[name]
                continue
            self.m[name] = BETA_1 * self.m.get(name, 0 * g) + (1 - BETA_1) * g
            self.v[name] = BETA_2 * self.v.get(name, 0 * g) + (1 - BETA_2) * g**2
            m_hat = self.m[name] / (1 - BETA_1**self.steps)
            v_hat = self.v[name] / (1 - BETA_2**self.steps)
            new[name] = value - self.lr * m_hat / (v_hat.sqrt() + ADAM_EPS)
        return new


def cosine_lr(lr: float, i: int, steps: int) -> float:
    """Return the rate of step i, counted from 0: it falls from lr towards 0 over the steps."""
    return lr / 2 * (1 + math.cos(math.pi * i / steps))


def ce(target: Tensor, logits: Tensor) -> Tensor:
    """Return the mean cross-entropy; target: integer labels."""
    return F.cross_entropy(logits, target)


def soft_ce(target: Tensor, logits: Tensor) -> Tensor:
    """Return CFD's -Σ_c y_c · log(max(p_c, 1e-7)), mean over the rows; target: probabilities y."""
    return -(target * logits.softmax(1).clamp(min=P_MIN).log()).sum(1).mean()


def kl(target: Tensor, logits: Tensor, tau: float = 1.0) -> Tensor:
    """Return KL(softmax(target/τ) ‖ softmax(logits/τ)), mean over the rows; no factor τ²."""
    log_p, log_q = (target / tau).log_softmax(1), (logits / tau).log_softmax(1)
    return (log_p.exp() * (log_p - log_q)).sum(1).mean()


def train(
    w: Model, x: Tensor, target: Tensor, batches: Iterable[Tensor], loss: Loss, by: Optimizer
) -> Model:
    """Return w after one step per batch on loss(target, logits of x), local or distillation."""
    for batch in batches:
        leaves = {name: value.detach().clone().requires_grad_() for name, value in w.items()}
        value = loss(target[batch], forward(leaves, x[batch])[1])
        grads = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))
        w = by.step(w, grads)
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


def distil_feddf(
    w: Model, x: Tensor, target: Tensor, batches: Iterable[Tensor], val: Data | None, o: Options
) -> tuple[Model, list[tuple[int, float]], int]:
    """Train FedDF's student w with a new Adam; keep the best of the evaluated models.

    Evaluations come after every validate_every steps; the start is no candidate. Only a strictly
    better accuracy makes a new best; training stops at the first evaluation that lies `patience`
    or more steps behind the best one. Without any evaluation (no val, or too few steps) the final
    student is kept. Returns it, (step, accuracy) of every evaluation, and the steps made.
    """
    adam, best, made = Optimizer("adam", o["distil_lr"], o["distil_clip"]), None, 0
    best_step, best_accuracy = 0, -1.0
    evaluations: list[tuple[int, float]] = []
    for made, batch in enumerate(take(batches, o["steps"]), start=1):
        adam.lr = cosine_lr(o["distil_lr"], made - 1, o["steps"])
        w = train(w, x, target, [batch], partial(kl, tau=o["tau"]), adam)
        if val is None or made % o["validate_every"]:
            continue
        correct = int((logits_of(w, val[0].double()).argmax(1) == val[1]).sum())
        evaluations.append((made, correct / len(val[1])))
        if evaluations[-1][1] > best_accuracy:
            best, (best_step, best_accuracy) = w, evaluations[-1]
        elif made - best_step >= o["patience"]:
            break
    return (w if best is None else best), evaluations, made


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
        if left < 0:
            raise ValueError("a row sums to more than one")
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
) -> tuple[Tensor, Tensor]:
    """Return (w, s) of a client: its separator, noise added, and s = sigmoid(w·h) + 1e-8.

    The inputs are the initial net's features: of the client's own rows (label 1), of D- (label 0),
    of D_distill. All three are divided by the largest norm in the first two.
    """
    both = torch.cat([local, negatives])
    scale = both.norm(dim=1).max()
    y = torch.cat([torch.ones(len(local)), torch.zeros(len(negatives))])
    w = logistic_regression(both / scale, y, lam)
    w = w if noise is None else w + noise
    return w, (distil / scale @ w).sigmoid() + XI


def run(
    method: str,
    w0: Model,
    clients: Sequence[Data],
    cohorts: Sequence[Sequence[int]],
    *,
    batches: Callable[[int, int], Sequence[Tensor]],
    public: Tensor,
    public_batches: Callable[[int, int | str], Iterable[Tensor]],
    val: Data | None = None,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: float | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Run whole rounds of one method; its settings and their defaults are in `SETTINGS`.

    - "feddf": from the cohort's mean, `distil_feddf` towards the uniform mean of its logits.
      weighted: the models' mean (not the logits') by n_k.
    - "cfd": clients start at w_0, from round 2 on after client_steps towards the last labels down,
      with a new Adam; the labels up are averaged, and the server's own model, w_0 at first, makes
      server_steps with one Adam for all rounds. delta: a message is coded against the last one of
      (down: to) that client; 32 bits are never coded and count rows · classes · 32.
    - "fedaux": the first `negatives` public rows (None: a fifth, rounded down) are D-, the others
      D_distill. From the cohort's uniform mean, one Adam for all rounds goes towards the score-
      weighted mean of its logits, for `epochs` passes counted in rows, or `steps` steps if given.
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
        val: (x, y) for "feddf"; None: nothing is evaluated and the last student kept.
        lr: Of local training, as momentum, weight_decay, clip and the setting optimizer ("sgd" or
            "adam", new for every client and round): distillation has its own.
        **settings: The method's own.

    Returns:
        One entry per round in each: "models" (evaluated), "locals" (client → model after local
        training), "targets" (on all inputs distilled on: logits; in "cfd" mean labels), "means"
        (not "cfd"). "feddf": "evaluations", "steps". "cfd": "starts", "labels_up", "bits_up",
        "bits_down" (all client → ...; no bits down in round 1), "labels_down". By client instead
        of by round, "fedaux": "scores", "separators".

    """
    o = SETTINGS[method] | settings
    if o.keys() != SETTINGS[method].keys() or o["optimizer"] not in ("sgd", "adam"):
        raise TypeError(f"{method} does not take these settings: {settings}")
    w = start = {name: value.detach().clone().double() for name, value in w0.items()}
    x = public.double()
    adam = partial(Optimizer, "adam", o["distil_lr"], o["distil_clip"])
    server_adam = adam()
    out: dict[str, Any] = defaultdict(list)
    last: dict[tuple[str, int], Tensor] = {}  # "cfd": newest labels by direction and client

    def bits(way: str, k: int, labels: Tensor) -> float:
        previous, last[way, k] = last.get((way, k)), labels
        if o[f"bits_{way}"] == 32:
            return 32.0 * labels.numel()
        return coded_bits(labels, previous if o["delta"] else None)

    if method == "fedaux":
        cut = len(x) // 5 if o["negatives"] is None else o["negatives"]
        negatives, x = x[:cut], x[cut:]
        out |= {"separators": {}, "scores": {}}
        for k, (own, _) in enumerate(clients):
            h = [forward(start, part)[0] for part in (own.double(), negatives, x)]
            noise = None if o["noise"] is None else o["noise"][k]
            out["separators"][k], out["scores"][k] = scores(*h, o["lam"], noise)

    for t, cohort in enumerate(cohorts, start=1):
        starts = dict.fromkeys(cohort, start if method == "cfd" else w)
        if method == "cfd":
            out["bits_down"].append({})
            for k in cohort if t > 1 else ():
                down = out["labels_down"][-1]
                out["bits_down"][-1][k] = bits("down", k, down)
                steps = take(public_batches(t, k), o["client_steps"])
                starts[k] = train(start, x, down, steps, soft_ce, adam())
            out["starts"].append(starts)

        trained = {}
        for k, (own, y) in ((k, clients[k]) for k in cohort):
            new = Optimizer(o["optimizer"], lr, clip, momentum, weight_decay)
            trained[k] = train(starts[k], own.double(), y, batches(t, k), ce, new)
        out["locals"].append(trained)
        logits = {k: logits_of(model, x) for k, model in trained.items()}

        steps = public_batches(t, "server")
        if method == "cfd":
            up = {k: quantise(z.softmax(1), o["bits_up"]) for k, z in logits.items()}
            out["labels_up"].append(up)
            out["bits_up"].append({k: bits("up", k, labels) for k, labels in up.items()})
            target = sum(up.values()) / len(up)
            steps = take(steps, o["server_steps"])
            w = train(w, x, target, steps, soft_ce, server_adam)
            out["labels_down"].append(quantise(logits_of(w, x).softmax(1), o["bits_down"]))
        else:
            counts = [len(clients[k][1]) if o.get("weighted") else 1 for k in cohort]
            w = aggregate(list(trained.values()), counts)
            out["means"].append(w)
        if method == "feddf":
            target = mixed_logits(list(logits.values()))
            w, evaluations, made = distil_feddf(w, x, target, steps, val, o)
            out["evaluations"].append(evaluations)
            out["steps"].append(made)
        elif method == "fedaux":
            target = mixed_logits(list(logits.values()), [out["scores"][k] for k in cohort])
            rows = o["steps"] is None
            steps = take(steps, o["epochs"] * len(x) if rows else o["steps"], rows)
            w = train(w, x, target, steps, kl, server_adam)
        out["targets"].append(target)
        out["models"].append(w)
    return dict(out)
